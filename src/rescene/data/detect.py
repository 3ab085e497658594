"""Tell from a path alone which reader it needs."""

from __future__ import annotations

import warnings
from pathlib import Path

from rescene.core.errors import DataError, ResceneWarning
from rescene.data import prepared
from rescene.data.sources import cifar_archive, cifar_parquet, image_table, office31, tinyimagenet
from rescene.data.sources.cifar_spec import CIFAR10, CIFAR100
from rescene.data.sources.decode import shown
from rescene.data.sources.image_folder import subfolders


def detect(path: Path) -> str:
    """Name of the reader for a file or folder (``folder`` if nothing more special); an unknown kind of file is E205."""
    if path.is_file():
        return _detect_file(path)
    return _detect_cifar(path) or _detect_named(path) or _detect_tables(path) or "folder"


def _detect_file(path: Path) -> str:
    kind = path.suffix.lower()[1:]
    if kind in ("npz", "csv", prepared.KIND):
        return kind
    if kind == "tsv":
        return "csv"
    found = _detect_cifar(path) or ("parquet" if kind == "parquet" else None)
    if found:
        return found
    raise DataError(
        "E205",
        f"cannot tell what kind of data {path.name} is",
        where=str(path),
        fix="a folder of images, a .csv, .tsv, .parquet or .npz file, a CIFAR archive, or a prepared .safetensors file",
    )


def _detect_cifar(path: Path) -> str | None:
    shards = cifar_parquet.find(path)
    for files in shards.values():
        return _cifar_of_columns(cifar_parquet.columns(files[0]), image_table.class_names(files[0]))
    for cifar in (CIFAR10, CIFAR100):
        if cifar_archive.find(path, cifar):
            return cifar.name
    if (path / "train").is_dir():
        names = {folder.name for folder in subfolders(path / "train")}
        return next((cifar.name for cifar in (CIFAR10, CIFAR100) if names == set(cifar.classes)), None)
    return None


def _cifar_of_columns(columns: list[str], names: dict[str, list[str]]) -> str | None:
    """CIFAR's columns are img and label, or img and two labels; other tables of images are somebody's own."""
    if "img" in columns and CIFAR100.columns[0] in columns:
        return "cifar100"
    plain = set(columns) == {"img", "label"}
    return "cifar10" if plain and names.get("label", [*CIFAR10.classes]) == [*CIFAR10.classes] else None


def _detect_named(path: Path) -> str | None:
    tiny = tinyimagenet.root(path)
    if (tiny / "wnids.txt").is_file() or (tiny / "val" / "val_annotations.txt").is_file():
        return "tinyimagenet"
    if {folder.name for folder in subfolders(office31.root(path))} == set(office31.NUM_IMAGES):
        return "office31"
    return None


def _detect_tables(path: Path) -> str | None:
    """A folder with parquet files, one list of images, one NumPy file or one prepared file: that is the data set."""
    listed = _only(path, "csv")
    if listed and image_table.is_listing(listed):
        return "csv"
    stored = image_table.parquet_files(path)[0]
    if stored:
        inside = {file.relative_to(path).parts[0] for file in stored}
        _tell_of_folders(path, "parquet files", [f.name for f in subfolders(path) if f.name not in inside])
        return "parquet"
    packed = _only(path, "npz")
    if packed:
        _tell_of_folders(path, shown(packed.name), [folder.name for folder in subfolders(path)])
        return "npz"
    ready = _only(path, prepared.KIND)
    return prepared.KIND if ready and prepared.is_prepared(ready) else None


def _tell_of_folders(path: Path, taken: str, beside: list[str]) -> None:
    if beside:
        names = ", ".join(shown(name) for name in beside[:5])
        what = f"not read: folders beside {taken} in {shown(path.name)}, taken for the data set: {names}"
        warnings.warn(ResceneWarning("W214", what, fix="data.name=folder reads the folders"), stacklevel=5)


def single_file(path: Path, kind: str) -> Path:
    """The file itself, or the only one of that kind in a folder."""
    found = path if path.is_file() else _only(path, kind)
    if found is None:
        raise DataError("E205", f"not exactly one .{kind} file here", where=str(path), fix="give the file itself")
    return found


def _only(path: Path, kind: str) -> Path | None:
    found = [file for file in path.glob(f"*.{kind}") if not file.name.startswith(".")]
    return found[0] if len(found) == 1 else None
