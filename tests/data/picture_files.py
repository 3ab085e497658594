"""Small image files for the reader tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def picture(number: int, size: tuple[int, int] = (32, 32)) -> np.ndarray:
    """A random RGB picture [height, width, 3] that depends on its number alone; ``size`` is (width, height)."""
    return np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)


def write_picture(path: Path, number: int, size: tuple[int, int] = (32, 32)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(picture(number, size)).save(path)
    return path


def write_classes(folder: Path, counts: dict[str, int], size: tuple[int, int] = (32, 32), start: int = 0) -> None:
    """``folder``/<class>/0.png, 1.png, ...; the numbers of all pictures are different."""
    for name, count in counts.items():
        for i in range(count):
            write_picture(folder / name / f"{i}.png", start, size)
            start += 1
