"""Surrogates from noised moments of the pictures themselves: the private form of the start ``coloured``.

Per site, task and class of the task: one clipped sum of picture moments and a count, noised once. It does not depend on the
model, so it is released once per task; every later round draws fresh surrogates from the same numbers, which is free. Nothing
else touches the images, and every class of the task is treated alike whether the site has it or not.

The moments are the first and second ones of a class's pictures at a low resolution: few numbers, so that little noise hides a record.

    p(x)    picture averaged over g x g cells, / g: its length is the picture's RMS        [channels g^2]
    q(x)    its grey version, or all its channels, averaged over h x h cells, / h         [h^2 or channels h^2]
    psi(x) = (p(x), w q(x) q(x)')         w = ``weight``; the symmetric matrix as its upper triangle, lengths kept

From a noised mean of psi pictures can be drawn at will: mean + noise with the covariance, both smoothed up to full size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rescene.core.rng import Rng
from rescene.data import Shard
from rescene.privacy.class_sums import noised_means
from rescene.privacy.mechanism import Mechanism, SitePrivacy, digest
from rescene.privacy.released_embeddings import noised_sums
from rescene.training.condensation import CHUNK, Condensation, Surrogates, collect


def picture_moments(x: Tensor, grid: int, coarse: int, weight: float, colour: bool = False) -> Tensor:
    """psi(x) of each picture: [n, channels, s, s] -> [n, channels grid^2 + d (d + 1) / 2], d the numbers of q.

    >>> picture_moments(torch.ones(1, 1, 8, 8), 2, 1, 0.5).tolist()
    [[0.5, 0.5, 0.5, 0.5, 0.5]]
    """
    p, q = _cells(x, grid), _coarse(x, coarse, colour)
    rows, columns = torch.triu_indices(q.shape[1], q.shape[1], device=x.device)
    products = q[:, rows] * q[:, columns] * torch.where(rows == columns, 1.0, math.sqrt(2.0))
    return torch.cat([p, weight * products], dim=1)


class PictureLaw(NamedTuple):
    """What pictures are drawn from: their mean, and how far they vary along each axis of the coarse picture."""

    mean: Tensor  # [1, channels, s, s]
    axes: Tensor  # [d, d], one per column
    scale: Tensor  # [d]
    coarse: int  # side of what varies


def picture_law(
    mean: Tensor,
    deviation: float,
    shape: torch.Size,
    grid: int,
    coarse: int,
    weight: float,
    colour: bool = False,
) -> PictureLaw:
    """The law of pictures of this ``shape`` [channels, s, s] with the moments ``mean``, which carry noise of this ``deviation``.

    The mean picture is smoothed by :func:`without_noise`; of the covariance those directions are kept that stand out: the
    eigenvalues of a symmetric matrix of such noise end at 2 sqrt(d) times its deviation (Wigner's semicircle). Where the
    covariance is that of the whole picture, all other eigenvalues become their mean, which the noise disturbs least.
    """
    channels, size = shape[0], shape[-1]
    split = channels * grid * grid
    unit = grid * math.sqrt(channels)
    picture = without_noise((unit * mean[:split]).reshape(1, channels, grid, grid), unit * deviation)
    (q,) = _coarse(picture, coarse, colour)
    size_q = len(q)
    rows, columns = torch.triu_indices(size_q, size_q, device=mean.device)
    second = mean.new_zeros(size_q, size_q)
    second[rows, columns] = mean[split:] / weight / torch.where(rows == columns, 1.0, math.sqrt(2.0))
    second[columns, rows] = second[rows, columns].clone()
    values, axes = torch.linalg.eigh(second - torch.outer(q, q))
    edge = 2 * deviation / weight * math.sqrt(size_q / 2)  # off the diagonal entries carry the deviation / sqrt 2
    stands_out = values > edge
    rest = 0.0
    if colour and coarse == size and not bool(stands_out.all()):
        # nothing is smoothed away: keep what the others add up to
        rest = max(0.0, float(values[~stands_out].mean()))
    return PictureLaw(_smooth(picture, size), axes, torch.where(stands_out, values, rest).sqrt(), coarse)


def drawn_pictures(law: PictureLaw, noise: Tensor) -> Tensor:
    """A picture [channels, s, s] for each row of white ``noise`` [m, d]."""
    varied = (noise.to(law.mean) * law.scale) @ law.axes.T * math.sqrt(len(law.scale))
    return law.mean + _smooth(varied.reshape(len(noise), -1, law.coarse, law.coarse), law.mean.shape[-1])


def without_noise(picture: Tensor, deviation: float) -> Tensor:
    """Wiener's filter for a mean picture [..., g, g] with noise of this deviation on every cell.

    The power of wave (u, v) is taken to be g^2 / (1 + u^2 + v^2)^2: what averages of centred objects have, roughly, and no
    number that any image was asked for.
    """
    side = picture.shape[-1]
    wave = torch.arange(side, dtype=picture.dtype, device=picture.device)
    basis = torch.cos(math.pi / side * (wave + 0.5) * wave.unsqueeze(1)) * math.sqrt(2 / side)  # DCT-II, rows are waves
    basis[0] /= math.sqrt(2)
    power = side**2 / (1 + wave.square() + wave.square().unsqueeze(1)).square()
    return basis.T @ (basis @ picture @ basis.T * power / (power + deviation**2)) @ basis


def _cells(x: Tensor, side: int) -> Tensor:
    """Averages over side x side cells of each channel, as rows as long as the picture's RMS."""
    return F.adaptive_avg_pool2d(x, side).flatten(1) / (side * math.sqrt(x.shape[1]))


def _coarse(x: Tensor, side: int, colour: bool) -> Tensor:
    """q of each picture."""
    return _cells(x if colour else x.mean(dim=1, keepdim=True), side)


def _smooth(x: Tensor, size: int) -> Tensor:
    return F.interpolate(x, size=(size, size), mode="bicubic", align_corners=False)


WHOLE_TASK = -1  # the round under which the ledger keeps what is released once per task


def released_moments(shard: Shard, site: SitePrivacy, centre: Tensor | None = None) -> Tensor | None:
    """The site's noised sums [classes, d + 1], the same in every round of the task; None if it declines."""
    mechanism = site.mechanism
    found = replace(site, round=WHOLE_TASK).answer(
        digest([], mechanism, *["colour"] * mechanism.covariance_colour),
        lambda: {"sums": _sums(shard, site, centre)},
    )
    return None if found is None else found["sums"]


def laws_of(sums: Tensor, shape: torch.Size, mechanism: Mechanism, deviation: float) -> list[PictureLaw | None]:
    """What pictures of this shape are drawn from, for each class of sums with noise of this deviation; None: suppressed."""
    means, enough = noised_means(sums, mechanism.kappa, mechanism.least_count)
    counts = sums[:, -1] / mechanism.kappa
    return [
        picture_law(mean.float(), deviation / float(count), shape, *_grids(mechanism)) if sent else None
        for mean, count, sent in zip(means, counts, enough, strict=True)
    ]


def drawn_from_laws(
    shard: Shard, rng: Rng, laws: Sequence[PictureLaw | None] | None, settings: Condensation
) -> Surrogates:
    """Surrogates; the shard says which classes, size and device, and may be empty. No laws: the site declined."""
    if laws is None:
        return replace(collect(shard, []), num_declined=1)
    classes, images = [], []
    for label, law in zip(shard.task.classes, laws, strict=True):
        if law is not None:
            noise = torch.randn(settings.ipc, len(law.scale), generator=rng.at("condense", label).generator())
            images.append(shard.transform.possible(drawn_pictures(law, noise).to(shard.device)))
            classes.append(label)
    suppressed = len(laws) - len(classes)
    if not images:
        return replace(collect(shard, []), num_suppressed=suppressed)
    labels = torch.tensor(classes, device=shard.device).repeat_interleave(settings.ipc)
    pixels = torch.cat(images)
    return Surrogates(pixels, labels, pixels, loss=0.0, num_fallbacks=0, num_suppressed=suppressed)


def _sums(shard: Shard, site: SitePrivacy, centre: Tensor | None = None) -> Tensor:
    """The one look at the images: a noised clipped sum and count for every class of the task."""
    parts = shard.index.split(CHUNK[shard.device.type]) if len(shard) else (shard.index,)
    psi = (moments_of(shard.pictures(part), site.mechanism) for part in parts)
    return noised_sums(psi, shard, site.mechanism, site.noise, centre)


def moments_of(pictures: Tensor, mechanism: Mechanism) -> Tensor:
    """First and second moments of pictures on the mechanism's grids."""
    return picture_moments(pictures, *_grids(mechanism))


def num_rows(mechanism: Mechanism, channels: int) -> int:
    """Rows of the covariance that is released."""
    return mechanism.covariance_grid**2 * (channels if mechanism.covariance_colour else 1)


def _grids(mechanism: Mechanism) -> tuple[int, int, float, bool]:
    m = mechanism
    return m.mean_grid, m.covariance_grid, m.covariance_weight, m.covariance_colour
