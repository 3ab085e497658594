"""A stage small enough for tests: the tiny world's images, half of them strangers, and a network of four channels."""

from dataclasses import replace

import torch

from rescene.audit.stage import Stage
from rescene.core.rng import Rng
from rescene.data import Images
from rescene.privacy.accounting import Composition
from rescene.privacy.mechanism import Mechanism
from rescene.training import Condensation

RELEASE = Mechanism("release", 2.0, 2.0, Composition(1, 1), kappa=1.0, num_nets=1, threshold=0.0)
PER_EXAMPLE = Mechanism("per-example", 2.0, 0.1, Composition(2, 1), typical_count=3.0)


def small_stage(tiny_world):
    """20 training and 10 other images of each of two classes; random pictures, so that no two are alike."""
    shard = tiny_world["shards"][0]
    pixels = torch.randint(0, 256, shard.images.pixels.shape, generator=torch.Generator().manual_seed(3))
    images = Images(pixels.to(torch.uint8), shard.images.labels)
    return Stage(
        tiny_world["net"].eval(),
        images,
        tiny_world["task"],
        tiny_world["transform"],
        Condensation(ipc=2, num_steps=2),
        Rng(0),
        {0: torch.arange(20), 1: torch.arange(30, 50)},
        {0: torch.arange(20, 30), 1: torch.arange(50, 60)},
    )


def with_settings(stage, **changes):
    return replace(stage, settings=stage.settings.model_copy(update=changes))
