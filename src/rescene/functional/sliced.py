"""The mathematics of FedAF (Wang et al., CVPR 2024): mixing, sliced distance, averages over owners, knowledge matching.

theta~ = gamma theta + (1 - gamma) std(theta) eps      model under which clients condense, tensor by tensor
u_c    mean logits of the surrogates of class c         V_c   mean logits of the real images, averaged over owners
w      uniform random direction in R^C                  SWD(u, v) = E_w |<w, u - v>|
R_c    mean of softmax(f / tau) over real images        T_c   the same over the surrogates of a batch
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_SMALLEST = 1e-12  # of a probability, so that a softmax that underflowed has a logarithm


def mixed(params: Sequence[Tensor], keep: float, generator: torch.Generator) -> list[Tensor]:
    """theta~: each tensor shrunk to the share ``keep`` (gamma) and filled up with noise of its own scale.

    std is over the entries of one tensor, so a constant tensor (a fresh bias, a single entry) gets no noise. keep = 1
    returns the values bit for bit. The noise is drawn on the generator's device, in the given order; inputs stay as they are.
    """
    moved = []
    for p in params:
        eps = torch.randn(p.shape, generator=generator, device=generator.device, dtype=p.dtype).to(p.device)
        moved.append(keep * p.detach() + (1.0 - keep) * p.detach().std(correction=0) * eps)
    return moved


def sliced_distance(u: Tensor, v: Tensor) -> Tensor:
    """Sliced Wasserstein distance of single vectors in closed form: [g, C], [g, C] -> [g].

    Along a direction the distance of two points is |<w, u - v>|, and its mean over directions is ||u - v|| times
    Gamma(C/2) / (sqrt(pi) Gamma((C+1)/2)). No sampling noise; differentiable, with gradient 0 where u = v.

    >>> round(sliced_distance(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)).item(), 4)  # 5 * 2 / pi
    3.1831
    """
    size = u.shape[1]
    constant = math.exp(math.lgamma(size / 2) - math.lgamma((size + 1) / 2)) / math.sqrt(math.pi)
    norms: Tensor = torch.linalg.vector_norm(u - v, dim=1)
    return constant * norms


def owners_average(labels: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean of the rows that share a label: who has no row of a class has no say in it.

    labels [n], rows [n, C], weights [n] > 0 -> (labels that occur, ascending [m], means [m, C]); summed in float64.

    >>> owners_average(torch.tensor([1, 1, 0]), torch.tensor([[1.0], [5.0], [9.0]]), torch.tensor([3, 1, 7]))
    (tensor([0, 1]), tensor([[9.],
            [2.]]))
    """
    owned, group = torch.unique(labels, return_inverse=True)
    weights = weights.double()
    sums = rows.new_zeros(len(owned), rows.shape[1], dtype=torch.float64)
    sums.index_add_(0, group, rows.double() * weights.unsqueeze(1))
    totals = weights.new_zeros(len(owned)).index_add_(0, group, weights)
    return owned, (sums / totals.unsqueeze(1)).to(rows.dtype)


def knowledge_matching(r: Tensor, t: Tensor) -> Tensor:
    """1/2 [KL(R_c || T_c) + KL(T_c || R_c)] of each pair of rows: [m, C], [m, C] -> [m].

    The two divergences together are sum (R - T)(log R - log T): symmetric, and 0 only where the rows agree. A row of zeros
    gives a finite value, so that a caller may mask it afterwards.
    """
    difference = r.clamp(min=_SMALLEST).log() - t.clamp(min=_SMALLEST).log()
    return 0.5 * ((r - t) * difference).sum(dim=1)
