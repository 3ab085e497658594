"""A CSV that lists images: columns path,label and optionally split, domain; paths are relative to the CSV."""

from __future__ import annotations

import csv
from pathlib import Path

from rescene.data.images import Dataset
from rescene.data.options import Options
from rescene.data.sources.folder import TEST_NAMES
from rescene.data.sources.listing import File, assemble, check_inside
from rescene.errors import DataError, did_you_mean

REQUIRED, OPTIONAL = ("path", "label"), ("split", "domain")


def read(path: Path, options: Options) -> Dataset:
    """Class order is alphabetical (by value if all are numbers); domains arrive in the order of their first row."""
    files = list_files(path)
    domains = tuple(dict.fromkeys(file.domain for file in files if file.domain))
    if domains and not all(file.domain for file in files):
        raise _bad(path, "some rows have a domain and some have none", fix="fill the column domain in every row")
    check_inside(path.parent, files, options)
    return assemble(path.stem, files, options, domains=domains)


def list_files(path: Path) -> list[File]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            rows = list(csv.reader(stream))
    except (UnicodeDecodeError, csv.Error) as problem:
        raise _bad(path, f"not a readable CSV: {problem}", fix="save it as UTF-8 with commas") from problem
    rows = [row for row in rows if any(cell.strip() for cell in row)]
    column = _columns(path, rows[0] if rows else [])
    if len(rows) < 2:
        raise _bad(path, "no row below the header", fix="add one row per image")
    return [_file(path, number, row, column) for number, row in enumerate(rows[1:], start=2)]


def is_manifest(path: Path) -> bool:
    """Whether the first line names the required columns."""
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as stream:
        header = next(csv.reader(stream), [])
    return set(REQUIRED) <= {cell.strip().lower() for cell in header}


def _columns(path: Path, header: list[str]) -> dict[str, int]:
    column = {cell.strip().lower(): i for i, cell in enumerate(header)}
    for name in REQUIRED:
        if name not in column:
            close = did_you_mean(name, column)
            hint = f" (is it {close!r}?)" if close else ""
            raise _bad(
                path,
                f"no column {name!r}{hint}; found: {', '.join(header) or 'nothing'}",
                fix="path,label[,split][,domain]",
            )
    return column


def _file(path: Path, number: int, row: list[str], column: dict[str, int]) -> File:
    cells = {name: row[i].strip() if i < len(row) else "" for name, i in column.items()}
    if not cells["path"] or not cells["label"]:
        raise _bad(
            path, f"row {number} has no {'path' if not cells['path'] else 'label'}", fix="fill or remove the row"
        )
    split = cells.get("split", "").lower()
    split = "test" if split in TEST_NAMES else split
    if "split" in column and split not in ("train", "test"):
        raise _bad(
            path, f"row {number}: split is {cells['split']!r}", fix="train or test in every row, or no such column"
        )
    return File(path.parent / cells["path"], cells["label"], split, cells.get("domain", ""))


def _bad(path: Path, why: str, *, fix: str) -> DataError:
    return DataError("E206", "cannot use the CSV", where=str(path), why=why, fix=fix)
