"""Pictures of one place as a federation sees them: its class names, its normalisation, a hold-out that stays put.

Order and hold-out depend on the content of a picture alone: images may be added or renamed and every other one stays on its
side, and two copies of an image are never on both.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from rescene.core.errors import DataError, ResceneWarning, did_you_mean
from rescene.data.images import Dataset, Images, Transform


def adopt(
    dataset: Dataset,
    classes: Sequence[str],
    labels: Mapping[str, str | None],
    transform: Transform,
    hold_out: float,
    may_be_empty: bool = False,
) -> Dataset:
    """A local data set with the labels of the federation; pictures of classes it does not know (yet) are left out (W342).

    ``labels``: local name -> the federation's name, or None to leave a class out; the same name where it says nothing. A
    local class may be missing, and two may become one. A test split of the data's own is the hold-out.
    """
    check_labels(dataset.classes, labels, dataset.name)
    number = {name: i for i, name in enumerate(classes)}
    new_label = torch.tensor([number.get(labels.get(name, name) or "", -1) for name in dataset.classes])
    train, test = (_renamed(images, new_label) for images in (dataset.train, dataset.test))
    if dataset.split == "given":
        train, test = (images.select(_order(images)[0]) for images in (train, test))
    else:
        train, test = _split(_joined(train, test), hold_out)
    if not len(train) + len(test) and not may_be_empty:
        raise _nothing_known(dataset, classes)
    strangers = sorted({labels.get(name, name) or "" for name in dataset.classes} - {*classes, ""})
    if strangers:
        fix = "rescene deploy add-classes opens them; labels in site.yaml maps them"
        warnings.warn(
            ResceneWarning("W342", f"classes outside the plan: {', '.join(strangers[:10])}; {fix}"), stacklevel=2
        )
    return replace(dataset, classes=tuple(classes), train=train, test=test, transform=transform, domains=())


def away(classes: Sequence[str], transform: Transform, image_size: int, test: Dataset | None = None) -> Dataset:
    """The data set of a server whose sites keep their images: class names, and test pictures where it has some."""
    none = Images(torch.zeros(0, 3, image_size, image_size, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64))
    found = none
    if test is not None:
        kept = adopt(test, classes, {}, transform, hold_out=0.0)
        found = _joined(kept.train, kept.test)  # all of it, however it is arranged
    return Dataset("images at the sites", tuple(classes), none, found, transform)


def check_labels(local: Sequence[str], labels: Mapping[str, str | None], where: str) -> None:
    """A map may only speak of classes that are there."""
    for name in labels:
        if name not in local:
            close = did_you_mean(name, local)
            raise DataError(
                "E209",
                f"labels names {name!r}, but no such class is among the images",
                where=where,
                fix=f"did you mean {close!r}?" if close else f"classes here: {', '.join(local[:20])}",
            )


def _nothing_known(dataset: Dataset, classes: Sequence[str]) -> DataError:
    return DataError(
        "E210",
        f"none of the classes {', '.join(dataset.classes[:10])} is one of the federation's",
        where=dataset.name,
        why=f"the federation has: {', '.join(classes[:20])}",
        fix="say in labels which class is which (labels: {local name: the federation's name}), or wait for the class",
    )


def _renamed(images: Images, new_label: torch.Tensor) -> Images:
    labels = new_label[images.labels]
    return Images(images.pixels, labels).select(labels >= 0)


def _joined(one: Images, other: Images) -> Images:
    return Images(torch.cat([one.pixels, other.pixels]), torch.cat([one.labels, other.labels]))


def _order(images: Images) -> tuple[list[int], list[float]]:
    """Positions in the order of content, and for each of them a number in [0, 1) that depends on it alone."""
    digests = images.digests
    order = sorted(range(len(digests)), key=lambda i: (digests[i], int(images.labels[i])))
    return order, [int.from_bytes(digests[i][:8], "big") / 2**64 for i in order]


def _split(images: Images, hold_out: float) -> tuple[Images, Images]:
    order, draws = _order(images)
    held = [i for i, draw in zip(order, draws, strict=True) if draw < hold_out]
    kept = [i for i, draw in zip(order, draws, strict=True) if draw >= hold_out]
    return images.select(kept), images.select(held)
