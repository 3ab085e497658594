"""Pictures that lie in a file as arrays: in a NumPy file of the user's, or decoded once by ``prepare``.

NumPy file: x_train, y_train, x_test, y_test, or x, y with a drawn test split; optionally ``classes`` (names).
Prepared file: safetensors with both splits and everything said about them.
"""

from __future__ import annotations

import json
import math
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rescene.core.documents import parse_json
from rescene.core.errors import ConfigError, DataError
from rescene.core.files import replacing, unique_draft
from rescene.data.images import Dataset, Images, Transform, measure
from rescene.data.sources.decode import TooLarge, fit_pixels, resize_notes
from rescene.data.sources.listing import Options, check_names, class_order, draw_test

MOST_BYTES, MOST_SHRUNK = 2**28, 100  # an archive may unpack to the first, and beyond it to so many times its size
KNOWN = {"x_train", "y_train", "x_test", "y_test", "x", "y", "classes"}
Split = tuple[list[Tensor], list[str]]  # pixels in parts [n, 3, H, W], and the names of all labels
Header = tuple[tuple[int, ...], np.dtype]


def read_npz(path: Path, options: Options) -> Dataset:
    """uint8 pictures [n, H, W], [n, H, W, 1 or 3] or [n, 1 or 3, H, W]; labels are numbers or names."""
    arrays = _open_npz(path)
    names = tuple(map(str, arrays["classes"].tolist())) if "classes" in arrays else None
    if "x_train" in arrays:
        train, test, split = _split(path, arrays, "_train", names), _split(path, arrays, "_test", names), "given"
    else:
        train, test, split = *_drawn(_split(path, arrays, "", names), options), options.split
    classes = names or class_order([*train[1], *test[1]])
    size, add_test = min(train[0][0].shape[-2:]), "add x_test or raise data.test_fraction"
    try:
        return dataset_of_pixels(path.stem, str(path), classes, train, test, split, size, add_test)
    except TooLarge as problem:
        fix = "shrink or cut the pictures"
        raise DataError("E219", "the pictures are too large", where=str(path), why=str(problem), fix=fix) from problem


def _open_npz(path: Path) -> dict[str, np.ndarray]:
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
    return [_pixels(path, f"x{suffix}", x)], _labels(path, f"y{suffix}", y, names)


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
    (pixels,), labels = everything
    test = draw_test([("", label) for label in labels], options)
    parts = [i for i in range(len(labels)) if i not in test], sorted(test)
    train, held = (([pixels[part]], [labels[i] for i in part]) for part in parts)
    return train, held


def dataset_of_pixels(
    name: str, where: str, classes: tuple[str, ...], train: Split, test: Split, split: str, size: int, add_test: str
) -> Dataset:
    """A data set of squares of this size. Every class has a training image (E204), and there is something to test on (E202)."""
    check_names("class", classes, where)
    missing = [c for c in classes if c not in set(train[1])]
    if missing:
        raise DataError("E204", f"no training image of class {', '.join(missing[:5])}", where=where, fix="add some")
    if not test[1]:
        raise DataError("E202", "there is no test image", where=where, fix=add_test)
    number = {c: i for i, c in enumerate(classes)}
    first, second = (
        Images(
            torch.cat([fit_pixels(p, size) for p in pixels]),
            torch.tensor([number[c] for c in labels], dtype=torch.int64),
        )
        for pixels, labels in (train, test)
    )
    originals = {(p.shape[-1], p.shape[-2]) for pixels, _ in (train, test) for p in pixels}
    notes = resize_notes(originals, size)
    return Dataset(name, classes, first, second, measure(first.pixels), notes=notes, split=split)


def _bad(path: Path, why: str, *, fix: str) -> DataError:
    return DataError("E206", "cannot use the NumPy file", where=str(path), why=why, fix=fix)


PREPARED = "safetensors"  # kind of the files that ``prepare`` writes
FORMAT = "rescene-data-1"
_FIELDS = ("pixels", "labels", "domains", "sites")


def write_prepared(dataset: Dataset, file: Path) -> Path:
    """One file with both splits and everything said about them, written atomically; returns it."""
    from safetensors.torch import save_file

    tensors = {
        f"{split}.{field}": getattr(images, field).cpu().contiguous()
        for split, images in (("train", dataset.train), ("test", dataset.test))
        for field in _FIELDS
        if getattr(images, field) is not None
    }
    about = {
        "name": dataset.name,
        "classes": dataset.classes,
        "domains": dataset.domains,
        "sites": dataset.sites,
        "notes": dataset.notes,
        "split": dataset.split,
        "mean": dataset.transform.mean,
        "std": dataset.transform.std,
        "pad": dataset.transform.pad,
        "sha256": dataset.fingerprint(),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file, unique_draft(file)) as unfinished:
        save_file(tensors, unfinished, metadata={"format": FORMAT, "about": json.dumps(about)})
    return file


def read_prepared(file: Path) -> Dataset:
    """Inverse of :func:`write_prepared`; a file that is damaged or not one of these is E202."""
    about, tensors = _open_prepared(file)
    try:
        dataset = _rebuild(about, tensors)
    except (KeyError, TypeError, ValueError) as problem:
        raise _damaged(file, str(problem)) from problem
    if dataset.fingerprint() != about.get("sha256"):
        raise _damaged(file, "its checksum does not match its content")
    return dataset


def is_prepared(file: Path) -> bool:
    """Whether a safetensors file holds a data set (and not, say, a model)."""
    try:
        return bool(_open_prepared(file, header_only=True)[0])
    except DataError:
        return False


def split_of(file: Path) -> str:
    """How the test split of a prepared file was chosen, from its header alone."""
    return str(_open_prepared(file, header_only=True)[0].get("split"))


def sites_of(file: Path) -> tuple[str, ...]:
    """Names of the sites in a prepared file, from its header alone."""
    return tuple(map(str, _open_prepared(file, header_only=True)[0].get("sites", ())))


def _open_prepared(file: Path, header_only: bool = False) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as stored:
            metadata = stored.metadata() or {}
            tensors = {} if header_only else {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as problem:
        raise _damaged(file, str(problem)) from problem
    if metadata.get("format") != FORMAT:
        raise _damaged(file, f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
    try:
        return dict(parse_json(metadata["about"], "its header")), tensors
    except (ConfigError, KeyError, TypeError, ValueError) as problem:
        raise _damaged(file, f"its header makes no sense ({type(problem).__name__})") from None


def _rebuild(about: dict[str, Any], tensors: dict[str, Tensor]) -> Dataset:
    train, test = (
        Images(
            tensors[f"{split}.pixels"],
            tensors[f"{split}.labels"],
            tensors.get(f"{split}.domains"),
            tensors.get(f"{split}.sites"),
        )
        for split in ("train", "test")
    )
    transform = Transform(tuple(about["mean"]), tuple(about["std"]), about["pad"])
    classes, domains, notes = (tuple(about[key]) for key in ("classes", "domains", "notes"))
    sites = tuple(about.get("sites", ()))  # files of earlier versions know of none
    return Dataset(about["name"], classes, train, test, transform, domains, notes, about["split"], sites=sites)


def _damaged(file: Path, why: str) -> DataError:
    fix = "delete it and prepare the data set again: rescene data prepare"
    return DataError("E202", "a prepared data file cannot be used", where=str(file), why=why, fix=fix)
