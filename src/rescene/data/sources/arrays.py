"""A NumPy file: x_train, y_train, x_test, y_test, or x, y with a drawn test split; optionally ``classes`` (names)."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from rescene.data.images import Dataset, Images, measure
from rescene.data.options import Options
from rescene.data.resize import fit_pixels, resize_note
from rescene.data.sources.listing import class_order, draw_test
from rescene.errors import DataError

Split = tuple[Tensor, list[str]]  # pixels, label names


def read(path: Path, options: Options) -> Dataset:
    """uint8 pictures [n, H, W], [n, H, W, 1 or 3] or [n, 1 or 3, H, W]; labels are numbers or names."""
    arrays = _open(path)
    names = tuple(map(str, arrays["classes"].tolist())) if "classes" in arrays else None
    if "x_train" in arrays:
        train, test, drawn = _split(path, arrays, "_train", names), _split(path, arrays, "_test", names), False
    else:
        train, test, drawn = *_drawn(_split(path, arrays, "", names), options), True
    classes = names or class_order([*train[1], *test[1]])
    missing = [name for name in classes if name not in set(train[1])]
    if missing:
        raise DataError("E204", f"no training image of class {', '.join(missing[:5])}", where=str(path), fix="add some")
    if not test[1]:
        raise DataError("E202", "there is no test image", where=str(path), fix="add x_test or raise test_fraction")
    return _dataset(path.stem, classes, train, test, options.split if drawn else "given")


def _open(path: Path) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, AttributeError, zipfile.BadZipFile) as problem:
        raise _bad(path, f"not a readable .npz: {problem}", fix="write it with numpy.savez_compressed") from problem
    wanted = ("x_train", "y_train", "x_test", "y_test") if "x_train" in arrays else ("x", "y")
    missing = [name for name in wanted if name not in arrays]
    if missing:
        why = f"no array {', '.join(missing)}; found: {', '.join(arrays) or 'nothing'}"
        raise _bad(path, why, fix="x_train, y_train, x_test, y_test, or x, y")
    return arrays


def _split(path: Path, arrays: dict[str, np.ndarray], suffix: str, names: tuple[str, ...] | None) -> Split:
    x, y = arrays[f"x{suffix}"], arrays[f"y{suffix}"]
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.ndim != 1 or len(x) != len(y):
        raise _bad(path, f"x{suffix} has {len(x)} pictures, y{suffix} has shape {y.shape}", fix="one label per picture")
    return _pixels(path, f"x{suffix}", x), _labels(path, f"y{suffix}", y, names)


def _pixels(path: Path, key: str, x: np.ndarray) -> Tensor:
    """-> uint8 [n, 3, H, W]"""
    if x.dtype != np.uint8:
        raise _bad(path, f"{key} is {x.dtype}", fix="pixels as uint8, 0 to 255")
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
