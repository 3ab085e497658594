"""Parameter perturbation of the matching objective (Sec. 3.2).

theta   parameters        rho   radius of the ball        theta' = theta + eps * min(1, rho / ||eps||), eps ~ N(0, I)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
