"""Sums of features in whole steps, and the discrete noise with which they leave a site behind the mechanism ``release``.

An image has one feature z, whole numbers in steps. A site sums for each class the number n_c of images and their features s_c, and
over all classes the second moment S = sum z z'. A sum keeps an image within the promised epsilon if the image's part is at most
1 / sigma deviations of the noise long; :func:`deviations` is that noise. Nothing here depends on how the sums are used.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rescene.core.record import record
from rescene.privacy.accounting import check_grid, least_deviation
from rescene.privacy.mechanism import Mechanism, SitePrivacy
from rescene.privacy.noise import discrete_gaussian

STEPS = 16  # whole steps to one unit of a feature: what a lens gives comes in these steps already
LARGEST = 127  # steps: features are cut beyond 8 units
EXACT = 1024  # rows whose products of such numbers float32 adds up without rounding
# public clip, in units of the norm that procedural pictures have; chosen on the validation part of CIFAR-10
RADIUS = 0.9


def exact_sums(z: Tensor, labels: Tensor, num: int) -> dict[str, Tensor]:
    """n_c, s_c and S in whole numbers, the same in every order and on every machine."""
    counts = torch.bincount(labels, minlength=num)
    sums = torch.zeros(num, z.shape[1], dtype=torch.int64, device=z.device).index_add(0, labels, z.long())
    return {"counts": counts, "sums": sums, "second": packed(second_moment(z)).int()}


def second_moment(z: Tensor) -> Tensor:
    """sum z z' as float64 [d, d]: exact for whole numbers of at most 127."""
    total = torch.zeros(z.shape[1], z.shape[1], dtype=torch.float64, device=z.device)
    for part in z.split(EXACT):
        total += part.T @ part
    return total


def noised_feature_sums(z: Tensor, labels: Tensor, num: int, site: SitePrivacy) -> dict[str, Tensor]:
    """What leaves a site behind the mechanism ``release``: whole numbers with discrete noise, each kind on a grid of its own.

    An image of norm |z| <= R adds 1 to a count, z to a sum and z z' to S. With the noise of :func:`deviations` on the three
    (off the diagonal of S, where a product counts twice, a factor of sqrt(2) less) adding or taking away one image moves the
    whole answer by 1 / sigma deviations at most.
    """
    d, share = z.shape[1], site.mechanism.share
    grid = Grid.of(site.mechanism, d, num)
    sums = exact_sums(clipped(z, RADIUS * norm(d)), labels, num)
    diagonal = on_diagonal(d)

    def noised(values: Tensor, step: int, deviation: float) -> Tensor:
        drawn = discrete_gaussian(values.numel(), step * deviation * share, site.noise)
        return values.cpu().long() * step + drawn.reshape(values.shape)

    of_count, of_sum, of_square = deviations(site.mechanism, d)
    second, upper = torch.empty(len(diagonal), dtype=torch.int64), sums["second"].cpu()
    second[diagonal] = noised(upper[diagonal], grid.second, of_square)
    second[~diagonal] = noised(upper[~diagonal], grid.second, of_square / math.sqrt(2))
    found = {
        "counts": noised(sums["counts"], grid.counts, of_count),
        "sums": noised(sums["sums"], grid.sums, of_sum),
        "second": wrapped(second),
    }
    return {name: value.to(z.device) for name, value in found.items()}


@record
class Grid:
    """Whole steps to one image, to one step of a feature, and to one product of two such steps.

    Discrete noise must be wide on its grid to count as continuous. So each grid is as fine as that needs, and no finer.
    """

    counts: int
    sums: int
    second: int

    @staticmethod
    def of(m: Mechanism, d: int, num_classes: int) -> Grid:
        """The coarsest integer grid on which the discrete noise of ``m`` is fine enough for ``d`` features."""
        numbers = num_classes * (d + 1) + d * (d + 1) // 2
        of_count, of_sum, of_square = deviations(m, d)
        widths = of_count, of_sum, of_square / math.sqrt(2)
        finer = [2 ** max(0, math.ceil(math.log2(least_deviation(numbers) / width))) for width in widths]
        for step, width in zip(finer, widths, strict=True):
            check_grid(step * width, numbers)
        return Grid(*finer)


def deviations(m: Mechanism, d: int) -> tuple[float, float, float]:
    """Of the whole noise on a count, on a sum and on the diagonal of S, for features in steps clipped at R.

    In units of them one image has the parts kappa, a and a w of sqrt(C^2 + kappa^2), with a = C / sqrt(1 + w^2), and sigma
    deviations are as long as all three together.
    """
    whole, radius = m.sigma * m.sensitivity, RADIUS * norm(d)
    a = m.clip / math.sqrt(1 + m.covariance_weight**2)
    return whole / m.kappa, whole * radius / a, whole * radius**2 / (a * m.covariance_weight)


def norm(d: int) -> float:
    """The norm, in steps, that d features of procedural pictures have: a lens gives unit variance there. No site is asked."""
    return STEPS * math.sqrt(d)


def clipped(z: Tensor, radius: float) -> Tensor:
    """Whole numbers with norm at most ``radius``: longer rows are shortened, and cut towards zero to whole numbers again."""
    length = z.double().norm(dim=1, keepdim=True).clamp_min(1)
    return torch.where(length > radius, (z * (radius / length * (1 - 1e-9))).trunc(), z).to(z.dtype)


def wrapped(values: Tensor) -> Tensor:
    """int64 -> int32, modulo 2**32."""
    return ((values + 2**31) % 2**32 - 2**31).int()


def noise_eigenvalue(m: Mechanism, d: int, noises: float) -> float:
    """The largest eigenvalue, in units, of the noise on a second moment (Wigner's semicircle)."""
    return math.sqrt(2 * d * noises) * deviations(m, d)[2] / STEPS**2


def packed(matrix: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix, row by row: [d, d] -> [d (d + 1) / 2]."""
    d = len(matrix)
    return matrix.masked_select(torch.triu(torch.ones(d, d, dtype=torch.bool, device=matrix.device)))


def unpacked(upper: Tensor, d: int) -> Tensor:
    """Inverse of :func:`packed`."""
    matrix = upper.new_zeros(d, d)
    mask = torch.triu(torch.ones(d, d, dtype=torch.bool, device=upper.device))
    matrix[mask] = upper
    return matrix + matrix.T - torch.diag(matrix.diagonal())


def on_diagonal(d: int, device: torch.device | None = None) -> Tensor:
    """Which entries of a packed triangle lie on the diagonal."""
    k = torch.arange(d, device=device)
    found = torch.zeros(d * (d + 1) // 2, dtype=torch.bool, device=device)
    found[k * d - k * (k - 1) // 2] = True  # rows are one shorter than the one before
    return found
