"""What one client holds of one task: positions into the shared training split, and how to look at them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from rescene.data.images import Images, Transform
from rescene.data.tasks import Task


@dataclass(frozen=True)
class Batch:
    """Network input [n, 3, H, W], labels [n], and where they came from: positions into the set being trained on."""

    x: Tensor
    y: Tensor
    index: Tensor
    beside: Tensor | None = None  # what a method's loss looks at beside the batch


@dataclass(frozen=True, eq=False)
class Shard:
    """One client's part of one task. ``images`` is the whole training split, shared; only ``index`` is the client's.

    ``first_remembered``: from this position of ``images`` on they are pictures of earlier tasks; None: there are none.
    """

    images: Images
    index: Tensor
    task: Task
    transform: Transform
    first_remembered: int | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def labels(self) -> Tensor:
        """int64 [len(self)], in the order of ``index``."""
        return self.images.labels[self.index]

    @property
    def device(self) -> torch.device:
        """Where the images are."""
        return self.images.pixels.device

    def by_class(self) -> dict[int, Tensor]:
        """Label -> positions into ``images.pixels``; only classes with at least one picture, ascending labels."""
        labels = self.labels
        return {c: self.index[labels == c] for c in torch.unique(labels).tolist()}

    def pictures(self, positions: Tensor) -> Tensor:
        """Normalised float pictures [len(positions), 3, H, W] at these positions of ``images.pixels``."""
        return self.transform.normalise(self.images.pixels[positions])
