"""A picture as waves: how much of each scale and direction there is in each part of it. No number in here was learned.

    Y        the picture's light, C1 and C2 its colour
    psi_jl   wave of scale j = 0, 1 (0.375 / 2^j cycles a pixel) and direction l pi / 8 under a Gaussian of 0.8 * 2^j pixels,
             without its mean (Morlet)
    S(x) = (Y, C1, C2, sqrt |Y * psi_jl|), each averaged over 4 x 4 parts of the picture

That is the first order of a scattering transform (Bruna and Mallat, 2013), at a low resolution. Pictures of one class lie close
to a normal distribution in S, far closer than in pixels, so that a mean and a covariance tell much of what there is to learn.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SCALES, DIRECTIONS, GRID = 2, 8, 4
NUM_WAVES = 3 + SCALES * DIRECTIONS
REACH = 5  # pixels: three deviations of the wider Gaussian
ROUNDING = 1e-7  # of a convolution in float32: the square root would make a number of it that differs between machines
COLOUR = ((0.299, 0.587, 0.114), (-0.169, -0.331, 0.5), (0.5, -0.419, -0.081))  # ITU-R BT.601


def wave_picture(x: Tensor) -> Tensor:
    """S of each picture: [n, 3, s, s] with values in [0, 1] -> [n, 19, 4, 4].

    >>> flat = wave_picture(torch.full((1, 3, 8, 8), 0.5))
    >>> flat.shape, round(float(flat[0, 0, 0, 0]), 3), bool((flat[0, 3:] < 1e-3).all())
    (torch.Size([1, 19, 4, 4]), 0.5, True)
    """
    light_and_colour = torch.einsum("ij,njhw->nihw", torch.tensor(COLOUR, device=x.device), x)
    light = F.pad(light_and_colour[:, :1], (REACH,) * 4, mode="reflect")
    real, imaginary = F.conv2d(light, torch.tensor(_bank(), device=x.device)).chunk(2, dim=1)
    modulus = (real.square() + imaginary.square()).sqrt()
    strength = F.relu(F.adaptive_avg_pool2d(modulus, GRID) - ROUNDING).sqrt()
    return torch.cat([F.adaptive_avg_pool2d(light_and_colour, GRID), strength], dim=1)


@lru_cache(maxsize=1)
def _bank() -> np.ndarray:
    """The waves' real, then their imaginary parts: float32 [32, 1, 11, 11]. No tensor is kept: it might be one of a trace."""
    y, x = np.mgrid[-REACH : REACH + 1, -REACH : REACH + 1]
    waves = []
    for scale in range(SCALES):
        width, frequency = 0.8 * 2**scale, 0.375 / 2**scale
        window = np.exp(-(x**2 + y**2) / (2 * width**2))
        for direction in range(DIRECTIONS):
            angle = math.pi * direction / DIRECTIONS
            wave = window * np.exp(2j * math.pi * frequency * (x * math.cos(angle) + y * math.sin(angle)))
            waves.append((wave - window * wave.sum() / window.sum()) / window.sum())
    bank = np.stack(waves)[:, None]
    return np.concatenate([bank.real, bank.imag]).astype(np.float32)
