"""Raw upload: the control of every claim about condensation. ReSCENE with zero condensation steps.

each round: client: send at most IPC real images per class, drawn afresh, unchanged
            server: exactly ReSCENE's: pool, balanced training, logit adjustment; herding at the end of the task

What ReSCENE scores below this line is the price of condensing; what it scores above it, condensing has earned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from torch import nn

from rescene.data import Shard, Task
from rescene.hyperparameters import hyper
from rescene.methods.base import Federation, Method, Model, Payload, Uploads
from rescene.methods.forms import Form, Place
from rescene.methods.registry import register
from rescene.methods.rescene import ReSCENE, ServerState
from rescene.record import Tree
from rescene.rng import Rng


@register
class RawUpload(Method):
    name: ClassVar[str] = "raw-upload"
    title: ClassVar[str] = "Raw upload"
    open_ended: ClassVar[bool] = True
    paper: ClassVar[str] = "control, not a method to use: what sharing a few real images would give"
    leaves_site: ClassVar[str] = "real training images with their labels, unchanged"
    sends_pictures_only: ClassVar[bool] = True

    can_forget: ClassVar[bool] = True

    ipc: int = hyper(10, "IPC", "App. A", "real images sent per class and round, at most", ge=1)
    surrogates_per_class: Literal["half", "min"] = hyper(
        "half", "-", "[ours]", "of n images: min(IPC, n//2) as ReSCENE by default, or min(IPC, n)"
    )
    budget: int = hyper(1000, "B", "Sec. 4.1", "images kept per class after a task", ge=1)
    recent_fraction: float = hyper(
        0.75, "lambda", "Sec. 4.1", "fraction of rounds that forms the herding target", gt=0, le=1
    )
    alpha: float = hyper(
        0.5, "alpha", "App. A", "sampling exponent: 1 count-proportional, 0 class-balanced", ge=0, le=1
    )
    tau: float = hyper(1.0, "tau", "App. A", "strength of the logit adjustment", ge=0)

    @property
    def _rescene(self) -> ReSCENE:
        """The method this is a corner of; the fields have the same names."""
        return ReSCENE(**self.model_dump(exclude={"train"}), num_steps=0, guard=False, train=self.train)

    def init(self, net: nn.Module, rng: Rng) -> ServerState:
        return self._rescene.init(net, rng)

    def expects(self, verb: str, payload: Payload, place: Place) -> Form:
        return self._rescene.expects(verb, payload, place)

    def broadcast(self, state: ServerState, round: int, federation: Federation, rng: Rng) -> Payload:
        return self._rescene.broadcast(state, round, federation, rng)

    def client_round(self, payload: Payload, shard: Shard, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        return self._rescene.client_round(payload, shard, client_state, rng)

    def client_round_batched(
        self, payload: Payload, shards: Sequence[Shard], client_states: Sequence[Tree], rngs: Sequence[Rng]
    ) -> list[tuple[Payload, Tree]]:
        return self._rescene.client_round_batched(payload, shards, client_states, rngs)

    def server_round(
        self, state: ServerState, uploads: Uploads, round: int, federation: Federation, rng: Rng
    ) -> ServerState:
        return self._rescene.server_round(state, uploads, round, federation, rng)

    def end_task(self, state: ServerState, task: Task, federation: Federation, rng: Rng) -> ServerState:
        return self._rescene.end_task(state, task, federation, rng)

    def forget(
        self, state: ServerState, client: int, model: Model, num_rounds: int, federation: Federation, rng: Rng
    ) -> ServerState:
        return self._rescene.forget(state, client, model, num_rounds, federation, rng)
