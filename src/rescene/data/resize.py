"""One policy for odd sizes: scale the shorter side with antialiasing, then crop the centre."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from rescene.data.images import Dataset, Transform


def scaled_size(width: int, height: int, size: int) -> tuple[int, int]:
    """(width, height) after the shorter side became ``size``.

    >>> scaled_size(100, 50, 32), scaled_size(28, 28, 32)
    ((64, 32), (32, 32))
    """
    scale = size / min(width, height)
    return max(size, round(width * scale)), max(size, round(height * scale))


def centre(width: int, height: int, size: int) -> tuple[int, int]:
    """Left and top of the centred window of ``size``."""
    return (width - size) // 2, (height - size) // 2


def resize_note(origin: str, size: int) -> str:
    return f"resized from {origin} to {size}x{size} (shorter side, centre crop)"


def fit_pixels(pixels: Tensor, size: int) -> Tensor:
    """uint8 [n, 3, H, W] -> uint8 [n, 3, size, size]."""
    height, width = pixels.shape[-2:]
    if height == width == size:
        return pixels
    new_width, new_height = scaled_size(width, height, size)
    left, top = centre(new_width, new_height, size)
    parts = []
    for chunk in torch.split(pixels, 1024):  # bounds the float copy
        scaled = F.interpolate(chunk.float(), (new_height, new_width), mode="bilinear", antialias=True)
        window = scaled[..., top : top + size, left : left + size]
        parts.append(window.round().clamp(0, 255).to(torch.uint8))
    return torch.cat(parts) if parts else pixels.new_zeros((0, 3, size, size))


def fit_dataset(dataset: Dataset, size: int | None) -> Dataset:
    """The data set at another picture size, with a note; the same one if it has that size already."""
    old = dataset.image_size
    if size is None or size == old:
        return dataset
    return replace(
        dataset,
        train=replace(dataset.train, pixels=fit_pixels(dataset.train.pixels, size)),
        test=replace(dataset.test, pixels=fit_pixels(dataset.test.pixels, size)),
        transform=Transform(dataset.transform.mean, dataset.transform.std, size // 8),
        notes=(*dataset.notes, resize_note(f"{old}x{old}", size)),
    )
