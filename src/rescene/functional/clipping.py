"""Norm clipping of blocks of pixels: g <- g / max(1, ||g|| / C), one norm per (client, class) block (App. F)."""

from __future__ import annotations

from torch import Tensor


def clip_groups(gradient: Tensor, groups: Tensor, num_groups: int, max_norm: float) -> Tensor:
    """Scale each group's block of rows to norm at most ``max_norm``.

    gradient [n, ...], groups [n] -> same shape. A block within the bound is returned unchanged; a zero block stays zero.
    """
    squares = gradient.flatten(1).double().square().sum(dim=1)
    norms = squares.new_zeros(num_groups).index_add(0, groups, squares).sqrt()
    factors = (norms / max_norm).clamp(min=1.0).reciprocal().to(gradient.dtype)
    return gradient * factors[groups].reshape(-1, *[1] * (gradient.dim() - 1))
