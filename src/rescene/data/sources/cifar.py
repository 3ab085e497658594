"""CIFAR-10 and CIFAR-100 in the forms people have them: parquet, the official archives, or folders of PNGs.

Whatever the form, the labels are the official ones (for CIFAR-100 that is the alphabet), the statistics are the data's
own, and a copy that is not complete is refused with the name of what is missing.

    parquet    as on Hugging Face: an image column (bytes of a PNG or WebP) and a label column, in shards
    archives   packed (.tar.gz) or unpacked: pickled batches ("python") or raw records ("binary")

Pickles can run code when they are opened, and an array in one can hold pointers of its maker's choice. These are read by an
unpickler that calls nothing: what stands for an array there is only noted, and its bytes are then read as integers.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from rescene.core.errors import DataError
from rescene.data.images import Channels, Dataset, Images, Transform
from rescene.data.sources.decode import decode, shown
from rescene.data.sources.image_folder import list_splits, subfolders, survey
from rescene.data.sources.image_table import missing_shards, open_parquet, parquet_below
from rescene.data.sources.listing import Options, assemble


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


SIZE = 32


def read(path: Path, options: Options, cifar: Cifar) -> Dataset:
    """Parquet if there is any, else an official archive (packed or not), else train/<class>/* and test/<class>/*."""
    shards = find_parquet(path)
    if shards:
        return _from_splits(path, cifar, read_parquet(path, shards, options, cifar))
    container = find_archive(path, cifar)
    if container:
        return _from_splits(path, cifar, read_archive(container, cifar))
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


_IMAGE_COLUMNS = ("img", "image")
Shards = dict[str, list[Path]]


def find_parquet(path: Path) -> Shards:
    """split -> files in name order; a file's split is the start of its name or its folder. Empty without parquet."""
    folder = path.parent if path.suffix == ".parquet" else path
    shards: Shards = {}
    for file in parquet_below(folder) if folder.is_dir() else []:
        split = next((s for s in ("train", "test") if file.name.startswith(s) or file.parent.name == s), None)
        if split:
            shards.setdefault(split, []).append(file)
    return shards


def read_parquet(path: Path, shards: Shards, options: Options, cifar: Cifar) -> dict[str, tuple[Tensor, Tensor]]:
    """train and test -> pixels uint8 [n, 3, 32, 32] and labels [n]."""
    for split in ("train", "test"):
        if split not in shards:
            raise incomplete(cifar, path, f"there is no parquet file of the {split} split")
        missing = missing_shards(shards[split])
        if missing:
            raise incomplete(cifar, path, f"missing: {', '.join(missing)}")
        check_count(cifar, path, split, sum(open_parquet(file).metadata.num_rows for file in shards[split]))
    return {split: _read_split(shards[split], options, cifar) for split in ("train", "test")}


def _read_split(files: list[Path], options: Options, cifar: Cifar) -> tuple[Tensor, Tensor]:
    data: list[bytes] = []
    names: list[str] = []
    labels: list[int] = []
    for file in files:
        rows = open_parquet(file)
        image, label = (_column(file, rows.schema_arrow.names, wanted) for wanted in (_IMAGE_COLUMNS, cifar.columns))
        table = rows.read(columns=[image, label])
        cells = table[image].to_pylist()
        data += [cell["bytes"] if isinstance(cell, dict) else cell for cell in cells]
        names += [f"{file} row {i}" for i in range(len(cells))]
        labels += table[label].to_pylist()
    decoded = decode(data, names, 32, skip_unreadable=options.skip_unreadable)
    return decoded.pixels, torch.tensor(labels)[decoded.kept]


def _column(file: Path, present: list[str], wanted: tuple[str, ...]) -> str:
    for name in wanted:
        if name in present:
            return name
    why = f"columns: {', '.join(present)}"
    raise DataError(
        "E205", f"no column {' or '.join(wanted)}", where=str(file), why=why, fix="check the data set's name"
    )


_SHAPE = (3, 32, 32)
_NUM_VALUES = 3 * 32 * 32
_MOST_BYTES = 2**28  # of one batch; the largest official one has 155 MB
_ALLOWED = (
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
)
_INTEGERS = {f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)}


@dataclass(frozen=True)
class Container:
    """Where the batches lie: base name -> a function that reads that file's bytes."""

    path: Path
    members: dict[str, Callable[[], bytes]]

    def has(self, names: tuple[str, ...]) -> bool:
        """Whether one of these files is inside."""
        return any(name in self.members for name in names)


def find_archive(path: Path, cifar: Cifar) -> Container | None:
    """The first folder or archive at or just below ``path`` with at least one training batch in it."""
    if path.is_file():
        places = [path]
    else:
        places = [path, *subfolders(path), *sorted(path.glob("*.tar.gz")), *sorted(path.glob("*.tgz"))]
    for place in places:
        container = _open_folder(place, cifar) if place.is_dir() else _open_tar(place, cifar)
        if container.has(cifar.train_files + _binary(cifar.train_files)):
            return container
    return None


def read_archive(container: Container, cifar: Cifar) -> dict[str, tuple[Tensor, Tensor]]:
    """train and test -> pixels uint8 [n, 3, 32, 32] and labels [n]."""
    binary = container.has(_binary(cifar.train_files))
    splits = {}
    for split, names in (("train", cifar.train_files), ("test", cifar.test_files)):
        names = _binary(names) if binary else names
        missing = [name for name in names if name not in container.members]
        if missing:
            raise incomplete(cifar, container.path, f"missing: {', '.join(missing)}")
        parse = _parse_binary if binary else _parse_pickle
        parts = [parse(container.members[name](), cifar, container.path / name) for name in names]
        pixels, labels = (torch.cat(values) for values in zip(*parts, strict=True))
        check_count(cifar, container.path, split, len(labels))
        splits[split] = (pixels, labels)
    return splits


def _binary(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{name}.bin" for name in names)


def _open_folder(path: Path, cifar: Cifar) -> Container:
    """Asks for the few names that matter: the folder may be anybody's, with a hundred thousand images in it."""
    files = [path / name for name in _batches(cifar)]
    return Container(path, {file.name: file.read_bytes for file in files if file.is_file()})


def _batches(cifar: Cifar) -> tuple[str, ...]:
    names = cifar.train_files + cifar.test_files
    return names + _binary(names)


def _open_tar(path: Path, cifar: Cifar) -> Container:
    """Read in one pass (each seek in a .tar.gz unpacks it from the start); nothing is unpacked to disk, and only batches are
    kept: the archive may be anybody's."""
    members: dict[str, Callable[[], bytes]] = {}
    try:
        if tarfile.is_tarfile(path):
            with tarfile.open(path) as archive:
                for member in archive:
                    name = PurePosixPath(member.name).name
                    if not member.isfile() or name not in _batches(cifar):
                        continue
                    if member.size > _MOST_BYTES:
                        raise tarfile.ReadError(
                            f"{shown(name)} has {member.size:,} bytes, more than any batch of CIFAR"
                        )
                    stream = archive.extractfile(member)
                    if stream:
                        members[name] = partial(bytes, stream.read())
    except (tarfile.TarError, zlib.error, EOFError, OSError) as problem:
        raise _damaged(path, problem) from problem
    return Container(path, members)


def _parse_binary(data: bytes, cifar: Cifar, where: Path) -> tuple[Tensor, Tensor]:
    record = cifar.label_bytes + _NUM_VALUES
    if len(data) % record:
        raise incomplete(cifar, where, f"{len(data):,} bytes is not a whole number of {record}-byte records")
    rows = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).reshape(-1, record).copy())
    return rows[:, cifar.label_bytes :].reshape(-1, *_SHAPE), rows[:, cifar.label_bytes - 1].long()


class _Noted:
    """Stands for a NumPy array or type of a pickle: what it would be made of. Nothing of NumPy is called or built."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = ()

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def integers(self) -> np.ndarray:
        """The array, if it is one of integers of a fixed size and its bytes are there."""
        _, shape, kind, column_first, data = self.state
        code, order = _text(kind.args[0]), cast(Literal["|", "<", ">"], _text(kind.state[1]))
        if code not in _INTEGERS or order not in ("|", "<", ">") or not isinstance(data, bytes):
            raise pickle.UnpicklingError(f"an array of {shown(repr(code))}, where plain integers belong")
        if len(data) != math.prod(shape) * int(code[1:]):
            raise pickle.UnpicklingError(f"{len(data):,} bytes for an array of shape {shape}")
        return np.frombuffer(data, dtype=np.dtype(code).newbyteorder(order)).reshape(
            shape, order="F" if column_first else "C"
        )


class _NothingCalled(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which image data does not need")
        return type("_Noted", (_Noted,), {})  # a new one each time: a pickle may set attributes of what it is given


def _unpickle(data: bytes) -> Any:
    """Plain values, with ``_Noted`` for arrays."""
    for count, (opcode, arg, _) in enumerate(pickletools.genops(data)):
        if opcode.name.endswith("PUT") and isinstance(arg, int) and arg > count:  # a place far out would take memory
            raise pickle.UnpicklingError("its memory is numbered as no program does")
    return _NothingCalled(io.BytesIO(data), encoding="bytes").load()


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _parse_pickle(data: bytes, cifar: Cifar, where: Path) -> tuple[Tensor, Tensor]:
    try:
        batch = {_text(key): value for key, value in _unpickle(data).items()}
        pixels = batch["data"].integers().reshape(-1, *_SHAPE)
        labels = batch[cifar.key]
        labels = (labels.integers() if isinstance(labels, _Noted) else np.array(list(map(int, labels)))).astype(
            np.int64
        )
    except Exception as problem:  # a damaged pickle can fail in any way
        raise _damaged(where, problem) from problem
    if pixels.dtype != np.uint8 or labels.shape != pixels.shape[:1]:
        raise _damaged(where, ValueError(f"{len(pixels)} pictures of {pixels.dtype}, labels {labels.shape}"))
    return torch.from_numpy(pixels.copy()), torch.from_numpy(labels)


def _damaged(path: Path, problem: Exception) -> DataError:
    why = str(problem) or type(problem).__name__
    return DataError(
        "E202", f"cannot read {path.name}", where=str(path), why=why, fix="download or copy the file again"
    )
