"""Federated averaging: theta <- sum_k (w_k / sum w) theta_k (McMahan et al., 2017)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def weighted_average(states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """Entry-wise weighted mean of state dicts, summed in float64 in the given order.

    Floating-point entries (running statistics of BatchNorm included) are averaged; integer entries such as
    ``num_batches_tracked`` take the maximum, since their mean would not be an integer. One state is returned bit for bit.

    >>> weighted_average([{"a": torch.tensor([0.0])}, {"a": torch.tensor([4.0])}], [3, 1])["a"].item()
    1.0
    """
    total = float(sum(weights))
    if not states or total <= 0:
        raise ValueError("an average needs at least one state with positive weight")
    if len(states) == 1:
        return dict(states[0])
    average: dict[str, Tensor] = {}
    for key, first in states[0].items():
        entries = [state[key] for state in states]
        if first.is_floating_point():
            summed = torch.zeros_like(first, dtype=torch.float64)
            for entry, weight in zip(entries, weights, strict=True):
                summed += entry.double() * (weight / total)
            average[key] = summed.to(first.dtype)
        else:
            average[key] = torch.stack(entries).amax(dim=0)
    return average
