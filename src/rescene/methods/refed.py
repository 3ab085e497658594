"""Re-Fed (Li et al., CVPR 2024): clients keep the previous images that matter most to a personalised model.

begin of task t >= 2, all clients: pool = cache + D_{t-1}; room = max(0, M - |D_t|)
    client: if the pool fits into the room, keep it. Otherwise v <- w, and for p = 1, 2, ...:
                one epoch of v <- v - eta (grad CE + q(lambda) (v - w))
                I(x) += (1/p) ||grad_v l(f_v(x), y)||  for every x of the pool
            and keep the `room` images with the highest I
            (behind a privacy mechanism: keep each image of the pool with the same public chance)
each round of task t:
    server: broadcast theta
    client: E epochs of SGD on D_t + cache, cross-entropy over all seen classes; send theta_k, n_k
    server: theta <- sum_k (n_k / sum n) theta_k
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from rescene.core.hyperparameters import hyper
from rescene.core.method_style import ORANGE
from rescene.core.record import Tree, record
from rescene.core.rng import Rng
from rescene.core.verification import Verified
from rescene.data import Task
from rescene.functional.importance import (
    last_layer_gradient_norms,
    most_important,
    proximal_coefficient,
    proximal_penalty,
)
from rescene.methods.averaging import AveragingMethod, refuse_twice, trained
from rescene.methods.base import Client, Federation, Model, ModelState, Payload
from rescene.methods.nominal_cost import TRAINING_PASSES, NominalReplay, Setting, image_bytes
from rescene.methods.registry import register
from rescene.nets import Arch
from rescene.privacy.mechanism import SitePrivacy
from rescene.training import Batch, Training, cross_entropy, embed, fit_shard, repeatable, with_replay
from rescene.training.per_image import gradient_norms


@record
class Memory:
    """Previous images of a client: the cache during a task, cache and finished task between two tasks."""

    pixels: Tensor  # uint8 [m, 3, H, W]
    labels: Tensor  # int64 [m]
    chance: float = 1.0  # behind a mechanism: with which an earlier image is still here
    last_task: int = -1  # whose images are in it


@register
class ReFed(AveragingMethod):
    """FedAvg with a replay memory at every site, chosen by gradient norms of a personalised model."""

    name: ClassVar[str] = "refed"
    title: ClassVar[str] = "Re-Fed"
    colour: ClassVar[str] = ORANGE
    marker: ClassVar[str] = "*"
    paper: ClassVar[str] = "Li et al., CVPR 2024"
    own_orders: ClassVar[bool] = True
    verified: ClassVar[tuple[Verified, ...]] = (
        Verified(
            "hand computation",
            "tests/methods/test_refed.py::test_importance_follows_the_update_rule_and_the_weights_one_over_p",
            "the importance, to rounding",
        ),
    )
    leaves_site: ClassVar[str] = "model weights and the number of images trained on"
    leaves_in_short: ClassVar[str] = "weights"
    compute: ClassVar[tuple[str, str] | None] = ("O(R K E (D_loc + D_mem) F + N E_PIM D_pool F)", "O(R K P)")
    remembers: ClassVar[str] = "real images of earlier tasks: as many as its storage leaves beside the current ones"
    mechanisms: ClassVar[tuple[str, ...]] = ("none", "dp-sgd", "paper-experiment")
    reuses_records: ClassVar[bool] = True

    storage: int = hyper(1000, "M", "App. A", "images a client can hold, current and previous together", ge=0)
    pim_epochs: int = hyper(40, "p", "App. A", "epochs of the personalised informative model", ge=1)
    pim_lr: float = hyper(0.01, "eta", "App. A", "learning rate of the personalised informative model", gt=0)
    pim_batch_size: int = hyper(64, "-", "App. A", "images per step of the personalised informative model", ge=2)
    locality: float = hyper(
        0.5, "lambda", "App. A", "1: the model follows the pool only; towards 0: stays global", gt=0, le=1
    )
    importance: Literal["gradient", "last-layer", "random"] = hyper(
        "gradient",
        "-",
        "[ours]",
        "norm of the whole gradient, or (cheaper, another ranking) of the head's part of it; random: a control",
    )

    def begin_task(self, state: ModelState, task: Task, federation: Federation, rng: Rng) -> ModelState:
        if task.index > 0:
            # before the head grows: w is the model of the finished task, and the pool has none of the new classes
            federation.ask(federation.clients, "refresh_cache", {"model": state.model})
        grown: ModelState = super().begin_task(state, task, federation, rng)
        return grown

    def refresh_cache(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """Make room for the images of the new task. Nothing is sent back."""
        memory = _memory(client_state, shard)
        if site := shard.hidden:  # the choice is local, so the paper's experiment leaves it as it is
            return {}, self._thinned(memory, shard, site)
        room = max(0, self.storage - len(shard))
        if len(memory.labels) <= room:
            return {}, memory
        kept = torch.arange(0, device=shard.device)
        if room > 0:
            pool = with_replay(replace(shard, index=shard.index[:0]), memory.pixels, memory.labels)
            kept = most_important(self._importance(payload["model"], pool, rng), room)
        return {}, replace(memory, pixels=memory.pixels[kept], labels=memory.labels[kept])

    def _thinned(self, memory: Memory, shard: Client, site: SitePrivacy) -> Memory:
        """Room by public numbers, and a coin for each image: importance would depend on the pool and need a budget."""
        task, count = shard.task, site.mechanism.typical_count
        earlier = task.num_seen - len(task.classes) if task.domain is None else task.index * len(task.classes)
        chance = min(memory.chance, max(0.0, self.storage / count - len(task.classes)) / earlier)
        kept = site.noise.chosen(len(memory.labels), chance / memory.chance if memory.chance else 0.0)
        kept = kept.to(shard.device)
        return replace(memory, pixels=memory.pixels[kept], labels=memory.labels[kept], chance=chance)

    def _importance(self, model: Model, pool: Client, rng: Rng) -> Tensor:
        """I(x) of every image of the pool, summed while the personalised informative model v moves away from w."""
        if self.importance == "random":
            return torch.rand(len(pool), generator=rng.at("chance").generator()).to(pool.device)
        net = pool.net(model)
        anchors = [parameter.detach().clone() for parameter in net.parameters()]  # w
        q = proximal_coefficient(self.locality)

        @repeatable
        def loss(net: nn.Module, batch: Batch) -> Tensor:
            return cross_entropy(net, batch) + proximal_penalty(net.parameters(), anchors, q)

        x, y = pool.pictures(pool.index), pool.labels
        importance = torch.zeros(len(pool), device=pool.device)

        def weigh(p: int) -> None:
            importance.add_(self._norms(net, x, y) / p)

        fit_shard(net, pool, self._pim_training(), rng.at("pim").generator(pool.device), loss, after_epoch=weigh)
        return importance

    def _pim_training(self) -> Training:
        """The update rule is plain gradient descent. Pictures are augmented as remembered ones are in local training."""
        return Training(
            local_epochs=self.pim_epochs,
            batch_size=self.pim_batch_size,
            smallest_batch=self.train.smallest_batch,
            lr=self.pim_lr,
            momentum=0.0,
            weight_decay=0.0,
            augment=self.train.augment,
        )

    def _norms(self, net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """||grad_v l|| of every image, pictures as they are. ``net`` is in eval mode, where images do not mix."""
        if self.importance == "last-layer":
            features = embed(net, x)
            return last_layer_gradient_norms(features, net.head(features).detach(), y)  # type: ignore[operator]
        return gradient_norms(net, x, y)

    def client_round(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        memory = _memory(client_state, shard)
        if shard.hidden:
            refuse_twice(memory.last_task, shard.task)
        mixed = with_replay(shard, memory.pixels, memory.labels)
        net = shard.net(payload["model"])
        generator, notes = rng.at("sgd").generator(shard.device), {"replay_size": len(memory.labels)}
        return trained(net, mixed, self.train, generator, notes=notes, counted=self.counted(mixed)), client_state

    def end_task(self, state: ModelState, task: Task, federation: Federation, rng: Rng) -> ModelState:
        """The model does not change; every client puts the finished task's images beside its cache."""
        federation.ask(federation.clients, "set_aside", {})
        return state

    def set_aside(self, payload: Payload, shard: Client, client_state: Tree, rng: Rng) -> tuple[Payload, Tree]:
        """What the next refresh chooses from: cache + D_t, each image once however often this is asked. Nothing is sent."""
        memory, index = _memory(client_state, shard), shard.index
        if shard.task.index <= memory.last_task:
            return {}, memory
        if site := shard.hidden:  # as likely to be here as those of earlier tasks
            index = index[site.noise.chosen(len(index), memory.chance).to(index.device)]
        pixels = torch.cat([memory.pixels, shard.images.pixels[index]])
        labels = torch.cat([memory.labels, shard.images.labels[index]])
        return {}, Memory(pixels, labels, memory.chance, shard.task.index)

    def nominal_memory_bytes(self, arch: Arch, num_classes: int) -> float:
        """The whole storage."""
        return self.storage * image_bytes(arch)

    def nominal_replayed(self, setting: Setting, task: int) -> float:
        return _cached_and_scored(setting.sizes, self.storage)[0][task]

    def nominal_client_flops(self, setting: Setting) -> float:
        """And at task boundaries E_PIM epochs of the informative model and as many of scoring, each forward and backward."""
        scored = _cached_and_scored(setting.sizes, self.storage)[1]
        boundaries = self.pim_epochs * scored * 2 * TRAINING_PASSES * setting.forward
        return super().nominal_client_flops(setting) + boundaries

    def nominal_replay(self, setting: Setting) -> NominalReplay | None:
        each = _cached_and_scored(setting.sizes, self.storage)[0][-1]
        return NominalReplay(self.storage, each, each * setting.num_clients)


def _cached_and_scored(sizes: list[list[int]], storage: int) -> tuple[list[float], int]:
    """Cached images of the average site in each task, and how many previous images are scored in all.

    Storage covers current and previous images together; where the previous ones fit nothing is scored.
    """
    cache, cached, scored = [0] * len(sizes[0]), [0.0], 0
    for before, now in zip(sizes, sizes[1:], strict=False):
        pools = [kept + n for kept, n in zip(cache, before, strict=True)]
        rooms = [max(0, storage - n) for n in now]
        scored += sum(pool for pool, room in zip(pools, rooms, strict=True) if pool > room > 0)
        cache = [min(pool, room) for pool, room in zip(pools, rooms, strict=True)]
        cached.append(sum(cache) / len(cache))
    return cached, scored


def _memory(client_state: Tree, shard: Client) -> Memory:
    """The client's memory; an empty one if it has none yet (first task, or a client that joined late)."""
    if client_state is not None:
        assert isinstance(client_state, Memory)
        return client_state
    return Memory(shard.images.pixels[:0], shard.images.labels[:0])
