"""A validation part: some of the training images in the place of the test images, which nobody then sees."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rescene.core.errors import DataError
from rescene.data.images import Dataset

WORDS = "on a validation part of the training images; the test images were not looked at"


def validation_part(dataset: Dataset, share: float, seed: int) -> Dataset:
    """The data set with ``share`` of each class's training images as its test images. Its own test images are gone.

    Drawn per class and domain with ``seed``: the same call gives the same images. Settings that are chosen on this part were
    not chosen on the test images. E229 if a class has a single training image.
    """
    group = dataset.train.labels.cpu()
    if dataset.train.domains is not None:
        group = group * (int(dataset.train.domains.max()) + 1) + dataset.train.domains.cpu()
    kept = torch.zeros(len(group), dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    for value in group.unique().tolist():
        places = (group == value).nonzero().flatten()
        kept[_drawn(places, share, generator, dataset)] = True
    note = f"evaluated {WORDS} ({int(kept.sum())} of {len(kept)} training images, data.validation={share:g})"
    return replace(
        dataset,
        train=dataset.train.select(~kept),
        test=dataset.train.select(kept),
        notes=(*dataset.notes, note),
        split=f"validation={share:g} seed={seed}",
    )


def _drawn(places: Tensor, share: float, generator: torch.Generator, dataset: Dataset) -> Tensor:
    if len(places) < 2:
        name = dataset.classes[int(dataset.train.labels[places[0]])]
        raise DataError(
            "E229",
            f"class {name!r} has one training image, so none can be held back for validation",
            where="data.validation",
            fix="add images of this class or leave it out",
        )
    count = min(len(places) - 1, max(1, round(share * len(places))))
    return places[torch.randperm(len(places), generator=generator)[:count]]
