"""The contract of a method.

The object is its hyperparameters, the state is an argument. A method is a frozen, validated record with verbs, of which
a simple one writes two (``client_round`` and ``server_round``). The engine decides when a verb runs, the method what it does::

    state = method.init(net, rng)
    for each task:
        state = method.begin_task(state, task, federation, rng)
        for each round:
            payload = method.broadcast(state, round, federation, rng)
            uploads = federation.ask(federation.participants, "client_round", payload)
            state = method.server_round(state, uploads, round, federation, rng)
        state = method.end_task(state, task, federation, rng)

What crosses the wire and what is remembered are trees of tensors and plain values (see ``rescene.core.record``); verbs never
change their arguments. The engine accounts for a method by the names of what it finds in states and uploads::

    model       in a state: the global model
    images      pictures that travel, normalised, with their ``labels``
    notes       in a state or an upload: numbers worth logging
    pool        in a state: pictures of the task that the server keeps, as records of ``images``, ``labels`` and ``rounds``
    buffers     the same of finished tasks
    clients     beside kept pictures: who sent each one, so that the server can ``forget`` a client
                (a server that keeps something else says so in ``kept``)
    closings    (label, 1-based round) of each buffer, from a server that closes buffers itself
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from rescene.core.hyperparameters import Hyperparameters
from rescene.core.method_style import MethodStyle, UploadKind, derived_colour, derived_marker
from rescene.core.record import Tree, num_bytes, record
from rescene.core.rng import Rng
from rescene.core.verification import Verified
from rescene.data import Shard, Task, Transform
from rescene.methods.nominal_cost import NominalBytes, NominalReplay, Setting
from rescene.methods.upload_schema import Form, Place, anything
from rescene.nets import Arch, grow_head
from rescene.privacy.mechanism import Mechanism, SitePrivacy
from rescene.privacy.totals import Total
from rescene.training import Training

Payload = dict[str, Tree]
# by client, in ascending order whatever the order of arrival; a failed client is absent
Uploads = Mapping[int, Payload]
Model = dict[str, Tensor]
NOT_SAID = "not said"  # by a method in short words, what leaves its sites


@dataclass(frozen=True, eq=False)
class Client(Shard):
    """What a client verb works with: the client's images of the task, and what it needs to answer.

    ``net`` builds the network with the given weights; the head's size is read from them.
    ``site`` is the mechanism, noise and ledger that every answer must pass; None without a mechanism.
    ``notice`` is for simulations only: it is shown surrogates and their start images, which never leave a real site.
    """

    net: Callable[[Mapping[str, Tensor]], nn.Module]
    site: SitePrivacy | None = None
    notice: Callable[[Tensor, Tensor], None] | None = None

    @property
    def hidden(self) -> SitePrivacy | None:
        """``site``, where its mechanism has a guarantee: nobody may learn which images it has, nor how many."""
        return self.site if self.site is not None and self.site.mechanism.formal else None


class Federation(Protocol):
    """What a method sees of the world on the server's side. In-process and Flower are two implementations."""

    clients: Sequence[int]  # all N
    participants: Sequence[int]  # the K of this round; all N outside rounds
    task: Task
    num_rounds: int
    transform: Transform
    device: torch.device
    mechanism: Mechanism | None  # what stands between the sites' images and their uploads

    def ask(self, clients: Sequence[int], verb: str, payload: Payload, late: bool = False) -> Uploads:
        """Call a client verb, by name, on these clients: the only way to reach them; bytes are metered here.

        ``late``: others have answered before, so the run goes on if none of these does.
        """

    def total(self, clients: Sequence[int], verb: str, payload: Payload, late: bool = False) -> Total:
        """Call a client verb that answers whole numbers, and get their sum without seeing a part (``privacy.totals``).

        ``late``: these clients missed a sum that is open already.
        """

    def net(self, model: Model) -> nn.Module:
        """The network with (a copy of) these weights, on the federation's device."""

    def vacant(self) -> Client:
        """A client without images, for work that the server does in the sites' place."""


@record
class ModelState:
    """State of a server that remembers nothing but the global model."""

    model: Model
    notes: dict[str, float]


@dataclass(frozen=True)
class Kept:
    """What a server keeps of one client, for the case that it withdraws."""

    # number of a buffer (-1: of no task), label, kind (pool, buffer or sums) -> images
    images: Counter[tuple[int, int, str]]
    num_bytes: int


@dataclass(frozen=True)
class LateAnswer:
    """An answer that arrives in a later round than it was asked for, perhaps in a later task."""

    upload: Payload
    sent: Payload  # the question
    classes: tuple[int, ...]  # of the task of the question
    rounds: int  # how late it is
    weight: float  # (1 + rounds)^-a, for a server that counts it less


def weights_of(net: nn.Module) -> Model:
    """The network's state as plain tensors, detached from it."""
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


class Method(Hyperparameters):
    """Base of all methods: hyperparameters as fields, verbs with their defaults."""

    name: ClassVar[str]
    title: ClassVar[str]  # in tables, figures and on pages; without it the name
    colour: ClassVar[str] = ""  # "#rrggbb"; empty: from the name
    marker: ClassVar[str] = ""  # one of o s ^ v D P X * < >; empty: from the name
    uploads: ClassVar[UploadKind] = "weights"  # the kind of what a site sends (UPLOAD_KINDS)
    reconstructs: ClassVar[bool] = False  # the server can reconstruct images of the sites from what they send
    reference: ClassVar[str] = ""  # what line it draws, e.g. "upper bound"; empty: it competes
    cost_unit: ClassVar[bool] = False  # costs of other methods are also shown as multiples of its own
    paper: ClassVar[str] = NOT_SAID
    leaves_site: ClassVar[str] = NOT_SAID  # by default; see leaving()
    # the same in two or three words, for tables and filters; see leaving_in_short()
    leaves_in_short: ClassVar[str] = ""
    remembers: ClassVar[str] = "nothing"
    paints: ClassVar[bool] = False  # pictures of its own, with three channels
    mechanisms: ClassVar[tuple[str, ...]] = ("none",)  # privacy mechanisms that cover everything it sends
    unprotected: ClassVar[str] = ""  # what no mechanism here covers, where leaves_site does not say it
    reuses_records: ClassVar[bool] = False  # clients train on real images of earlier tasks again
    # the server keeps sums over images, and each image enters one of them once, however many rounds there are: a site releases
    # once in a task, its sums can be subtracted again, and without a mechanism they are exact, so for simulations only
    additive: ClassVar[bool] = False
    sums_securely: ClassVar[bool] = False  # what its mechanism releases, it releases through ``federation.total``
    sends_pictures_only: ClassVar[bool] = False  # and their labels, so that a round's uploads can be screened
    scenarios: ClassVar[tuple[str, ...]] = ("class", "domain")  # what kinds of task sequence it can learn
    open_ended: ClassVar[bool] = False  # learns from a stream whose tasks nobody announces (tasks.drift)
    # learns where every site meets the classes in an order of its own (tasks.order=per-site): it does not take ``task.classes`` for
    # new to everybody, nor for the last labels, and a class may come again from another site
    own_orders: ClassVar[bool] = False
    one_order_only: ClassVar[Mapping[str, str]] = {"local_ce": "new"}  # hyperparameters with which it cannot
    late_verbs: ClassVar[
        tuple[str, ...]
    ] = ()  # client verbs whose answers may come rounds later (federation.delay); see late()
    compute: ClassVar[tuple[str, str] | None] = None  # O(...) of all clients and of the server per task, for `explain`
    verified: ClassVar[tuple[Verified, ...]] = ()  # what it was compared with; a class speaks for itself alone

    train: Training = Training()

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """A class with a name of its own does not go by the title of the one that it extends: tables would show one row for two."""
        super().__pydantic_init_subclass__(**options)
        own = vars(cls)
        if "name" in own and "title" not in own:
            cls.title = cls.name

    @classmethod
    def style(cls) -> MethodStyle:
        """How tables and figures show the method; ConfigError E179 if that cannot be drawn."""
        return MethodStyle(
            title=cls.title,
            colour=cls.colour or derived_colour(cls.name),
            marker=cls.marker or derived_marker(cls.name),
            uploads=cls.uploads,
            sends="" if cls.leaves_site == NOT_SAID else cls.leaves_site,
            reference=cls.reference,
            cost_unit=cls.cost_unit,
            reconstructs=cls.reconstructs,
        )

    @classmethod
    def verifications(cls) -> tuple[Verified, ...]:
        """What this very class was compared with: a method that extends another one inherits no comparison."""
        return tuple(cls.__dict__.get("verified", ()))

    @classmethod
    def leaving(cls, mechanism: Mechanism | None) -> str:
        """What leaves a site behind this mechanism."""
        return cls.leaves_site

    @classmethod
    def leaving_in_short(cls, mechanism: Mechanism | None) -> str:
        """The same in two or three words. A class that writes ``leaves_site`` anew inherits no short words: it sends something else."""
        says = next((own for own in cls.__mro__ if {"leaves_site", "leaves_in_short"} & vars(own).keys()), cls)
        return vars(says).get("leaves_in_short") or NOT_SAID

    def check_network(self, arch: Arch) -> None:
        """Refuse a network that the method cannot use, by a ConfigError before the run. The default takes every network."""

    def init(self, net: nn.Module, rng: Rng) -> Any:
        """The server's state before the first task. The default holds the initial weights."""
        return ModelState(model=weights_of(net), notes={})

    def begin_task(self, state: Any, task: Task, federation: Federation, rng: Rng) -> Any:
        """Grow the head to all classes seen so far; old rows are kept."""
        return replace(state, model=grow_head(state.model, task.num_seen, rng.at("head").generator()))

    def broadcast(self, state: Any, round: int, federation: Federation, rng: Rng) -> Payload:
        """What the server sends to every participant of a round. The default is the global model."""
        return {"model": state.model}

    def client_round(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """The client's work of one round: what it received, its images, what it remembers -> what it sends, remembers.

        A verb may have a batched form named ``<verb>_batched`` that takes lists of shards, client states and streams and
        returns a list of answers; the in-process engine prefers it. Both forms must agree.
        """
        raise TypeError(f"method {self.name!r} does not define client_round")

    def expects(self, verb: str, payload: Payload, place: Place) -> Form:
        """What an answer to ``verb`` must look like; a site whose answer does not is left out (``methods/upload_schema.py``)."""
        return anything(place)

    def opened(self, uploads: Uploads, payload: Payload, federation: Federation, rng: Rng) -> Uploads:
        """What the answers to ``payload`` stand for. ``rng.at(k)`` is the stream that client k had for its answer."""
        return uploads

    def late(self, answer: LateAnswer, payload: Payload) -> Payload:
        """What a late answer stands for in the round in which it arrives, where ``payload`` is asked. The default: as it is."""
        return answer.upload

    def server_round(self, state: Any, uploads: Uploads, round: int, federation: Federation, rng: Rng) -> Any:
        """The server's new state after the uploads of a round. Every method must define it."""
        raise TypeError(f"method {self.name!r} does not define server_round")

    def end_task(self, state: Any, task: Task, federation: Federation, rng: Rng) -> Any:
        """The server's new state after the last round of a task. The default changes nothing."""
        return state

    def nominal_bytes(self, arch: Arch, classes_per_task: int, num_classes: int) -> NominalBytes | None:
        """Bytes in the paper's convention (``methods.nominal_cost``); None: there is no convention, nor for FLOPs."""
        return None

    def nominal_client_flops(self, setting: Setting) -> float:
        """FLOPs of the run on all clients, in the paper's convention."""
        return 0.0

    def nominal_server_flops(self, setting: Setting, task: int) -> float:
        """FLOPs of the server in one task with all earlier ones completed, in the paper's convention."""
        return 0.0

    def nominal_replay(self, setting: Setting) -> NominalReplay | None:
        """What is replayed at the end of the sequence, counted as in Table 8; None for a method without such a memory."""
        return None

    def sent_size(self, kind: Literal["features", "inputs", "outputs"], size: int) -> int:
        """How many of ``size`` features of an image, inputs of a layer (as columns) or outputs of a layer (as rows) it sends.

        A forecast runs the method on a small copy of the run, and takes from here how large its tensors are in the real one.
        """
        return size

    def kept_per_class(self) -> int:
        """Pictures of a class that the server keeps after a task at most, by herding; 0: there is no such limit."""
        return 0

    def recent_share(self) -> float:
        """lambda: the server herds towards the mean of this newest share of a task's rounds; 1: of all of them."""
        return 1.0

    def leakage_note(self) -> str:
        """A sentence that must stand beside the measured leakage of its uploads; empty: there is none."""
        return ""

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

    @classmethod
    def can_forget(cls) -> bool:
        """Whether it has written ``forget``: its server keeps what each client sent, and can go on with the rest."""
        return cls.forget is not Method.forget

    def forget(self, state: Any, client: int, model: Model, num_rounds: int, federation: Federation, rng: Rng) -> Any:
        """The state without anything this client sent, its model trained from ``model``, which is fresh, on what remains.

        ``num_rounds`` rounds were held so far: the work that went into the model it replaces.
        """
        raise TypeError(f"method {self.name!r} keeps nothing by client that could be taken out")
