"""Which of several samples is not like the others, when a minority of them may be hostile.

x_k [n_k, d]   what site k sent of one class         m_k   its mean                  mu_k   geometric median of the others' means
S, s^2 = tr S  covariance of a picture about its own site's mean, pooled             h^2    how far honest sites truly differ
q_k = |m_k - mu_k|^2 / (s^2 / n_k + h^2)             about 1; by chance chi^2_v / v with v = (tr S)^2 / tr S^2
z_k                                                  the same as deviations of a normal variable (Wilson and Hilferty 1931)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def geometric_median(points: Tensor, num_steps: int = 50) -> Tensor:
    """The point with the least sum of distances, by Weiszfeld's steps: [n, d] -> [d]. Half of the points cannot move it far.

    >>> geometric_median(torch.tensor([[0.0], [0.1], [0.2], [100.0]])).item() < 0.21
    True
    """
    centre = points.median(dim=0).values
    for _ in range(num_steps):
        weights = 1 / (points - centre).norm(dim=1).clamp(min=1e-6)
        centre = (weights[:, None] * points).sum(dim=0) / weights.sum()
    return centre


def outlyingness(groups: Sequence[Tensor], reference: Sequence[Tensor] = ()) -> list[float]:
    """z_k of each group, against all the other groups and the ``reference`` groups, which are not judged themselves."""
    everybody = [*groups, *reference]
    sizes = torch.tensor([len(group) for group in everybody])
    freedom = int((sizes - 1).sum())
    if len(everybody) < 3 or freedom < 2:  # of two that differ nobody can say which one is wrong
        return [0.0] * len(groups)
    means = torch.stack([group.mean(dim=0) for group in everybody]).double()
    within = torch.cat([group - group.mean(dim=0) for group in everybody]).double()
    variance = within.square().sum() / freedom
    gram = within @ within.T / freedom if len(within) < within.shape[1] else within.T @ within / freedom
    dims = (variance**2 / gram.square().sum().clamp(min=1e-30)).clamp(min=1)
    index = torch.arange(len(everybody))
    centres = torch.stack([geometric_median(means[index != k]) for k in range(len(everybody))])
    squared, chance = (means - centres).square().sum(dim=1), variance / sizes.to(means)
    honest = (squared - chance).median().clamp(min=0)  # h^2: what most of them differ by beyond chance
    q = squared / (chance + honest).clamp(min=1e-30)
    spread = 2 / (9 * dims)
    return ((q.pow(1 / 3) - (1 - spread)) / spread.sqrt())[: len(groups)].tolist()


def far_off(groups: Sequence[Tensor], reference: Sequence[Tensor] = (), limit: float = 3.0) -> dict[int, float]:
    """Positions of groups beyond the limit, with their z. The farthest goes first and the rest are judged again without
    it, so that one hostile group does not make honest ones look odd; a majority is never turned away."""
    left, found = list(range(len(groups))), dict[int, float]()
    for _ in range((len(groups) + len(reference) - 1) // 2):
        scores = outlyingness([groups[k] for k in left], reference)
        worst = max(range(len(left)), key=scores.__getitem__, default=None)
        if worst is None or scores[worst] <= limit:
            break
        found[left.pop(worst)] = scores[worst]
    return found
