"""Distribution matching (Eq. 1).

    phi   features of the network without its head       f   logits
    S_c   surrogates of a class                          D_c real images of that class (or a minibatch of them)

Groups stand for (client, class) pairs: the loss is separable over them, so that one pass serves every class of every client.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_means(values: Tensor, groups: Tensor, num_groups: int) -> Tensor:
    """Mean of the rows of each group.

    values [n, d], groups [n] with entries in 0..num_groups-1 -> [num_groups, d]. An empty group has mean 0.

    >>> group_means(torch.tensor([[1.], [3.], [5.]]), torch.tensor([0, 0, 1]), 2).squeeze(1).tolist()
    [2.0, 5.0]
    """
    member = (groups == torch.arange(num_groups, device=groups.device).unsqueeze(1)).to(values.dtype)  # [g, n]
    # a matrix product: faster than scattering rows, and on a GPU its sums always run in the same order
    return member @ values / member.sum(dim=1, keepdim=True).clamp(min=1)


def matching_loss(synthetic_means: Tensor, real_means: Tensor, reduction: str = "sum") -> Tensor:
    """Squared distance of the means, one value per group: Eq. 1 for ``sum``, divided by the dimensions for ``mean``.

    [g, d], [g, d] -> [g]. Called once with features and once with logits; the two terms are added with weight 1.
    """
    squares = (synthetic_means - real_means).square()
    return squares.sum(dim=1) if reduction == "sum" else squares.mean(dim=1)
