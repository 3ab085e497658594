"""Where privacy noise comes from: the operating system. A run's seed is known to the server, which could subtract its noise.

Long vectors take a cipher's key from it instead of every byte: AES-256 in counter mode, a fresh key for each vector, forgotten
after it. Whoever could tell its stream from the operating system's could break the cipher.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 2**15  # numbers at a time: they stay in the processor's cache
_KEEP = (1 << 52) - 1  # 52 bits of each word, so that the half below is exact too


@dataclass(frozen=True, eq=False)
class Noise:
    """Uniform and normal numbers in float64. With a ``generator`` it is a test mode, which protects nobody."""

    generator: torch.Generator | None = None

    def uniform(self, count: int) -> Tensor:
        """Numbers strictly between 0 and 1."""
        return self._drawn(count, lambda u: u)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers by inversion, each from bits of its own; the largest is about eight deviations."""
        return self._drawn(math.prod(shape), _inverted).reshape(shape)

    def chosen(self, count: int, rate: float) -> Tensor:
        """Poisson sampling: each of ``count`` records on its own with this probability. Mask [count]."""
        return self.uniform(count) < rate

    def _drawn(self, count: int, law: Callable[[Tensor], Tensor]) -> Tensor:
        found, words = torch.empty(count, dtype=torch.float64), self.words()
        for block in found.split(BLOCK) if count else ():
            block.copy_(law((words(len(block)) & _KEEP).double().add_(0.5).mul_(2.0**-52)))
        return found

    def words(self) -> Callable[[int], Tensor]:
        """A source of 64 random bits at a time: [count] int64."""
        if self.generator is not None:
            return lambda count: torch.randint(-(2**63), 2**63 - 1, (count,), generator=self.generator)
        stream = unforeseen()
        return lambda count: torch.frombuffer(stream(8 * count), dtype=torch.int64)


def unforeseen() -> Callable[[int], bytearray]:
    """A stream of bytes under a key of its own; without the package ``cryptography`` the operating system's own, slower."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
    except ImportError:
        return lambda count: bytearray(os.urandom(count))
    cipher = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(os.urandom(16))).encryptor()
    return lambda count: bytearray(cipher.update(bytes(count)))


def _inverted(u: Tensor) -> Tensor:
    return torch.erfinv(u.mul_(2).sub_(1)).mul_(math.sqrt(2))
