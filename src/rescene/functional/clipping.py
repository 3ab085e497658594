"""Steps on blocks of pixels that stay short enough, one norm per (client, class) block.

C       bound on the norm:          g <- g / max(1, ||g|| / C)                  (App. F)
L / eta Polyak's bound on the step: eta ||g|| <= L / ||g||, where the tangent of a loss L >= 0 reaches zero (Loizou et al., AISTATS 2021)
"""

from __future__ import annotations

import torch
from torch import Tensor


def clip_groups(
    gradient: Tensor, groups: Tensor, num_groups: int, max_norm: float | None, reach: Tensor | None = None
) -> Tensor:
    """Scale each group's block of rows to norm at most ``max_norm``, and at most ``reach`` / its norm.

    gradient [n, ...], groups [n], reach = L / eta [num_groups] -> shape of gradient. A block within the bounds is returned
    unchanged; a zero block stays zero.
    """
    squares = gradient.flatten(1).double().square().sum(dim=1)
    squares = squares.new_zeros(num_groups).index_add(0, groups, squares)
    excess = torch.zeros_like(squares) if max_norm is None else squares.sqrt() / max_norm
    if reach is not None:
        excess = torch.maximum(excess, squares / reach.double().clamp(min=torch.finfo(torch.float32).tiny))
    factors = excess.clamp(min=1.0).reciprocal().to(gradient.dtype)
    return gradient * factors[groups].reshape(-1, *[1] * (gradient.dim() - 1))
