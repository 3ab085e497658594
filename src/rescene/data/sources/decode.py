"""From image files (or their bytes) to one uint8 tensor, in parallel threads (Pillow decodes without the GIL)."""

from __future__ import annotations

import os
import statistics
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rescene.data.resize import centre, resize_note, scaled_size
from rescene.errors import DataError, ResceneWarning

if TYPE_CHECKING:
    from PIL.Image import Image

EXTENSIONS = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".tif", ".tiff"}
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "PPM", "TIFF")  # naming them keeps Pillow from trying forty others
_NUM_HEADERS = 1000  # enough for a median
_NUM_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Decoded:
    """``pixels`` uint8 [m, 3, S, S]; ``kept``: which of the sources they are; ``notes``: what was resized."""

    pixels: Tensor
    kept: list[int]
    notes: tuple[str, ...]


def decode(
    sources: Sequence[Path | bytes], names: Sequence[str], size: int, *, skip_unreadable: bool = False
) -> Decoded:
    """Decode to RGB at ``size``. What cannot be read is an error (E203), with ``skip_unreadable`` a warning (W203)."""
    pixels = np.zeros((len(sources), 3, size, size), dtype=np.uint8)

    def one(i: int) -> tuple[int, int] | str:
        try:
            original, pixels[i] = _decode_one(sources[i], size)
        except Exception as problem:  # Pillow's decoders raise many types on damaged files
            return str(problem) or type(problem).__name__
        return original

    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        outcome = list(pool.map(one, range(len(sources))))
    bad = {i: result for i, result in enumerate(outcome) if isinstance(result, str)}
    if bad:
        _report(bad, names, skip_unreadable)
    kept = [i for i in range(len(sources)) if i not in bad]
    notes = _resize_notes({result for result in outcome if not isinstance(result, str)}, size)
    return Decoded(torch.from_numpy(pixels[kept] if bad else pixels), kept, notes)


def guess_size(paths: Sequence[Path]) -> int:
    """32 if the median shorter side (of up to 1,000 evenly spaced images) is below 48 pixels, else 64."""
    step = max(1, len(paths) // _NUM_HEADERS)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        sides = [side for side in pool.map(_shorter_side, paths[::step]) if side]
    return 32 if sides and statistics.median(sides) < 48 else 64


@contextmanager
def _opened(source: Path | bytes) -> Iterator[Image]:
    from PIL import Image

    with Image.open(BytesIO(source) if isinstance(source, bytes) else source, formats=_FORMATS) as image:
        yield image


def _shorter_side(path: Path) -> int | None:
    """From the header alone; None if it cannot be read (decoding will say so)."""
    try:
        with _opened(path) as image:
            return min(image.size)
    except Exception:  # as in `decode`
        return None


def _decode_one(source: Path | bytes, size: int) -> tuple[tuple[int, int], np.ndarray]:
    """Original (width, height) and pixels uint8 [3, size, size] of the first frame, upright."""
    from PIL import ImageOps

    with _opened(source) as image:
        upright = ImageOps.exif_transpose(image)
        pixels = np.asarray(_fit(_rgb(upright), size))
        return upright.size, pixels.transpose(2, 0, 1)


def _rgb(image: Image) -> Image:
    """Grey, palette and 16-bit pictures become RGB; transparency is dropped."""
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits per pixel: keep the upper eight instead of clipping to white
        image = Image.fromarray((np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("floating-point pixels have no agreed range; save it with 8 bits")
    return image.convert("RGB")


def _fit(image: Image, size: int) -> Image:
    from PIL import Image

    if image.size == (size, size):
        return image
    scaled = image.resize(scaled_size(*image.size, size), Image.Resampling.BILINEAR)  # antialiased when shrinking
    left, top = centre(*scaled.size, size)
    return scaled.crop((left, top, left + size, top + size))


def _report(bad: dict[int, str], names: Sequence[str], skip: bool) -> None:
    first = min(bad)
    more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    if skip:
        what = f"left out {len(bad)} of {len(names)} images that cannot be read: {names[first]}{more}"
        warnings.warn(ResceneWarning("W203", what, fix="copy them again"), stacklevel=3)
        return
    shown = "\n".join(names[i] for i in sorted(bad)[:5])
    raise DataError(
        "E203",
        f"cannot read image {names[first]}{more}",
        where=shown,
        why=bad[first],
        fix="copy these files again or remove them; skip_unreadable=true leaves them out",
    )


def _resize_notes(originals: set[tuple[int, int]], size: int) -> tuple[str, ...]:
    if originals <= {(size, size)}:
        return ()
    origin = "{}x{}".format(*next(iter(originals))) if len(originals) == 1 else "mixed sizes"
    return (resize_note(origin, size),)
