"""What the tests of TARGET share: a tiny network and transform, and settings that are quick."""

import torch

from rescene.data import Transform
from rescene.nets import Arch

SIZE = 16
TRANSFORM = Transform(mean=(0.5, 0.4, 0.3), std=(0.25, 0.2, 0.3), pad=1)
TINY = {"synthesis_rounds": 3, "synthesis_batch": 6, "warmup_rounds": 1, "generator_steps": 2, "student_steps": 2}
TINY |= {"latent_size": 5, "generator_width": 3}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def small_net(num_classes: int = 3, *, norm: str = "batch", seed: int = 0):
    return Arch("convnet", SIZE, norm, 4).build(num_classes, seeded(seed))


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
