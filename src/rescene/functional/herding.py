"""Temporal herding (Sec. 3.3, Eq. 2).

z_i   unit-normalised task-end feature of candidate i      m   target, the mean of z over the recent window W
r     residual (j-1) m - sum of the z picked so far        B   budget
R     rounds of a task                                     lambda   fraction of them that forms the window
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

DEVICE_GRAM_LIMIT_BYTES = 2**33  # on a GPU, for all classes of a task together
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


def herding_order(z: Tensor) -> Tensor:
    """All of z [n, d] in the order in which herding towards their mean picks them (iCaRL, Algorithm 4): LongTensor [n].

    The first m entries are the exemplars of a budget of m, so a set is reduced by dropping its end.

    >>> herding_order(torch.tensor([[0.0], [1.0], [5.0]])).tolist()  # the mean is 2
    [1, 2, 0]
    """
    picks = herd(z, z.mean(dim=0), len(z) - 1) if len(z) > 1 else torch.zeros(0, dtype=torch.int64, device=z.device)
    left = torch.ones(len(z), dtype=torch.bool, device=z.device)
    left[picks] = False
    return torch.cat([picks, left.nonzero().squeeze(1)])


def herd_classes(z: Sequence[Tensor], targets: Sequence[Tensor], budget: int) -> list[Tensor]:
    """``herd`` for several classes; on a GPU one pick of every class at a time, so that the device is asked B times in all.

    z [n_c, d] and targets [d] of each class -> picks of each class.
    """
    longest = max((len(own) for own in z), default=0)
    small_enough = len(z) * longest**2 * 8 <= DEVICE_GRAM_LIMIT_BYTES
    if not (z and z[0].is_cuda and small_enough):
        return [herd(own, target, budget) for own, target in zip(z, targets, strict=True)]
    return _herd_together(z, targets, budget)


def _herd_together(z: Sequence[Tensor], targets: Sequence[Tensor], budget: int) -> list[Tensor]:
    """All classes side by side, shorter ones filled up with candidates that are never picked."""
    sizes = [len(own) for own in z]
    d = pad_sequence([own.double() - m.double() for own, m in zip(z, targets, strict=True)], batch_first=True)
    gram = d @ d.mT
    cost = d.square().sum(dim=2)  # ||d_i||^2 - 2 <r, d_i> with r = 0
    tolerance = 1e-12 * (1.0 + cost.amax(dim=1, keepdim=True))
    place = torch.arange(d.shape[1], device=d.device)
    cost[place >= torch.tensor(sizes, device=d.device).unsqueeze(1)] = torch.inf
    classes = torch.arange(len(z), device=d.device)
    picks = []
    for _ in range(min(budget, max(sizes))):
        pick = (cost <= cost.amin(dim=1, keepdim=True) + tolerance).to(torch.uint8).argmax(dim=1)
        picks.append(pick)
        cost += 2.0 * gram[classes, pick]  # r loses d_pick
        cost[classes, pick] = torch.inf
    order = torch.stack(picks, dim=1)
    return [
        torch.arange(n, device=d.device) if budget >= n else own[:budget] for n, own in zip(sizes, order, strict=True)
    ]


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
