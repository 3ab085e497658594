"""CIFAR-10 and CIFAR-100 in the forms people have them: parquet, the official archives, or folders of PNGs.

Whatever the form, the labels are the official ones (for CIFAR-100 that is the alphabet), the statistics are the data's
own, and a copy that is not complete is refused with the name of what is missing.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rescene.core.errors import DataError
from rescene.data.images import Dataset, Images, Transform
from rescene.data.options import Options
from rescene.data.sources import cifar_archive, cifar_parquet
from rescene.data.sources.cifar_spec import CIFAR10, CIFAR100, Cifar, check_count, incomplete
from rescene.data.sources.image_folder import list_splits, survey
from rescene.data.sources.listing import assemble

SIZE = 32


def read_cifar10(path: Path, options: Options) -> Dataset:
    """CIFAR-10 from its archive or folder."""
    return read(path, options, CIFAR10)


def read_cifar100(path: Path, options: Options) -> Dataset:
    """CIFAR-100 with its 100 fine labels, from its archive or folder."""
    return read(path, options, CIFAR100)


def read(path: Path, options: Options, cifar: Cifar) -> Dataset:
    """Parquet if there is any, else an official archive (packed or not), else train/<class>/* and test/<class>/*."""
    shards = cifar_parquet.find(path)
    if shards:
        return _from_splits(path, cifar, cifar_parquet.read(path, shards, options, cifar))
    container = cifar_archive.find(path, cifar)
    if container:
        return _from_splits(path, cifar, cifar_archive.read(container, cifar))
    if (path / "train").is_dir():
        return _read_folders(path, options, cifar)
    raise DataError(
        "E205",
        f"no {cifar.name} was found in a known form",
        where=str(path),
        fix="parquet files, the official python or binary archive, or PNGs in train/<class>/ and test/<class>/",
    )


def _read_folders(path: Path, options: Options, cifar: Cifar) -> Dataset:
    files = list_splits(survey(path)[0])
    found, expected = {file.label for file in files}, set(cifar.classes)
    if found != expected:
        odd = [f"missing: {c}" for c in sorted(expected - found)] + [f"unknown: {c}" for c in sorted(found - expected)]
        raise incomplete(cifar, path, "class folders " + ", ".join(odd[:6]))
    for split in ("train", "test"):
        check_count(cifar, path, split, sum(file.split == split for file in files))
    return assemble(cifar.name, files, options, classes=cifar.classes, size=SIZE, statistics=cifar.statistics)


def _from_splits(path: Path, cifar: Cifar, splits: dict[str, tuple[Tensor, Tensor]]) -> Dataset:
    """``splits``: train and test -> pixels uint8 [n, 3, 32, 32], labels [n]; already counted by their readers."""
    for split, (_, labels) in splits.items():
        if not 0 <= int(labels.min()) <= int(labels.max()) < len(cifar.classes):
            raise incomplete(cifar, path, f"{split} labels run from {int(labels.min())} to {int(labels.max())}")
    train, test = (Images(pixels, labels.to(torch.int64)) for pixels, labels in (splits["train"], splits["test"]))
    return Dataset(cifar.name, cifar.classes, train, test, Transform(*cifar.statistics, SIZE // 8))
