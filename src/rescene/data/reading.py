"""What every reader of pictures shares: what it may be told, and one policy for odd sizes.

A picture's shorter side is scaled with antialiasing, then the centre is cropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from rescene.core.errors import ConfigError
from rescene.data.images import Dataset, Transform

LAYOUTS = ("auto", "classes", "domains", "sites", "sites-domains")
OUTSIDE = ("warn", "refuse")


@dataclass(frozen=True)
class Options:
    """``image_size``: None keeps or guesses the size. ``test_fraction`` and ``seed`` matter only where the data has no
    test set of its own. ``skip_unreadable``: leave damaged images out (counted in a warning) instead of refusing.
    ``layout`` says what the first folders are, classes, domains or sites, where nothing else tells; ``outside``: warn of
    files that lie outside of the folder, or refuse them. ``columns``: pairs that say what the columns of a table
    are called, such as ("label", "species")."""

    image_size: int | None = None
    test_fraction: float = 0.2
    seed: int = 0
    skip_unreadable: bool = False
    layout: str = "auto"
    outside: str = "warn"
    columns: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.test_fraction < 1:
            raise ConfigError(
                "E208", f"test_fraction is {self.test_fraction}", fix="a number from 0 up to, not including, 1"
            )
        if self.image_size is not None and not 8 <= self.image_size <= 1024:
            raise ConfigError("E208", f"image_size is {self.image_size}", fix="a size in pixels from 8 to 1024")
        for key, value, possible in (("layout", self.layout, LAYOUTS), ("outside", self.outside, OUTSIDE)):
            if value not in possible:
                raise ConfigError("E208", f"{key} is {value!r}", fix=f"one of: {', '.join(possible)}")

    @property
    def split(self) -> str:
        """How a data set says that its test images were drawn with these options."""
        return f"fraction={self.test_fraction:g} seed={self.seed}"


MAX_PIXELS = 2**27  # of one picture, stored or scaled; as RGB in memory that is half a gigabyte


class TooLarge(ValueError):
    """A picture, known by its header alone, that would take more memory than a picture may."""


def check_area(width: int, height: int, size: int) -> int:
    """Pixels of the larger of the picture and its scaled copy; above ``MAX_PIXELS`` it is refused.

    A long thin picture is small on disk and enormous when its shorter side has become ``size``.

    >>> check_area(100, 50, 32)
    5000
    """
    if min(width, height) < 1:
        raise TooLarge(f"it has no pixels ({width} x {height})")
    new_width, new_height = scaled_size(width, height, size)
    if width * height > MAX_PIXELS:
        raise TooLarge(f"{width:,} x {height:,} pixels; a picture may have {MAX_PIXELS:,} in all")
    if new_width * new_height > MAX_PIXELS:
        raise TooLarge(
            f"{width:,} x {height:,} pixels: too long and thin, with a shorter side of {size} it would be "
            f"{new_width:,} x {new_height:,}; a picture may have {MAX_PIXELS:,} pixels in all"
        )
    return max(width * height, new_width * new_height)


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
    """What was done to the pictures, for the list of notes."""
    return f"resized from {origin} to {size}x{size} (shorter side, centre crop)"


def fit_pixels(pixels: Tensor, size: int) -> Tensor:
    """uint8 [n, 3, H, W] -> uint8 [n, 3, size, size]."""
    height, width = pixels.shape[-2:]
    if height == width == size:
        return pixels
    at_once = 2**26 // check_area(width, height, size)  # bounds the float copy
    new_width, new_height = scaled_size(width, height, size)
    left, top = centre(new_width, new_height, size)
    parts = []
    for chunk in torch.split(pixels, max(1, min(1024, at_once))):
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
