"""One clipped sum per class, with a count in its last coordinate: what is noised once and then used freely.

    psi(x)  embedding of a record        C      bound on its part        kappa  what a record adds to the count coordinate
    u(x) = (clip_C(psi(x) - a_c), kappa) ||u|| <= D = sqrt(C^2 + kappa^2): adding or removing a record moves one sum by that
    a_c     centre of the class, 0 or anything that was public before the noise is drawn: the bound holds for every a_c

Sums are whole numbers of grid steps, each record's part rounded by itself, so no order of adding changes them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rescene.privacy.accounting import check_grid, least_deviation
from rescene.privacy.noise import Noise, discrete_gaussian

TAIL = 9.0  # deviations; noise exceeds them once in 10^18 numbers


def clip_rows(rows: Tensor, max_norm: float) -> Tensor:
    """Each row scaled to norm at most ``max_norm``, in float64; a row that is not finite becomes 0, so the bound holds for any input.

    >>> rows = clip_rows(torch.tensor([[3., 4.], [0.3, 0.4], [torch.inf, 0.]]), 1.0)
    >>> [round(norm, 6) for norm in rows.norm(dim=1).tolist()]
    [1.0, 0.5, 0.0]
    """
    rows = rows.double()
    largest = rows.abs().amax(dim=1, keepdim=True) if rows.shape[1] else rows.new_zeros(len(rows), 1)
    finite = torch.isfinite(largest)
    rows = torch.where(finite, rows, 0.0)
    unit = torch.where(finite & (largest > 0), largest, 1.0)
    norms = unit * (rows / unit).square().sum(dim=1, keepdim=True).sqrt()  # squares of huge entries would overflow
    return rows * (max_norm / norms.clamp(min=max_norm))


def release_bound(clip: float, kappa: float) -> float:
    """D, the sensitivity of :func:`class_sums` to one record."""
    return math.hypot(clip, kappa)


def class_sums(
    psi: Tensor, groups: Tensor, num_groups: int, clip: float, kappa: float, step: float, centre: Tensor | None = None
) -> Tensor:
    """Sum of u(x) over each group in whole steps: psi [n, d], groups [n], centre [num_groups, d] -> int64 [num_groups, d + 1].

    An empty group has sum 0.
    """
    psi = psi if centre is None else psi.double() - centre.double()[groups]
    u = torch.cat([clip_rows(psi, clip), torch.full((len(psi), 1), kappa, dtype=torch.float64, device=psi.device)], 1)
    units = in_steps(u, step)
    return units.new_zeros(num_groups, units.shape[1]).index_add(0, groups, units)


def in_steps(rows: Tensor, step: float) -> Tensor:
    """Rounded to whole steps, int64.

    >>> in_steps(torch.tensor([0.3, -1.0]), 0.25).tolist()
    [1, -4]
    """
    return (rows.double() / step).round().long()


def moved_back(sums: Tensor, centre: Tensor, kappa: float) -> Tensor:
    """Noised sums around no centre, from those around one: a_c once for every record that the noised count tells of."""
    counts = sums[:, -1:] / kappa
    return torch.cat([sums[:, :-1] + counts * centre.to(sums), sums[:, -1:]], 1)


def honest_sums(
    sums: Tensor, clip: float, kappa: float, deviation: float, least: float, centre: Tensor | None = None
) -> bool:
    """Whether a site that follows the protocol could have sent these noised sums [g, d + 1] as not suppressed.

    Noise is taken to be at most ``TAIL`` deviations. So the true count is at most the noised one plus so many deviations,
    and no coordinate of the sum exceeds what so many clipped records and the noise add up to. The centre may be that of an
    earlier round, so it counts twice.
    """
    sums = sums.double()
    tail = TAIL * deviation
    reach = clip + (0.0 if centre is None else 2 * float(centre.abs().max()))
    most = (sums[:, -1:].abs() + tail) / kappa * reach + tail
    return bool(noised_means(sums, kappa, least)[1].all()) and bool((sums[:, :-1].abs() <= most).all())


def noised_means(sums: Tensor, kappa: float, least: float) -> tuple[Tensor, Tensor]:
    """From noised sums to means: ([g, d], which groups have a noised count of at least ``least`` [g]).

    Post-processing: it looks at nothing but the noised sums. Rows of groups below the threshold carry no meaning.
    """
    counts = sums[:, -1] / kappa
    return sums[:, :-1] / counts.clamp(min=1.0).unsqueeze(1), (counts >= least) & (counts >= 1.0)


def noised_counts(counts: Tensor, sigma: float, noise: Noise) -> Tensor:
    """Counts of images [kinds, classes] behind discrete Gaussian noise, rounded to whole images again; they may be negative.

    The grid is so fine that the accountant's cost of a grid (``check_grid``) covers the noise.
    """
    deviation = count_deviation(sigma, len(counts))
    grid = math.ceil(least_deviation(counts.numel()) / deviation)  # steps to one image
    check_grid(grid * deviation, counts.numel())
    drawn = discrete_gaussian(counts.numel(), grid * deviation, noise).reshape(counts.shape)
    return (counts * grid + drawn + grid // 2).div(grid, rounding_mode="floor")


def count_deviation(sigma: float, num_kinds: int) -> float:
    """Deviation of the noise, in images. An image adds at most 1 to one count of each kind: the sensitivity is sqrt(num_kinds).

    >>> count_deviation(2.0, 4)
    4.0
    """
    return sigma * math.sqrt(num_kinds)
