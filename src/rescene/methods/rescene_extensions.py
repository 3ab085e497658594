"""What ReSCENE can do beyond its paper: other buffers (the ablations of Sec. 5.2), tasks that nobody announces, withdrawal of a site.

The algorithm itself is in ``rescene.py`` and can be read without this file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from rescene.core.hyperparameters import hyper
from rescene.core.rng import Rng
from rescene.methods.base import Federation, Model, weights_of
from rescene.methods.surrogates import SurrogateMethod

PATIENCE = 3  # rounds after which an absent class is closed, unless something else is said
Part = TypeVar("Part")  # a record of tensors with a row for each picture


def joined(parts: Sequence[Part]) -> Part | None:
    """All pictures of these records as one; None if there is no record."""
    if not parts:
        return None
    names = [field.name for field in fields(parts[0])]  # type: ignore[arg-type]
    return type(parts[0])(*(torch.cat([getattr(part, name) for part in parts]) for name in names))


def chosen(part: Part, index: Tensor) -> Part:
    """These pictures of a record: positions, or a mask."""
    names = [field.name for field in fields(part)]  # type: ignore[arg-type]
    return type(part)(*(getattr(part, name)[index] for name in names))


def divided(parts: Sequence[Any], labels: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Pictures of these labels, and the others. A part that has none of them stays the very same, so it is saved once."""
    inside, outside = [], []
    for part in parts:
        own = torch.isin(part.labels, labels)
        if bool(own.any()):
            inside.append(chosen(part, own))
            part = chosen(part, ~own)
        if len(part.labels):
            outside.append(part)
    return tuple(inside), tuple(outside)


class ReSCENEExtensions(SurrogateMethod):
    """Not a method of its own: settings and verbs that ``ReSCENE`` adds to its algorithm."""

    buffer: Literal["temporal", "full-pool", "earliest", "latest", "random", "keep-all", "none"] = hyper(
        "temporal", "-", "Sec. 5.2", "which surrogates of a finished task are kept"
    )
    close_after: int | None = hyper(
        None, "W", "[ours]", f"with tasks.drift: close a class after so many rounds without it; null: {PATIENCE}", ge=1
    )
    accumulate: bool = hyper(True, "-", "Sec. 3.2", "keep the surrogates of earlier rounds of the task in the pool")

    def fit_server(self, net: nn.Module, everything: Any, federation: Federation, rng: Rng) -> float:
        """The server's training of one round on these pictures."""
        raise NotImplementedError

    def herded(
        self, pool: Any, classes: Sequence[int], num_rounds: int | None, model: Model, federation: Federation, rng: Rng
    ) -> Any:
        """What is kept of these classes. Without a number of rounds each class counts those in which it came."""
        raise NotImplementedError

    def kept_otherwise(self, n: int, budget: int, rng: Rng) -> Tensor:
        """Ablations: positions that stay of a class of n. The pool is in order of rounds, and of clients within a round."""
        if self.buffer == "random":
            return torch.randperm(n, generator=rng.generator())[:budget]
        order = torch.arange(n)
        if self.buffer == "earliest":
            return order[:budget]
        return order[-budget:] if self.buffer == "latest" else order

    def close_absent(self, state: Any, now: int, federation: Federation, rng: Rng) -> Any:
        """Where no end is announced: close the classes that have not come for W rounds (docs/arrivals.md)."""
        pool, patience = joined(state.pool), self.close_after or PATIENCE
        assert pool is not None
        seen = {label: int(pool.rounds[pool.labels == label].max()) for label in pool.labels.unique().tolist()}
        gone = [label for label, last in seen.items() if now - last >= patience]
        if not gone:
            return state
        closed = self.close(state, torch.tensor(gone, device=pool.labels.device), federation, rng)
        return replace(closed, closings=(*state.closings, *((label, now) for label in gone)))

    def close(self, state: Any, labels: Tensor, federation: Federation, rng: Rng) -> Any:
        """Herd these classes into a buffer. One that was closed before and came back is herded with what was kept of it."""
        buffers, pool = divided(state.buffers, labels), divided(state.pool, labels)
        candidates = joined(buffers[0] + pool[0])
        if candidates is None or self.buffer == "none":
            return replace(state, pool=pool[1])
        kept = self.herded(candidates, labels.tolist(), None, state.model, federation, rng)
        return replace(state, pool=pool[1], buffers=(*buffers[1], kept))

    def forget(self, state: Any, client: int, model: Model, num_rounds: int, federation: Federation, rng: Rng) -> Any:
        """Without the client's surrogates; the fresh model is trained on the others as often as in so many rounds."""
        pool, buffers = (tuple(chosen(p, p.clients != client) for p in parts) for parts in (state.pool, state.buffers))
        pool = tuple(part for part in pool if len(part.labels))  # buffers keep their places, one per task
        everything, net = joined(buffers + pool), federation.net(model)
        if everything is not None and len(everything.labels):
            for r in range(num_rounds):
                self.fit_server(net, everything, federation, rng.at(r))
        return replace(state, model=weights_of(net), pool=pool, buffers=buffers)
