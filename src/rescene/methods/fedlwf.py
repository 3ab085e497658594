"""FedLwF (Li and Hoiem, TPAMI 2018, federated): the model of the finished task teaches while the next one is learned.

start of task t > 1:
    server: send the global model of task t-1 to every client, once; it is the teacher
each round:
    server: broadcast theta
    client: E epochs of SGD on its images, CE over the new classes + lambda_KD KD(student, teacher) over the old ones,
            both on the same augmented images; send theta_k and n_k
    server: theta <- sum_k (n_k / sum n) theta_k
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.core.hyperparameters import hyper
from rescene.core.method_style import BROWN
from rescene.core.record import Tree
from rescene.core.rng import Rng
from rescene.core.verification import Verified
from rescene.data import Task
from rescene.functional.distillation import distillation_loss
from rescene.methods.averaging import AveragingMethod, first_learned, trained
from rescene.methods.base import Client, Federation, ModelState, Payload
from rescene.methods.nominal_cost import TRAINING_PASSES
from rescene.methods.registry import register
from rescene.nets import Arch, model_bytes
from rescene.training import Batch, Training, frozen, repeatable


@register
class FedLwF(AveragingMethod):
    """FedAvg with distillation from the global model of the previous task."""

    name: ClassVar[str] = "fedlwf"
    title: ClassVar[str] = "FedLwF"
    colour: ClassVar[str] = BROWN
    marker: ClassVar[str] = "v"
    paper: ClassVar[str] = "Li and Hoiem, TPAMI 2018"
    own_orders: ClassVar[bool] = True
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified(
            "published code", "tests/oracles/test_oracles.py::test_fedlwf_takes_the_published_step", "3e-5, a step"
        ),
        Verified("paper figure", "results/cifar10/fedlwf-beta0.5-s0", "AA 14.75 against 16.94 +- 5.70 (n = 1)"),
    )
    remembers: ClassVar[str] = "the global model of the previous task, as a teacher"
    mechanisms: ClassVar[tuple[str, ...]] = ("none", "dp-sgd")

    kd_weight: float = hyper(3.0, "lambda_KD", "App. A", "weight of the distillation loss", ge=0)
    kd_temperature: float = hyper(2.0, "T_KD", "App. A", "temperature of both softmaxes of the distillation", gt=0)
    kd_t2: bool = hyper(False, "-", "[ours]", "multiply the distillation loss by the squared temperature")
    kd_reduction: Literal["sum", "mean"] = hyper(
        "sum", "-", "[public code]", "the distillation adds up the old classes, or averages over them"
    )
    local_ce: Literal["new", "all"] = hyper(
        "new", "-", "[ours]", "cross-entropy over this task's classes only, or over all seen classes"
    )

    def begin_task(self, state: ModelState, task: Task, federation: Federation, rng: Rng) -> ModelState:
        if task.index > 0:  # before the head grows: the teacher knows the old classes only
            federation.ask(federation.clients, "keep_teacher", {"teacher": state.model})
        grown: ModelState = super().begin_task(state, task, federation, rng)
        return grown

    def keep_teacher(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """Site: store the global model of the finished task as the teacher of the next one."""
        return {}, {"teacher": payload["teacher"]}

    def client_round(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        net = shard.net(payload["model"])
        teacher = _teacher(shard, client_state, self.train)
        first = first_learned(shard.task, self.local_ce)

        @repeatable
        def loss(net: nn.Module, batch: Batch) -> Tensor:
            logits = net(batch.x)
            value = F.cross_entropy(logits[:, first:], batch.y - first)
            return value if teacher is None else value + self.kd_weight * self._distillation(logits, teacher, batch.x)

        return trained(net, shard, self.train, rng.at("sgd").generator(shard.device), loss), client_state

    def _distillation(self, logits: Tensor, teacher: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            targets = teacher(x)
        return distillation_loss(logits, targets, self.kd_temperature, self.kd_t2, self.kd_reduction)

    def nominal_memory_bytes(self, arch: Arch, num_classes: int) -> float:
        """The teacher."""
        return model_bytes(arch, num_classes)

    def nominal_passes(self, task: int) -> int:
        """The teacher looks at every image, too."""
        return TRAINING_PASSES + (task > 0)


def _teacher(shard: Client, client_state: Tree, settings: Training) -> nn.Module | None:
    """The previous task's model, frozen, with its own BatchNorm statistics; None in the first task or if never received."""
    return frozen(shard.net(client_state["teacher"]), settings) if client_state else None
