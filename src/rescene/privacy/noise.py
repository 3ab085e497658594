"""Where privacy noise comes from: the operating system. A run's seed is known to the server, which could subtract its noise."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Noise:
    """Uniform and normal numbers in float64. With a ``generator`` it is a test mode, which protects nobody."""

    generator: torch.Generator | None = None

    def uniform(self, count: int) -> Tensor:
        """Numbers strictly between 0 and 1."""
        if self.generator is None:
            raw = torch.frombuffer(bytearray(os.urandom(8 * count)), dtype=torch.int64) if count else torch.zeros(0)
        else:
            raw = torch.randint(-(2**63), 2**63 - 1, (count,), generator=self.generator)
        bits = raw.long() & ((1 << 52) - 1)  # 52, so that the half below is exact too
        return (bits.double() + 0.5) * 2.0**-52

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers by inversion; the largest is about eight deviations."""
        normal: Tensor = torch.special.ndtri(self.uniform(math.prod(shape)))
        return normal.reshape(shape)

    def chosen(self, count: int, rate: float) -> Tensor:
        """Poisson sampling: each of ``count`` records on its own with this probability. Mask [count]."""
        return self.uniform(count) < rate
