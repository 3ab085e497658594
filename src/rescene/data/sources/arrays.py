"""A NumPy file: x_train, y_train, x_test, y_test, or x, y with a drawn test split; optionally ``classes`` (names)."""

from __future__ import annotations

import math
import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rescene.core.errors import DataError
from rescene.data.images import Dataset, Images, measure
from rescene.data.reading import Options, TooLarge, fit_pixels, resize_note
from rescene.data.sources.listing import check_names, class_order, draw_test

MOST_BYTES, MOST_SHRUNK = 2**28, 100  # an archive may unpack to the first, and beyond it to so many times its size
KNOWN = {"x_train", "y_train", "x_test", "y_test", "x", "y", "classes"}
Split = tuple[Tensor, list[str]]  # pixels, label names
Header = tuple[tuple[int, ...], np.dtype]


def read(path: Path, options: Options) -> Dataset:
    """uint8 pictures [n, H, W], [n, H, W, 1 or 3] or [n, 1 or 3, H, W]; labels are numbers or names."""
    arrays = _open(path)
    names = tuple(map(str, arrays["classes"].tolist())) if "classes" in arrays else None
    if "x_train" in arrays:
        train, test, drawn = _split(path, arrays, "_train", names), _split(path, arrays, "_test", names), False
    else:
        train, test, drawn = *_drawn(_split(path, arrays, "", names), options), True
    classes = names or class_order([*train[1], *test[1]])
    check_names("class", classes, str(path))
    missing = [name for name in classes if name not in set(train[1])]
    if missing:
        raise DataError("E204", f"no training image of class {', '.join(missing[:5])}", where=str(path), fix="add some")
    if not test[1]:
        raise DataError("E202", "there is no test image", where=str(path), fix="add x_test or raise data.test_fraction")
    try:
        return _dataset(path.stem, classes, train, test, options.split if drawn else "given")
    except TooLarge as problem:
        fix = "shrink or cut the pictures"
        raise DataError("E219", "the pictures are too large", where=str(path), why=str(problem), fix=fix) from problem


def _open(path: Path) -> dict[str, np.ndarray]:
    """The arrays that make a data set, after their headers were looked at; others in the file are not unpacked."""
    try:
        headers = _headers(path)
        _check_headers(path, headers)
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in KNOWN & headers.keys()}
    except (OSError, ValueError, EOFError, zlib.error, zipfile.BadZipFile) as problem:
        raise _bad(path, f"not a readable .npz: {problem}", fix="write it with numpy.savez_compressed") from problem


def _headers(path: Path) -> dict[str, Header]:
    """Shape and type of every array, without its content."""
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    found: dict[str, Header] = {}
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            with archive.open(member) as stream:
                version = np.lib.format.read_magic(stream)
                if version not in read:
                    raise ValueError(f"{member} has a format that images do not need, {version}")
                shape, _, kind = read[version](stream)
                found[member.removesuffix(".npy")] = shape, kind
    return found


def _check_headers(path: Path, headers: dict[str, Header]) -> None:
    wanted = ("x_train", "y_train", "x_test", "y_test") if "x_train" in headers else ("x", "y")
    missing = [name for name in wanted if name not in headers]
    if missing:
        why = f"no array {', '.join(missing)}; found: {', '.join(headers) or 'nothing'}"
        raise _bad(path, why, fix="x_train, y_train, x_test, y_test, or x, y")
    size, packed = 0, path.stat().st_size
    for name in KNOWN & headers.keys():
        shape, kind = headers[name]
        if name.startswith("x") and kind != np.uint8:
            raise _bad(path, f"{name} is {kind}", fix="pixels as uint8, 0 to 255")
        if kind.hasobject or (name.startswith("x") and 0 in shape[1:]):
            raise _bad(path, f"{name} is {kind} of shape {shape}", fix="numbers or text, and pictures with pixels")
        size += math.prod(shape) * kind.itemsize
    if size > max(MOST_BYTES, MOST_SHRUNK * packed):
        raise DataError(
            "E220",
            f"the NumPy file would unpack to {size / 1e9:.1f} GB",
            where=str(path),
            why=f"it has {packed / 1e6:.1f} MB; real pictures do not compress to less than a hundredth",
            fix="write it with numpy.savez, which does not compress",
        )


def _split(path: Path, arrays: dict[str, np.ndarray], suffix: str, names: tuple[str, ...] | None) -> Split:
    x, y = arrays[f"x{suffix}"], arrays[f"y{suffix}"]
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.ndim != 1 or len(x) != len(y):
        raise _bad(path, f"x{suffix} has {len(x)} pictures, y{suffix} has shape {y.shape}", fix="one label per picture")
    return _pixels(path, f"x{suffix}", x), _labels(path, f"y{suffix}", y, names)


def _pixels(path: Path, key: str, x: np.ndarray) -> Tensor:
    """-> uint8 [n, 3, H, W]"""
    if x.ndim == 3:
        x = x[:, None]
    elif x.ndim == 4 and x.shape[1] not in (1, 3) and x.shape[3] in (1, 3):
        x = x.transpose(0, 3, 1, 2)
    if x.ndim != 4 or x.shape[1] not in (1, 3):
        raise _bad(path, f"{key} has shape {x.shape}", fix="[n, H, W], [n, H, W, 1 or 3] or [n, 1 or 3, H, W]")
    return torch.from_numpy(np.ascontiguousarray(x)).expand(-1, 3, -1, -1).contiguous()


def _labels(path: Path, key: str, y: np.ndarray, names: tuple[str, ...] | None) -> list[str]:
    """Label names; with ``classes`` a number is a place in it."""
    if y.dtype.kind not in "iuU":
        raise _bad(path, f"{key} is {y.dtype}", fix="labels as integers or text")
    values = y.tolist()
    if names is not None and y.dtype.kind in "iu":
        wrong = [v for v in values if not 0 <= v < len(names)]
        values = [] if wrong else [names[v] for v in values]
    else:
        wrong = [v for v in values if names is not None and v not in names]
    if wrong:
        raise _bad(
            path, f"{key} holds {wrong[0]!r}, which is not in classes", fix="extend classes or correct the labels"
        )
    return [str(v) for v in values]


def _drawn(everything: Split, options: Options) -> tuple[Split, Split]:
    pixels, labels = everything
    test = draw_test([("", label) for label in labels], options)
    parts = [i for i in range(len(labels)) if i not in test], sorted(test)
    train, held = ((pixels[part], [labels[i] for i in part]) for part in parts)
    return train, held


def _dataset(name: str, classes: tuple[str, ...], train: Split, test: Split, split: str) -> Dataset:
    """Pictures that are not square, or differ between splits, become squares of the training split's shorter side."""
    shapes = {tuple(pixels.shape[-2:]) for pixels, _ in (train, test)}
    size = min(train[0].shape[-2:])
    label = {c: i for i, c in enumerate(classes)}
    first, second = (
        Images(fit_pixels(pixels, size), torch.tensor([label[c] for c in labels], dtype=torch.int64))
        for pixels, labels in (train, test)
    )
    origin = "x".join(map(str, reversed(train[0].shape[-2:]))) if len(shapes) == 1 else "mixed sizes"
    notes = () if shapes == {(size, size)} else (resize_note(origin, size),)
    return Dataset(name, classes, first, second, measure(first.pixels), notes=notes, split=split)


def _bad(path: Path, why: str, *, fix: str) -> DataError:
    return DataError("E206", "cannot use the NumPy file", where=str(path), why=why, fix=fix)
