"""Where surrogates can start without a real image: dead leaves, random discs that cover each other, and coloured noise."""

from __future__ import annotations

import torch
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
