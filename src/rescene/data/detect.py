"""Tell from a path alone which reader it needs."""

from __future__ import annotations

import warnings
from pathlib import Path

from rescene.data import prepared
from rescene.data.sources import cifar_archive, cifar_parquet, manifest, office31, tinyimagenet
from rescene.data.sources.cifar_spec import CIFAR10, CIFAR100
from rescene.data.sources.decode import shown
from rescene.data.sources.folder import subfolders
from rescene.errors import DataError, ResceneWarning


def detect(path: Path) -> str:
    """Name of the reader for a file or folder (``folder`` if nothing more special); an unknown kind of file is E205."""
    if path.is_file():
        return _detect_file(path)
    return _detect_cifar(path) or _detect_named(path) or _detect_single_file(path) or "folder"


def _detect_file(path: Path) -> str:
    kind = path.suffix.lower()[1:]
    if kind in ("npz", "csv", prepared.KIND):
        return kind
    found = _detect_cifar(path)
    if found:
        return found
    raise DataError(
        "E205",
        f"cannot tell what kind of data {path.name} is",
        where=str(path),
        fix="a folder of images, a .csv, an .npz, a CIFAR archive, or a prepared .safetensors file",
    )


def _detect_cifar(path: Path) -> str | None:
    shards = cifar_parquet.find(path)
    for files in shards.values():
        return "cifar100" if CIFAR100.columns[0] in cifar_parquet.columns(files[0]) else "cifar10"
    for cifar in (CIFAR10, CIFAR100):
        if cifar_archive.find(path, cifar):
            return cifar.name
    if (path / "train").is_dir():
        names = {folder.name for folder in subfolders(path / "train")}
        return next((cifar.name for cifar in (CIFAR10, CIFAR100) if names == set(cifar.classes)), None)
    return None


def _detect_named(path: Path) -> str | None:
    tiny = tinyimagenet.root(path)
    if (tiny / "wnids.txt").is_file() or (tiny / "val" / "val_annotations.txt").is_file():
        return "tinyimagenet"
    if {folder.name for folder in subfolders(office31.root(path))} == set(office31.NUM_IMAGES):
        return "office31"
    return None


def _detect_single_file(path: Path) -> str | None:
    """A folder with one manifest, one NumPy file or one prepared file: that file is the data set."""
    listed = _only(path, "csv")
    if listed and manifest.is_manifest(listed):
        return "csv"
    packed = _only(path, "npz")
    if packed:
        beside = ", ".join(shown(folder.name) for folder in subfolders(path)[:5])
        if beside:
            what = f"not read: folders beside {shown(packed.name)}, which was taken for the data set: {beside}"
            warnings.warn(ResceneWarning("W214", what, fix="data.name=folder reads the folders"), stacklevel=4)
        return "npz"
    ready = _only(path, prepared.KIND)
    return prepared.KIND if ready and prepared.is_prepared(ready) else None


def single_file(path: Path, kind: str) -> Path:
    """The file itself, or the only one of that kind in a folder."""
    found = path if path.is_file() else _only(path, kind)
    if found is None:
        raise DataError("E205", f"not exactly one .{kind} file here", where=str(path), fix="give the file itself")
    return found


def _only(path: Path, kind: str) -> Path | None:
    found = [file for file in path.glob(f"*.{kind}") if not file.name.startswith(".")]
    return found[0] if len(found) == 1 else None
