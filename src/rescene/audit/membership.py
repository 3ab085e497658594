"""Was this image among the data? A likelihood ratio for each image, from many condensations with and without it.

LiRA (Carlini et al., "Membership inference attacks from first principles", 2022), with condensations in the place of trained
models. What counts is the share found out while almost nobody is accused wrongly, not the average over easy and hard.

    x  [s, t, k]  k statistics of target t as seen in condensation s; NaN where nothing was uploaded
    z  [s, t]     whether target t was among the data of condensation s
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_likelihood_ratios(x: Tensor, z: Tensor) -> Tensor:
    """log p(x | in) - log p(x | out) for every pair [s, t]; each condensation is judged by all the others.

    Normal laws, statistics taken as independent, a mean for each target and side, a variance for each side that all targets
    share (few condensations each). A missing statistic says nothing: 0.
    """
    there = torch.isfinite(x)
    value = torch.where(there, x, 0.0).double()

    def log_density(side: Tensor) -> Tensor:
        weight = (side.unsqueeze(2) & there).double()
        others = weight.sum(dim=0) - weight
        mean = ((weight * value).sum(dim=0) - weight * value) / others.clamp(min=1)
        square = (value - mean).square()
        known = weight * (others > 0)
        variance = ((known * square).sum(dim=(0, 1)) / known.sum(dim=(0, 1)).clamp(min=1)).clamp(min=1e-12)
        return torch.where(there & (others > 0), -0.5 * (square / variance + variance.log()), torch.nan)

    return (log_density(z) - log_density(~z)).nan_to_num(nan=0.0).sum(dim=2)


def true_positive_rate(inside: Tensor, outside: Tensor, false_positive_rate: float) -> float:
    """Share of ``inside`` scores above a threshold that at most this share of ``outside`` scores exceeds.

    >>> true_positive_rate(torch.tensor([5., 3., 1.]), torch.tensor([4., 2., 0., 0.]), 0.25)
    0.6666666666666666
    """
    allowed = int(false_positive_rate * len(outside))
    threshold = outside.sort(descending=True).values[allowed]
    return float((inside > threshold).double().mean())


def area_under_curve(inside: Tensor, outside: Tensor) -> float:
    """Chance that a member scores above a non-member; ties count half.

    >>> area_under_curve(torch.tensor([2., 1.]), torch.tensor([1., 0.]))
    0.875
    """
    ordered = outside.sort().values
    below = torch.searchsorted(ordered, inside.contiguous(), right=False)
    not_above = torch.searchsorted(ordered, inside.contiguous(), right=True)
    return float((below + not_above).double().mean() / (2 * len(outside)))
