"""The official archives, packed (.tar.gz) or unpacked: pickled batches ("python") or raw records ("binary").

Pickles can run code when they are opened, so these are read by an unpickler that only knows arrays and plain values.
"""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rescene.data.sources.cifar_spec import Cifar, check_count, incomplete
from rescene.data.sources.folder import subfolders
from rescene.errors import DataError

_SHAPE = (3, 32, 32)
_NUM_VALUES = 3 * 32 * 32
_RECONSTRUCT = np.empty(0).__reduce__()[0]  # NumPy's own, wherever this NumPy keeps it
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
}


@dataclass(frozen=True)
class Container:
    """Where the batches lie: base name -> a function that reads that file's bytes."""

    path: Path
    members: dict[str, Callable[[], bytes]]

    def has(self, names: tuple[str, ...]) -> bool:
        return any(name in self.members for name in names)


def find(path: Path, cifar: Cifar) -> Container | None:
    """The first folder or archive at or just below ``path`` with at least one training batch in it."""
    if path.is_file():
        places = [path]
    else:
        places = [path, *subfolders(path), *sorted(path.glob("*.tar.gz")), *sorted(path.glob("*.tgz"))]
    for place in places:
        container = _open_folder(place, cifar) if place.is_dir() else _open_tar(place)
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
    names = cifar.train_files + cifar.test_files
    files = [path / name for name in names + _binary(names)]
    return Container(path, {file.name: file.read_bytes for file in files if file.is_file()})


def _open_tar(path: Path) -> Container:
    """Read in one pass (each seek in a .tar.gz unpacks it from the start); nothing is unpacked to disk."""
    members: dict[str, Callable[[], bytes]] = {}
    try:
        if tarfile.is_tarfile(path):
            with tarfile.open(path) as archive:
                for member in archive:
                    stream = archive.extractfile(member) if member.isfile() else None
                    if stream:
                        members[PurePosixPath(member.name).name] = partial(bytes, stream.read())
    except (tarfile.TarError, zlib.error, EOFError, OSError) as problem:
        raise _damaged(path, problem) from problem
    return Container(path, members)


def _parse_binary(data: bytes, cifar: Cifar, where: Path) -> tuple[Tensor, Tensor]:
    record = cifar.label_bytes + _NUM_VALUES
    if len(data) % record:
        raise incomplete(cifar, where, f"{len(data):,} bytes is not a whole number of {record}-byte records")
    rows = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).reshape(-1, record).copy())
    return rows[:, cifar.label_bytes :].reshape(-1, *_SHAPE), rows[:, cifar.label_bytes - 1].long()


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which image data does not need")
        return _ALLOWED[module, name]


def _parse_pickle(data: bytes, cifar: Cifar, where: Path) -> tuple[Tensor, Tensor]:
    try:
        raw = _ArraysOnly(io.BytesIO(data), encoding="bytes").load()
        batch = {key.decode() if isinstance(key, bytes) else key: value for key, value in raw.items()}
        pixels = np.asarray(batch["data"]).reshape(-1, *_SHAPE)
        labels = np.asarray(batch[cifar.key], dtype=np.int64)
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
