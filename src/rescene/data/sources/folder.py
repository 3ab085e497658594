"""Image folders: train/<class>/* with test/<class>/*, or <class>/*, or <domain>/<class>/*."""

from __future__ import annotations

import os
from pathlib import Path

from rescene.data.images import Dataset
from rescene.data.options import Options
from rescene.data.sources.decode import EXTENSIONS
from rescene.data.sources.listing import File, assemble, class_order
from rescene.errors import DataError

TEST_NAMES = ("test", "val", "valid", "validation")


def read(path: Path, options: Options) -> Dataset:
    """Any image folder; class and domain order is alphabetical (by value if all names are numbers)."""
    files = list_files(path)
    domains = class_order(file.domain for file in files if file.domain)
    return assemble(path.resolve().name, files, options, domains=domains)


def list_files(path: Path) -> list[File]:
    """All images of a folder in whichever of the three layouts it has; an unknown layout is E205.

    A class folder without images is E204: it is more likely a half-copied class than no class.
    """
    if not path.is_dir():
        raise DataError("E201", f"{path} is not a folder", fix="give the folder that holds the images")
    if (path / "train").is_dir() and subfolders(path / "train"):  # without: "train" is a class, beside "car" and "bus"
        return list_splits(path)
    tops = subfolders(path)
    if any(images_in(top) for top in tops):
        return _list_classes(path, "", "")
    if any(images_in(sub) for top in tops for sub in subfolders(inner(top))):
        return _list_domains(path, tops)
    raise _unknown_layout(path, "found no images in folders of classes")


def list_splits(path: Path) -> list[File]:
    """train/<class>/* and test/<class>/* (test may be called val); without a test folder one is drawn later."""
    tests = [path / name for name in TEST_NAMES if (path / name).is_dir()]
    if not tests:
        return _list_classes(path / "train", "", "")
    labelled = [
        test for test in tests if subfolders(test)
    ]  # a test folder may hold unlabelled images, with val beside it
    return _list_classes(path / "train", "train", "") + _list_classes((labelled or tests)[0], "test", "")


def _list_domains(path: Path, domains: list[Path]) -> list[File]:
    names = [{sub.name for sub in subfolders(inner(domain))} for domain in domains]
    if len(domains) > 1 and not set.intersection(*names):
        raise _unknown_layout(path, "read as <domain>/<class>, the domains have no class in common")
    return [file for domain in domains for file in _list_classes(inner(domain), "", domain.name)]


def inner(domain: Path) -> Path:
    """Where a domain keeps its classes: in itself or, as Office-31's original does, in its only folder ``images``."""
    return domain / "images" if [sub.name for sub in subfolders(domain)] == ["images"] else domain


def _list_classes(path: Path, split: str, domain: str) -> list[File]:
    folders = subfolders(path)
    if not folders:
        raise _unknown_layout(path, "expected one folder per class")
    files = []
    for folder in folders:
        images = images_in(folder)
        if not images and split != "test":
            raise DataError(
                "E204", f"no image in class folder {folder.name}", where=str(folder), fix="fill or remove it"
            )
        files += [File(image, folder.name, split, domain) for image in images]
    return files


def subfolders(path: Path) -> list[Path]:
    """Folders in a folder, sorted; hidden ones and archive leftovers are ignored."""
    with os.scandir(path) as entries:
        names = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith((".", "__"))]
    return [path / name for name in sorted(names)]


def images_in(path: Path) -> list[Path]:
    """Image files directly in a folder, sorted; hidden files and other types are ignored."""
    with os.scandir(path) as entries:
        names = [entry.name for entry in entries if entry.is_file() and not entry.name.startswith(".")]
    return [path / name for name in sorted(names) if os.path.splitext(name)[1].lower() in EXTENSIONS]


def _unknown_layout(path: Path, why: str) -> DataError:
    return DataError(
        "E205",
        "cannot tell how the images are arranged",
        where=str(path),
        why=why,
        fix="arrange them as train/<class>/* and test/<class>/*, <class>/*, or <domain>/<class>/*,\n"
        "or list them in a CSV with columns path,label",
    )
