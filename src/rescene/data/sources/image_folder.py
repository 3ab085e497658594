"""Image folders: <class>/*, or <domain>/<class>/*, <site>/<class>/*, <site>/<domain>/<class>/*; each also below train/ and test/.

Every image below a class folder belongs to the class. What is not read is counted and named (W214).
"""

from __future__ import annotations

import os
import re
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rescene.core.errors import DataError, ResceneWarning, command, few
from rescene.data.images import Dataset
from rescene.data.sources.decode import EXTENSIONS, shown
from rescene.data.sources.listing import File, Options, assemble, check_inside, class_order

TEST_NAMES = ("test", "val", "valid", "validation")
_UNREAD = {".heic", ".heif", ".avif", ".jxl", ".jp2", ".dng", ".raw", ".cr2", ".cr3", ".nef", ".arw", ".psd", ".tga"}
_LITTER = {"thumbs.db", "desktop.ini"}  # of file managers
_LOOSE = "pictures in no folder that is read"
_HIDDEN = "hidden pictures"
_SITE = re.compile(r"(site|hospital|clinic|client|centre|center)[-_ ]?\w+", re.IGNORECASE)
_BATCH = re.compile(
    r"(batch|part|session|upload|images?|photos?)[-_ ]?\d+|\d{4}-\d\d(-\d\d)?|\d{3}[A-Z]{5}", re.IGNORECASE
)
Left = dict[str, list[Path]]  # reason -> files that are not read


@dataclass(frozen=True)
class Folder:
    """A folder as it was found: its own images and its subfolders, both in name order."""

    path: Path
    images: tuple[Path, ...] = ()
    folders: tuple[Folder, ...] = ()

    @property
    def name(self) -> str:
        """The name of the data set: that of its folder."""
        return self.path.name

    def everything(self) -> list[Path]:
        """Its own images, then those of its subfolders."""
        return [*self.images, *(image for folder in self.folders for image in folder.everything())]

    def filled(self) -> Folder:
        """Itself without subfolders that hold no image: a site may have a folder for a class that it has not met yet."""
        return replace(self, folders=tuple(folder.filled() for folder in self.folders if folder.everything()))

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
    domains, sites = (
        class_order(filter(None, names)) for names in zip(*((f.domain, f.site) for f in files), strict=True)
    )
    dataset = assemble(path.resolve().name, files, options, domains=domains, sites=sites)
    reasons = [told for told in (_told_by_names(part) for part in (place, *_named(place, ("train",)))) if told]
    why = f", because {reasons[-1][1]}" if reasons and options.layout == "auto" else ""
    return replace(dataset, notes=(*_reading(files, why), *dataset.notes))


def list_files(place: Folder, layout: str = "auto") -> list[File]:
    """All images of a folder in whichever of the layouts it has; an unknown layout is E205.

    A class folder without images is E204: it is more likely a half-copied class than no class. A site may lack a class. Where
    the folders alone do not tell classes from domains and sites, ``layout`` must (E214).
    """
    if _training_part(place) is not place:  # without folders in it "train" is a class, beside "car" and "bus"
        return list_splits(place, layout)
    if not any(folder.everything() for folder in place.folders):
        loose = f"; {len(place.images):,} pictures lie in no folder" if place.images else ""
        raise _unknown_layout(place.path, f"found no images in folders of classes{loose}")
    return _list_split(place, "", layout)


def list_splits(place: Folder, layout: str = "auto") -> list[File]:
    """train/ and test/ (which may be called val), in the same layout; without a test folder one is drawn later."""
    (train,) = _named(place, ("train",))
    tests = _named(place, TEST_NAMES)
    if not tests:
        return _list_split(train, "", layout)
    labelled = [test for test in tests if test.folders]  # a test folder may hold unlabelled images, with val beside it
    files = _list_split(train, "train", layout)
    return files + _list_split((labelled or tests)[0], "test", _layout_of(files[0]))


def survey(path: Path) -> tuple[Folder, Left]:
    """Everything below a folder: its images, and by reason what is not read. Links are followed, but not in circles."""
    left: Left = defaultdict(list)
    place = _walk(path, left, (os.path.realpath(path),))
    for reason in [reason for reason, files in left.items() if reason.endswith("files")]:
        left[reason] = [file for file in left[reason] if file.parent != path]  # a README beside the classes is no loss
    return place, left


def warn_of_left(left: Left, path: Path) -> None:
    """Name what is not read, with a few examples of each kind."""
    kinds = [
        f"{reason}: {len(files):,} ({_few([os.path.relpath(file, path) for file in files], 3)})"
        for reason, files in left.items()
        if files
    ]
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
    """The files of one split, as classes, domains, sites, or domains of sites."""
    if layout == "auto":
        layout = _tell_layout(place)
    if layout == "classes":
        return _list_classes(place, split)
    bare = [part for part in place.folders if (inner := part.inner()).images and not inner.folders]
    if bare:
        raise _no_class_folders(place, bare, layout)
    if layout == "domains":
        names = [{folder.name for folder in _training_part(domain.inner()).folders} for domain in place.folders]
        if len(names) > 1 and split != "test" and not set.intersection(*names):
            raise _unknown_layout(place.path, "read as <domain>/<class>, the domains have no class in common")
        return [
            replace(file, domain=part.name) for part in place.folders for file in _list_part(part, split, "classes")
        ]
    below = "domains" if layout == "sites-domains" else "classes"
    return [replace(file, site=part.name) for part in place.folders for file in _list_part(part.filled(), split, below)]


def _list_part(part: Folder, split: str, layout: str) -> list[File]:
    """What one site or domain holds; it may have its own train/ and test/."""
    inner = part.inner()
    if not split and _training_part(inner) is not inner:
        return list_splits(inner, layout)
    return _list_split(inner, split, layout)


def _training_part(place: Folder) -> Folder:
    """train/ of a folder that is split into train/ and test/, else the folder itself."""
    train = _named(place, ("train",))
    return train[0] if train and train[0].folders else place


def _layout_of(file: File) -> str:
    if file.site:
        return "sites-domains" if file.domain else "sites"
    return "domains" if file.domain else "classes"


def _tell_layout(place: Folder) -> str:
    """classes, if most images lie directly in the folders and none has all of its images deeper; domains, if there is only
    one folder; what the names of the folders tell. Otherwise nothing tells <class>/<batch>/* from <domain>/<class>/* or
    <site>/<class>/*, and a person must."""
    nested = [folder for folder in place.folders if folder.everything() and not folder.inner().images]
    num_direct = sum(len(folder.inner().images) for folder in place.folders)
    if not nested and 2 * num_direct >= sum(len(folder.everything()) for folder in place.folders):
        return "classes"
    if len(place.folders) == 1:
        return "domains"
    told = _told_by_names(place)
    if told:
        return told[0]
    raise _two_readings(place, nested)


def _told_by_names(place: Folder) -> tuple[str, str] | None:
    """The layout and the reason, where names of folders speak for themselves: site-a/dog/*, dog/batch1/*, dog/2024-05/*."""
    tops = [folder.name for folder in place.folders]
    inside = sorted({sub.name for folder in place.folders for sub in folder.inner().folders})
    deeper = any(below.folders for folder in place.folders for below in folder.inner().folders)
    if len(tops) > 1 and inside and not deeper and all(_SITE.fullmatch(name) for name in tops):
        return "sites", f"the first folders are called {_few(tops, 3)}"
    if inside and all(_BATCH.fullmatch(name) for name in inside):
        return "classes", f"the folders below are called {_few(inside, 3)}"
    return None


def _two_readings(place: Folder, nested: Sequence[Folder]) -> DataError:
    """What was found, by name alone: a site of a federation tells this to its server."""
    held = nested or [folder for folder in place.folders if folder.folders]
    found = [f"{shown(top.name)}/ holds {_few([sub.name for sub in top.inner().folders], 4)}" for top in held[:4]]
    found += [f"and {len(held) - 4} folders more"] if len(held) > 4 else []
    tops = _few([folder.name for folder in held], 3)
    below = [sub for folder in place.folders for sub in folder.inner().folders]
    split = all(sub.name in ("train", *TEST_NAMES) for sub in below)
    inside = [sub for part in below for sub in part.folders] if split else below
    deeper, subs = any(sub.folders for sub in inside), _few(sorted({sub.name for sub in inside}), 3)
    readings = {
        "classes": f"{tops} are classes, and {subs} are parts of them",
        "domains": f"{subs} are classes, and {tops} are domains (a light, a camera, a season)",
        "sites": f"{subs} are classes, and {tops} are sites (places that keep their images)",
    }
    if split:
        del readings["classes"]
    if deeper:
        readings["sites-domains"] = f"{tops} are sites, {subs} are domains, and classes lie below"
    root = place.path.parent if place.name == "train" else place.path
    choices = [f"{command('data', 'inspect', root, '--layout', name)}  if {words}" for name, words in readings.items()]
    return DataError(
        "E214",
        "the folders can be read in more than one way",
        where=shown(place.path),
        why="; ".join(found),
        fix="say which it is:\n" + "\n".join(choices) + f"\n(in a run: data.layout={', '.join(readings)})",
    )


def _list_classes(place: Folder, split: str) -> list[File]:
    if not place.folders:
        raise _unknown_layout(place.path, "expected one folder per class")
    files = []
    for folder in place.folders:
        images = folder.everything()
        if not images and split != "test":
            fix = "fill or remove it (a file whose name begins with a dot is no image)"
            raise DataError("E204", f"no image in class folder {shown(folder.name)}", where=shown(folder.path), fix=fix)
        files += [File(image, folder.name, split) for image in images]
    return files


def _no_class_folders(place: Folder, bare: Sequence[Folder], layout: str) -> DataError:
    """Images where folders of classes were expected, because somebody or the names of the folders asked for sites or domains."""
    form, names = _READ_AS[layout], _few([part.name for part in bare], 3)
    (what, setting), whole = _ASKED_BY[layout], len(bare) == len(place.folders)
    wrap = f"put the folders of classes into a folder for each {what}; or, if there is none, leave out {setting}"
    fix = wrap if whole else f"move the images of {names} into folders of classes"
    return DataError(
        "E205",
        f"the images are not arranged as {form}",
        where=shown(place.path),
        why=f"images lie directly in {names}" + (", as in <class>/*" if whole else ", without a folder of their class"),
        fix=f"{setting} or data.layout={layout} expects {form}:\n{fix}",
    )


_READ_AS = {"domains": "<domain>/<class>/*", "sites": "<site>/<class>/*", "sites-domains": "<site>/<domain>/<class>/*"}

_ASKED_BY = {
    "domains": ("domain", "tasks.scenario=domain"),
    "sites": ("site", "federation.partition=sites"),
    "sites-domains": ("site and domain", "federation.partition=sites, tasks.scenario=domain"),
}


def _reading(files: Sequence[File], why: str = "") -> tuple[str, ...]:
    """How the folders were read, where that is not plain to see, and ``why``."""
    layout = _layout_of(files[0])
    notes: tuple[str, ...] = (f"read as {_READ_AS.get(layout, '<class>/*')}{why}",) if why or layout in _READ_AS else ()
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


def _few(names: Sequence[str], most: int = 5) -> str:
    return few([shown(name) for name in names], most)


def _unknown_layout(path: Path, why: str) -> DataError:
    return DataError(
        "E205",
        "cannot tell how the images are arranged",
        where=shown(path),
        why=why,
        fix="arrange them as <class>/*, <domain>/<class>/* or <site>/<class>/*, each also below train/ and test/,\n"
        "or list them in a CSV with columns path,label",
    )
