"""Office-31: 31 classes in three domains at 64 px. It has no test set: 20 % of each domain and class are held out, with
nearest rounding, which gives the paper's 563 / 99 / 158 test images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rescene.core.errors import DataError
from rescene.data.images import Dataset
from rescene.data.reading import Options
from rescene.data.sources.image_folder import subfolders, survey
from rescene.data.sources.listing import File, assemble

NUM_IMAGES = {"amazon": 2817, "dslr": 498, "webcam": 795}  # also the order in which the domains arrive
NUM_CLASSES = 31
SIZE = 64


def read(
    path: Path, options: Options, num_images: dict[str, int] = NUM_IMAGES, num_classes: int = NUM_CLASSES
) -> Dataset:
    """Both layouts, <domain>/<class>/* and <domain>/images/<class>/*; a set with other counts is refused (E202)."""
    path = root(path)
    files = [file for domain in num_images for file in _list_domain(path, domain)]
    for domain, expected in num_images.items():
        labels = [file.label for file in files if file.domain == domain]
        if (len(labels), len(set(labels))) != (expected, num_classes):
            raise incomplete(
                path, f"{domain}: {len(labels)} images in {len(set(labels))} classes, not {expected} in {num_classes}"
            )
    dataset = assemble("office31", files, options, domains=tuple(num_images), size=SIZE)
    return replace(dataset, notes=(*dataset.notes, "the original repeats some Amazon images exactly; kept"))


def root(path: Path) -> Path:
    """The folder that holds the domains: the given one or an only child of it."""
    inside = subfolders(path)
    return inside[0] if len(inside) == 1 and inside[0].name not in NUM_IMAGES else path


def _list_domain(path: Path, domain: str) -> list[File]:
    if not (path / domain).is_dir():
        raise incomplete(path, f"the folder {domain} is missing")
    folders = survey(path / domain)[0].inner().folders
    return [File(image, folder.name, "", domain) for folder in folders for image in folder.images]


def incomplete(path: Path, why: str) -> DataError:
    """The error for a copy of the data set with parts missing (E202)."""
    fix = "copy the data set again; to use it as it is, data.name=folder data.layout=domains"
    return DataError("E202", "Office-31 is incomplete", where=str(path), why=why, fix=fix)
