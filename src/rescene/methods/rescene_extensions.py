"""What ReSCENE can do beyond its paper: other buffers (the ablations of Sec. 5.2), tasks that nobody announces, withdrawal of a site.

Plain functions of its state and of records of pictures. The algorithm itself is in ``rescene.py`` and can be read without this file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from rescene.core.rng import Rng

PATIENCE = 3  # rounds after which an absent class is closed, unless something else is said
Part = TypeVar("Part")  # a record of tensors with a row for each picture
Herd = Callable[[Any, Sequence[int]], Any]  # candidates and their classes -> what is kept of them


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


def kept_otherwise(buffer: str, n: int, budget: int, rng: Rng) -> Tensor:
    """Ablations: positions that stay of a class of n. The pool is in order of rounds, and of clients within a round."""
    if buffer == "random":
        return torch.randperm(n, generator=rng.generator())[:budget]
    order = torch.arange(n)
    if buffer == "earliest":
        return order[:budget]
    return order[-budget:] if buffer == "latest" else order


def close_absent(state: Any, now: int, patience: int, herd: Herd | None) -> Any:
    """Where no end is announced: close the classes that have not come for ``patience`` rounds (docs/arrivals.md)."""
    pool = joined(state.pool)
    assert pool is not None
    seen = {label: int(pool.rounds[pool.labels == label].max()) for label in pool.labels.unique().tolist()}
    gone = [label for label, last in seen.items() if now - last >= patience]
    if not gone:
        return state
    closed = close(state, torch.tensor(gone, device=pool.labels.device), herd)
    return replace(closed, closings=(*state.closings, *((label, now) for label in gone)))


def close(state: Any, labels: Tensor, herd: Herd | None) -> Any:
    """Herd these classes into a buffer. One that was closed before and came back is herded with what was kept of it.

    Without ``herd`` nothing is kept of them.
    """
    buffers, pool = divided(state.buffers, labels), divided(state.pool, labels)
    candidates = joined(buffers[0] + pool[0])
    if candidates is None or herd is None:
        return replace(state, pool=pool[1])
    return replace(state, pool=pool[1], buffers=(*buffers[1], herd(candidates, labels.tolist())))


def without_client(state: Any, client: int) -> Any:
    """The state without the surrogates of this client. Buffers keep their places, one per task."""
    pool, buffers = (tuple(chosen(p, p.clients != client) for p in parts) for parts in (state.pool, state.buffers))
    return replace(state, pool=tuple(part for part in pool if len(part.labels)), buffers=buffers)
