"""What one client holds of one task: positions into the shared training split, and how to look at them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rescene.data.images import Images, Transform
from rescene.data.tasks import Task


@dataclass(frozen=True, eq=False)
class Shard:
    """One client's part of one task. ``images`` is the whole training split, shared; only ``index`` is the client's.

    ``net`` builds the network with the given weights (the head's size is read from them); the engine supplies it.
    ``site`` is the privacy mechanism and ledger that uploads must pass (``rescene.privacy.Site``), None without one.
    ``notice`` is for simulations only: it is shown surrogates and their start images, which never leave a real site.
    """

    images: Images
    index: Tensor
    task: Task
    transform: Transform
    net: Callable[[Mapping[str, Tensor]], nn.Module]
    site: Any = None
    notice: Callable[[Tensor, Tensor], None] | None = None

    def __len__(self) -> int:
        return len(self.index)

    @property
    def labels(self) -> Tensor:
        """int64 [len(self)], in the order of ``index``."""
        return self.images.labels[self.index]

    @property
    def device(self) -> torch.device:
        return self.images.pixels.device

    def by_class(self) -> dict[int, Tensor]:
        """Label -> positions into ``images.pixels``; only classes with at least one picture, ascending labels."""
        labels = self.labels
        return {c: self.index[labels == c] for c in torch.unique(labels).tolist()}

    def pictures(self, positions: Tensor) -> Tensor:
        """Normalised float pictures [len(positions), 3, H, W] at these positions of ``images.pixels``."""
        return self.transform.normalise(self.images.pixels[positions])
