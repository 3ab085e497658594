"""The contract of a method.

The object is its hyperparameters, the state is an argument. A method is a frozen, validated record with six verbs, of which
a simple one writes two (``client_round`` and ``server_round``). Time belongs to the engine, meaning to the method::

    state = method.init(net, rng)
    for each task:
        state = method.begin_task(state, task, federation, rng)
        for each round:
            payload = method.broadcast(state, round, federation, rng)
            uploads = federation.ask(federation.participants, "client_round", payload)
            state = method.server_round(state, uploads, round, federation, rng)
        state = method.end_task(state, task, federation, rng)

What crosses the wire and what is remembered are trees of tensors and plain values (see ``rescene.record``); verbs never
change their arguments. Four conventions let the engine account for a method without knowing it: a state has the global
model under ``model``; pictures travel under ``images`` (normalised) with their ``labels``; numbers worth logging stand
under ``notes`` in a state or an upload; a server that keeps pictures has those of the task under ``pool`` and those of
finished tasks under ``buffers``, as records of ``images``, ``labels`` and ``rounds``; with ``clients``, who sent each one,
it can also ``forget`` a client (a server that keeps something else says so in ``kept``).
One that closes buffers itself lists (label, 1-based round) of each under ``closings``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from rescene.data import Shard, Task, Transform
from rescene.hyperparameters import Hyperparameters
from rescene.methods.forms import Form, Place, anything
from rescene.nets import grow_head
from rescene.privacy.mechanism import Mechanism
from rescene.privacy.totals import Total
from rescene.record import Tree, num_bytes, record
from rescene.rng import Rng
from rescene.steps import Training

Payload = dict[str, Tree]
Uploads = Mapping[
    int, Payload
]  # by client, in ascending order whatever the order of arrival; a failed client is absent
Model = dict[str, Tensor]


class Federation(Protocol):
    """What a method sees of the world on the server's side. In-process and Flower are two implementations."""

    clients: Sequence[int]  # all N
    participants: Sequence[int]  # the K of this round; all N outside rounds
    task: Task
    num_rounds: int
    transform: Transform
    device: torch.device
    mechanism: Mechanism | None  # what stands between the sites' images and their uploads

    def ask(self, clients: Sequence[int], verb: str, payload: Payload) -> Uploads:
        """Call a client verb, by name, on these clients: the only way to reach them; bytes are metered here."""

    def total(self, clients: Sequence[int], verb: str, payload: Payload) -> Total:
        """Call a client verb that answers whole numbers, and get their sum without seeing a part (``privacy.totals``)."""

    def net(self, model: Model) -> nn.Module:
        """The network with (a copy of) these weights, on the federation's device."""

    def vacant(self) -> Shard:
        """A site without images, for work that the server does in the sites' place."""


@record
class ModelState:
    """State of a server that remembers nothing but the global model."""

    model: Model
    notes: dict[str, float]


@dataclass(frozen=True)
class Kept:
    """What a server keeps of one client, for the case that it withdraws."""

    images: Counter[
        tuple[int, int, str]
    ]  # number of a buffer (-1: of no task), label, kind (pool, buffer or sums) -> images
    num_bytes: int


def weights_of(net: nn.Module) -> Model:
    """The network's state as plain tensors, detached from it."""
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


class Method(Hyperparameters):
    """Base of all methods: hyperparameters as fields, verbs with their defaults."""

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    leaves_site: ClassVar[str]  # by default; see leaving()
    remembers: ClassVar[str] = "nothing"
    paints: ClassVar[bool] = False  # pictures of its own, with three channels
    mechanisms: ClassVar[tuple[str, ...]] = ("none",)  # privacy mechanisms that cover everything it sends
    unprotected: ClassVar[str] = ""  # what no mechanism here covers, where leaves_site does not say it
    reuses_records: ClassVar[bool] = False  # clients train on real images of earlier tasks again
    releases_once: ClassVar[bool] = False  # each image enters one answer only, however many rounds there are
    needs_mechanism: ClassVar[bool] = False  # at real sites; without one it is for simulations
    sums_securely: ClassVar[bool] = False  # what its mechanism releases, it releases through ``federation.total``
    sends_pictures_only: ClassVar[bool] = False  # and their labels, so that a round's uploads can be screened
    scenarios: ClassVar[tuple[str, ...]] = ("class", "domain")  # what kinds of task sequence it can learn

    can_forget: ClassVar[bool] = False  # its server keeps what each client sent, and can train on the rest
    forgets_exactly: ClassVar[bool] = False  # without training: the model is the one that never met the client

    open_ended: ClassVar[bool] = False  # learns from a stream whose tasks nobody announces (tasks.drift)

    train: Training = Training()

    @classmethod
    def leaving(cls, mechanism: Mechanism | None) -> str:
        """What leaves a site behind this mechanism."""
        return cls.leaves_site

    def init(self, net: nn.Module, rng: Rng) -> Any:
        return ModelState(model=weights_of(net), notes={})

    def begin_task(self, state: Any, task: Task, federation: Federation, rng: Rng) -> Any:
        """Grow the head to all classes seen so far; old rows are kept."""
        return replace(state, model=grow_head(state.model, task.num_seen, rng.at("head").generator()))

    def broadcast(self, state: Any, round: int, federation: Federation, rng: Rng) -> Payload:
        return {"model": state.model}

    def client_round(self, payload: Payload, shard: Shard, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """The client's work of one round: what it received, its images, what it remembers -> what it sends, remembers.

        A verb may have a batched form named ``<verb>_batched`` that takes lists of shards, client states and streams and
        returns a list of answers; the in-process engine prefers it. Both forms must agree.
        """
        raise TypeError(f"method {self.name!r} does not define client_round")

    def expects(self, verb: str, payload: Payload, place: Place) -> Form:
        """What an answer to ``verb`` must look like; a site whose answer does not is left out (``methods/forms.py``)."""
        return anything(place)

    def opened(self, uploads: Uploads, payload: Payload, federation: Federation, rng: Rng) -> Uploads:
        """What the answers to ``payload`` stand for. ``rng.at(k)`` is the stream that client k had for its answer."""
        return uploads

    def server_round(self, state: Any, uploads: Uploads, round: int, federation: Federation, rng: Rng) -> Any:
        raise TypeError(f"method {self.name!r} does not define server_round")

    def end_task(self, state: Any, task: Task, federation: Federation, rng: Rng) -> Any:
        return state

    def kept(self, state: Any) -> dict[int, Kept]:
        """What the server keeps, by client (-1: nobody wrote down whose). Here: the pictures of ``buffers`` and ``pool``."""
        places = [(number, part, "buffer") for number, part in enumerate(state.buffers)]
        places += [(len(state.buffers), part, "pool") for part in state.pool]
        found: dict[int, Kept] = {}
        for number, part, kind in places:
            for client in part.clients.unique().tolist():
                own = part.clients == client
                mine = found.setdefault(client, Kept(Counter(), 0))
                images = Counter((number, label, kind) for label in part.labels[own].tolist())
                found[client] = Kept(mine.images + images, mine.num_bytes + num_bytes(part.images[own]))
        return found

    def forget(self, state: Any, client: int, model: Model, num_rounds: int, federation: Federation, rng: Rng) -> Any:
        """The state without anything this client sent, its model trained from ``model``, which is fresh, on what remains.

        ``num_rounds`` rounds were held so far: the work that went into the model it replaces.
        """
        raise TypeError(f"method {self.name!r} keeps nothing by client that could be taken out")
