"""Augmentation that destroys fine texture: what a network could learn from the artefacts of surrogates, real images do not have."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
