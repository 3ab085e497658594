"""Distribution matching (Eq. 1): the loss, the parameters under which it is taken, and how far a step on pixels may go.

    phi     features of the network without its head     f   logits
    S_c     surrogates of a class                        D_c real images of that class (or a minibatch of them)
    theta   parameters        rho   radius of the ball   theta' = theta + eps * min(1, rho / ||eps||), eps ~ N(0, I)   (Sec. 3.2)
    C       bound on the norm of the gradient:           g <- g / max(1, ||g|| / C)                                    (App. F)
    L / eta Polyak's bound on the step:                  eta ||g|| <= L / ||g||, where the tangent of a loss L >= 0 reaches zero
            (Loizou et al., AISTATS 2021)

Groups stand for (client, class) pairs: the loss is separable over them, so that one pass serves every class of every client.

The mathematics of FedAF (Wang et al., CVPR 2024): mixing, sliced distance, averages over owners, knowledge matching.

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


def perturbed(params: Sequence[Tensor], radius: float, generator: torch.Generator) -> list[Tensor]:
    """Parameters moved by isotropic Gaussian noise projected into a ball; the norm is one norm over all tensors.

    The noise is drawn on the generator's device, tensor by tensor in the given order. A network of more than a few
    hundred parameters always lands on the sphere, ||theta' - theta|| = rho; a very small one may stay inside.
    Radius 0 returns copies. The inputs are not changed.
    """
    eps = [
        torch.randn(p.shape, generator=generator, device=generator.device, dtype=p.dtype).to(p.device) for p in params
    ]
    norm = torch.stack([e.double().square().sum() for e in eps]).sum().sqrt()
    scale = torch.clamp(radius / norm.clamp(min=1e-30), max=1.0)
    return [p.detach() + e * scale.to(p.dtype) for p, e in zip(params, eps, strict=True)]


def clip_groups(
    gradient: Tensor, groups: Tensor, num_groups: int, max_norm: float | None, reach: Tensor | None = None
) -> Tensor:
    """Scale each group's block of rows to norm at most ``max_norm``, and at most ``reach`` / its norm.

    gradient [n, ...], groups [n], reach = L / eta [num_groups] -> shape of gradient. A block within the bounds is returned
    unchanged; a zero block stays zero.
    """
    squares = gradient.flatten(1).double().square().sum(dim=1)
    squares = squares.new_zeros(num_groups).index_add(0, groups, squares)
    excess = torch.zeros_like(squares) if max_norm is None else squares.sqrt() / max_norm
    if reach is not None:
        excess = torch.maximum(excess, squares / reach.double().clamp(min=torch.finfo(torch.float32).tiny))
    factors = excess.clamp(min=1.0).reciprocal().to(gradient.dtype)
    return gradient * factors[groups].reshape(-1, *[1] * (gradient.dim() - 1))


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
