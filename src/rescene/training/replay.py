"""Local images together with remembered ones, for methods whose clients keep exemplars."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from rescene.data import Images, Shard

Held = TypeVar("Held", bound=Shard)


def with_replay(shard: Held, pixels: Tensor, labels: Tensor) -> Held:
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
