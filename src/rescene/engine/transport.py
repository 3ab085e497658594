"""How a question reaches the clients and how their answers come back: a protocol with two implementations.

``engine.in_process.InProcess`` calls the clients' verbs in this process. ``deploy.server.PostTransport`` sends
letters to real sites. A transport only carries. Metering, quorum, checks and observation belong to ``engine.federation``
and are the same for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rescene.core.record import Tree
from rescene.core.rng import Rng
from rescene.data import Task, Transform
from rescene.engine.cost_ledger import CostLedger
from rescene.engine.evaluate import Tally
from rescene.methods import Method, Payload
from rescene.methods.base import Client
from rescene.methods.upload_schema import Form
from rescene.nets import Arch
from rescene.privacy.mechanism import Mechanism

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
    note("warning", "W435", f"the sum of {call.verb} is not opened: {call.least} sites must be in it, fewer were")
