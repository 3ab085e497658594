"""Pictures by formula: starts of surrogates, a softer texture, and waves.

Where surrogates can start without a real image: dead leaves, random discs that cover each other, and coloured noise.

Augmentation that destroys fine texture: what a network could learn from the artefacts of surrogates, real images do not have.

A picture as waves: how much of each scale and direction there is in each part of it. No number in here was learned.

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

NUM_DISCS = 40


def dead_leaves(n: int, size: int, generator: torch.Generator, *, grey: bool = False) -> Tensor:
    """``n`` pictures [n, 3, size, size] in [0, 1]: discs of random place, radius and colour, the last one on top.

    Radii follow the power law r^-3 of natural scenes between size/16 and size/2. Only ``generator`` decides.
    """
    draws = torch.rand(n, NUM_DISCS, 6, generator=generator)
    smallest, largest = 16.0 / size, 2.0 / size  # inverse radii
    radius = 1 / (largest**2 + draws[..., 0] * (smallest**2 - largest**2)).sqrt()
    colour = draws[..., 3:4].expand(-1, -1, 3) if grey else draws[..., 3:6]
    axis = torch.arange(size) + 0.5
    down = (axis - draws[..., 1:2] * size).square().unsqueeze(3)  # [n, discs, size, 1]
    right = (axis - draws[..., 2:3] * size).square().unsqueeze(2)
    inside = down + right < radius.square()[..., None, None]  # [n, discs, size, size]
    top = (inside * torch.arange(1, NUM_DISCS + 1).reshape(1, -1, 1, 1)).amax(dim=1) - 1  # -1: no disc
    place = torch.arange(n).reshape(n, 1, 1)
    colour = torch.cat([colour, torch.full((n, 1, 3), 0.5)], dim=1)  # row -1: the ground
    return colour[place, top].permute(0, 3, 1, 2).contiguous()


def coloured_noise(real: Tensor, m: int, generator: torch.Generator, neighbours: int | None = None) -> Tensor:
    """White noise z turned into mu + C^(1/2) z: ``m`` pictures with the mean mu and the covariance C of ``real`` [n, ...].

    With ``neighbours``, each is drawn once more from the moments of that many real pictures nearest to it: a class is then
    no single cloud. No picture is chosen, only moments are used; but the result lies in the span of the real ones, so for
    few pictures the moments tell almost everything, and for one they are the picture.
    """
    flat = real.flatten(1)
    drawn = _coloured(flat.unsqueeze(0), torch.randn(1, m, flat.shape[1], generator=generator).to(real))[0]
    if neighbours is not None and neighbours < len(flat):
        nearest = torch.cdist(drawn, flat).topk(neighbours, largest=False).indices  # [m, neighbours]
        drawn = _coloured(flat[nearest], torch.randn(m, 1, flat.shape[1], generator=generator).to(real))[:, 0]
    return drawn.reshape(m, *real.shape[1:])


def _coloured(sets: Tensor, noise: Tensor) -> Tensor:
    """[s, n, d] pictures, [s, m, d] noise -> [s, m, d], each set with its own moments."""
    mean = sets.mean(dim=1, keepdim=True)
    _, scale, axes = torch.linalg.svd(sets - mean, full_matrices=False)  # C = axes' scale^2 axes / n
    root: Tensor = noise @ axes.mT * (scale / sets.shape[1] ** 0.5).unsqueeze(1) @ axes
    return mean + root


BLUR = torch.tensor([1.0, 2.0, 1.0]) / 4


def soften(x: Tensor, strength: float, generator: torch.Generator) -> Tensor:
    """Blur half of the pictures [n, channels, H, W], scale the contrast of each by e^(+-strength), add noise of that deviation or less."""
    n, device = len(x), generator.device
    draws = torch.rand(3, n, 1, 1, 1, generator=generator, device=device).to(x.device)
    noise = torch.randn(x.shape, generator=generator, device=device).to(x.device)
    kernel = (BLUR.unsqueeze(0) * BLUR.unsqueeze(1)).to(x).expand(x.shape[1], 1, 3, 3)
    blurred = F.conv2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), kernel, groups=x.shape[1])
    x = torch.where(draws[0] < 0.5, blurred, x)
    return x * (strength * (2 * draws[1] - 1)).exp() + strength * draws[2] * noise


SCALES, DIRECTIONS, GRID = 2, 8, 4
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
