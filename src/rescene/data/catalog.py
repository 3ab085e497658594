"""The data sets known by name: facts about them, the places where they are looked for, and stand-ins without their pictures.

A stand-in is enough to plan tasks, splits and costs on a machine that does not have the data set.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rescene.core.errors import DataError
from rescene.data.images import Dataset, Images, Transform


@dataclass(frozen=True)
class Entry:
    """Facts about one named data set. ``source``: what a user points ``prepare`` at; ``per_class``: train and test images
    of every class, where all classes have the same number; ``held_out``: which images become the test if nobody says."""

    name: str
    num_classes: int
    image_size: int
    licence: str
    source: str
    per_class: tuple[int, int] | None = None
    held_out: str = "drawn"


CATALOG = {
    entry.name: entry
    for entry in (
        Entry(
            "fashion-mini",
            10,
            32,
            "MIT, Zalando SE 2017; cite Xiao, Rasul, Vollgraf 2017",
            "part of the package",
            (600, 200),
        ),
        Entry(
            "cifar10",
            10,
            32,
            "no formal licence; cite Krizhevsky 2009",
            "cifar-10-python.tar.gz, cifar-10-binary.tar.gz, the parquet files, or a folder with train/ and test/",
            (5000, 1000),
        ),
        Entry(
            "cifar100",
            100,
            32,
            "no formal licence; cite Krizhevsky 2009",
            "cifar-100-python.tar.gz, cifar-100-binary.tar.gz, the parquet files, or a folder with train/ and test/",
            (500, 100),
        ),
        Entry(
            "tinyimagenet",
            200,
            64,
            "ImageNet terms: non-commercial research; cite Le and Yang 2015",
            "the folder tiny-imagenet-200 (train/, val/, wnids.txt)",
            (500, 50),
        ),
        Entry(
            "office31",
            31,
            64,
            "third-party photographs, research use; cite Saenko et al. 2010",
            "a folder with amazon/, dslr/ and webcam/",
            held_out="last",
        ),
    )
}


def usual_hold_out(name: str) -> str:
    """How the test images of a data set are chosen if nobody says."""
    return CATALOG[name].held_out if name in CATALOG else "drawn"


def prepare_command(name: str, held_out: str | None) -> str:
    """What prepares a named data set with these test images.

    >>> prepare_command("office31", "last")
    'rescene data prepare office31 --from SOURCE'
    >>> prepare_command("office31", "drawn")
    'rescene data prepare office31 --from SOURCE --held-out drawn'
    """
    option = "" if held_out in (None, usual_hold_out(name)) else f" --held-out {held_out}"
    return f"rescene data prepare {name} --from SOURCE{option}"


def prepared_name(name: str, held_out: str = "drawn") -> str:
    """File that ``prepare`` writes and ``load`` prefers.

    >>> prepared_name("office31"), prepared_name("office31", "last")
    ('office31.safetensors', 'office31-last.safetensors')
    """
    return f"{name}.safetensors" if held_out == "drawn" else f"{name}-{held_out}.safetensors"


def cache_folder() -> Path:
    """The user's cache folder for prepared data sets and features."""
    from platformdirs import user_cache_path

    return user_cache_path("rescene")


def places(name: str) -> list[Path]:
    """Folders in which a named data set is looked for, in this order."""
    roots = [Path("data")]
    if os.environ.get("RESCENE_DATA"):
        roots.append(Path(os.environ["RESCENE_DATA"]).expanduser())
    return [root / name for root in [*roots, cache_folder()]]


def available() -> list[dict[str, Any]]:
    """One row per named data set: name, classes, image_size, found (a place or None), licence, source."""
    rows = []
    for entry in CATALOG.values():
        found = [str(folder) for folder in places(entry.name) if folder.is_dir() and any(folder.iterdir())]
        rows.append(
            {
                "name": entry.name,
                "classes": entry.num_classes,
                "image_size": entry.image_size,
                "found": "embedded" if entry.name == "fashion-mini" else next(iter(found), None),
                "licence": entry.licence,
                "source": entry.source,
            }
        )
    return rows


def has_stand_in(name: str) -> bool:
    """Whether the number of images of each class is known without them."""
    return name in CATALOG and CATALOG[name].per_class is not None


def stand_in(name: str) -> Dataset:
    """The data set's published size, labels in order of class, and black pictures that share one byte of memory.

    A split depends on the number of images of each class, not on their order, so that every site holds as many images of
    each class as it would of the real set.

    >>> len(stand_in("cifar100").train), stand_in("tinyimagenet").image_size
    (50000, 64)
    """
    entry = CATALOG.get(name)
    if entry is None or entry.per_class is None:
        raise DataError(
            "E201",
            f"the sizes of {name!r} are not known without its images",
            why=f"known: {', '.join(e.name for e in CATALOG.values() if e.per_class)}",
            fix="give its path (data.path=...)",
        )
    train, test = (_black(entry.num_classes, count, entry.image_size) for count in entry.per_class)
    classes = tuple(f"class {c}" for c in range(entry.num_classes))
    transform = Transform((0.5, 0.5, 0.5), (0.25, 0.25, 0.25), entry.image_size // 8)
    return Dataset(name, classes, train, test, transform, notes=("sizes only, no pictures",))


def _black(num_classes: int, per_class: int, size: int) -> Images:
    pixels = torch.zeros(1, dtype=torch.uint8).expand(num_classes * per_class, 3, size, size)
    return Images(pixels, torch.arange(num_classes).repeat_interleave(per_class))
