"""What a complete CIFAR-10 or CIFAR-100 looks like, and how to say that a copy is not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rescene.core.errors import DataError
from rescene.data.images import Channels


@dataclass(frozen=True)
class Cifar:
    """One of the two sets; ``classes`` in the official label order. ``columns``: possible label columns of the parquet
    form. Of the archives: ``train_files`` and ``test_files`` (the binary form adds .bin), ``key`` of the labels in the
    pickles, ``label_bytes`` before the pixels of a binary record, the last of them being the label."""

    name: str
    classes: tuple[str, ...]
    statistics: tuple[Channels, Channels]
    columns: tuple[str, ...]
    train_files: tuple[str, ...]
    test_files: tuple[str, ...]
    key: str
    label_bytes: int
    num_train: int = 50_000
    num_test: int = 10_000


CIFAR10 = Cifar(
    name="cifar10",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    statistics=((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    columns=("label", "labels"),
    train_files=tuple(f"data_batch_{i}" for i in range(1, 6)),
    test_files=("test_batch",),
    key="labels",
    label_bytes=1,
)
_CIFAR100_NAMES = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
    castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
    elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard
    lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
    pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark
    shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone
    television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
CIFAR100 = Cifar(
    name="cifar100",
    classes=tuple(_CIFAR100_NAMES.split()),
    statistics=((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    columns=("fine_label", "label"),
    train_files=("train",),
    test_files=("test",),
    key="fine_labels",
    label_bytes=2,
)


def check_count(cifar: Cifar, path: Path, split: str, found: int) -> None:
    """Refuse a split with another number of images than the official one."""
    expected = cifar.num_train if split == "train" else cifar.num_test
    if found != expected:
        raise incomplete(cifar, path, f"the {split} split holds {found:,} images, not {expected:,}")


def incomplete(cifar: Cifar, path: Path, why: str) -> DataError:
    """The error for a copy of the data set with parts missing (E202)."""
    fix = "copy it again; to use the images as they are: data.name=folder (class folders) or data.name=parquet"
    return DataError("E202", f"{cifar.name} is incomplete", where=str(path), why=why, fix=fix)
