"""Stochastic gradient descent on the server's pool and on a client's shard.

Both are the same loop with different batches: a plan gives the indices of an epoch, a fetch turns indices into a batch, a
loss turns a batch into a number. Baselines add their penalty by passing their own loss.

A client's images may stand together with remembered ones, for methods whose clients keep exemplars.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.sgd import sgd as sgd_

from rescene.accel.sgd_graph import fit_captured, fit_repeated
from rescene.core.hyperparameters import Hyperparameters, hyper
from rescene.data import Batch, Images, Shard, Transform
from rescene.functional import logit_adjusted_cross_entropy, sampling_probabilities
from rescene.functional.balance import EXCLUDED, log_prior
from rescene.functional.minibatches import minibatches, num_minibatches
from rescene.functional.pictures import soften
from rescene.nets import alike, is_recordable, is_rehearsal, laps

HeldShard = TypeVar("HeldShard", bound=Shard)


def with_replay(shard: HeldShard, pixels: Tensor, labels: Tensor) -> HeldShard:
    """The client's images of this task followed by its remembered ones (uint8 [m, 3, H, W], labels [m]).

    Positions 0..n-1 of the result are the current images in the order of ``shard.index``, n..n+m-1 the remembered ones, so
    a loss can tell them apart by ``batch.index >= n``. Only the client's own images are copied, not the whole split.
    """
    own = shard.images.pixels[shard.index]
    images = Images(torch.cat([own, pixels.to(own)]), torch.cat([shard.labels, labels.to(shard.labels)]))
    index = torch.arange(len(images.labels), device=own.device)
    return replace(shard, images=images, index=index, first_remembered=len(own))


def crops_of(shard: Shard, index: Tensor, draws: Tensor, augment: bool | str) -> Tensor:
    """The drawn crops and mirrors [3, n] of the pictures at these positions; with ``new`` remembered ones stay as they are."""
    draws = draws.to(shard.device)
    if augment != "new" or shard.first_remembered is None:
        return draws
    as_it_is = torch.tensor([[shard.transform.pad], [shard.transform.pad], [0]], device=draws.device)
    return torch.where(index >= shard.first_remembered, as_it_is, draws)


def shown(shard: Shard, index: Tensor, augment: bool | str, generator: torch.Generator) -> Tensor:
    """Normalised pictures at these positions as a training step sees them: cropped and mirrored as ``augment`` says."""
    x = shard.pictures(index)
    if not augment:
        return x
    draws = shard.transform.draw(len(index), generator)
    return shard.transform.apply(x, crops_of(shard, index, draws, augment))


WORTH_RECORDING = 4  # epochs of a call at least: a recording costs about as much as a dozen plain steps

BatchOrders = Callable[[], Tensor]
Fetch = Callable[[Tensor], Batch]
Loss = Callable[[nn.Module, Batch], Tensor]
Penalty = Callable[[], Tensor]  # a term of the objective that sees the weights alone: no image enters it
AfterEpoch = Callable[[int], None]  # called with 1, 2, ..., the network in eval mode


class Training(Hyperparameters):
    """The optimisation all methods share (App. A, common protocol)."""

    local_epochs: int = hyper(20, "E", "Sec. 4.1", "epochs of local training per round (model-update methods)", ge=1)
    server_epochs: int = hyper(100, "E_srv", "Sec. 4.1", "server epochs per round (surrogate methods)", ge=1)
    batch_size: int = hyper(128, "-", "App. A", "images per SGD step, on clients and on the server", ge=2)
    smallest_batch: int = hyper(
        2,
        "-",
        "[ours]",
        "a last batch of fewer images is left out, unless it is the only one",
        ge=2,
    )
    lr: float = hyper(0.01, "eta", "App. A", "learning rate; cosine-annealed within a round on the server", gt=0)
    momentum: float = hyper(0.9, "-", "App. A", "SGD momentum", ge=0, lt=1)
    weight_decay: float = hyper(5e-4, "-", "App. A", "SGD weight decay", ge=0)
    precision: Literal["auto", "float32", "bfloat16"] = hyper(
        "auto", "-", "[ours]", "arithmetic of recorded steps; auto is bfloat16 on a GPU and float32 on a CPU"
    )
    augment: bool | Literal["new"] = hyper(
        True,
        "-",
        "App. A",
        "random crop and horizontal flip, on clients and (ours) on the server; new: not of pictures that a client remembers",
    )
    soften: float = hyper(
        0.0, "-", "[ours]", "blur, noise and contrast on the server, which hide fine texture; 0: none", ge=0
    )


def repeatable(loss: Loss) -> Loss:
    """Says of a loss that it depends on nothing but the network, the batch and tensors that stay as they are.

    Such a step is the same computation every time, and on a GPU it is recorded once and replayed.
    """
    loss.is_repeatable = True  # type: ignore[attr-defined]
    return loss


def cosine_rate(lr: float, epoch: int, epochs: int) -> float:
    """Annealed from lr towards 0 over the epochs of one round (App. A)."""
    return lr * 0.5 * (1 + math.cos(math.pi * epoch / epochs))


@repeatable
def cross_entropy(net: nn.Module, batch: Batch) -> Tensor:
    """Plain CE over all outputs of the network."""
    return F.cross_entropy(net(batch.x), batch.y)


def cross_entropy_from(first_class: int) -> Loss:
    """CE over the outputs from this class on."""

    def loss(net: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(net(batch.x)[:, first_class:], batch.y - first_class)

    return loss


def penalised(loss: Loss, penalty: Penalty) -> Loss:
    """The loss plus the penalty. It can be recorded on a GPU, so the penalty may close over constant tensors only."""

    @repeatable
    def total(net: nn.Module, batch: Batch) -> Tensor:
        return loss(net, batch) + penalty()

    return total


class Optimiser(Protocol):
    """What makes the steps of :func:`fit`."""

    lr: float  # set before each epoch where the rate is annealed

    def step(self, loss: Tensor) -> None:
        """Compute the gradient of ``loss`` and move what learns."""


class FusedSgd:
    """SGD with momentum on a network's trainable weights: the arithmetic of ``torch.optim.SGD(..., fused=True)``.

    It calls torch's functional form, because the class loads torch's compiler: one to three seconds and 200 MB in every
    process that trains.
    """

    def __init__(self, net: nn.Module, settings: Training) -> None:
        self.parameters = [p for p in net.parameters() if p.requires_grad]
        self.lr, self.momentum, self.weight_decay = settings.lr, settings.momentum, settings.weight_decay
        self._velocities: dict[int, Tensor | None] = {}

    def step(self, loss: Tensor) -> None:
        """Compute the gradient of ``loss`` and move the weights that it reaches."""
        for parameter in self.parameters:
            parameter.grad = None
        loss.backward()
        reached = {i: (p, p.grad) for i, p in enumerate(self.parameters) if p.grad is not None}
        velocities = [self._velocities.get(i) for i in reached]
        with torch.no_grad():
            sgd_(
                [p for p, _ in reached.values()],
                [gradient for _, gradient in reached.values()],
                velocities,
                fused=True,
                lr=self.lr,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
        self._velocities.update(zip(reached, velocities, strict=True))


class AdamSteps:
    """Adam on groups of tensors, each with its learning rate; ``lr`` is that of the first group and may change between steps."""

    def __init__(self, groups: Sequence[tuple[Sequence[Tensor], float]], weight_decay: float = 0.0) -> None:
        self.lr = groups[0][1]
        rates = [{"params": list(learned), "lr": lr} for learned, lr in groups]
        self._adam = torch.optim.Adam(rates, weight_decay=weight_decay)

    def step(self, loss: Tensor) -> None:
        """Compute the gradient of ``loss`` and move the tensors."""
        self._adam.param_groups[0]["lr"] = self.lr
        self._adam.zero_grad()
        loss.backward()
        self._adam.step()


def fit(
    net: nn.Module,
    plan: BatchOrders,
    fetch: Fetch,
    loss: Loss,
    settings: Training,
    *,
    epochs: int,
    cosine: bool = False,
    after_epoch: AfterEpoch | None = None,
    optimiser: Optimiser | None = None,
) -> float:
    """Train ``net`` in place for ``epochs`` and return the mean loss of the last epoch.

    A last batch of fewer than ``settings.smallest_batch`` images is left out, unless it is the only one; a set of a single
    image is trained with the running statistics. The optimiser is new on every call, unless one is given: momentum does
    not cross rounds.
    """
    worth = epochs >= WORTH_RECORDING and next(net.parameters()).is_cuda
    if getattr(loss, "is_repeatable", False) and worth and is_recordable(net) and optimiser is None:
        rates = [cosine_rate(settings.lr, epoch, epochs) if cosine else settings.lr for epoch in range(epochs)]
        return fit_repeated(net, plan, fetch, loss, settings, rates, after_epoch)
    optimiser = optimiser or FusedSgd(net, settings)
    total, count = 0.0, 0
    for epoch in laps(epochs):
        if cosine:
            optimiser.lr = cosine_rate(settings.lr, epoch, epochs)
        losses = []
        batches = minibatches(plan(), settings.batch_size, settings.smallest_batch)
        net.train(len(batches[0]) > 1)
        for index in alike(batches):
            value = loss(net, fetch(index))
            optimiser.step(value)
            losses.append(value.detach())
        total, count = float(torch.stack(losses).sum()), len(losses)
        net.eval()
        if after_epoch is not None:
            after_epoch(epoch + 1)
    return total / max(count, 1)


@dataclass
class ShardEpochs:
    """A client's images, and the draws of one epoch after the other: a new order, and crops batch by batch."""

    shard: Shard
    settings: Training
    generator: torch.Generator

    def __post_init__(self) -> None:
        self.images, self.labels = self.shard.images.pixels[self.shard.index], self.shard.labels
        self.transform = self.shard.transform

    def draw(self) -> tuple[Tensor, Tensor | None]:
        """(order [n] into the shard, crops [3, n] or None) of the next epoch."""
        n, device = len(self.labels), self.shard.device
        order = torch.randperm(n, generator=self.generator, device=self.generator.device).to(device)
        if not self.settings.augment:
            return order, None
        sizes = [len(part) for part in minibatches(order, self.settings.batch_size, self.settings.smallest_batch)]
        order = order[: sum(sizes)]  # nothing is drawn for a batch that is left out
        draws = torch.cat([self.transform.draw(size, self.generator) for size in sizes], dim=1)
        return order, crops_of(self.shard, self.shard.index[order], draws, self.settings.augment)


def fit_shard(
    net: nn.Module,
    shard: Shard,
    settings: Training,
    generator: torch.Generator,
    loss: Loss | None = None,
    *,
    first_class: int = 0,
    beside: Callable[[], Tensor] | None = None,
    after_epoch: AfterEpoch | None = None,
    optimiser: Optimiser | None = None,
) -> float:
    """Local training of one client on its own images for E epochs, reshuffled each epoch; returns the last mean loss.

    Without a ``loss`` of one's own it is cross-entropy over the outputs from ``first_class`` on, and on a GPU the step is
    replayed as a CUDA graph. The images stay where they are: a batch is gathered from the device tensor by index,
    normalised and augmented there. ``beside``, ``after_epoch`` and ``optimiser`` are for a loss of one's own.
    """
    index = shard.index
    if loss is None and is_recorded(net, shard.images.pixels, index):
        adjustment = torch.zeros(_num_classes(net), device=shard.device)
        adjustment[:first_class] = EXCLUDED
        rates = [settings.lr] * settings.local_epochs
        return fit_captured(net, ShardEpochs(shard, settings, generator), settings, rates, adjustment)

    def plan() -> Tensor:
        return index[torch.randperm(len(index), generator=generator, device=generator.device).to(index.device)]

    def fetch(index: Tensor) -> Batch:
        x = shown(shard, index, settings.augment, generator)
        return Batch(x, shard.images.labels[index], index, None if beside is None else beside())

    loss = loss or cross_entropy_from(first_class)
    epochs = settings.local_epochs
    return fit(net, plan, fetch, loss, settings, epochs=epochs, after_epoch=after_epoch, optimiser=optimiser)


def num_local_steps(num_images: int, settings: Training) -> int:
    """How many steps :func:`fit_shard` takes on so many images.

    >>> settings = Training(local_epochs=2, batch_size=4)
    >>> [num_local_steps(n, settings) for n in (0, 1, 4, 5, 6, 8)]
    [0, 2, 2, 2, 4, 4]
    """
    return settings.local_epochs * num_minibatches(num_images, settings.batch_size, settings.smallest_batch)


def is_recorded(net: nn.Module, images: Tensor, labels: Tensor) -> bool:
    """Steps are replayed as a CUDA graph on a GPU, except those of a network of the user's.

    A single image is trained with running statistics, step by step.
    """
    return images.is_cuda and len(labels) > 1 and is_recordable(net)


def _num_classes(net: nn.Module) -> int:
    return len(net.head.bias)  # type: ignore[union-attr,arg-type]


@dataclass
class PoolEpochs:
    """What the server trains on, and the draws of one epoch after the other: which images, in which order, cropped how.

    alpha < 1 draws |pool| images per epoch with replacement so that class c appears with probability q_c; alpha = 1 is a
    plain shuffled epoch. The draws of an epoch are made at once, so they do not depend on how batches are processed.
    """

    images: Tensor  # normalised
    labels: Tensor
    num_classes: int
    alpha: float
    transform: Transform
    augment: bool
    generator: torch.Generator

    def __post_init__(self) -> None:
        self.counts = torch.bincount(self.labels, minlength=self.num_classes)
        share = sampling_probabilities(self.counts, self.alpha) / self.counts.clamp(min=1)
        self.weights = share[self.labels].to(self.generator.device)

    def adjustment(self, tau: float) -> Tensor:
        """tau log pi [C], EXCLUDED for a class the pool does not hold; all 0 without adjustment."""
        if tau == 0:
            return torch.zeros(self.num_classes, device=self.labels.device)
        return torch.where(self.counts == 0, EXCLUDED, tau * log_prior(self.counts))

    def draw(self) -> tuple[Tensor, Tensor | None]:
        """(order [n] into the pool, crops [3, n] or None) of the next epoch, on the pool's device."""
        n, device = len(self.labels), self.generator.device
        if is_rehearsal():  # only the number of images counts
            return torch.arange(n, device=self.images.device), None
        if self.alpha == 1.0:
            order = torch.randperm(n, generator=self.generator, device=device)
        else:
            order = torch.multinomial(self.weights, n, replacement=True, generator=self.generator)
        crops = self.transform.draw(n, self.generator).to(self.images.device) if self.augment else None
        return order.to(self.images.device), crops


def fit_pool(
    net: nn.Module,
    images: Tensor,
    labels: Tensor,
    transform: Transform,
    settings: Training,
    generator: torch.Generator,
    *,
    num_classes: int,
    alpha: float = 1.0,
    tau: float = 0.0,
    loss: Loss | None = None,
) -> float:
    """Server training on a pool of normalised images for E_srv epochs; returns the last mean loss (Sec. 3.4).

    tau > 0 adds tau log pi to the logits and leaves out classes the pool does not hold; ``loss`` replaces that objective.
    On a GPU the step is replayed as a CUDA graph; elsewhere, where capture is refused, and for a loss of one's own, it
    runs as written here.
    """
    epochs = PoolEpochs(images, labels, num_classes, alpha, transform, bool(settings.augment), generator)
    if loss is None and is_recorded(net, images, labels) and not settings.soften:
        rates = [cosine_rate(settings.lr, epoch, settings.server_epochs) for epoch in range(settings.server_epochs)]
        return fit_captured(net, epochs, settings, rates, epochs.adjustment(tau))
    order, crops = torch.zeros(0), None

    def plan() -> Tensor:
        nonlocal order, crops
        order, crops = epochs.draw()
        return torch.arange(len(order), device=order.device)

    def fetch(place: Tensor) -> Batch:
        index = order[place]
        x = images[index] if crops is None else transform.apply(images[index], crops[:, place])
        return Batch(soften(x, settings.soften, generator) if settings.soften else x, labels[index], index)

    def adjusted(net: nn.Module, batch: Batch) -> Tensor:
        return logit_adjusted_cross_entropy(net(batch.x), batch.y, epochs.counts, tau)

    return fit(net, plan, fetch, loss or adjusted, settings, epochs=settings.server_epochs, cosine=True)
