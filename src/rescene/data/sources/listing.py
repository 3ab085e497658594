"""From a list of labelled image files to a data set: class order, hold-out, decoding, checks. File readers end here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from rescene.data.images import Channels, Dataset, Images, Transform, measure
from rescene.data.options import Options
from rescene.data.sources.decode import decode, guess_size
from rescene.errors import DataError
from rescene.rng import Rng


@dataclass(frozen=True)
class File:
    """One image file. ``split``: train, test, or empty when the hold-out is to be drawn here."""

    path: Path
    label: str
    split: str = ""
    domain: str = ""


def assemble(
    name: str,
    files: Sequence[File],
    options: Options,
    *,
    classes: tuple[str, ...] | None = None,
    domains: tuple[str, ...] = (),
    size: int | None = None,
    statistics: tuple[Channels, Channels] | None = None,
) -> Dataset:
    """Decode the files into a data set.

    ``classes`` and ``domains`` fix the order (classes otherwise: :func:`class_order`); ``size`` and ``statistics``
    (mean, std) are a named set's own, otherwise guessed and measured.
    """
    classes = classes or class_order(file.label for file in files)
    drawn = any(not file.split for file in files)
    files = hold_out(files, options) if drawn else files
    check_classes(name, classes, files)
    paths = [file.path for file in files]
    size = options.image_size or size or guess_size(paths)
    decoded = decode(paths, [str(path) for path in paths], size, skip_unreadable=options.skip_unreadable)
    files = [files[i] for i in decoded.kept]
    check_classes(name, classes, files)
    train, test = (_images(files, decoded.pixels, s, classes, domains) for s in ("train", "test"))
    transform = Transform(*statistics, size // 8) if statistics else measure(train.pixels)
    split = options.split if drawn else "given"
    return Dataset(name, classes, train, test, transform, domains, decoded.notes, split)


def class_order(labels: Iterable[str]) -> tuple[str, ...]:
    """Alphabetical, or by value if every name is a number.

    >>> class_order(["10", "9"]), class_order(["b", "a", "b"])
    (('9', '10'), ('a', 'b'))
    """
    names = set(labels)
    return tuple(sorted(names, key=int if all(name.isdecimal() for name in names) else None))


def hold_out(files: Sequence[File], options: Options) -> list[File]:
    """Mark the drawn files of each domain and class as test; a file that has a split keeps it."""
    open_files = [i for i, file in enumerate(files) if not file.split]
    drawn = draw_test([(files[i].domain, files[i].label) for i in open_files], options)
    split = {i: "test" if place in drawn else "train" for place, i in enumerate(open_files)}
    return [replace(file, split=split[i]) if i in split else file for i, file in enumerate(files)]


def draw_test(groups: Sequence[tuple[str, str]], options: Options) -> set[int]:
    """Positions that go to the test split: nearest(fraction * n) of each (domain, class), never all of them.

    The choice in a group depends on the seed, its names and its size, not on the other groups.
    """
    members: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, group in enumerate(groups):
        members[group].append(i)
    test: set[int] = set()
    for group, places in members.items():
        num_test = min(int(options.test_fraction * len(places) + 0.5), len(places) - 1)
        order = torch.randperm(len(places), generator=Rng(options.seed).at("hold-out", *group).generator())
        test.update(places[i] for i in order[:num_test].tolist())
    return test


def check_classes(name: str, classes: tuple[str, ...], files: Sequence[File]) -> None:
    """Every class has a training image (E204) and there is something to test on (E202)."""
    trained = {file.label for file in files if file.split == "train"}
    missing = [c for c in classes if c not in trained]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        raise DataError(
            "E204",
            f"no training image of class {', '.join(missing[:5])}{more}",
            where=name,
            fix="add images to the class, or remove its folder or rows",
        )
    if not any(file.split == "test" for file in files):
        raise DataError("E202", "there is no test image", where=name, fix="add a test split or raise test_fraction")


def _images(
    files: Sequence[File], pixels: torch.Tensor, split: str, classes: tuple[str, ...], domains: tuple[str, ...]
) -> Images:
    chosen = [i for i, file in enumerate(files) if file.split == split]
    label, domain = ({name: i for i, name in enumerate(names)} for names in (classes, domains))
    labels = torch.tensor([label[files[i].label] for i in chosen], dtype=torch.int64)
    places = torch.tensor([domain[files[i].domain] for i in chosen], dtype=torch.int64) if domains else None
    return Images(pixels[chosen], labels, places)
