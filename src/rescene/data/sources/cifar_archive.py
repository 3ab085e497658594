"""The official archives, packed (.tar.gz) or unpacked: pickled batches ("python") or raw records ("binary").

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
from rescene.data.sources.cifar_spec import Cifar, check_count, incomplete
from rescene.data.sources.decode import shown
from rescene.data.sources.image_folder import subfolders

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


def find(path: Path, cifar: Cifar) -> Container | None:
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


def read(container: Container, cifar: Cifar) -> dict[str, tuple[Tensor, Tensor]]:
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
