"""From image files (or their bytes) to one uint8 tensor, in parallel threads (Pillow decodes without the GIL)."""

from __future__ import annotations

import os
import statistics
import threading
import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rescene.core.errors import DataError, ResceneWarning
from rescene.data.reading import TooLarge, centre, check_area, resize_note, scaled_size

if TYPE_CHECKING:
    from PIL.Image import Image

EXTENSIONS = {".jpg", ".jpeg", ".jfif", ".png", ".gif", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
NO_PICTURE = "not a picture"  # why a file is refused whose first bytes are those of no format below
_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "PPM", "TIFF")  # naming them keeps Pillow from trying forty others
_NUM_HEADERS = 1000  # enough for a median
_NUM_THREADS = min(8, os.cpu_count() or 1)
_MOST_AT_ONCE = 64  # pictures that a thread takes: handing over small ones singly costs as much as decoding them
_LARGE = 2**24  # pixels; such pictures are decoded one at a time, so that threads do not multiply their memory
_one_large = threading.Lock()


@dataclass(frozen=True)
class Decoded:
    """``pixels`` uint8 [m, 3, S, S]; ``kept``: which of the sources they are; ``refused``: why the others are not there;
    ``notes``: what was resized, and how many are animations."""

    pixels: Tensor
    kept: list[int]
    refused: dict[int, Exception]
    notes: tuple[str, ...]


_LEAVE_OUT = (
    "data.skip_unreadable=true leaves such files out (in site.yaml: data: {path: FOLDER, skip_unreadable: true})"
)


def decode(
    sources: Sequence[Path | bytes], names: Sequence[str], size: int, *, skip_unreadable: bool = False
) -> Decoded:
    """Decode to RGB at ``size``; all pictures of files go through here.

    What cannot be read is an error (E203, too large: E219), with ``skip_unreadable`` a warning (W203).
    """
    pixels = np.zeros((len(sources), 3, size, size), dtype=np.uint8)

    def one(i: int) -> tuple[tuple[int, int], bool] | Exception:
        try:
            original, moves, pixels[i] = _decode_one(sources[i], size)
        except Exception as problem:  # Pillow's decoders raise many types on damaged files
            return problem
        return original, moves

    at_once = max(1, min(_MOST_AT_ONCE, len(sources) // (4 * _NUM_THREADS)))
    parts = [range(start, min(start + at_once, len(sources))) for start in range(0, len(sources), at_once)]
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        outcome = [result for part in pool.map(lambda part: [one(i) for i in part], parts) for result in part]
    refused = {i: result for i, result in enumerate(outcome) if isinstance(result, Exception)}
    if refused:
        _report(refused, names, skip_unreadable)
    read = [result for result in outcome if not isinstance(result, Exception)]
    notes = _resize_notes({original for original, _ in read}, size)
    if moving := sum(moves for _, moves in read):
        notes += (f"of {moving} animations or files with several pages only the first picture was read",)
    kept = [i for i in range(len(sources)) if i not in refused]
    return Decoded(torch.from_numpy(pixels[kept] if refused else pixels), kept, refused, notes)


def reason(problem: Exception) -> str:
    """Why a picture cannot be read, in one line."""
    from PIL import UnidentifiedImageError

    if isinstance(problem, UnidentifiedImageError):
        return NO_PICTURE
    return shown((str(problem) or type(problem).__name__).splitlines()[0])


def shown(name: str | Path) -> str:
    r"""A name as it can be printed and recorded: control characters and bytes that are not UTF-8 are written out.

    >>> print(shown("a\x1b[1m\udcff b"))
    a\x1b[1m\udcff b
    """
    unseen = ("Cc", "Cs", "Zl", "Zp")  # control characters, lone surrogates (undecoded bytes), line separators
    return "".join(c.encode("unicode_escape").decode() if unicodedata.category(c) in unseen else c for c in str(name))


def guess_size(sources: Sequence[Path | bytes]) -> int:
    """32 if the median shorter side (of up to 1,000 evenly spaced images) is below 48 pixels, else 64."""
    sides = [min(size) for size in header_sizes(sources)]
    return 32 if sides and statistics.median(sides) < 48 else 64


def header_sizes(sources: Sequence[Path | bytes]) -> list[tuple[int, int]]:
    """(width, height) of up to 1,000 evenly spaced images, from their headers; those that cannot be read are left out."""
    step = max(1, len(sources) // _NUM_HEADERS)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        return [size for size in pool.map(size_of, sources[::step]) if size]


@contextmanager
def _opened(source: Path | bytes) -> Iterator[Image]:
    from PIL import Image

    with Image.open(BytesIO(source) if isinstance(source, bytes) else source, formats=_FORMATS) as image:
        yield image


def size_of(source: Path | bytes) -> tuple[int, int] | None:
    """(width, height) from the header alone; None if it cannot be read (decoding will say so)."""
    try:
        with _opened(source) as image:
            return image.size
    except Exception:  # as in `decode`
        return None


def _decode_one(source: Path | bytes, size: int) -> tuple[tuple[int, int], bool, np.ndarray]:
    """Original (width, height), whether there is more than one frame, and pixels uint8 [3, size, size] of the first, upright."""
    from PIL import Image, ImageOps

    try:
        with _opened(source) as image:
            area = check_area(*image.size, size)
            with _one_large if area > _LARGE else nullcontext():
                moves = _moves(image)
                ImageOps.exif_transpose(image, in_place=True)
                pixels = np.asarray(_fit(_rgb(image), size))
                return image.size, moves, pixels.transpose(2, 0, 1)
    except Image.DecompressionBombError as problem:  # Pillow's own limit is higher than ours
        raise TooLarge("far more pixels than a picture may have") from problem


def _moves(image: Image) -> bool:
    """Whether an image file holds more than one frame; damage behind the first is no matter here."""
    try:
        return bool(getattr(image, "is_animated", False))
    except Exception:  # as in `decode`
        return False


def _rgb(image: Image) -> Image:
    """Grey, palette and 16-bit pictures become RGB; transparency is dropped."""
    from PIL import Image

    if image.mode.startswith("I"):  # 16 bits per pixel: keep the upper eight instead of clipping to white
        image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    elif image.mode == "F":
        raise ValueError("floating-point pixels have no agreed range; save it with 8 bits")
    return image if image.mode == "RGB" else image.convert("RGB")


def _fit(image: Image, size: int) -> Image:
    from PIL import Image

    if image.size == (size, size):
        return image
    scaled = image.resize(scaled_size(*image.size, size), Image.Resampling.BILINEAR)  # antialiased when shrinking
    left, top = centre(*scaled.size, size)
    return scaled.crop((left, top, left + size, top + size))


def _report(refused: dict[int, Exception], names: Sequence[str], skip: bool) -> None:
    first = min(refused)
    shown = [f"{names[i]} ({reason(refused[i])})" for i in sorted(refused)[:3]]
    more = f" and {len(refused) - 3} more" if len(refused) > 3 else ""
    if skip:
        what = f"left out {len(refused)} of {len(names)} images that cannot be read: {', '.join(shown)}{more}"
        warnings.warn(ResceneWarning("W203", what, fix="copy them again, or convert them to JPEG or PNG"), stacklevel=3)
        return
    others = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
    where, why = "\n".join(names[i] for i in sorted(refused)[:5]), reason(refused[first])
    if isinstance(refused[first], TooLarge):
        fix = f"shrink or cut it, or remove it; {_LEAVE_OUT}"
        raise DataError("E219", f"image {names[first]}{others} is too large to read", where=where, why=why, fix=fix)
    fix = f"copy these files again, convert them to JPEG or PNG, or remove them; {_LEAVE_OUT}"
    raise DataError("E203", f"cannot read image {names[first]}{others}", where=where, why=why, fix=fix)


def _resize_notes(originals: set[tuple[int, int]], size: int) -> tuple[str, ...]:
    if originals <= {(size, size)}:
        return ()
    origin = "{}x{}".format(*next(iter(originals))) if len(originals) == 1 else "mixed sizes"
    return (resize_note(origin, size),)
