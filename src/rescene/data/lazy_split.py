"""A split for federations far larger than the data set: a client's images are drawn when somebody asks for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rescene.core.rng import Rng


class LazySplit(Sequence[Tensor]):
    """Client k -> sorted positions of its images of one task. Nothing is drawn in advance and nothing is kept.

    A client draws its class mixture from Dirichlet(``beta``) and then ``size`` different images with that mixture, all from
    an address of its own, so a draw is the same whenever and however often it is made. Clients draw from the same images:
    two of them may hold the same one, unlike in the disjoint splits. A class gives at most all the images it has.
    """

    def __init__(self, positions: Tensor, labels: Tensor, num_clients: int, beta: float, size: int, seed: int) -> None:
        self.positions, self.labels = positions, labels
        self.num_clients, self.beta, self.size = num_clients, beta, size
        self._rng = Rng(seed).at("partition", "lazy")

    def __len__(self) -> int:
        return self.num_clients

    def __getitem__(self, client: Any) -> Any:
        if not 0 <= client < self.num_clients:
            raise IndexError(f"client {client} of {self.num_clients}")
        return self.positions[torch.from_numpy(self._draw(client)).to(self.positions.device)]

    def counts(self, client: int) -> dict[int, int]:
        """Images of each class that this client has any of; no image is drawn for it."""
        sizes = self._sizes(self._stream(client))
        return {int(label): int(n) for label, n in zip(self._classes, sizes, strict=True) if n}

    def _draw(self, client: int) -> np.ndarray:
        rng = self._stream(client)
        sizes = zip(self._classes.values(), self._sizes(rng), strict=True)
        return np.sort(np.concatenate([rng.choice(own, n, replace=False) for own, n in sizes]))

    def _stream(self, client: int) -> np.random.Generator:
        return np.random.default_rng(self._rng.at(client).integer())

    def _sizes(self, rng: np.random.Generator) -> np.ndarray:
        counts = rng.multinomial(self.size, rng.dirichlet(np.full(len(self._classes), self.beta)))
        return np.minimum(counts, [len(own) for own in self._classes.values()])

    @cached_property
    def _classes(self) -> dict[int, np.ndarray]:
        labels = self.labels.cpu().numpy()
        return {c: np.flatnonzero(labels == c) for c in np.unique(labels)}
