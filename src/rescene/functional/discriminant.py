"""Linear discriminant analysis from sums: counts, class sums and one second moment say all that it needs.

    n_c, n    images of class c, of all classes
    s_c       sum of the features z of class c, [d];  m_c = s_c / n_c
    S         sum of z z' over all images, [d, d]
    W         (S - sum_c n_c m_c m_c') / n, the covariance within classes
    score     m_c' (W + r I)^-1 z - m_c' (W + r I)^-1 m_c / 2

Sums add up over sites, rounds and tasks, so the head does not depend on how the images were split or when they came.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

# tried by :func:`cross_validated_ridge`, in units of the mean variance
RIDGES = tuple(10.0 ** (e / 2) for e in range(-10, 3))

ROUNDING = 1e-12  # eigenvalues below this share of the largest are rounding errors
MOST_FREEDOM = (
    0.95  # tr H / n; above, a fit goes nearly through every image (chosen on training images of CIFAR-10 and Office-31)
)


def discriminant_head(
    counts: Tensor, sums: Tensor, second: Tensor, ridge: float, floor: float = 0.0, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weights [C, d] and biases [C] of the head; classes without images get a bias that never wins.

    ``ridge`` r is in units of the mean variance. Eigenvalues of W below ``floor`` are raised to it: noise on ``second`` makes
    small ones meaningless and some negative. ``noise`` [C] is the variance of the known noise on each number of a class's sum.
    It adds noise_c / n_c^2 tr (W + r I)^-1 to m_c' (W + r I)^-1 m_c in expectation, most for the smallest class, so that is taken off.

    >>> z = torch.tensor([[-2.0, 0.1], [-1.0, -0.1], [1.0, 0.1], [2.0, -0.1]])
    >>> y = torch.tensor([0, 0, 1, 1])
    >>> sums = torch.stack([z[y == c].sum(dim=0) for c in (0, 1)])
    >>> weight, bias = discriminant_head(torch.tensor([2.0, 2.0]), sums, z.T @ z, ridge=1e-6)
    >>> (z.double() @ weight.T + bias).argmax(dim=1).tolist()
    [0, 0, 1, 1]
    """
    counts, sums, second = counts.double(), sums.double(), second.double()
    present = counts > 0
    means = torch.where(present[:, None], sums / counts.clamp_min(1e-12)[:, None], 0.0)
    within = scatter_within(counts, sums, second)
    variance = float(within.diagonal().mean().clamp_min(1e-12))
    solve = regularised_inverse(within, ridge * variance, floor)
    solved = solve(means.T)
    lengths = (means.T * solved).sum(dim=0)
    if noise is not None:
        trace = solve(torch.eye(len(within)).to(within)).trace()
        lengths = lengths - noise.double() / counts.clamp_min(1.0).square() * trace
    bias = -0.5 * lengths
    return solved.T.contiguous(), torch.where(present, bias, -1e9)


def regularised_solve(matrix: Tensor, right: Tensor, ridge: float, floor: float = 0.0) -> Tensor:
    """(matrix + ridge I)^-1 right for a symmetric matrix whose eigenvalues are first raised to ``floor``.

    Without either a singular matrix (more features than images) has its pseudo-inverse.
    """
    return regularised_inverse(matrix, ridge, floor)(right)


def regularised_inverse(matrix: Tensor, ridge: float, floor: float = 0.0) -> Callable[[Tensor], Tensor]:
    """:func:`regularised_solve` for several right sides: eigenvectors, which take longest, are computed once."""
    if floor > 0:
        values, vectors = torch.linalg.eigh(matrix)
        values = values.clamp_min(floor) + ridge
        return lambda right: vectors @ ((vectors.T @ right) / values[:, None])
    if ridge > 0:
        return partial(torch.linalg.solve, matrix + ridge * torch.eye(len(matrix)).to(matrix))
    inverse = torch.linalg.pinv(matrix, hermitian=True)
    return lambda right: inverse @ right


def scatter_within(counts: Tensor, sums: Tensor, second: Tensor) -> Tensor:
    """W, [d, d]. Classes with a (noised) count of zero or less are left out."""
    present = counts > 0
    scaled = sums[present] / counts[present].sqrt()[:, None]
    return (second - scaled.T @ scaled) / counts[present].sum().clamp_min(1e-12)


def cross_validated_ridge(counts: Tensor, sums: Tensor, second: Tensor, ridges: tuple[float, ...] = RIDGES) -> float:
    """The ridge with the least generalised cross-validation error, from the same sums; the largest of several."""
    errors = cross_validation_errors(counts, sums, second, ridges)
    return min(ridges, key=lambda ridge: (errors[ridge], -ridge))


def cross_validation_errors(
    counts: Tensor, sums: Tensor, second: Tensor, ridges: tuple[float, ...] = RIDGES
) -> dict[float, float]:
    """The generalised cross-validation error (Golub, Heath and Wahba 1979) of each ridge. No image is looked at again.

    The error is that of ridge regression with an intercept from z to the classes, the least-squares form of the discriminant:
    GCV(r) = |Y - H Y|^2 / n / (1 - tr H / n)^2, where H is the hat matrix. The intercept is one of the tr H degrees of
    freedom. A fit that goes nearly through every image has no error (infinity here): copies among the images make it look
    perfect.
    """
    counts, sums, second = counts.double(), sums.double(), second.double()
    n = counts.sum()
    mean = sums.sum(dim=0) / n
    total = second - n * mean.outer(mean)
    values, vectors = torch.linalg.eigh(total)
    explained = (vectors.T @ (sums.T - mean[:, None] * counts)).square().sum(dim=1)
    varied = values > values[-1] * ROUNDING  # in the other directions all images are alike
    values, explained = values[varied], explained[varied]
    spread = (counts - counts.square() / n).sum()
    variance = total.diagonal().mean().clamp_min(1e-12)
    errors = {}
    for ridge in ridges:
        penalty = ridge * variance
        residual = spread - (explained * (values + 2 * penalty) / (values + penalty).square()).sum()
        freedom = (1 + (values / (values + penalty)).sum()) / n
        errors[ridge] = float(residual / n / (1 - freedom).square()) if freedom <= MOST_FREEDOM else math.inf
    return errors
