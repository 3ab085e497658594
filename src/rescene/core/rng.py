"""Randomness has an address: (seed, purpose, task, round, client) -> generator.

There is no global stream. Two methods with the same seed see the same split and the same participants, and a resumed run
draws what the uninterrupted run would have drawn, because a draw depends on its address and on nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rng:
    """A place in the tree of random streams.

    >>> rng = Rng(0)
    >>> rng.at("split", 3).integer() == Rng(0).at("split").at(3).integer()
    True
    >>> rng.at("split", 3).integer() == rng.at("split", 4).integer()
    False
    """

    seed: int
    path: tuple[str | int, ...] = ()

    def at(self, *names: str | int) -> Rng:
        """The stream one or more steps further down."""
        return Rng(self.seed, self.path + names)

    def integer(self) -> int:
        """A 63-bit integer that depends on the address alone (the same on every machine and Python)."""
        address = "/".join([str(self.seed), *(f"{type(part).__name__}:{part}" for part in self.path)])
        return int.from_bytes(hashlib.blake2b(address.encode(), digest_size=8).digest(), "big") >> 1

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator:
        """A fresh torch generator for this address."""
        return seeded_generator(self.integer(), device)


def seeded_generator(seed: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator from a plain integer, such as the noise seed that a broadcast carries."""
    return torch.Generator(device=device).manual_seed(seed)


@contextmanager
def torch_draws_from(rng: Rng, needed: bool) -> Iterator[None]:
    """What draws from torch's global stream inside, such as dropout, draws from this address; afterwards all is as before."""
    if not needed:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(rng.at("torch").integer())
        yield
