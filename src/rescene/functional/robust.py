"""Which of several samples is not like the others, when a minority of them may be hostile.

x_k [n_k, d]   what site k sent of one class         m_k   its mean                  mu_k   geometric median of the others' means
s^2            variance of one picture about its own site's mean, of the others      h^2    how far honest sites truly differ
r_k = |m_k - mu_k| / sqrt(s^2 / n_k + h^2)           distance in units of what chance and honest differences explain; about 1
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NUM_STEPS = 50  # of Weiszfeld's


def geometric_median(points: Tensor) -> Tensor:
    """The point with the least sum of distances, by Weiszfeld's steps: [n, d] -> [d]. Half of the points cannot move it far.

    >>> geometric_median(torch.tensor([[0.0], [0.1], [0.2], [100.0]])).item() < 0.21
    True
    """
    centre = points.median(dim=0).values
    for _ in range(NUM_STEPS):
        weights = 1 / (points - centre).norm(dim=1).clamp(min=1e-6)
        centre = (weights[:, None] * points).sum(dim=0) / weights.sum()
    return centre


def outlyingness(groups: Sequence[Tensor], reference: Sequence[Tensor] = ()) -> list[float]:
    """r_k of each group, against all the other groups and the ``reference`` groups, which are not judged themselves."""
    everybody = [*groups, *reference]
    if len(everybody) < 3:  # of two that differ nobody can say which one is wrong
        return [0.0] * len(groups)
    means = torch.stack([group.mean(dim=0) for group in everybody])
    spread = torch.stack([(group - group.mean(dim=0)).square().sum() for group in everybody])
    sizes = torch.tensor([len(group) for group in everybody], device=means.device)
    index = torch.arange(len(everybody), device=means.device)
    squared, chance = torch.zeros(len(everybody)), torch.zeros(len(everybody))
    for k in range(len(everybody)):
        others = index != k
        squared[k] = (means[k] - geometric_median(means[others])).square().sum()
        chance[k] = spread[others].sum() / (sizes[others] - 1).sum().clamp(min=1) / sizes[k]
    honest = (squared - chance).median().clamp(min=0)  # h^2: what most of them differ by beyond chance
    ratio = (squared / (chance + honest).clamp(min=1e-12)).sqrt()
    return ratio[: len(groups)].tolist()


def far_off(groups: Sequence[Tensor], reference: Sequence[Tensor] = (), limit: float = 2.0) -> dict[int, float]:
    """Positions of groups beyond the limit, with their r. The farthest goes first and the rest are judged again without
    it, so that one hostile group does not make honest ones look odd; a majority is never turned away."""
    left, found = list(range(len(groups))), dict[int, float]()
    for _ in range((len(groups) + len(reference) - 1) // 2):
        ratios = outlyingness([groups[k] for k in left], reference)
        worst = max(range(len(left)), key=ratios.__getitem__, default=None)
        if worst is None or ratios[worst] <= limit:
            break
        found[left.pop(worst)] = ratios[worst]
    return found
