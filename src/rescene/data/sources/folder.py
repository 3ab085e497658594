"""Image folders: train/<class>/* with test/<class>/*, or <class>/*, or <domain>/<class>/*. A class may have subfolders.

Every image below a class folder belongs to the class. What is not read is counted and named (W214).
"""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rescene.data.images import Dataset
from rescene.data.options import Options
from rescene.data.sources.decode import EXTENSIONS, shown
from rescene.data.sources.listing import File, assemble, check_inside, class_order
from rescene.errors import DataError, ResceneWarning

TEST_NAMES = ("test", "val", "valid", "validation")
_UNREAD = {".heic", ".heif", ".avif", ".jxl", ".jp2", ".dng", ".raw", ".cr2", ".cr3", ".nef", ".arw", ".psd", ".tga"}
_LITTER = {"thumbs.db", "desktop.ini"}  # of file managers
_LOOSE = "pictures in no folder that is read"
_HIDDEN = "hidden pictures"
Left = dict[str, list[Path]]  # reason -> files that are not read


@dataclass(frozen=True)
class Folder:
    """A folder as it was found: its own images and its subfolders, both in name order."""

    path: Path
    images: tuple[Path, ...] = ()
    folders: tuple[Folder, ...] = ()

    @property
    def name(self) -> str:
        return self.path.name

    def everything(self) -> list[Path]:
        """Its own images, then those of its subfolders."""
        return [*self.images, *(image for folder in self.folders for image in folder.everything())]

    def inner(self) -> Folder:
        """Where a class or domain keeps what it holds: in itself or, as Office-31's original does, in a folder ``images``."""
        lone = not self.images and [folder.name for folder in self.folders] == ["images"]
        return self.folders[0] if lone else self


def read(path: Path, options: Options) -> Dataset:
    """Any image folder; class and domain order is alphabetical (by value if all names are numbers)."""
    if not path.is_dir():
        raise DataError("E201", f"{shown(path)} is not a folder", fix="give the folder that holds the images")
    place, left = survey(path)
    files = list_files(place, options.layout)
    read_too = {file.path for file in files}
    left[_LOOSE] += [image for image in place.everything() if image not in read_too]
    warn_of_left(left, path)
    check_inside(path, files, options)
    domains = class_order(file.domain for file in files if file.domain)
    dataset = assemble(path.resolve().name, files, options, domains=domains)
    return replace(dataset, notes=(*_reading(files), *dataset.notes))


def list_files(place: Folder, layout: str = "auto") -> list[File]:
    """All images of a folder in whichever of the three layouts it has; an unknown layout is E205.

    A class folder without images is E204: it is more likely a half-copied class than no class. Where the folders alone
    do not tell classes from domains, ``layout`` must (E214).
    """
    train = _named(place, ("train",))
    if train and train[0].folders:  # without: "train" is a class, beside "car" and "bus"
        return list_splits(place, layout)
    if not any(folder.everything() for folder in place.folders):
        raise _unknown_layout(place.path, "found no images in folders of classes")
    return _list_split(place, "", layout)


def list_splits(place: Folder, layout: str = "auto") -> list[File]:
    """train/<class>/* and test/<class>/* (test may be called val); without a test folder one is drawn later."""
    (train,) = _named(place, ("train",))
    tests = _named(place, TEST_NAMES)
    if not tests:
        return _list_split(train, "", layout)
    labelled = [test for test in tests if test.folders]  # a test folder may hold unlabelled images, with val beside it
    files = _list_split(train, "train", layout)
    return files + _list_split((labelled or tests)[0], "test", "domains" if files[0].domain else "classes")


def survey(path: Path) -> tuple[Folder, Left]:
    """Everything below a folder: its images, and by reason what is not read. Links are followed, but not in circles."""
    left: Left = defaultdict(list)
    place = _walk(path, left, (os.path.realpath(path),))
    for reason in [reason for reason, files in left.items() if reason.endswith("files")]:
        left[reason] = [file for file in left[reason] if file.parent != path]  # a README beside the classes is no loss
    return place, left


def warn_of_left(left: Left, path: Path) -> None:
    """Name what is not read, with a few examples of each kind."""
    kinds = [f"{reason}: {len(files):,} ({_few(_below(path, files), 3)})" for reason, files in left.items() if files]
    if kinds:
        told = "; ".join(kinds[:8]) + (f"; and {len(kinds) - 8} more kinds" if len(kinds) > 8 else "")
        fix = "convert pictures of other kinds to JPEG or PNG; put pictures into a class folder; remove what is no picture"
        warnings.warn(ResceneWarning("W214", f"not read: {told}", fix=fix), stacklevel=3)


def subfolders(path: Path) -> list[Path]:
    """Folders in a folder, sorted; hidden ones and archive leftovers are ignored."""
    with os.scandir(path) as entries:
        names = [entry.name for entry in entries if entry.is_dir() and not _is_hidden(entry.name)]
    return [path / name for name in sorted(names)]


def _walk(path: Path, left: Left, above: tuple[str, ...], hidden: bool = False) -> Folder:
    """``above``: the real paths of this folder and those around it; a link to one of them would be a circle."""
    try:
        with os.scandir(path) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except OSError as problem:
        if hidden:
            return Folder(path)
        fix = "give yourself the right to read it, or remove it"
        raise DataError("E203", f"cannot open the folder {shown(path)}", why=problem.strerror, fix=fix) from problem
    images, folders = [], []
    for entry in found:
        file, out_of_sight = path / entry.name, hidden or _is_hidden(entry.name)
        if entry.is_dir():
            real = os.path.realpath(file) if entry.is_symlink() else os.path.join(above[-1], entry.name)
            if real in above:
                left["links that lead in a circle"].append(file)
            else:
                folders.append(_walk(file, left, (*above, real), out_of_sight))
        elif reason := _why_not(entry, out_of_sight):
            left[reason].append(file)
        elif not (out_of_sight or entry.name.lower() in _LITTER):
            images.append(file)
    return Folder(path, tuple(images), tuple(folder for folder in folders if not _is_hidden(folder.name)))


def _why_not(entry: os.DirEntry[str], hidden: bool) -> str | None:
    """Why a file is not read; None for an image, and for what nobody misses: hidden files that do not claim to be one."""
    kind = os.path.splitext(entry.name)[1].lower()
    if hidden or entry.name.lower() in _LITTER:
        return _HIDDEN if kind in EXTENSIONS else None
    if not entry.is_file():
        return "links that lead nowhere" if entry.is_symlink() else "special files"
    if kind in EXTENSIONS:
        return None
    return f"{shown(kind)} pictures" if kind in _UNREAD else f"{shown(kind)} files" if kind else "other files"


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "__"))


def _list_split(place: Folder, split: str, layout: str) -> list[File]:
    """The files of one split, as classes or as domains."""
    if layout == "auto":
        layout = _tell_layout(place)
    if layout == "classes":
        return _list_classes(place, split, "")
    names = [{folder.name for folder in domain.inner().folders} for domain in place.folders]
    if len(names) > 1 and split != "test" and not set.intersection(*names):
        raise _unknown_layout(place.path, "read as <domain>/<class>, the domains have no class in common")
    return [file for domain in place.folders for file in _list_classes(domain.inner(), split, domain.name)]


def _tell_layout(place: Folder) -> str:
    """classes, if most images lie directly in the folders and none has all of its images deeper; domains, if there is only
    one folder. Otherwise nothing in the folders tells <class>/<batch>/* from <domain>/<class>/*, and a person must."""
    nested = [folder for folder in place.folders if folder.everything() and not folder.inner().images]
    num_direct = sum(len(folder.inner().images) for folder in place.folders)
    if not nested and 2 * num_direct >= sum(len(folder.everything()) for folder in place.folders):
        return "classes"
    if len(place.folders) == 1:
        return "domains"
    inside = sorted({sub.name for folder in place.folders for sub in folder.inner().folders})
    tops = _few([folder.name for folder in nested or place.folders])
    raise DataError(
        "E214",
        "the folders can be read in two ways",
        where=shown(place.path),
        why=f"{tops} hold images in subfolders: {_few(inside)}.\n"
        f"Classes {tops} with subfolders, or domains {tops} with classes {_few(inside)}?",
        fix="data.layout=classes or data.layout=domains (rescene data inspect: --layout)",
    )


def _list_classes(place: Folder, split: str, domain: str) -> list[File]:
    if not place.folders:
        raise _unknown_layout(place.path, "expected one folder per class")
    files = []
    for folder in place.folders:
        images = folder.everything()
        if not images and split != "test":
            fix = "fill or remove it"
            raise DataError("E204", f"no image in class folder {shown(folder.name)}", where=shown(folder.path), fix=fix)
        files += [File(image, folder.name, split, domain) for image in images]
    return files


def _reading(files: Sequence[File]) -> tuple[str, ...]:
    """How the folders were read, where that is not plain to see."""
    notes = ("read as <domain>/<class>/*",) if files[0].domain else ()
    nested: dict[str, int] = defaultdict(int)
    for file in files:
        if file.path.parent.name not in (file.label, "images"):
            nested[file.label] += 1
    if nested:
        told = _few([f"{label} ({count})" for label, count in nested.items()])
        notes += (f"{sum(nested.values()):,} images lie in subfolders of their class: {told}",)
    return notes


def _named(place: Folder, names: Sequence[str]) -> list[Folder]:
    return [folder for name in names for folder in place.folders if folder.name == name]


def _below(root: Path, files: Sequence[Path]) -> list[str]:
    return [os.path.relpath(file, root) for file in files]


def _few(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(shown(name) for name in names[:most]) + more


def _unknown_layout(path: Path, why: str) -> DataError:
    return DataError(
        "E205",
        "cannot tell how the images are arranged",
        where=shown(path),
        why=why,
        fix="arrange them as train/<class>/* and test/<class>/*, <class>/*, or <domain>/<class>/*,\n"
        "or list them in a CSV with columns path,label",
    )
