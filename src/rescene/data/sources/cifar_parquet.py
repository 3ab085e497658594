"""CIFAR in the Hugging Face parquet layout: an image column (bytes of a PNG or WebP) and a label column, in shards."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rescene.core.errors import DataError
from rescene.data.options import Options
from rescene.data.sources.cifar_spec import Cifar, check_count, incomplete
from rescene.data.sources.decode import decode

_SHARD = re.compile(r"(?P<split>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.parquet")
_IMAGE_COLUMNS = ("img", "image")
Shards = dict[str, list[Path]]


def find(path: Path) -> Shards:
    """split -> files in name order; a file's split is the start of its name or its folder. Empty without parquet."""
    folder = path.parent if path.suffix == ".parquet" else path
    files = sorted(folder.rglob("*.parquet")) if folder.is_dir() else []
    shards: Shards = {}
    for file in files:
        if any(part.startswith(".") for part in file.relative_to(folder).parts):
            continue
        split = next((s for s in ("train", "test") if file.name.startswith(s) or file.parent.name == s), None)
        if split:
            shards.setdefault(split, []).append(file)
    return shards


def columns(path: Path) -> list[str]:
    """Column names of a parquet file."""
    return list(open_parquet(path).schema_arrow.names)


def read(path: Path, shards: Shards, options: Options, cifar: Cifar) -> dict[str, tuple[Tensor, Tensor]]:
    """train and test -> pixels uint8 [n, 3, 32, 32] and labels [n]."""
    for split in ("train", "test"):
        if split not in shards:
            raise incomplete(cifar, path, f"there is no parquet file of the {split} split")
        missing = missing_shards(shards[split])
        if missing:
            raise incomplete(cifar, path, f"missing: {', '.join(missing)}")
        check_count(cifar, path, split, sum(open_parquet(file).metadata.num_rows for file in shards[split]))
    return {split: _read_split(shards[split], options, cifar) for split in ("train", "test")}


def missing_shards(files: Sequence[Path]) -> list[str]:
    """Names that the pattern <split>-00000-of-00002.parquet promises and that are not there."""
    present = {file.name for file in files}
    promised = set()
    for match in filter(None, map(_SHARD.fullmatch, present)):
        total = int(match["total"])
        promised |= {f"{match['split']}-{i:05d}-of-{total:05d}.parquet" for i in range(total)}
    return sorted(promised - present)


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


def open_parquet(path: Path):  # type: ignore[no-untyped-def]  # pyarrow has no stubs and is imported only here
    """A parquet file; one that cannot be read is E202."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as problem:
        raise DataError(
            "E202", f"cannot read {path.name}", where=str(path), why=str(problem), fix="copy it again"
        ) from problem
