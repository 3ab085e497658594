"""Weights as a base that sites share, a mask, and sparse additions (FedWeIT, Yoon et al., ICML 2021).

B        base of a layer, [outputs, ...]
v, m     [outputs]; m = sigmoid(v) is the mask, one number for each output
A        adaptive weights of one site in one task, of the shape of B
K, alpha adaptive weights of other sites in earlier tasks, and the attention that they get
theta = B * m + A + sum_i alpha_i K_i are the weights of the layer
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def masked(base: Tensor, mask: Tensor) -> Tensor:
    """B [outputs, ...] times a mask m [outputs].

    >>> masked(torch.ones(2, 3), torch.tensor([1.0, 0.5])).tolist()
    [[1.0, 1.0, 1.0], [0.5, 0.5, 0.5]]
    """
    return base * mask.reshape(-1, *[1] * (base.ndim - 1))


def composed(base: Tensor, mask: Tensor, adaptive: Tensor, attention: Tensor, received: Sequence[Tensor]) -> Tensor:
    """theta = B * m + A + sum_i alpha_i K_i (Eq. 1), for a mask m and attention alpha [number received]."""
    theta = masked(base, mask) + adaptive
    for alpha, other in zip(attention, received, strict=True):
        theta = theta + alpha * other
    return theta


def drift(base: Tensor, mask: Tensor, adaptive: Tensor, anchor: Tensor) -> Tensor:
    """||B * m + A - anchor||^2 / 2: how far the weights of an earlier task have moved from what they were.

    >>> drift(torch.ones(1, 2), torch.ones(1), torch.zeros(1, 2), torch.tensor([[1.0, 3.0]])).item()
    2.0
    """
    return (masked(base, mask) + adaptive - anchor).square().sum() / 2


def pruned(adaptive: Tensor, threshold: float) -> Tensor:
    """A with 0 in the place of every entry that is not larger than the threshold.

    >>> pruned(torch.tensor([0.5, -0.2, 0.1, -1.0]), 0.2).tolist()
    [0.5, 0.0, 0.0, -1.0]
    """
    return torch.where(adaptive.abs() > threshold, adaptive, 0.0)


def num_kept(outputs: int, dropped: float) -> int:
    """Outputs of a layer that are left when this share of them is dropped, at least one.

    >>> [num_kept(outputs, 0.3) for outputs in (1, 3, 10, 32)]
    [1, 3, 7, 23]
    """
    return max(outputs - math.floor(outputs * dropped), 1)


def kept_outputs(mask: Tensor, dropped: float) -> Tensor:
    """bool [outputs]: those with the largest mask, all but the share that is dropped; of equal ones the first.

    >>> kept_outputs(torch.tensor([0.4, 0.9, 0.4, 0.1]), 0.5).tolist()
    [True, True, False, False]
    """
    order = mask.argsort(descending=True, stable=True)
    kept = torch.zeros_like(mask, dtype=torch.bool)
    kept[order[: num_kept(len(mask), dropped)]] = True
    return kept


def mean_of_kept(before: Tensor, kept: Sequence[Tensor], rows: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The mean of each row of B over the sites that sent it, weighted; a row that nobody sent stays as it was before.

    ``kept[k]`` bool [outputs] says which rows site k sent, ``rows[k]`` [number kept, ...] are these. Summed in float64.

    >>> sent = [torch.tensor([True, False]), torch.tensor([True, False])]
    >>> mean_of_kept(torch.tensor([[0.0], [7.0]]), sent, [torch.tensor([[1.0]]), torch.tensor([[5.0]])], [3, 1]).tolist()
    [[2.0], [7.0]]
    """
    summed = torch.zeros_like(before, dtype=torch.float64)
    total = torch.zeros(len(before), dtype=torch.float64, device=before.device)
    for which, values, weight in zip(kept, rows, weights, strict=True):
        summed[which] += weight * values.double()
        total[which] += weight
    mean = masked(summed, 1 / total.clamp_min(torch.finfo(torch.float64).tiny))
    return torch.where(total.reshape(-1, *[1] * (before.ndim - 1)) > 0, mean.to(before.dtype), before)


def to_bits(which: Tensor) -> Tensor:
    """A bool tensor as uint8 [ceil(entries / 8)], eight entries in a byte, the first in the lowest bit.

    >>> to_bits(torch.tensor([[True, False, True], [False, False, False], [False, False, True]])).tolist()
    [5, 1]
    """
    flat = which.flatten().to(torch.uint8)
    padded = torch.cat([flat, flat.new_zeros(-len(flat) % 8)]).reshape(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=flat.device)).sum(dim=1, dtype=torch.uint8)


def from_bits(bits: Tensor, shape: Sequence[int]) -> Tensor:
    """The bool tensor of this shape that :func:`to_bits` made bytes of.

    >>> from_bits(torch.tensor([5, 1], dtype=torch.uint8), (9,)).int().tolist()
    [1, 0, 1, 0, 0, 0, 0, 0, 1]
    """
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    flat = ((bits.unsqueeze(1) >> places) & 1).flatten().bool()
    return flat[: math.prod(shape)].reshape(tuple(shape))


def scattered(present: Tensor, values: Tensor) -> Tensor:
    """Zeros of the shape of ``present`` (bool) with ``values`` where it is true, in order.

    >>> scattered(torch.tensor([[True, False], [False, True]]), torch.tensor([3.0, 4.0])).tolist()
    [[3.0, 0.0], [0.0, 4.0]]
    """
    return torch.zeros(present.shape, dtype=values.dtype, device=values.device).masked_scatter(present, values)
