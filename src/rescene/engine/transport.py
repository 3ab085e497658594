"""How a question reaches the clients and how their answers come back: the protocol, and the transport inside one process.

``InProcess`` calls the verbs of simulated clients, for all of them in one pass where a method can. ``deploy.server`` has the
transport that sends letters to real sites. A transport only carries. Metering, quorum, checks and observation belong to
``engine.federation`` and are the same for both.

Behind a mechanism each client has noise and a ledger of its own (``site_at``). In a simulation the ledgers lie in the run folder.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rescene.accel.cuda_graph import Streams, attempt
from rescene.core.errors import ResceneError, RunError, is_out_of_memory
from rescene.core.record import Tree, num_bytes
from rescene.core.rng import Rng, torch_draws_from
from rescene.data import Task, Transform
from rescene.engine.cost_ledger import CostLedger
from rescene.engine.evaluate import Tally
from rescene.engine.experiment import Experiment
from rescene.engine.method_mistakes import checked_answer, first_line, place_of
from rescene.methods import Method, Payload
from rescene.methods.base import Client
from rescene.methods.upload_schema import Form
from rescene.nets import Arch
from rescene.privacy.ledger import Ledger
from rescene.privacy.mechanism import Mechanism, SitePrivacy
from rescene.privacy.noise import Noise
from rescene.privacy.totals import added, check_part, layout

Answer = tuple[Payload, Tree]  # what a client sends, and what it remembers
Note = Callable[..., None]  # note(level, code, message, client=...)


@dataclass(frozen=True)
class Call:
    """One question to some clients, and its place in the run."""

    verb: str
    payload: Payload
    rng: Rng  # client k draws from rng.at(k)
    task: Task
    round: int  # -1 outside rounds
    attempt: int  # how often this round was held before
    states: Mapping[int, Tree]  # what clients remember
    form: Callable[[], Form]  # makes the schema of an answer
    least: int | None = None  # the answers are parts of a sum, and so many sites must be in it; None: they are not


Absent = Callable[[Sequence[int], Call], tuple[Sequence[int], Sequence[int]]]


@dataclass
class FederationSettings:
    """What a federation and its transport need to know of a run.

    ``shard_of`` gives what a simulated client works with. ``num_clients`` counts the sites that left too, ``clients`` does
    not (by default nobody left). ``form`` is batched, one-by-one or debug (stop at the first client that fails). ``absent``
    simulates faults: who of these clients is lost, and whose answer comes too late.
    """

    method: Method
    arch: Arch
    shard_of: Callable[[Task, int], Client]
    ledger: CostLedger
    note: Note
    num_clients: int
    num_rounds: int
    transform: Transform
    device: torch.device
    rng: Rng
    clients: Sequence[int] = ()
    form: str = "batched"
    quorum: float = 0.5
    wire: str = "float32"
    mechanism: Mechanism | None = None
    absent: Absent = lambda clients, call: ((), ())

    def __post_init__(self) -> None:
        self.clients = self.clients or range(self.num_clients)


class Transport(Protocol):
    """Carries calls to clients."""

    here: bool  # the clients and their images are in this process, so their faults can be simulated
    advice: str  # what a person can do when too few clients answer

    def connect(self, settings: FederationSettings) -> None:
        """Called once, before the first call."""

    def carry(self, clients: Sequence[int], call: Call) -> dict[int, Answer]:
        """The answers of these clients, in their order. One that fails is noted and left out."""

    def open_sum(self, call: Call, parts: Mapping[int, Payload]) -> tuple[dict[str, Tensor], tuple[int, ...]]:
        """The sum of what was carried as ``parts``, and who is in it; nothing and nobody if too few could be."""

    def evaluate(self, clients: Sequence[int], call: Call) -> dict[int, Tally | None]:
        """What each client counted on its own hold-out with the model of the payload; None from one that could not."""

    def state_bytes(self, state: Tree) -> int:
        """Bytes that a client keeps, from what ``carry`` said it remembers."""


def note_too_few(note: Note, call: Call) -> None:
    """Tell that a sum stays closed."""
    note("warning", "W435", f"the sum of {call.verb} is not opened: {call.least} sites must be in it, fewer were")


SIDE_BY_SIDE = 2  # clients at a time on a GPU; more gained nothing (results/bench/README.md)


class InProcess:
    """All sites are simulated here."""

    here = True
    advice = "federation.engine=debug with another --out stops at the first failure and shows where; the run itself can be resumed"

    def __init__(self) -> None:
        self._streams: Streams | None = None

    def connect(self, settings: FederationSettings) -> None:
        self.settings = settings

    def carry(self, clients: Sequence[int], call: Call) -> dict[int, Answer]:
        lost, late = self.settings.absent(clients, call)
        answers = self._answers([k for k in clients if k not in lost], call)
        return {k: answer for k, answer in answers.items() if k not in late}  # late ones worked, but for nothing

    def open_sum(self, call: Call, parts: Mapping[int, Payload]) -> tuple[dict[str, Tensor], tuple[int, ...]]:
        for part in parts.values():
            check_part(part, self.settings.num_clients)
        agreed = self._agreed({client: layout(part) for client, part in parts.items()}, call.verb)
        if 0 < len(agreed) < (call.least or 0):
            note_too_few(self.settings.note, call)
            agreed = ()
        return (added(parts[k] for k in agreed) if agreed else {}), agreed

    def evaluate(self, clients: Sequence[int], call: Call) -> dict[int, Tally | None]:
        raise TypeError("only real sites have a hold-out; here all images are in one place")

    def state_bytes(self, state: Tree) -> int:
        return num_bytes(state)

    def _agreed(self, layouts: Mapping[int, Any], verb: str) -> tuple[int, ...]:
        """Sites whose numbers have the names, types and shapes that most have; the others are named."""
        most = Counter(layouts.values()).most_common(1)
        agreed = tuple(client for client in sorted(layouts) if layouts[client] == most[0][0])
        for client in sorted(layouts.keys() - set(agreed)):
            words = f"site {client} sent numbers of another shape than the others to {verb}; left out"
            self.settings.note("error", "E437", words, client=client)
        return agreed

    def _answers(self, clients: Sequence[int], call: Call) -> dict[int, Answer]:
        settings, verb = self.settings, call.verb
        batched = getattr(settings.method, f"{verb}_batched", None)
        if settings.form == "batched" and batched is not None and len(clients) > 1:
            try:
                shards = [settings.shard_of(call.task, k) for k in clients]
                states, streams = [call.states.get(k) for k in clients], [call.rng.at(k) for k in clients]
                with torch_draws_from(call.rng, settings.arch.draws):
                    found = batched(call.payload, shards, states, streams)
                told = (checked_answer(settings.method, f"{verb}_batched", answer) for answer in found)
                return dict(zip(clients, told, strict=True))
            except ResceneError:
                raise
            except Exception as error:
                words = f"{verb} failed for all sites together ({first_line(error)}); one by one now"
                settings.note("info", "I301", words)
        one = getattr(settings.method, verb)

        def work(client: int) -> Answer:
            shard = settings.shard_of(call.task, client)
            with torch_draws_from(call.rng.at(client), settings.arch.draws):
                given = one(call.payload, shard, call.states.get(client), call.rng.at(client))
            answer: Answer = checked_answer(settings.method, verb, given)
            return answer

        answers = {}
        for client, outcome in zip(clients, self._outcomes(work, clients), strict=True):
            if isinstance(outcome, tuple):
                answers[client] = outcome
            elif isinstance(outcome, ResceneError) or is_out_of_memory(outcome):
                raise outcome  # a spoilt ledger, say, as in the batched form, or a machine too small for any site
            elif settings.form == "debug":
                raise self._explain(outcome, call, client) from outcome
            else:
                words = f"site {client} failed in {verb}: {first_line(outcome)}"
                settings.note("error", "E321", words, client=client)
        return answers

    def _outcomes(self, work: Callable[[int], Answer], clients: Sequence[int]) -> Iterator[Answer | Exception]:
        """What each client answered, or what stopped it; on a GPU some at a time, so that one's gaps are another's turn."""
        device = self.settings.device
        side_by_side = self.settings.form == "batched" and device.type == "cuda" and not self.settings.arch.draws
        if side_by_side and len(clients) > 1:
            self._streams = self._streams or Streams(device, SIDE_BY_SIDE)
            yield from self._streams.outcomes(work, clients)
            return
        for client in clients:
            yield attempt(work, client)

    def _explain(self, error: Exception, call: Call, client: int) -> RunError:
        shard, state = self.settings.shard_of(call.task, client), call.states.get(client)
        counts = {label: len(members) for label, members in shard.by_class().items()}
        return RunError(
            "E321",
            f"site {client} failed in {call.verb}: {first_line(error)}",
            where=f"task {call.task.index + 1}, {place_of(error)}",
            why=f"payload {_describe(call.payload)}; images per class {counts}; state {_describe(state)}",
            fix="--debug shows the whole traceback",
        )


def _describe(tree: Any) -> str:
    """Shapes instead of numbers."""
    if isinstance(tree, Tensor):
        return f"{str(tree.dtype).removeprefix('torch.')}{list(tree.shape)}"
    if isinstance(tree, dict):
        inner = ", ".join(f"{key}: {_describe(value)}" for key, value in list(tree.items())[:4])
        return "{" + inner + (f", and {len(tree) - 4} more" if len(tree) > 4 else "") + "}"
    return repr(tree)[:80]


def site_at(
    experiment: Experiment, run: str, task: int, round: int, client: int, ledger: Ledger, why: str = ""
) -> SitePrivacy | None:
    """A client at one place in time, with its own ledger; None without a mechanism."""
    promise = experiment.recipe.promise(len(experiment.tasks))
    if promise is None:
        return None
    fresh = ("again", promise.earlier_sums) if promise.earlier_sums else ()  # no sum has the noise of an earlier one
    seeded = experiment.rng.at("privacy", task, round, client, *fresh).generator() if promise.test_mode else None
    participations = promise.composition.participations
    # one release for the whole task has one place: in a later round the site gives the same numbers
    place = 0 if experiment.method.additive else round
    return SitePrivacy(promise.mechanism, Noise(seeded), run, task, place, participations, ledger, why=why)


def simulated_site(
    experiment: Experiment, run: str, folder: Path, task: int, round: int, client: int
) -> SitePrivacy | None:
    """A simulated client at one place in time; None without a mechanism, which a site with a floor does not accept.

    ``folder`` holds a ledger for each client, and a ``floor.yaml`` that limits them all.
    """
    ledger = ledger_in(folder, client)
    made, floor = site_at(experiment, run, task, round, client, ledger), ledger.floor_path
    if (made is None or made.noise.generator is not None) and floor.exists():
        raise RunError(
            "E415",
            "the site has a privacy floor, and the recipe has no guarantee, so nothing is sent",
            where=str(floor),
            fix="a recipe with privacy.mechanism and privacy.noise=os",
        )
    return made


def ledger_in(folder: Path, client: int) -> Ledger:
    """The ledger of a simulated client: in this folder, or in $RESCENE_LEDGERS, where runs on the same images add up."""
    return Ledger(Path(os.environ.get("RESCENE_LEDGERS", folder)) / f"client-{client}.jsonl")
