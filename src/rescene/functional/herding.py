"""Temporal herding (Sec. 3.3, Eq. 2).

z_i   unit-normalised task-end feature of candidate i      m   target, the mean of z over the recent window W
r     residual (j-1) m - sum of the z picked so far        B   budget
R     rounds of a task                                     lambda   fraction of them that forms the window
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

GRAM_LIMIT_BYTES = 2**30  # above it the Gram matrix is not stored; one product per pick replaces it


def herd(z: Tensor, target: Tensor, budget: int) -> Tensor:
    """Greedy picks of Eq. 2, in the order they are picked; ties go to the lowest index.

    z [n, d], target [d] -> LongTensor [min(budget, n)]. With budget >= n every index is returned in ascending order.

    Pick j minimises ||r - (z_i - m)||^2 over what is left, i.e. ||d_i||^2 - 2 <r, d_i> with d_i = z_i - m (App. C.3).
    The inner products <r, d_i> are kept up to date by subtracting one column of the Gram matrix per pick, so a pick costs
    n operations instead of n * d. Computed in float64.

    >>> herd(torch.tensor([[0.0], [1.0], [0.9]]), torch.tensor([1.0]), 2).tolist()
    [1, 2]
    """
    n = len(z)
    if budget >= n:
        return torch.arange(n, device=z.device)
    d = z.double() - target.double()
    gram = (d @ d.T).cpu().numpy() if n * n * 8 <= GRAM_LIMIT_BYTES else None
    cost = d.square().sum(dim=1).cpu().numpy()  # ||d_i||^2 - 2 <r, d_i> with r = 0
    tolerance = 1e-12 * (1.0 + cost.max())  # equal candidates may differ in the last bits of a matrix product
    picks = []
    for _ in range(budget):  # numpy: an operation on n numbers costs less than launching one in torch
        pick = int((cost <= cost.min() + tolerance).argmax())
        picks.append(pick)
        column = gram[pick] if gram is not None else (d @ d[pick]).cpu().numpy()
        cost += 2.0 * column  # r loses d_pick
        cost[pick] = np.inf
    return torch.tensor(picks, device=z.device)


def recent_window(rounds: Tensor, num_rounds: int, recent_fraction: float) -> Tensor:
    """Which candidates belong to the last ceil(lambda R) rounds.

    rounds [n] are 1-based as in the paper -> BoolTensor [n]. If the window holds nobody, the latest round that has any
    candidate forms it (App. C.1). No candidates gives an empty answer.

    >>> recent_window(torch.tensor([1, 5, 6, 20]), 20, 0.75).tolist()
    [False, False, True, True]
    """
    if len(rounds) == 0:
        return torch.zeros(0, dtype=torch.bool, device=rounds.device)
    width = math.ceil(recent_fraction * num_rounds - 1e-9)  # .75 * 20 must give 15 whatever the floats say
    window = rounds >= num_rounds - width + 1
    return window if bool(window.any()) else rounds == rounds.max()
