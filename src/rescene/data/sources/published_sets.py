"""Published data sets in the layouts in which people have them: TinyImageNet-200, Office-31, and the embedded Fashion-MNIST part.

A copy of TinyImageNet or Office-31 with other counts than the published ones is refused (E202).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rescene.core.errors import DataError
from rescene.data.images import Dataset, Images, measure
from rescene.data.sources.image_folder import subfolders, survey
from rescene.data.sources.listing import File, Options, assemble

SIZE = 64  # of TinyImageNet and Office-31

FASHION_MINI = Path(__file__).parent.parent / "embedded" / "fashion-mini.npz"
FASHION_CLASSES = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def read_fashion_mini(path: Path, options: Options) -> Dataset:
    """The embedded default: 600 training and 200 test images of each Fashion-MNIST class (licence in ``embedded/``).

    ``path`` and ``options`` have no say (resizing is done by ``load``).
    """
    with np.load(FASHION_MINI, allow_pickle=False) as arrays:
        train, test = (
            Images(_padded(arrays[f"x_{s}"]), torch.from_numpy(arrays[f"y_{s}"].astype(np.int64)))
            for s in ("train", "test")
        )
    notes = ("28x28 padded to 32x32 with black, grey repeated in three channels",)
    return Dataset("fashion-mini", FASHION_CLASSES, train, test, measure(train.pixels), notes=notes)


def _padded(grey: np.ndarray) -> Tensor:
    return F.pad(torch.from_numpy(grey), (2, 2, 2, 2))[:, None].expand(-1, 3, -1, -1).contiguous()


def read_tinyimagenet(
    path: Path, options: Options, num_classes: int = 200, num_train: int = 500, num_test: int = 10_000
) -> Dataset:
    """``num_train`` images of each class in train/<wnid>/images, ``num_test`` in val/images, which is the test split.

    Its ``test`` has no labels. Classes are in the order of their WordNet ids and carry the first word of ``words.txt`` where
    that is there.
    """
    path = tinyimagenet_root(path)
    ids = _class_ids(path, num_classes)
    names = _class_names(path, ids)
    train = _list_train(path, ids, num_train)
    test = _list_val(path, set(ids), num_test)
    files = [File(image, names[wnid], split) for wnid, image, split in train + test]
    return assemble("tinyimagenet", files, options, classes=tuple(names[wnid] for wnid in ids), size=SIZE)


def tinyimagenet_root(path: Path) -> Path:
    """The folder with ``wnids.txt``: the given one or ``tiny-imagenet-200`` in it."""
    return path / "tiny-imagenet-200" if (path / "tiny-imagenet-200").is_dir() else path


def _class_ids(path: Path, num_classes: int) -> list[str]:
    listed = path / "wnids.txt"
    ids = listed.read_text().split() if listed.is_file() else [folder.name for folder in subfolders(path / "train")]
    if len(ids) != num_classes:
        raise _tinyimagenet_incomplete(path, f"{len(ids)} classes listed, not {num_classes}")
    return sorted(ids)


def _class_names(path: Path, ids: list[str]) -> dict[str, str]:
    """WordNet id -> first word; ids whose word is missing or shared keep the id beside it."""
    words = {}
    if (path / "words.txt").is_file():
        rows = (line.split("\t", 1) for line in (path / "words.txt").read_text(encoding="utf-8").splitlines())
        words = {row[0]: row[1].split(",")[0].strip() for row in rows if len(row) == 2}
    first = {wnid: words.get(wnid, wnid) for wnid in ids}
    shared = Counter(first.values())
    return {wnid: word if shared[word] == 1 else f"{word} ({wnid})" for wnid, word in first.items()}


def _list_train(path: Path, ids: list[str], expected: int) -> list[tuple[str, Path, str]]:
    rows = []
    for wnid in ids:
        folder = path / "train" / wnid / "images"
        images = survey(folder)[0].images if folder.is_dir() else ()
        if len(images) != expected:
            raise _tinyimagenet_incomplete(path, f"train/{wnid}/images holds {len(images)} images, not {expected}")
        rows += [(wnid, image, "train") for image in images]
    return rows


def _list_val(path: Path, ids: set[str], expected: int) -> list[tuple[str, Path, str]]:
    notes = path / "val" / "val_annotations.txt"
    if not notes.is_file():
        raise _tinyimagenet_incomplete(path, "val/val_annotations.txt is missing")
    rows = [line.split("\t") for line in notes.read_text().splitlines() if line.strip()]
    known = [(row[1], path / "val" / "images" / row[0], "test") for row in rows if len(row) > 1 and row[1] in ids]
    found = [row for row in known if row[1].is_file()]
    if len(found) != expected:
        raise _tinyimagenet_incomplete(path, f"val holds {len(found)} labelled images, not {expected}")
    return found


def _tinyimagenet_incomplete(path: Path, why: str) -> DataError:
    return DataError("E202", "TinyImageNet is incomplete", where=str(path), why=why, fix="copy or unpack it again")


OFFICE31_IMAGES = {"amazon": 2817, "dslr": 498, "webcam": 795}  # also the order in which the domains arrive


def read_office31(
    path: Path, options: Options, num_images: dict[str, int] = OFFICE31_IMAGES, num_classes: int = 31
) -> Dataset:
    """Both layouts, <domain>/<class>/* and <domain>/images/<class>/*.

    It has no test set. 20 % of each domain and class are held out, with nearest rounding, which gives the paper's 563 / 99 / 158
    test images.
    """
    path = office31_root(path)
    files = [file for domain in num_images for file in _list_domain(path, domain)]
    for domain, expected in num_images.items():
        labels = [file.label for file in files if file.domain == domain]
        if (len(labels), len(set(labels))) != (expected, num_classes):
            raise _office31_incomplete(
                path, f"{domain}: {len(labels)} images in {len(set(labels))} classes, not {expected} in {num_classes}"
            )
    dataset = assemble("office31", files, options, domains=tuple(num_images), size=SIZE)
    return replace(dataset, notes=(*dataset.notes, "the original repeats some Amazon images exactly; kept"))


def office31_root(path: Path) -> Path:
    """The folder that holds the domains: the given one or an only child of it."""
    inside = subfolders(path)
    return inside[0] if len(inside) == 1 and inside[0].name not in OFFICE31_IMAGES else path


def _list_domain(path: Path, domain: str) -> list[File]:
    if not (path / domain).is_dir():
        raise _office31_incomplete(path, f"the folder {domain} is missing")
    folders = survey(path / domain)[0].inner().folders
    return [File(image, folder.name, "", domain) for folder in folders for image in folder.images]


def _office31_incomplete(path: Path, why: str) -> DataError:
    fix = "copy the data set again; to use it as it is, data.name=folder data.layout=domains"
    return DataError("E202", "Office-31 is incomplete", where=str(path), why=why, fix=fix)
