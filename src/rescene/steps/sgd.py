"""Stochastic gradient descent on the server's pool and on a client's shard.

Both are the same loop with different batches: a plan gives the indices of an epoch, a fetch turns indices into a batch, a
loss turns a batch into a number. Baselines add their penalty by passing their own loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.data import Shard, Transform
from rescene.functional import logit_adjusted_cross_entropy, sampling_probabilities
from rescene.hyperparameters import Hyperparameters, hyper


@dataclass(frozen=True)
class Batch:
    """Network input [n, 3, H, W], labels [n], and where they came from: positions into the set being trained on."""

    x: Tensor
    y: Tensor
    index: Tensor


Plan = Callable[[], Tensor]
Fetch = Callable[[Tensor], Batch]
Loss = Callable[[nn.Module, Batch], Tensor]


class Training(Hyperparameters):
    """The optimisation all methods share (App. A, common protocol)."""

    local_epochs: int = hyper(20, "E", "Sec. 4.1", "epochs of local training per round (model-update methods)", ge=1)
    server_epochs: int = hyper(100, "E_srv", "Sec. 4.1", "server epochs per round (surrogate methods)", ge=1)
    batch_size: int = hyper(128, "-", "App. A", "images per SGD step, on clients and on the server", ge=1)
    lr: float = hyper(0.01, "eta", "App. A", "learning rate; cosine-annealed within a round on the server", gt=0)
    momentum: float = hyper(0.9, "-", "App. A", "SGD momentum", ge=0, lt=1)
    weight_decay: float = hyper(5e-4, "-", "App. A", "SGD weight decay", ge=0)
    augment: bool = hyper(True, "-", "App. A", "random crop and horizontal flip, on clients and (ours) on the server")


def cross_entropy(net: nn.Module, batch: Batch) -> Tensor:
    """Plain CE over all outputs of the network."""
    return F.cross_entropy(net(batch.x), batch.y)


def fit(
    net: nn.Module, plan: Plan, fetch: Fetch, loss: Loss, settings: Training, *, epochs: int, cosine: bool = False
) -> float:
    """Train ``net`` in place for ``epochs`` and return the mean loss of the last epoch.

    A trailing batch of one image is dropped when it is not the only one, since BatchNorm needs two; a set of a single image
    is trained with the running statistics instead. The optimiser is new on every call: momentum does not cross rounds.
    """
    parameters = [p for p in net.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(
        parameters, settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay, fused=True
    )
    total, count = 0.0, 0
    for epoch in range(epochs):
        if cosine:
            optimiser.param_groups[0]["lr"] = settings.lr * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        losses = []
        batches = plan().split(settings.batch_size)
        net.train(len(batches[0]) > 1)
        for index in batches:
            if len(index) == 1 and len(batches) > 1:
                continue
            value = loss(net, fetch(index))
            optimiser.zero_grad(set_to_none=True)
            value.backward()
            optimiser.step()
            losses.append(value.detach())
        total, count = float(torch.stack(losses).sum()), len(losses)
    net.eval()
    return total / max(count, 1)


def fit_shard(
    net: nn.Module, shard: Shard, settings: Training, generator: torch.Generator, loss: Loss = cross_entropy
) -> float:
    """Local training of one client on its own images for E epochs, reshuffled each epoch; returns the last mean loss.

    The images stay where they are: a batch is gathered from the device tensor by index, normalised and augmented there.
    """
    index = shard.index

    def plan() -> Tensor:
        return index[torch.randperm(len(index), generator=generator, device=generator.device).to(index.device)]

    def fetch(index: Tensor) -> Batch:
        x = shard.pictures(index)
        return Batch(
            shard.transform.augment(x, generator) if settings.augment else x, shard.images.labels[index], index
        )

    return fit(net, plan, fetch, loss, settings, epochs=settings.local_epochs)


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
) -> float:
    """Server training on a pool of normalised images for E_srv epochs; returns the last mean loss (Sec. 3.4).

    alpha < 1 draws |pool| images per epoch with replacement so that class c appears with probability q_c; alpha = 1 is a
    plain shuffled epoch. tau > 0 adds tau log pi to the logits and leaves out classes the pool does not hold.
    """
    counts = torch.bincount(labels, minlength=num_classes)
    weights = (sampling_probabilities(counts, alpha) / counts.clamp(min=1))[labels].to(generator.device)

    def plan() -> Tensor:
        if alpha == 1.0:
            drawn = torch.randperm(len(labels), generator=generator, device=generator.device)
        else:
            drawn = torch.multinomial(weights, len(labels), replacement=True, generator=generator)
        return drawn.to(labels.device)

    def fetch(index: Tensor) -> Batch:
        x = images[index]
        return Batch(transform.augment(x, generator) if settings.augment else x, labels[index], index)

    def loss(net: nn.Module, batch: Batch) -> Tensor:
        return logit_adjusted_cross_entropy(net(batch.x), batch.y, counts, tau)

    return fit(net, plan, fetch, loss, settings, epochs=settings.server_epochs, cosine=True)
