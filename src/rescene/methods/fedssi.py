"""FedSSI (Li et al., ICML 2025): synaptic intelligence at every site, measured on a model between its own and the global one.

each round of task t:
    server: broadcast w
    client: E epochs of SGD on its images, CE over all seen classes + alpha sum_i Omega_i (w_i - a_i)^2; send w_k and n_k
    server: w <- sum_k (n_k / sum n) w_k
end of task t, on every client, w^t the global model:
    v <- the global model that began the task                    the personalised surrogate model (PSM)
    steps of dv = -eta (g + q(lambda) (v - w^t)),  s_i <- s_i - g_i dv_i
    Omega_i <- Omega_i + s_i / ((v_i - its start)^2 + xi),  a <- w^t;  v is thrown away

lambda = 1 is synaptic intelligence on the site's own images alone; a smaller lambda pulls v to the global model, q(lambda) =
(1 - lambda) / (2 lambda), so that weights count that matter to both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from torch import Tensor, nn

from rescene.core.hyperparameters import hyper
from rescene.core.method_style import GREEN
from rescene.core.record import Tree, record
from rescene.core.rng import Rng
from rescene.core.verification import Verified
from rescene.data import Task
from rescene.functional.fisher import quadratic_penalty
from rescene.functional.importance import proximal_coefficient
from rescene.functional.synaptic import accumulated, synaptic_importance
from rescene.methods.averaging import AveragingMethod, trained
from rescene.methods.base import Client, Federation, Model, Payload, weights_of
from rescene.methods.nominal_cost import TRAINING_PASSES, Setting
from rescene.methods.registry import register
from rescene.nets import FLOAT_BYTES, Arch, num_parameters
from rescene.training.surrogate_model import contributions


@record
class FedSsiState:
    """The server's memory."""

    model: Model
    start: Model  # the global model that began the task, its head grown
    notes: dict[str, float]


@record
class Synapses:
    """What a site keeps, over trainable parameters by name."""

    importance: Model  # Omega of finished tasks; empty before the first in which the site had images
    anchor: Model  # a, the global model that ended the last task


@register
class FedSSI(AveragingMethod):
    """FedAvg with a penalty on weights that did the work in earlier tasks, by a surrogate model's own path."""

    name: ClassVar[str] = "fedssi"
    title: ClassVar[str] = "FedSSI"
    colour: ClassVar[str] = GREEN
    marker: ClassVar[str] = "v"
    paper: ClassVar[str] = "Li et al., ICML 2025"
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified(
            "hand computation",
            "tests/methods/test_fedssi.py::test_importance_is_that_of_the_written_out_path",
            "1e-5, the importance of every weight",
        ),
        Verified(
            "hand computation",
            "tests/methods/test_fedssi.py::test_one_penalised_step_equals_the_formula",
            "1e-6, a step",
        ),
    )
    own_orders: ClassVar[bool] = True
    compute: ClassVar[tuple[str, str] | None] = ("O(R K E D_loc F + N E D_loc F)", "O(R K P)")
    remembers: ClassVar[str] = "importance of every weight (synaptic intelligence), and the weights it pulls back to"
    unprotected: ClassVar[str] = (
        "the importance of weights is computed from images and steers every later upload outside the clipped gradients"
    )

    si_weight: float = hyper(1.0, "alpha", "[ours]", "weight of the penalty", ge=0)
    locality: float = hyper(
        0.5, "lambda", "[ours]", "1: the surrogate follows the site's images only; towards 0: stays global", gt=0, le=1
    )
    damping: float = hyper(0.1, "xi", "[ours]", "added to a weight's squared movement, in squared weights", gt=0)
    psm_epochs: int | None = hyper(
        None, "-", "[ours]", "epochs of the surrogate model after a task; null: as many as local training has", ge=1
    )
    psm_start: Literal["task_start", "task_end"] = hyper(
        "task_start", "v_0", "[ours]", "the surrogate starts at the global model that began the task, or ended it"
    )
    local_ce: Literal["all", "new"] = hyper(
        "all", "-", "[ours]", "cross-entropy over all seen classes, or this task's only"
    )

    def init(self, net: nn.Module, rng: Rng) -> FedSsiState:
        return FedSsiState(model=weights_of(net), start={}, notes={})

    def begin_task(self, state: FedSsiState, task: Task, federation: Federation, rng: Rng) -> FedSsiState:
        grown: FedSsiState = super().begin_task(state, task, federation, rng)
        return replace(grown, start=grown.model)

    def client_round(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        net = shard.net(payload["model"])
        w = dict(net.named_parameters())  # of the network being trained: the penalty must move it

        def surrogate_loss() -> Tensor:
            return 2 * self.si_weight * quadratic_penalty(w, client_state.importance, client_state.anchor)

        holds = self.si_weight > 0 and client_state is not None and client_state.importance
        generator = rng.at("sgd").generator(shard.device)
        first, penalty = self._first_class(shard.task), surrogate_loss if holds else None
        upload = trained(net, shard, self.train, generator, first_class=first, penalty=penalty)
        if penalty is not None and "notes" in upload:
            upload["notes"]["penalty"] = float(penalty().detach())
        return upload, client_state

    def end_task(self, state: FedSsiState, task: Task, federation: Federation, rng: Rng) -> FedSsiState:
        start = {"start": state.start} if self.psm_start == "task_start" else {}
        federation.ask(federation.clients, "consolidate", {"model": state.model, **start})
        return state

    def consolidate(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """Site: close the task. Without images in it Omega stays as it is, and the anchor moves."""
        global_net = shard.net(payload["model"])
        anchor = {name: value.detach().clone() for name, value in global_net.named_parameters()}  # w^t
        importance: Model = {} if client_state is None else client_state.importance
        if len(shard) > 0:
            importance = accumulated(importance, self._measured(payload, anchor, shard, rng))
        return {}, Synapses(importance, anchor)

    def _measured(self, payload: Payload, w: Model, shard: Client, rng: Rng) -> Model:
        """s / (Delta^2 + xi) of this task, on the path of the surrogate model."""
        surrogate = shard.net(payload["start"] if "start" in payload else payload["model"])
        start = {name: value.detach().clone() for name, value in surrogate.named_parameters()}
        s = contributions(
            surrogate,
            w,
            shard,
            self.train,
            rng.at("psm").generator(shard.device),
            epochs=self.psm_epochs or self.train.local_epochs,
            q=proximal_coefficient(self.locality),
            first_class=self._first_class(shard.task),
        )
        moved = {name: value.detach() - start[name] for name, value in surrogate.named_parameters()}
        return synaptic_importance(s, moved, self.damping)

    def _first_class(self, task: Task) -> int:
        return min(task.classes) if self.local_ce == "new" else 0

    def nominal_memory_bytes(self, arch: Arch, num_classes: int) -> float:
        """Omega and the anchor."""
        return 2 * num_parameters(arch, num_classes) * FLOAT_BYTES

    def nominal_client_flops(self, setting: Setting) -> float:
        """The surrogate model is trained once per task, on every client."""
        images = sum(setting.local_images(t) for t in range(len(setting.tasks)))
        epochs = self.psm_epochs or setting.train.local_epochs
        more = setting.num_clients * epochs * images * TRAINING_PASSES * setting.forward
        return super().nominal_client_flops(setting) + more
