"""Looking at pictures through a fixed lens: what every site applies to its images before anything else sees them.

A lens is public and knows nothing of the data, so it costs no privacy. What it gives is again a picture of bytes, only with
other channels: everything behind it, from partition to evaluation, is the same as for photographs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from rescene.data.images import Dataset, Images, Transform
from rescene.functional.waves import DIRECTIONS, NUM_WAVES, wave_picture

Lens = Literal["waves"]
CHUNK = 1024  # pictures at a time
STEP = 32  # bytes to a deviation: almost everything lies within four of them

# Mean and deviation of wave pictures of dead leaves (functional/starts.py): of pictures that are nobody's.
MEAN = (0.5, 0.0, 0.0) + (0.121,) * DIRECTIONS + (0.146,) * DIRECTIONS
DEVIATION = (0.11, 0.11, 0.11) + (0.043,) * DIRECTIONS + (0.048,) * DIRECTIONS


def look_through(lens: Lens, pixels: Tensor) -> Tensor:
    """uint8 [n, 3, s, s] -> uint8 [n, 19, 4, 4]: :func:`seen` as bytes."""
    return torch.cat([seen(lens, part).round().to(torch.uint8) for part in pixels.split(CHUNK)])


def seen(lens: Lens, pixels: Tensor) -> Tensor:
    """uint8 [n, 3, s, s] -> float [n, 19, 4, 4] from 0 to 255: S(x) in steps of 1/32 of the deviation above."""
    assert lens == "waves"
    mean, deviation = (torch.tensor(v, device=pixels.device).reshape(-1, 1, 1) for v in (MEAN, DEVIATION))
    return (128 + STEP * (wave_picture(pixels.float() / 255) - mean) / deviation).clamp(0, 255)


def through(lens: Lens | None, dataset: Dataset) -> Dataset:
    """The data set as seen through a lens, if there is one. How it looks to a network is then stated, not measured."""
    if lens is None:
        return dataset
    transform = Transform((128 / 255,) * NUM_WAVES, (STEP / 255,) * NUM_WAVES, pad=0)
    train, test = (
        Images(look_through(lens, split.pixels), split.labels, split.domains) for split in (dataset.train, dataset.test)
    )
    notes = (*dataset.notes, f"{dataset.image_size} pixels seen through {lens}")
    return replace(dataset, train=train, test=test, transform=transform, notes=notes, picture_size=dataset.image_size)
