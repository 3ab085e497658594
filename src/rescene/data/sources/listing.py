"""From a list of labelled image files to a data set: class order, hold-out, decoding, checks. File readers end here.

``Options`` are what every reader may be told.
"""

from __future__ import annotations

import os
import re
import unicodedata
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch

from rescene.core.errors import ConfigError, DataError, ResceneWarning, few
from rescene.core.rng import Rng
from rescene.data.images import Channels, Dataset, Images, Transform, measure
from rescene.data.sources.decode import decode, guess_size, reason, shown

LAYOUTS = ("auto", "classes", "domains", "sites", "sites-domains")
OUTSIDE = ("warn", "refuse")
HELD_OUT = ("drawn", "last")


@dataclass(frozen=True)
class Options:
    """``image_size``: None keeps or guesses the size. ``test_fraction``, ``seed`` and ``held_out`` matter only where the data
    has no test set of its own; ``held_out`` None is what is usual for the data. ``skip_unreadable``: leave damaged images out
    (counted in a warning) instead of refusing.
    ``layout`` says what the first folders are, classes, domains or sites, where nothing else tells; ``outside``: warn of
    files that lie outside of the folder, or refuse them. ``columns``: pairs that say what the columns of a table
    are called, such as ("label", "species")."""

    image_size: int | None = None
    test_fraction: float = 0.2
    seed: int = 0
    skip_unreadable: bool = False
    layout: str = "auto"
    outside: str = "warn"
    held_out: str | None = None
    columns: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.test_fraction < 1:
            raise ConfigError(
                "E208", f"test_fraction is {self.test_fraction}", fix="a number from 0 up to, not including, 1"
            )
        if self.image_size is not None and not 8 <= self.image_size <= 1024:
            raise ConfigError("E208", f"image_size is {self.image_size}", fix="a size in pixels from 8 to 1024")
        for key, value, possible in (
            ("layout", self.layout, LAYOUTS),
            ("outside", self.outside, OUTSIDE),
            ("held_out", self.held_out, (None, *HELD_OUT)),
        ):
            if value not in possible:
                raise ConfigError("E208", f"{key} is {value!r}", fix=f"one of: {', '.join(filter(None, possible))}")

    @property
    def split(self) -> str:
        """How a data set says that its test images were chosen with these options."""
        return f"fraction={self.test_fraction:g} " + ("last" if self.held_out == "last" else f"seed={self.seed}")


@dataclass(frozen=True)
class File:
    """One image file, or the ``content`` of one that ``path`` names. ``split``: train, test, or empty when the hold-out is to
    be drawn here."""

    path: Path
    label: str
    split: str = ""
    domain: str = ""
    site: str = ""
    content: bytes | None = field(default=None, repr=False)

    @property
    def source(self) -> Path | bytes:
        return self.path if self.content is None else self.content


def assemble(
    name: str,
    files: Sequence[File],
    options: Options,
    *,
    classes: tuple[str, ...] | None = None,
    domains: tuple[str, ...] = (),
    sites: tuple[str, ...] = (),
    size: int | None = None,
    statistics: tuple[Channels, Channels] | None = None,
    where: str | None = None,
) -> Dataset:
    """Decode the files into a data set. ``where`` stands in errors, by default its name.

    ``classes``, ``domains`` and ``sites`` fix the order (classes otherwise: :func:`class_order`); ``size`` and ``statistics``
    (mean, std) are a named set's own, otherwise guessed and measured.
    """
    where = where or name
    if classes is None:
        classes = class_order(file.label for file in files)
        for what, names in (("class", classes), ("domain", domains), ("site", sites)):
            check_names(what, names, where)
    drawn = any(not file.split for file in files)
    files = hold_out(files, options) if drawn else files
    try:
        check_classes(where, classes, files)
    except DataError as problem:
        raise _not_there(files) or problem from None
    sources = [file.source for file in files]
    size = options.image_size or size or guess_size(sources)
    decoded = decode(sources, [shown(file.path) for file in files], size, skip_unreadable=options.skip_unreadable)
    lost = [f"{shown(files[i].path)} ({reason(problem)})" for i, problem in sorted(decoded.refused.items())]
    files = [files[i] for i in decoded.kept]
    check_classes(where, classes, files, f"files that cannot be read were left out: {few(lost, 3)}" if lost else "")
    train, test = (_images(files, decoded.pixels, s, classes, domains, sites) for s in ("train", "test"))
    transform = Transform(*statistics, size // 8) if statistics else measure(train.pixels)
    split = options.split if drawn else "given"
    return Dataset(name, classes, train, test, transform, domains, decoded.notes, split, sites=sites)


def class_order(labels: Iterable[str]) -> tuple[str, ...]:
    """Alphabetical, or by value if every name is a number.

    >>> class_order(["10", "9"]), class_order(["b", "a", "b"])
    (('9', '10'), ('a', 'b'))
    """
    names = set(labels)
    return tuple(sorted(names, key=int if all(name.isdecimal() and len(name) < 100 for name in names) else None))


def check_names(what: str, names: Sequence[str], where: str) -> None:
    """Names of classes or domains must be told apart by a person who reads them (E216) and name something (E217).

    Two that differ in capitals only may be meant (the letters a and A): that is a warning (W216).
    """
    for name in names:
        if shown(name) != name:
            why = "it has bytes that are not UTF-8, or control characters such as line breaks"
            raise DataError("E217", f"a {what} cannot be called {shown(name)}", where=where, why=why, fix="rename it")
        if name.strip().lower() in ("", "nan"):
            why = "that is how tables write a label that is missing"
            raise DataError(
                "E217",
                f"a {what} cannot be called {name!r}",
                where=where,
                why=why,
                fix="fill in the label or rename it",
            )
    if alike := _alike(names, _as_read):
        why = "they differ only in spaces, in how accents are stored (NFC, NFD), or in how a number is written"
        fix = "give both the same name, or names that look different"
        told = ", ".join(ascii(name) for name in alike)
        raise DataError("E216", f"names of a {what} look the same: {told}", where=where, why=why, fix=fix)
    if alike := _alike(names, lambda name: _as_read(name).casefold()):
        told = f"{', '.join(alike)} differ only in capitals and are kept apart"
        warnings.warn(ResceneWarning("W216", told, fix="rename one if they are the same"), stacklevel=3)


def _as_read(name: str) -> str:
    """What a person sees of a name; numbers by their value.

    >>> _as_read("0.0") == _as_read("0"), _as_read("caf\u00e9 ") == _as_read("cafe\u0301")
    (True, True)
    """
    visible = "".join(c for c in unicodedata.normalize("NFC", name) if unicodedata.category(c) != "Cf")
    text = " ".join(visible.split())
    return repr(float(text)) if re.fullmatch(r"[+-]?\d{1,15}(\.\d*)?", text, re.ASCII) else text


def _alike(names: Sequence[str], key: Callable[[str], str]) -> list[str]:
    """The first names that have the same key."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[key(name)].append(name)
    return next((group for group in groups.values() if len(group) > 1), [])


def check_inside(root: Path, files: Sequence[File], options: Options) -> None:
    """Tell of images that lie outside of the folder (W215), or refuse them (E215), before one is opened.

    A link or a row of a CSV leads there. Whoever packed the folder may have chosen it, not whoever uses it.
    """
    out = _outside(root, [file.path for file in files if file.content is None])
    if not out:
        return
    shared = f"{len(out):,} of {len(files):,} images lie outside of the folder"
    first = f"{shown(out[0])} leads to {shown(os.path.realpath(out[0]))}"
    if options.outside == "refuse":
        why = f"{first}; what is sent is made of these images, and who packed the folder may have chosen them"
        fix = "copy them into the folder, or allow it: data.outside=warn (at a site in site.yaml)"
        raise DataError("E215", shared, where=shown(root), why=why, fix=fix)
    warnings.warn(ResceneWarning("W215", f"{shared}: {first}", fix="check that you mean them"), stacklevel=3)


def _outside(root: Path, paths: Sequence[Path]) -> list[Path]:
    """Those whose real place is not below the root's real place; a folder is looked up once."""
    home, real = os.path.join(os.path.realpath(root), ""), cache(os.path.realpath)

    def lies_at(path: Path) -> str:
        folder, name = os.path.split(path)
        return os.path.realpath(path) if name == ".." or os.path.islink(path) else os.path.join(real(folder), name)

    return [path for path in paths if not lies_at(path).startswith(home)]


def hold_out(files: Sequence[File], options: Options) -> list[File]:
    """Mark the held-out files of each site, domain and class as test; a file that has a split keeps it."""
    open_files = [i for i, file in enumerate(files) if not file.split]
    groups = [(files[i].domain, files[i].label, *filter(None, [files[i].site])) for i in open_files]
    if options.held_out == "last":  # in the order of their names, also where a table has another
        ranks = sorted(range(len(open_files)), key=lambda place: by_name(shown(files[open_files[place]].path)))
        drawn = {ranks[place] for place in draw_test([groups[rank] for rank in ranks], options)}
    else:
        drawn = draw_test(groups, options)
    split = {i: "test" if place in drawn else "train" for place, i in enumerate(open_files)}
    return [replace(file, split=split[i]) if i in split else file for i, file in enumerate(files)]


def by_name(name: str) -> list[tuple[int, str]]:
    """A key to sort names by, with numbers in them by value.

    >>> sorted(["img10.jpg", "img9.jpg", "IMG.jpg"], key=by_name)
    ['IMG.jpg', 'img9.jpg', 'img10.jpg']
    """
    parts = re.split(r"([0-9]+)", name)  # text, number, text, ...
    return [(int(part) if i % 2 else 0, part) for i, part in enumerate(parts)]


def draw_test(groups: Sequence[tuple[str, ...]], options: Options) -> set[int]:
    """Positions that go to the test split: nearest(fraction * n) of each group (domain, class, site), never all of it.

    The choice in a group depends on the seed, its names and its size, not on the other groups. With ``held_out`` "last" it is
    the end of each group: of pictures taken in a row none lies on both sides, except at the cut.
    """
    members: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, group in enumerate(groups):
        members[group].append(i)
    test: set[int] = set()
    for group, places in members.items():
        num_test = min(int(options.test_fraction * len(places) + 0.5), len(places) - 1)
        if options.held_out == "last":
            test.update(places[len(places) - num_test :])
            continue
        order = torch.randperm(len(places), generator=Rng(options.seed).at("hold-out", *group).generator())
        test.update(places[i] for i in order[:num_test].tolist())
    return test


def _not_there(files: Sequence[File]) -> DataError | None:
    """The error for files that a table names and that do not exist; None if all are there."""
    missing = [shown(file.path) for file in files if file.content is None and not file.path.exists()]
    if not missing:
        return None
    others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    why, fix = "there is no such file", "correct the path, or copy the file there"
    return DataError("E203", f"cannot read image {missing[0]}{others}", where="\n".join(missing[:5]), why=why, fix=fix)


def check_classes(where: str, classes: tuple[str, ...], files: Sequence[File], why: str = "") -> None:
    """Every class has a training image (E204) and there is something to test on (E202). ``why``: why images may be missing."""
    trained = {file.label for file in files if file.split == "train"}
    missing = [c for c in classes if c not in trained]
    if missing:
        raise DataError(
            "E204",
            f"no training image of class {few(missing)}",
            where=where,
            why=why,
            fix="add images to the class, or remove its folder or rows",
        )
    if not any(file.split == "test" for file in files):
        raise DataError(
            "E202", "there is no test image", where=where, why=why, fix="add a test split or raise data.test_fraction"
        )


def _images(
    files: Sequence[File],
    pixels: torch.Tensor,
    split: str,
    classes: tuple[str, ...],
    domains: tuple[str, ...],
    sites: tuple[str, ...],
) -> Images:
    chosen = [i for i, file in enumerate(files) if file.split == split]

    def numbered(key: str, names: tuple[str, ...]) -> torch.Tensor:
        number = {name: i for i, name in enumerate(names)}
        return torch.tensor([number[getattr(files[i], key)] for i in chosen], dtype=torch.int64)

    of_site = sites and all(files[i].site for i in chosen)  # test images may belong to nobody
    return Images(
        pixels[chosen],
        numbered("label", classes),
        numbered("domain", domains) if domains else None,
        numbered("site", sites) if of_site else None,
    )
