"""A named data set without its pictures: enough to plan tasks, splits and costs on a machine that does not have it."""

from __future__ import annotations

import torch

from rescene.core.errors import DataError
from rescene.data.catalog import CATALOG
from rescene.data.images import Dataset, Images, Transform


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
