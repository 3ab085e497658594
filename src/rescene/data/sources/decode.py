"""From image files (or their bytes) to one uint8 tensor of squares, in parallel threads (Pillow decodes without the GIL).

There is one policy for odd sizes, for files and for tensors: a picture's shorter side is scaled with antialiasing, then the centre
is cropped.
"""

from __future__ import annotations

import os
import statistics
import threading
import unicodedata
import warnings
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rescene.core.errors import DataError, ResceneWarning, few
from rescene.data.images import Dataset, Transform

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
    notes = resize_notes({original for original, _ in read}, size)
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
    if skip:
        told = few([f"{names[i]} ({reason(refused[i])})" for i in sorted(refused)], 3)
        what = f"left out {len(refused)} of {len(names)} images that cannot be read: {told}"
        warnings.warn(ResceneWarning("W203", what, fix="copy them again, or convert them to JPEG or PNG"), stacklevel=3)
        return
    others = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
    where, why = "\n".join(names[i] for i in sorted(refused)[:5]), reason(refused[first])
    if isinstance(refused[first], TooLarge):
        fix = f"shrink or cut it, or remove it; {_LEAVE_OUT}"
        raise DataError("E219", f"image {names[first]}{others} is too large to read", where=where, why=why, fix=fix)
    fix = f"copy these files again, convert them to JPEG or PNG, or remove them; {_LEAVE_OUT}"
    raise DataError("E203", f"cannot read image {names[first]}{others}", where=where, why=why, fix=fix)


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


def resize_notes(originals: Collection[tuple[int, int]], size: int) -> tuple[str, ...]:
    """What was done to pictures of these (width, height), for the list of notes; nothing, if all had this size.

    >>> resize_notes({(28, 28)}, 32), resize_notes({(28, 28), (40, 30)}, 32)[0][:33], resize_notes({(32, 32)}, 32)
    (('resized from 28x28 to 32x32 (shorter side, centre crop)',), 'resized from mixed sizes to 32x32', ())
    """
    if set(originals) <= {(size, size)}:
        return ()
    origin = "{}x{}".format(*next(iter(originals))) if len(originals) == 1 else "mixed sizes"
    return (f"resized from {origin} to {size}x{size} (shorter side, centre crop)",)


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
        notes=(*dataset.notes, *resize_notes({(old, old)}, size)),
    )
