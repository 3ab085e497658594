"""The federation of a run: ``ask`` and ``total`` of the method's contract, over any transport.

The transport brings questions to the clients and answers back. Here the bytes are metered, a quorum is required, answers are
checked and decoded, and observers see them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rescene.core.errors import RunError
from rescene.core.record import Tree, check_tree, num_bytes, tensors, to_device
from rescene.core.rng import Rng
from rescene.data import Images, Task
from rescene.engine import wire as on_wire
from rescene.engine.evaluate import Evaluation, summed
from rescene.engine.faults import LateAnswers
from rescene.engine.transport import Answer, Call, FederationSettings, InProcess, Transport
from rescene.methods import Payload, Uploads
from rescene.methods.base import Client
from rescene.methods.upload_schema import Form, Misfit, Place, check_form
from rescene.privacy.totals import Total, late_threshold, protocol_bytes, threshold


class RunFederation:
    """The clients of a run. Without a transport they are simulated in this process."""

    def __init__(
        self, settings: FederationSettings, transport: Transport | None = None, late: LateAnswers | None = None
    ) -> None:
        self.late_answers = late
        self.settings, self.transport = settings, transport or InProcess()
        self.transport.connect(settings)
        self.method, self.arch, self.ledger, self.note = settings.method, settings.arch, settings.ledger, settings.note
        self.clients = self.participants = settings.clients
        self.num_rounds, self.transform, self.device = settings.num_rounds, settings.transform, settings.device
        self.mechanism = settings.mechanism
        # real sites behind a formal mechanism do not tell what they do and remember: it depends on their images
        self.ledger.sites_tell = self.transport.here or self.mechanism is None or not self.mechanism.formal
        self.client_states: dict[int, Tree] = {}
        self.task: Task
        self.observe: Callable[[Mapping[int, Payload]], None] = lambda uploads: None
        self.phase: Callable[[], AbstractContextManager[None]] = nullcontext  # entered while clients work
        self.traffic = [0, 0]  # bytes up and down since the last move
        self.traffic_of: dict[int, list[int]] = {}  # the same of each client that was asked
        # who is in a sum that was opened since the last move; None: none was asked for
        self.summed: set[int] | None = None

    def move(self, task: Task, round: int | None, participants: Sequence[int] | None = None, attempt: int = 0) -> None:
        """Go to a place in time; ``round`` None is the beginning or end of the task, where everybody may be asked."""
        self.task, self.participants = task, self.clients if participants is None else participants
        self.round, self._attempt = -1 if round is None else round, attempt
        self._place = self.settings.rng.at("client", task.index, self.round)
        self._exchanges = 0
        self.traffic, self.traffic_of, self.summed = [0, 0], {}, None

    def net(self, model: Mapping[str, Tensor]) -> nn.Module:
        return self.ledger.meter.attach(self.arch.restore(model), len(model["head.weight"]))

    def vacant(self) -> Client:
        side, device = self.arch.image_size, self.device
        pixels = torch.zeros(0, self.arch.channels, side, side, dtype=torch.uint8, device=device)
        labels = torch.zeros(0, dtype=torch.int64, device=device)
        return Client(Images(pixels, labels), labels, self.task, self.transform, self.net)

    def ask(self, clients: Sequence[int], verb: str, payload: Payload, late: bool = False) -> Uploads:
        """Call ``verb`` on these clients; answers come back in client order, failures are noted and left out.

        ``late``: others have answered before, so there is no quorum.
        """
        call = self._call(verb, payload)
        delayed = self.late_answers if self.late_answers is not None and self.late_answers.concerns(call) else None
        asked = sorted(clients if delayed is None else delayed.free(clients))
        answers = self._collected(asked, call)
        messages = {client: self._sent(upload) for client, (upload, _) in answers.items()}
        self._meter(asked, payload, messages)
        if delayed is None:
            self._remember(answers)
        if not late:
            self._require_quorum(len(messages), len(asked), verb)
        uploads = {k: self._received(message) for k, message in messages.items()}
        uploads = dict(self.method.opened(uploads, payload, self, call.rng))
        if delayed is not None:
            uploads = self._as_they_arrive(delayed, call, {k: (uploads[k], answers[k][1]) for k in uploads})
        self.observe(uploads)
        return uploads

    def _as_they_arrive(self, delayed: LateAnswers, call: Call, answers: Mapping[int, Answer]) -> dict[int, Payload]:
        """What is there now: answers of this round that are on time, and late ones of earlier rounds, in client order."""
        there = delayed.arrived(call) | delayed.on_time(call, answers)
        self._remember(there)
        return {client: there[client][0] for client in sorted(there)}

    def total(self, clients: Sequence[int], verb: str, payload: Payload, late: bool = False) -> Total:
        """Call ``verb`` on these clients and add up what they answer; nobody else sees a part (``privacy.totals``).

        A site that answers nothing takes no part. Below the threshold nothing is opened, and the sites remember nothing of it.
        ``late``: these sites missed a sum that is open already. There is no quorum, and simulated sites have a smaller
        threshold; real sites know one threshold for all sums of a run.
        """
        least = self._late_least(len(clients)) if late and self.transport.here else self._least
        call = self._call(verb, payload, least)
        answers = self._collected(sorted(clients), call)
        parts = {client: upload for client, (upload, _) in answers.items() if upload}
        values, opened = dict[str, Tensor](), tuple[int, ...]()
        if late or self._has_quorum(len(answers), len(clients)):
            with self.ledger.meter.on("client"), self.phase():
                values, opened = self.transport.open_sum(call, parts)
        self.summed = {*(self.summed or ()), *opened}
        # a part that is masked on its way is as large as the sum
        messages = {k: (upload if self.transport.here or not upload else values) for k, (upload, _) in answers.items()}
        self._meter(sorted(clients), payload, messages, len(parts))
        if not late:
            self._require_quorum(len(answers), len(clients), verb)
        self._remember({k: answer for k, answer in answers.items() if not answer[0] or k in opened})
        return self._checked(Total(self._placed(values), opened), verb, payload)

    def evaluate(self, model: Mapping[str, Tensor], tasks: Sequence[Task]) -> Evaluation:
        """By the sites on their hold-outs. They tell counts per class, which are summed in client order."""
        payload: Payload = {"model": model}
        call = self._placed_call("evaluate", payload, self.settings.rng)
        found = self.transport.evaluate(self.clients, call)
        tallies = [tally for _, tally in sorted(found.items()) if tally is not None]
        up, down = self.ledger.exchange(payload, tallies, len(found), turns=None)
        self.traffic = [self.traffic[0] + up, self.traffic[1] + down]
        if len(tallies) < len(self.clients):
            self.note("info", "I341", f"evaluated by {len(tallies)} of {len(self.clients)} sites")
        return summed(tallies, tasks)

    def traffic_by_site(self) -> dict[str, list[int]]:
        """Client -> its bytes up and down since the last move, as JSON has it."""
        return {str(client): own for client, own in sorted(self.traffic_of.items())}

    def largest_state(self) -> int:
        """Bytes that the client with most to remember keeps between rounds."""
        return max((self.transport.state_bytes(state) for state in self.client_states.values()), default=0)

    def _call(self, verb: str, payload: Payload, least: int | None = None) -> Call:
        """The next question of this place in time."""
        check_tree(payload, f"payload of {verb}")
        rng, self._exchanges = self._place.at(verb, self._exchanges), self._exchanges + 1
        return self._placed_call(verb, payload, rng, least)

    def _placed_call(self, verb: str, payload: Payload, rng: Rng, least: int | None = None) -> Call:
        place, states = (self.task, self.round, self._attempt), self.client_states
        return Call(verb, payload, rng, *place, states, lambda: self._form_of(verb, payload), least)

    def _form_of(self, verb: str, payload: Payload) -> Form:
        coded = self.settings.wire != "float32"
        place = Place(self.task, self.arch.image_size, coded, self.mechanism, self.arch.channels)
        return self.method.expects(verb, payload, place)

    def _collected(self, clients: Sequence[int], call: Call) -> dict[int, Answer]:
        """The answers that came, as far as their numbers are finite."""
        with self.ledger.meter.on("client"), self.phase():
            answers = self.transport.carry(clients, call)
        for client, (upload, _) in list(answers.items()):
            check_tree(upload, f"upload of client {client} to {call.verb}")
            if not _finite(upload):
                words = f"site {client} sent numbers that are not finite to {call.verb}; left out"
                self.note("error", "E322", words, client=client)
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

    def _sent(self, upload: Payload) -> Payload:
        """The upload as the server would receive it. In a simulation pictures are coded here; real sites did it before."""
        return on_wire.sent(upload, self.settings.wire) if self.transport.here else upload

    def _received(self, message: Payload) -> Payload:
        picture = (self.arch.channels, self.arch.image_size, self.arch.image_size)
        upload: Payload = self._placed(on_wire.received(message, self.settings.wire, picture, self.device))
        return upload

    def _placed(self, tree: Any) -> Any:
        """On the server's device, where simulated clients work anyway."""
        return tree if self.transport.here else to_device(tree, self.device)

    @property
    def _honest(self) -> int | None:
        return self.mechanism.honest_sites if self.mechanism else None

    @property
    def _least(self) -> int:
        return threshold(self.settings.num_clients, self.settings.quorum, self._honest)

    def _late_least(self, num_late: int) -> int:
        if self._honest is None:
            return self._least
        return late_threshold(self.settings.num_clients, self.settings.quorum, self._honest, num_late)

    def _has_quorum(self, answered: int, asked: int) -> bool:
        return answered >= self.settings.quorum * asked and (answered > 0 or not asked)

    def _require_quorum(self, answered: int, asked: int, verb: str) -> None:
        if not self._has_quorum(answered, asked):
            raise RunError(
                "E320",
                f"only {answered} of {asked} sites answered {verb}",
                where=f"task {self.task.index + 1}",
                why=f"the quorum is {self.settings.quorum:.0%}; events.jsonl names each failure",
                fix=self.transport.advice,
            )

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
                where=f"task {self.task.index + 1}",
                why="a site sent wrong numbers; in a secure sum nobody can see which one",
                fix="leave sites out (federation.exclude) until it fits",
            ) from None
        return total


def _finite(tree: Tree) -> bool:
    """One NaN in one upload would poison an average for everybody."""
    return all(bool(torch.isfinite(t).all()) for t in tensors(tree) if t.is_floating_point())
