"""Data sets that came one after the other as one data set: the images of a later month lie in a folder of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rescene.core.errors import DataError
from rescene.data.images import Dataset, Images


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
    names = {what: _union(getattr(first, what), getattr(later, what)) for what in ("classes", "domains", "sites")}
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


def _union(first: tuple[str, ...], later: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*first, *later]))


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
