"""Data sets made from others: joined ones, a validation part, and the pictures of one place as a federation sees them.

Joined: the images of a later month lie in a folder of their own. Validation: some of the training images stand in the place of the
test images, which nobody then sees. A place takes over the federation's class names and normalisation, and has a hold-out that stays
put: order and hold-out depend on the content of a picture alone, so images may be added or renamed and every other one stays on its
side, and two copies of an image are never on both.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rescene.core.errors import DataError, ResceneWarning, did_you_mean
from rescene.data.images import Dataset, Images, Transform


def joined(first: Dataset, later: Dataset, where: str) -> Dataset:
    """Both as one. Classes, domains and sites keep the numbers they have in ``first``; new ones come after them.

    Pictures are normalised as in ``first``: a network was trained with that. E250 if both have images of one class (of one
    class and domain, where there are domains); E251 if only one of them has domains or sites.
    """
    for what in ("domains", "sites"):
        if bool(getattr(first, what)) != bool(getattr(later, what)):
            has, lacks = ("earlier", "new") if getattr(first, what) else ("new", "earlier")
            raise DataError(
                "E251",
                f"the {has} images name {what}, and the {lacks} ones do not",
                where=where,
                why="one run reads all its images in one way",
                fix="arrange the new images as the earlier ones; data.layout says what the first folders are",
            )
    _refuse_twice(first, later, where)
    names = {
        what: tuple(dict.fromkeys([*getattr(first, what), *getattr(later, what)]))
        for what in ("classes", "domains", "sites")
    }
    parts = [
        _stacked(getattr(first, split), _renumbered(getattr(later, split), later, names)) for split in ("train", "test")
    ]
    notes = (*first.notes, f"joined with {len(later.train) + len(later.test):,} images of {where}", *later.notes)
    return replace(first, **names, train=parts[0], test=parts[1], notes=notes)  # type: ignore[arg-type]


def narrowed(dataset: Dataset, domains: Sequence[str] = ()) -> Dataset:
    """The data set without the domains that are not named (none: all stay), and without sites that have no image then."""
    if domains:
        kept = [dataset.domains.index(name) for name in domains if name in dataset.domains]
        dataset = _selected(dataset, "domains", sorted(kept))
    if dataset.sites and dataset.train.sites is not None:
        dataset = _selected(dataset, "sites", dataset.train.sites.unique().tolist())
    return dataset


def _selected(dataset: Dataset, what: str, kept: Sequence[int]) -> Dataset:
    """The images whose domain or site is one of these numbers, numbered anew in the same order."""
    names = getattr(dataset, what)
    new = torch.full((len(names),), -1)
    new[list(kept)] = torch.arange(len(kept))

    def chosen(images: Images) -> Images:
        own = getattr(images, what)
        if own is None:
            return images
        numbers = new[own]
        return replace(images, **{what: numbers}).select(numbers >= 0)

    return replace(
        dataset,
        **{what: tuple(names[i] for i in kept)},  # type: ignore[arg-type]
        train=chosen(dataset.train),
        test=chosen(dataset.test),
    )


def _refuse_twice(first: Dataset, later: Dataset, where: str) -> None:
    both = sorted(_groups(first) & _groups(later))
    if both:
        domain, name = both[0]
        raise DataError(
            "E250",
            f"there are images of class {name!r} among the earlier and among the new ones"
            + (f", both of domain {domain!r}" if domain else ""),
            where=where,
            why="a class arrives once, with all its images; other images of it would make another run of the earlier tasks",
            fix="leave the folder of this class out of the new images",
        )


def _groups(dataset: Dataset) -> set[tuple[str, str]]:
    """Domain (or nothing) and class of all images."""
    found = set()
    for images in (dataset.train, dataset.test):
        domains = torch.full_like(images.labels, -1) if images.domains is None else images.domains
        for domain, label in torch.stack([domains, images.labels]).unique(dim=1).T.tolist():
            found.add((dataset.domains[domain] if domain >= 0 else "", dataset.classes[label]))
    return found


def _renumbered(images: Images, own: Dataset, names: dict[str, tuple[str, ...]]) -> Images:
    def new(values: Tensor | None, what: str) -> Tensor | None:
        place = [names[what].index(name) for name in getattr(own, what)]
        return None if values is None else torch.tensor(place, dtype=torch.int64)[values]

    labels = new(images.labels, "classes")
    assert labels is not None
    return Images(images.pixels, labels, new(images.domains, "domains"), new(images.sites, "sites"))


def _stacked(first: Images, later: Images) -> Images:
    def both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        return None if a is None or b is None else torch.cat([a, b])

    domains, sites = both(first.domains, later.domains), both(first.sites, later.sites)
    return Images(torch.cat([first.pixels, later.pixels]), torch.cat([first.labels, later.labels]), domains, sites)


VALIDATION_WORDS = "on a validation part of the training images; the test images were not looked at"


def validation_part(dataset: Dataset, share: float, seed: int, held_out: str = "drawn") -> Dataset:
    """The data set with ``share`` of each class's training images as its test images. Its own test images are gone.

    Drawn per class and domain with ``seed``, or with ``held_out`` "last" the last ones of each, and of each site: the same call
    gives the same images. Settings that are chosen on this part were not chosen on the test images. E229 if a class has a
    single training image.
    """
    last = held_out == "last"
    group = dataset.train.groups(
        domains=True, sites=last
    )  # images come site by site: the last ones would be one site's
    kept = torch.zeros(len(group), dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    for value in group.unique().tolist():
        places = (group == value).nonzero().flatten()
        count = _num_held_back(places, share, dataset)
        kept[places[-count:] if last else places[torch.randperm(len(places), generator=generator)[:count]]] = True
    note = f"evaluated {VALIDATION_WORDS} ({int(kept.sum())} of {len(kept)} training images, data.validation={share:g})"
    return replace(
        dataset,
        train=dataset.train.select(~kept),
        test=dataset.train.select(kept),
        notes=(*dataset.notes, note),
        split=f"validation={share:g} " + ("last" if last else f"seed={seed}"),
    )


def _num_held_back(places: Tensor, share: float, dataset: Dataset) -> int:
    if len(places) < 2:
        name = dataset.classes[int(dataset.train.labels[places[0]])]
        raise DataError(
            "E229",
            f"class {name!r} has one training image, so none can be held back for validation",
            where="data.validation",
            fix="add images of this class or leave it out",
        )
    return min(len(places) - 1, max(1, round(share * len(places))))


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
    train, test = (_relabelled(images, new_label) for images in (dataset.train, dataset.test))
    if dataset.split == "given":
        train, test = (images.select(_order(images)[0]) for images in (train, test))
    else:
        train, test = _split(_stacked(train, test), hold_out)
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
        found = _stacked(kept.train, kept.test)  # all of it, however it is arranged
    return Dataset("images at the sites", tuple(classes), none, found, transform)


def check_labels(local: Sequence[str], labels: Mapping[str, str | None], where: str) -> None:
    """A map may only speak of classes that are there."""
    for name in labels:
        if name not in local:
            raise DataError(
                "E209",
                f"labels names {name!r}, but no such class is among the images",
                where=where,
                fix=did_you_mean(name, local, "{!r}") or f"classes here: {', '.join(local[:20])}",
            )


def _nothing_known(dataset: Dataset, classes: Sequence[str]) -> DataError:
    return DataError(
        "E210",
        f"none of the classes {', '.join(dataset.classes[:10])} is one of the federation's",
        where=dataset.name,
        why=f"the federation has: {', '.join(classes[:20])}",
        fix="say in labels which class is which (labels: {local name: the federation's name}), or wait for the class",
    )


def _relabelled(images: Images, new_label: Tensor) -> Images:
    labels = new_label[images.labels]
    return Images(images.pixels, labels).select(labels >= 0)


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
