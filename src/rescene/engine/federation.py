"""The federation inside one process: ``ask`` and ``total`` call the clients' verbs directly, all in one pass where a method can."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rescene.data import Images, Shard, Task, Transform
from rescene.engine import wire as on_wire
from rescene.engine.evaluate import Evaluation
from rescene.engine.ledger import Ledger
from rescene.engine.streams import Streams, attempt
from rescene.errors import ResceneError, RunError, is_out_of_memory
from rescene.methods import Method, Payload, Uploads
from rescene.methods.forms import Form, Misfit, Place, check_form
from rescene.nets import Arch
from rescene.privacy.mechanism import Mechanism
from rescene.privacy.totals import Total, added, check_part, layout, protocol_bytes, threshold
from rescene.record import Tree, check_tree, num_bytes, tensors
from rescene.rng import Rng

SIDE_BY_SIDE = 2  # clients at a time on a GPU; more gained nothing (docs/performance.md)
Answer = tuple[Payload, Tree]
Note = Callable[..., None]  # events.note(level, code, message, client=...)


class InProcess:
    """All sites simulated here. ``form`` is batched, one-by-one or debug (stop at the first failing client)."""

    def __init__(
        self,
        method: Method,
        arch: Arch,
        shard_of: Callable[[Task, int], Shard],
        ledger: Ledger,
        note: Note,
        *,
        num_clients: int,
        num_rounds: int,
        transform: Transform,
        device: torch.device,
        rng: Rng,
        form: str = "batched",
        quorum: float = 0.5,
        wire: str = "float32",
        mechanism: Mechanism | None = None,
    ) -> None:
        self.method, self.arch, self.ledger, self.note = method, arch, ledger, note
        self.clients: Sequence[int] = range(num_clients)
        self.participants: Sequence[int] = self.clients
        self.num_rounds, self.transform, self.device = num_rounds, transform, device
        self.client_states: dict[int, Tree] = {}
        self.task: Task
        self.observe: Callable[[Mapping[int, Payload]], None] = lambda uploads: None
        self.phase: Callable[[], AbstractContextManager[None]] = nullcontext  # entered while clients work
        self.absent: Callable[[Sequence[int]], tuple[Sequence[int], Sequence[int]]] = lambda clients: ((), ())
        self.traffic = [0, 0]  # bytes up and down since the last move
        self.traffic_of: dict[int, list[int]] = {}  # the same of each client that was asked
        self._shard_of, self._rng, self._form, self._quorum = shard_of, rng, form, quorum
        self._streams: Streams | None = None
        self._wire = wire
        self._num_sites = num_clients  # also those that left
        self.mechanism = mechanism

    def move(self, task: Task, round: int | None, participants: Sequence[int] | None = None) -> None:
        """Go to a place in time; ``round`` None is the beginning or end of the task, where everybody may be asked."""
        self.task, self.participants = task, self.clients if participants is None else participants
        self.round = -1 if round is None else round
        self._place = self._rng.at("client", task.index, -1 if round is None else round)
        self._exchanges = 0
        self.traffic, self.traffic_of = [0, 0], {}

    def net(self, model: Mapping[str, Tensor]) -> nn.Module:
        return self.ledger.meter.attach(self.arch.restore(model), len(model["head.weight"]))

    def vacant(self) -> Shard:
        side, device = self.arch.image_size, self.device
        pixels = torch.zeros(0, self.arch.channels, side, side, dtype=torch.uint8, device=device)
        labels = torch.zeros(0, dtype=torch.int64, device=device)
        return Shard(Images(pixels, labels), labels, self.task, self.transform, self.net)

    def ask(self, clients: Sequence[int], verb: str, payload: Payload) -> Uploads:
        """Call ``verb`` on these clients; answers come back in client order, failures are noted and left out."""
        rng = self._begin(verb, payload)
        answers = self._collected(sorted(clients), verb, payload, rng)
        self._remember(answers)
        messages = {client: self._sent(upload) for client, (upload, _) in answers.items()}
        self._meter(sorted(clients), payload, messages)
        self._require_quorum(len(messages), len(clients), verb)
        uploads = {k: self._received(message) for k, message in messages.items()}
        uploads = dict(self.method.opened(uploads, payload, self, rng))
        self.observe(uploads)
        return uploads

    def total(self, clients: Sequence[int], verb: str, payload: Payload) -> Total:
        """Call ``verb`` on these clients and add up what they answer; nobody else sees a part (``privacy.totals``).

        A site that answers nothing takes no part. Below the threshold nothing is opened, and the sites remember nothing of it.
        """
        answers = self._collected(sorted(clients), verb, payload, self._begin(verb, payload))
        parts = {client: upload for client, (upload, _) in answers.items() if upload}
        for part in parts.values():
            check_part(part, self._num_sites)
        self._meter(sorted(clients), payload, {k: upload for k, (upload, _) in answers.items()}, len(parts))
        self._require_quorum(len(answers), len(clients), verb)
        agreed = self._agreed({client: layout(part) for client, part in parts.items()}, verb)
        opened = self._enough(agreed, verb)
        self._remember({k: answer for k, answer in answers.items() if not answer[0] or k in opened})
        return self._checked(Total(added(parts[k] for k in opened) if opened else {}, opened), verb, payload)

    def _agreed(self, layouts: Mapping[int, Any], verb: str) -> tuple[int, ...]:
        """Sites whose numbers have the names, types and shapes that most have; the others are named."""
        most = Counter(layouts.values()).most_common(1)
        agreed = tuple(client for client in sorted(layouts) if layouts[client] == most[0][0])
        for client in sorted(layouts.keys() - set(agreed)):
            words = f"site {client} sent numbers of another shape than the others to {verb}; left out"
            self.note("error", "E437", words, client=client)
        return agreed

    @property
    def _least(self) -> int:
        return threshold(self._num_sites, self._quorum, self.mechanism.honest_sites if self.mechanism else None)

    def _enough(self, clients: tuple[int, ...], verb: str) -> tuple[int, ...]:
        """These clients, or nobody."""
        if 0 < len(clients) < self._least:
            self._note_too_few(verb)
            return ()
        return clients

    def _note_too_few(self, verb: str) -> None:
        self.note("warning", "W435", f"the sum of {verb} is not opened: {self._least} sites must be in it, fewer were")

    def _checked(self, total: Total, verb: str, payload: Payload) -> Total:
        """The sum, if it can be one. Which site is to blame nobody can tell."""
        if not total.clients:
            return total
        try:
            check_form(self._form_of(verb, payload), total.values)
        except Misfit as misfit:
            raise RunError(
                "E438",
                f"the sum of {verb} over {len(total.clients)} sites is none that the method can give: {misfit}",
                where=f"task {self.task.index}",
                why="a site sent wrong numbers; in a secure sum nobody can see which one",
                fix="leave sites out (federation.exclude) until it fits",
            ) from None
        return total

    def _form_of(self, verb: str, payload: Payload) -> Form:
        place = Place(self.task, self.arch.image_size, self._wire != "float32", self.mechanism, self.arch.channels)
        return self.method.expects(verb, payload, place)

    def _begin(self, verb: str, payload: Payload) -> Rng:
        """The stream of the next exchange."""
        check_tree(payload, f"payload of {verb}")
        rng, self._exchanges = self._place.at(verb, self._exchanges), self._exchanges + 1
        return rng

    def _collected(self, clients: Sequence[int], verb: str, payload: Payload, rng: Rng) -> dict[int, Answer]:
        """The answers of those that are there and in time, as far as their numbers are finite."""
        lost, late = self.absent(clients)
        with self.ledger.meter.on("client"), self.phase():
            answers = self._answers([k for k in clients if k not in lost], verb, payload, rng)
        answers = {k: answer for k, answer in answers.items() if k not in late}  # they worked, but for nothing
        for client, (upload, _) in list(answers.items()):
            check_tree(upload, f"upload of client {client} to {verb}")
            if not _finite(upload):
                self.note(
                    "error",
                    "E322",
                    f"site {client} sent numbers that are not finite to {verb}; left out",
                    client=client,
                )
                del answers[client]
        return answers

    def _remember(self, answers: Mapping[int, Answer]) -> None:
        for client, (_, state) in answers.items():
            if state is not None:
                self.client_states[client] = state
            else:
                self.client_states.pop(client, None)  # what is kept grows with those who remember, not with all

    def _meter(
        self, clients: Sequence[int], payload: Payload, messages: Mapping[int, Payload], num_summed: int = 0
    ) -> None:
        """Bytes up and down of one exchange; ``num_summed`` sites also exchange keys and shares for their sum."""
        turns = len(set(clients) - self.traffic_of.keys()) if self.round >= 0 else None
        more_up, more_down = protocol_bytes(num_summed)
        up, down = self.ledger.exchange(
            payload, list(messages.values()), len(clients), turns, num_summed * more_up, num_summed * more_down
        )
        self.traffic = [self.traffic[0] + up, self.traffic[1] + down]
        to_each = num_bytes(payload)
        for client in clients:
            own, summed = self.traffic_of.setdefault(client, [0, 0]), bool(num_summed and messages.get(client))
            own[0] += (num_bytes(messages[client]) if client in messages else 0) + summed * more_up
            own[1] += to_each + summed * more_down

    def traffic_by_site(self) -> dict[str, list[int]]:
        """Client -> its bytes up and down since the last move, as JSON has it."""
        return {str(client): own for client, own in sorted(self.traffic_of.items())}

    def evaluate(self, model: Mapping[str, Tensor], tasks: Sequence[Task]) -> Evaluation:
        """By the sites on images of their own; here all images are in one place, and nobody has a hold-out."""
        raise TypeError("only a federation across sites evaluates at its sites")

    def largest_state(self) -> int:
        """Bytes that the client with most to remember keeps between rounds."""
        return max((num_bytes(state) for state in self.client_states.values()), default=0)

    def _sent(self, upload: Payload) -> Payload:
        return on_wire.sent(upload, self._wire)

    def _received(self, message: Payload) -> Payload:
        picture = (self.arch.channels, self.arch.image_size, self.arch.image_size)
        return on_wire.received(message, self._wire, picture, self.device)

    def _answers(self, clients: Sequence[int], verb: str, payload: Payload, rng: Rng) -> dict[int, Answer]:
        batched = getattr(self.method, f"{verb}_batched", None)
        if self._form == "batched" and batched is not None and len(clients) > 1:
            try:
                shards = [self._shard_of(self.task, k) for k in clients]
                states = [self.client_states.get(k) for k in clients]
                return dict(zip(clients, batched(payload, shards, states, [rng.at(k) for k in clients]), strict=True))
            except ResceneError:
                raise
            except Exception as error:
                self.note("info", "I301", f"{verb} failed for all sites together ({first_line(error)}); one by one now")
        one = getattr(self.method, verb)

        def work(client: int) -> Answer:
            answer: Answer = one(
                payload, self._shard_of(self.task, client), self.client_states.get(client), rng.at(client)
            )
            return answer

        answers = {}
        for client, outcome in zip(clients, self._outcomes(work, clients), strict=True):
            if isinstance(outcome, tuple):
                answers[client] = outcome
            elif isinstance(outcome, ResceneError) or is_out_of_memory(outcome):
                raise outcome  # a spoilt ledger, say, as in the batched form, or a machine too small for any site
            elif self._form == "debug":
                raise self._explain(outcome, verb, client, payload) from outcome
            else:
                self.note("error", "E321", f"site {client} failed in {verb}: {first_line(outcome)}", client=client)
        return answers

    def _outcomes(self, work: Callable[[int], Answer], clients: Sequence[int]) -> Iterator[Answer | Exception]:
        """What each client answered, or what stopped it; on a GPU some at a time, so that one's gaps are another's turn."""
        if self._form == "batched" and self.device.type == "cuda" and len(clients) > 1:
            self._streams = self._streams or Streams(self.device, SIDE_BY_SIDE)
            yield from self._streams.outcomes(work, clients)
            return
        for client in clients:
            yield attempt(work, client)

    def _require_quorum(self, answered: int, asked: int, verb: str) -> None:
        if answered < self._quorum * asked or (asked and not answered):
            raise RunError(
                "E320",
                f"only {answered} of {asked} sites answered {verb}",
                where=f"task {self.task.index}",
                why=f"the quorum is {self._quorum:.0%}; events.jsonl names each failure",
                fix="federation.engine=debug stops at the first failure; the run can be resumed",
            )

    def _explain(self, error: Exception, verb: str, client: int, payload: Payload) -> RunError:
        shard = self._shard_of(self.task, client)
        counts = {label: len(members) for label, members in shard.by_class().items()}
        return RunError(
            "E321",
            f"site {client} failed in {verb}: {first_line(error)}",
            where=f"task {self.task.index}, {_last_frame(error)}",
            why=f"payload {_describe(payload)}; images per class {counts}; state {_describe(self.client_states.get(client))}",
            fix="--debug shows the whole traceback",
        )


def _finite(tree: Tree) -> bool:
    """One NaN in one upload would poison an average for everybody."""
    return all(bool(torch.isfinite(t).all()) for t in tensors(tree) if t.is_floating_point())


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _last_frame(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno} in {frame.name}"


def _describe(tree: Any) -> str:
    """Shapes instead of numbers."""
    if isinstance(tree, Tensor):
        return f"{str(tree.dtype).removeprefix('torch.')}{list(tree.shape)}"
    if isinstance(tree, dict):
        inner = ", ".join(f"{key}: {_describe(value)}" for key, value in list(tree.items())[:4])
        return "{" + inner + (f", and {len(tree) - 4} more" if len(tree) > 4 else "") + "}"
    return repr(tree)[:80]
