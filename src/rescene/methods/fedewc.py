"""FedEWC (Kirkpatrick et al., PNAS 2017, federated): weights that mattered for finished tasks are held where they were.

start of task t > 1 (anchor = task_end):
    server: send the global model of task t-1 to every client, once; it is the anchor a
    client: F <- gamma F + F_pending
each round:
    server: broadcast theta
    client: E epochs of SGD on its images, CE over all seen classes + lambda_EWC 1/2 sum_i F_i (theta_i - a_i)^2;
            one more pass over its images: F_pending <- mean of squared gradients, each entry at most 1e-4;
            send theta_k and n_k
    server: theta <- sum_k (n_k / sum n) theta_k

With anchor = last_round there is no consolidation: after its own training a client replaces a by its local model and mixes
F_pending into F at once, so that the penalty pulls towards its previous participation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from rescene.core.hyperparameters import hyper
from rescene.core.method_style import SKY
from rescene.core.record import Tree, record
from rescene.core.rng import Rng
from rescene.core.verification import Verified
from rescene.data import Task
from rescene.functional.fisher import MeanLoss, blend_fisher, fisher_diagonal, quadratic_penalty
from rescene.functional.minibatches import minibatches
from rescene.methods.averaging import AveragingMethod, first_learned
from rescene.methods.base import Client, Federation, Model, ModelState, Payload, weights_of
from rescene.methods.nominal_cost import Setting
from rescene.methods.registry import register
from rescene.nets import FLOAT_BYTES, Arch, num_parameters
from rescene.training import Batch, fit_shard, repeatable
from rescene.training.per_image import chunks, is_layered, mean_squared_gradients


@record
class Memory:
    """What a client keeps, over trainable parameters by name; empty where there is nothing yet."""

    fisher: Model  # F of finished tasks
    anchor: Model  # a; has at least the rows of fisher
    pending: Model  # F of the task being learned, from the latest local model


NOTHING = Memory({}, {}, {})


@register
class FedEWC(AveragingMethod):
    """FedAvg with a penalty on weights that were important for earlier tasks."""

    name: ClassVar[str] = "fedewc"
    title: ClassVar[str] = "FedEWC"
    colour: ClassVar[str] = SKY
    marker: ClassVar[str] = "^"
    paper: ClassVar[str] = "Kirkpatrick et al., PNAS 2017"
    own_orders: ClassVar[bool] = True
    one_order_only: ClassVar[Mapping[str, str]] = {"local_ce": "new", "anchor": "last_round"}
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified("published code", "tests/oracles/test_oracles.py::test_fedewc_fisher_and_penalty", "1e-6"),
        Verified(
            "hand computation", "tests/methods/test_fedewc.py::test_one_step_equals_the_formula", "a step, to rounding"
        ),
    )
    remembers: ClassVar[str] = "importance of every weight (Fisher diagonal), and the weights it pulls back to"

    unprotected: ClassVar[str] = (
        "the Fisher diagonal is computed from images and steers every later upload outside the clipped gradients"
    )

    ewc_weight: float = hyper(1000.0, "lambda_EWC", "App. A", "weight of the penalty", ge=0)
    anchor: Literal["task_end", "last_round"] = hyper(
        "task_end", "a", "[ours]", "pull towards the last task's global model, or the client's own last model"
    )
    fisher: Literal["per_sample", "batch_mean"] = hyper(
        "per_sample", "F", "[ours]", "square the gradient of every image, or of every batch's mean loss"
    )
    fisher_clip: float | None = hyper(
        1e-4, "-", "[ours]", "bound on each entry of a task's Fisher; null for none", gt=0
    )
    fisher_decay: float = hyper(
        1.0, "gamma", "[ours]", "weight of the older tasks' Fisher when a task's is added (task_end)", ge=0, le=1
    )
    local_ce: Literal["all", "new"] = hyper(
        "all", "-", "[ours]", "cross-entropy over all seen classes, or this task's only"
    )

    def begin_task(self, state: ModelState, task: Task, federation: Federation, rng: Rng) -> ModelState:
        if task.index > 0 and self.anchor == "task_end":  # before the head grows: new rows have no anchor
            anchor = _trainable(federation.net(state.model))
            federation.ask(federation.clients, "consolidate", {"anchor": anchor})
        grown: ModelState = super().begin_task(state, task, federation, rng)
        return grown

    def consolidate(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """Close the finished task. Without a part in it F stays as it is; without any history there is nothing to hold."""
        if client_state is None:
            return {}, None
        fisher = client_state.fisher
        if client_state.pending:
            fisher = blend_fisher(fisher, client_state.pending, self.fisher_decay, 1.0)
        return {}, Memory(fisher=fisher, anchor=payload["anchor"], pending={})

    def client_round(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        if len(shard) == 0:
            return {"num_images": 0}, client_state
        memory = client_state or NOTHING
        held = memory if shard.task.index > 0 else NOTHING  # the first task has nothing to protect
        net = shard.net(payload["model"])
        parameters = dict(net.named_parameters())  # of the network being trained: the penalty must move it

        def penalty() -> Tensor:
            return self.ewc_weight * quadratic_penalty(parameters, held.fisher, held.anchor)

        @repeatable
        def loss(net: nn.Module, batch: Batch) -> Tensor:
            return self._task_loss(net(batch.x), batch.y, shard.task) + penalty()

        final = fit_shard(net, shard, self.train, rng.at("sgd").generator(shard.device), loss)
        notes = {"local_loss": final, "penalty": float(penalty().detach())}
        upload = {"model": weights_of(net), "num_images": len(shard), "notes": notes}
        return upload, self._remembered(memory, self._fisher(net, shard, rng.at("fisher")), net, shard.task)

    def _task_loss(self, logits: Tensor, labels: Tensor, task: Task, reduction: str = "mean") -> Tensor:
        first = first_learned(task, self.local_ce)
        return F.cross_entropy(logits[:, first:], labels - first, reduction=reduction)

    def _fisher(self, net: nn.Module, shard: Client, rng: Rng) -> Model:
        """F of the client's images, not augmented, at its trained model with BatchNorm's running statistics (App. A)."""
        net.eval()
        found = self._batch_fisher(net, shard, rng) if self.fisher == "batch_mean" else self._image_fisher(net, shard)
        limit = math.inf if self.fisher_clip is None else self.fisher_clip
        return {name: value.clamp(max=limit) for name, value in found.items()}

    def _image_fisher(self, net: nn.Module, shard: Client) -> Model:
        batches = _pictures(shard, [shard.index[rows] for rows in chunks(net, len(shard), shard.device)])
        if not is_layered(net):
            return fisher_diagonal(self._loss_in(net, shard.task), _trainable(net), batches)
        return mean_squared_gradients(net, batches, lambda z, y: self._task_loss(z, y, shard.task, "sum"))

    def _batch_fisher(self, net: nn.Module, shard: Client, rng: Rng) -> Model:
        """Here the batches matter, so they are drawn as in training."""
        order = torch.randperm(len(shard), generator=rng.generator()).to(shard.index.device)
        parts = minibatches(shard.index[order], self.train.batch_size, self.train.smallest_batch)
        batches = _pictures(shard, parts)
        return fisher_diagonal(self._loss_in(net, shard.task), _trainable(net), batches, per_sample=False)

    def _loss_in(self, net: nn.Module, task: Task) -> MeanLoss:
        return lambda theta, x, y: self._task_loss(functional_call(net, dict(theta), x), y, task)

    def _remembered(self, memory: Memory, pending: Model, net: nn.Module, task: Task) -> Memory:
        if self.anchor == "task_end":
            return replace(memory, pending=pending)
        share = _old_share(task)
        return Memory(blend_fisher(memory.fisher, pending, share, 1 - share), _trainable(net), {})

    def nominal_memory_bytes(self, arch: Arch, num_classes: int) -> float:
        """Fisher and anchor."""
        return 2 * num_parameters(arch, num_classes) * FLOAT_BYTES

    def nominal_client_flops(self, setting: Setting) -> float:
        """One more pass over the images, for the Fisher."""
        epochs = setting.train.local_epochs
        return super().nominal_client_flops(setting) * (epochs + 1) / epochs


def _pictures(shard: Client, parts: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    return ((shard.pictures(rows), shard.images.labels[rows]) for rows in parts)


def _trainable(net: nn.Module) -> Model:
    return {name: value.detach().clone() for name, value in net.named_parameters()}


def _old_share(task: Task) -> float:
    """How much of what is known is old: known over total classes, or domains."""
    if task.domain is not None:
        return task.index / (task.index + 1)
    return 1 - len(task.classes) / task.num_seen
