"""Low-rank changes of attention layers (LoRA: Hu et al., ICLR 2022; PILoRA: Guo et al., ECCV 2024).

W    weights of a layer that gives queries, keys and values, [3 d, d]
A    [2, r, d], B [2, d, r]: the pair of queries and that of values; keys are not changed
W + [B_q A_q; 0; B_v A_v] is the layer with the change
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def changed_layer(weight: Tensor, pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """W [3 d, d] with the changes of pairs (A [2, r, d], B [2, d, r]) added up.

    >>> a, b = torch.tensor([[[2.0]], [[3.0]]]), torch.tensor([[[5.0]], [[7.0]]])
    >>> changed_layer(torch.ones(3, 1), [(a, b)]).flatten().tolist()
    [11.0, 1.0, 22.0]
    """
    changed, d = weight.clone(), weight.shape[1]
    for a, b in pairs:
        changed[:d] += b[0] @ a[0]
        changed[2 * d :] += b[1] @ a[1]
    return changed


def change_of_output(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """What the pair adds to the output of its layer for inputs x [..., d]: [..., 3 d]."""
    queries, values = (x @ a[kind].T @ b[kind].T for kind in (0, 1))
    return torch.cat([queries, torch.zeros_like(queries), values], dim=-1)


def overlap(a: Tensor, earlier: Iterable[Tensor]) -> Tensor:
    """sum_i |A_i A^T|_1 over the pairs of earlier tasks, for A and A_i [..., r, d]: 0 if all rows are orthogonal.

    >>> overlap(torch.eye(2)[:1], [torch.eye(2)[1:], torch.tensor([[-3.0, 1.0]])]).item()
    3.0
    """
    return sum(((other @ a.mT).abs().sum() for other in earlier), a.new_zeros(()))
