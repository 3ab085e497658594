"""Training of a personalised surrogate model, and what each weight contributed on the way."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.data import Shard
from rescene.functional.minibatches import minibatches
from rescene.functional.synaptic import surrogate_step
from rescene.nets import alike, laps
from rescene.training.sgd import Training


def contributions(
    net: nn.Module,
    w: Mapping[str, Tensor],
    shard: Shard,
    settings: Training,
    generator: torch.Generator,
    *,
    epochs: int,
    q: float,
    first_class: int = 0,
) -> dict[str, Tensor]:
    """Train ``net``, the surrogate v, in place by dv = -eta (g + q (v - w)); returns s, the sum of -g dv over all steps.

    Plain gradient descent at ``settings.lr`` on batches as in local training: shuffled anew in each epoch, augmented, without a
    last batch of too few images. A single image is trained with running statistics.
    """
    v = {name: p for name, p in net.named_parameters() if p.requires_grad}
    s = {name: torch.zeros_like(p) for name, p in v.items()}
    for _ in laps(epochs):
        order = torch.randperm(len(shard), generator=generator, device=generator.device).to(shard.index.device)
        batches = minibatches(shard.index[order], settings.batch_size, settings.smallest_batch)
        net.train(len(batches[0]) > 1)
        for index in alike(batches):
            x = shard.pictures(index)
            x = shard.transform.augment(x, generator) if settings.augment else x
            logits, y = net(x), shard.images.labels[index]
            gradients = torch.autograd.grad(F.cross_entropy(logits[:, first_class:], y - first_class), list(v.values()))
            with torch.no_grad():
                for (name, p), g in zip(v.items(), gradients, strict=True):
                    step = surrogate_step(p, g, w[name], settings.lr, q)
                    s[name] -= g * step
                    p.add_(step)
    net.eval()
    return {name: value.detach() for name, value in s.items()}
