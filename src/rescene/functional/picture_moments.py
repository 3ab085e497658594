"""First and second moments of a class's pictures at a low resolution: few numbers, so that little noise hides a record in them.

    p(x)    picture averaged over g x g cells, / g: its length is the picture's RMS        [channels g^2]
    q(x)    its grey version averaged over h x h cells, / h                               [h^2]
    psi(x) = (p(x), w q(x) q(x)')         w = ``weight``; the symmetric matrix as its upper triangle, lengths kept

From a noised mean of psi pictures can be drawn at will: mean + noise with the covariance, both smoothed up to full size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def picture_moments(x: Tensor, grid: int, coarse: int, weight: float) -> Tensor:
    """psi(x) of each picture: [n, channels, s, s] -> [n, channels grid^2 + coarse^2 (coarse^2 + 1) / 2].

    >>> picture_moments(torch.ones(1, 1, 8, 8), 2, 1, 0.5).tolist()
    [[0.5, 0.5, 0.5, 0.5, 0.5]]
    """
    p = _cells(x, grid).flatten(1) / (grid * math.sqrt(x.shape[1]))
    q = _cells(x.mean(dim=1, keepdim=True), coarse).flatten(1) / coarse
    rows, columns = _triangle(coarse, x.device)
    products = q[:, rows] * q[:, columns] * torch.where(rows == columns, 1.0, math.sqrt(2.0))
    return torch.cat([p, weight * products], dim=1)


def drawn_pictures(
    mean: Tensor, deviation: float, shape: torch.Size, noise: Tensor, grid: int, coarse: int, weight: float
) -> Tensor:
    """A picture of this ``shape`` [channels, s, s] for each row of white ``noise`` [m, coarse^2], from the moments ``mean`` [d].

    The moments carry noise of this ``deviation``. The mean picture is smoothed by :func:`without_noise`; of the covariance those
    directions are kept that stand out: the eigenvalues of a symmetric matrix of such noise end at 2 h times its deviation
    (Wigner's semicircle).
    """
    channels, size = shape[0], shape[-1]
    split = channels * grid * grid
    unit = grid * math.sqrt(channels)
    picture = without_noise((unit * mean[:split]).reshape(1, channels, grid, grid), unit * deviation)
    q = _cells(picture.mean(dim=1, keepdim=True), coarse).flatten() / coarse
    rows, columns = _triangle(coarse, mean.device)
    second = mean.new_zeros(coarse**2, coarse**2)
    second[rows, columns] = mean[split:] / weight / torch.where(rows == columns, 1.0, math.sqrt(2.0))
    second[columns, rows] = second[rows, columns].clone()
    values, axes = torch.linalg.eigh(second - torch.outer(q, q))
    edge = 2 * deviation / weight * coarse / math.sqrt(2)  # off the diagonal entries carry the deviation / sqrt 2
    scale = torch.where(values > edge, values, 0.0).sqrt()
    varied = (noise.to(mean) * scale) @ axes.T * coarse
    return _smooth(picture, size) + _smooth(varied.reshape(-1, 1, coarse, coarse), size)


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
    return F.adaptive_avg_pool2d(x, side)


def _smooth(x: Tensor, size: int) -> Tensor:
    return F.interpolate(x, size=(size, size), mode="bicubic", align_corners=False)


def _triangle(coarse: int, device: torch.device) -> tuple[Tensor, Tensor]:
    rows, columns = torch.triu_indices(coarse**2, coarse**2, device=device)
    return rows, columns
