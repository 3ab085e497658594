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
    return replace(shard, images=images, index=torch.arange(len(images.labels), device=own.device))
