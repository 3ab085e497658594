"""A table that lists images, one row each: a CSV or parquet files, with columns of any name.

A column holds paths (relative to the table) or pictures themselves (bytes, or Hugging Face's ``{bytes, path}``); another one
holds labels; others may hold split, domain and site. Columns are found by their usual names, or named in ``data.columns``.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rescene.core.documents import parse_json
from rescene.core.errors import ConfigError, DataError, closest, command, did_you_mean
from rescene.data.images import Dataset
from rescene.data.sources.decode import EXTENSIONS, shown
from rescene.data.sources.image_folder import TEST_NAMES
from rescene.data.sources.listing import File, Options, assemble, check_inside, class_order

ROLES: dict[str, tuple[str, ...]] = {  # what a column is for, and how people call it; the first that is there counts
    "path": (
        *("path", "file", "filename", "file_name", "filepath", "file_path"),
        *("image_path", "image", "img", "picture", "photo"),
    ),
    "label": ("label", "labels", "class", "class_name", "category", "target", "y"),
    "split": ("split", "subset"),
    "domain": ("domain",),
    "site": ("site", "site_id", "client", "client_id", "hospital", "centre", "center"),
}
REQUIRED = ("path", "label")
_SHARD = re.compile(r"(?P<split>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.parquet")
_TRAIN_NAMES = ("train", "training")
_TEST_NAMES = (*TEST_NAMES, "testing")


@dataclass(frozen=True)
class Table:
    """Columns as lists, by name. ``first``: number of the first row, as people count; ``labels``: names of a column's numbers."""

    file: Path
    columns: Mapping[str, Sequence[Any]]
    first: int
    labels: Mapping[str, Sequence[str]]
    split: str = ""  # of all rows, where the name of the file tells it

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))


def read_csv(path: Path, options: Options) -> Dataset:
    """Class order is alphabetical (by value if all are numbers); domains and sites come in the order of their first row."""
    return _dataset(path, [_csv_table(path)], options)


def read_parquet(path: Path, options: Options) -> Dataset:
    """One file, or all below a folder: shards whose names begin with a split, as Hugging Face writes them."""
    files, left_out = parquet_files(path)
    if missing := missing_shards(files):
        raise DataError(
            "E202", "parquet files are missing", where=str(path), why=", ".join(missing), fix="copy them, too"
        )
    tables = [_parquet_table(file) for file in files]
    if len({table.split for table in tables}) == 1:
        tables = [replace(table, split="") for table in tables]  # one split alone: a part of it is held out
    dataset = _dataset(path, tables, options)
    note = (f"not read: {', '.join(left_out)}, because there is a test split",) if left_out else ()
    return replace(dataset, notes=(*note, *dataset.notes))


def column_of(path: Path, role: str, columns: Mapping[str, str]) -> list[str]:
    """The values of one column, such as the sites; empty if there is none."""
    values: list[str] = []
    for file in [path] if path.suffix != ".parquet" and path.is_file() else parquet_files(path)[0]:
        table = _csv_table(file) if file.suffix != ".parquet" else _parquet_table(file, names_only=True)
        name = _columns(table, columns).get(role)
        if name and file.suffix == ".parquet":
            table = _parquet_table(file, only=name)
        values += [str(value) for value in table.columns[name] if value not in (None, "")] if name else []
    return values


def parquet_files(path: Path) -> tuple[list[Path], list[str]]:
    """The files to read, and names of validation files that stand beside test files."""
    if path.is_file():
        return [path], []
    found = parquet_below(path)
    extra = [file for file in found if _split_of(file) == "test" and not _begins(file, ("test",))]
    tested = any(_begins(file, ("test",)) for file in found)
    return [file for file in found if not (tested and file in extra)], [f.name for f in extra] if tested else []


def parquet_below(folder: Path) -> list[Path]:
    """All parquet files in a folder and below it that are not hidden, in name order."""
    found = sorted(folder.rglob("*.parquet"))
    return [file for file in found if not any(part.startswith(".") for part in file.relative_to(folder).parts)]


def is_listing(path: Path) -> bool:
    """Whether a CSV has columns for paths and labels by the names that everybody uses, or its second line names a picture."""
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as stream:
        rows = csv.reader(stream, delimiter=_delimiter(path))
        header, first = next(rows, []), next(rows, [])
    return set(REQUIRED) <= _guessed([cell.strip() for cell in header]).keys() or any(map(_is_picture, first))


def _is_picture(value: Any) -> bool:
    """Whether a cell holds a picture or its path."""
    if isinstance(value, str):
        return Path(value.strip()).suffix.lower() in EXTENSIONS
    return isinstance(value, bytes) or (isinstance(value, dict) and "bytes" in value)


def _begins(file: Path, names: Sequence[str]) -> bool:
    """Whether a file's name begins with one of these, or its folder is called so."""
    starts = tuple(f"{name}{mark}" for name in names for mark in "-_.")
    return file.name.lower().startswith(starts) or file.parent.name.lower() in names


def _split_of(file: Path) -> str:
    """train, test, or nothing: from the name of the file or its folder."""
    return "train" if _begins(file, _TRAIN_NAMES) else "test" if _begins(file, _TEST_NAMES) else ""


def _csv_table(path: Path) -> Table:
    try:
        with path.open(newline="", encoding="utf-8-sig") as stream:
            rows = list(csv.reader(stream, delimiter=_delimiter(path)))
    except (UnicodeDecodeError, csv.Error) as problem:
        raise _bad(path, f"not a readable CSV: {problem}", fix="save it as UTF-8 with commas") from problem
    rows = [row for row in rows if any(cell.strip() for cell in row)]
    header = [cell.strip() for cell in rows[0]] if rows else []
    columns = {name: [row[i].strip() if i < len(row) else "" for row in rows[1:]] for i, name in enumerate(header)}
    return Table(path, columns, 2, {})


def _delimiter(path: Path) -> str:
    """A comma, unless the first line has none and has semicolons (as spreadsheets write in many countries) or tabs."""
    with path.open(encoding="utf-8-sig", errors="replace") as stream:
        header = stream.readline(100_000)
    return next((mark for mark in (",", ";", "\t") if mark in header), ",")


def _parquet_table(path: Path, only: str | None = None, names_only: bool = False) -> Table:
    stored = open_parquet(path)
    if names_only:
        return Table(path, dict.fromkeys(stored.schema_arrow.names, ()), 0, {})
    table = stored.read(columns=None if only is None else [only])
    columns = {name: table[name].to_pylist() for name in table.column_names}
    return Table(path, columns, 0, class_names(path), _split_of(path))


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


def missing_shards(files: Sequence[Path]) -> list[str]:
    """Names that the pattern <split>-00000-of-00002.parquet promises and that are not there."""
    present = {file.name for file in files}
    promised = set()
    for match in filter(None, map(_SHARD.fullmatch, present)):
        total = int(match["total"])
        promised |= {f"{match['split']}-{i:05d}-of-{total:05d}.parquet" for i in range(total)}
    return sorted(promised - present)


def column_names(path: Path) -> list[str]:
    """Column names of a parquet file."""
    return list(open_parquet(path).schema_arrow.names)


def class_names(path: Path) -> dict[str, list[str]]:
    """Names of the numbers in a column, where Hugging Face's ``datasets`` has written them into the file."""
    metadata = open_parquet(path).schema_arrow.metadata or {}
    try:
        about = parse_json(metadata.get(b"huggingface", b"{}").decode("utf-8", "replace"), "the file's metadata")
        features = about["info"]["features"]
        return {name: [str(n) for n in own["names"]] for name, own in features.items() if "names" in own}
    except (ConfigError, KeyError, TypeError, AttributeError):
        return {}


def _dataset(path: Path, tables: Sequence[Table], options: Options) -> Dataset:
    found = [_columns(table, dict(options.columns)) for table in tables]
    files = [
        _file(table, row, column) for table, column in zip(tables, found, strict=True) for row in range(len(table))
    ]
    if not files:
        raise _bad(path, "no row below the header", fix="add one row per image")
    domains, sites = (
        tuple(dict.fromkeys(filter(None, (getattr(f, key) for f in files)))) for key in ("domain", "site")
    )
    if domains and not all(file.domain for file in files):
        raise _bad(path, "some rows have a domain and some have none", fix="fill the column domain in every row")
    if sites and not all(file.site for file in files if file.split != "test"):
        raise _bad(
            path, "some training rows have a site and some have none", fix="fill the column of sites in every row"
        )
    check_inside(path if path.is_dir() else path.parent, files, options)
    classes, sites = _named_classes(tables[0], found[0], files), class_order(sites)
    dataset = assemble(path.stem, files, options, classes=classes, domains=domains, sites=sites, where=shown(path))
    return replace(dataset, notes=(*_mapping(found[0]), *dataset.notes))


def _named_classes(table: Table, column: Mapping[str, str], files: Sequence[File]) -> tuple[str, ...] | None:
    """The order of the names in the file's metadata, without those that no row has."""
    there = {file.label for file in files}
    return tuple(name for name in table.labels.get(column["label"], ()) if name in there) or None


def _guessed(header: Sequence[str]) -> dict[str, str]:
    """Role -> column, by the names that people use.

    >>> _guessed(["File_Name", "category", "x"])
    {'path': 'File_Name', 'label': 'category'}
    """
    present = {name.lower(): name for name in reversed(header)}
    hits = {role: next((present[name] for name in names if name in present), None) for role, names in ROLES.items()}
    return {role: name for role, name in hits.items() if name is not None}


def _columns(table: Table, asked: Mapping[str, str]) -> dict[str, str]:
    """Role -> column: as asked for, else guessed."""
    header = list(table.columns)
    for role, name in asked.items():
        if role not in ROLES:
            raise _bad(table.file, f"a column cannot be the {role!r}", fix=f"one of: {', '.join(ROLES)}")
        if name not in header:
            fix = did_you_mean(name, header, "{!r}") or f"columns here: {', '.join(map(shown, header))}"
            raise _bad(table.file, f"there is no column {name!r} for the {role}", fix=fix)
    column = {role: name for role, name in _guessed(header).items() if name not in asked.values()} | dict(asked)
    if "path" not in column:
        first = [name for name in header if table.columns[name] and _is_picture(table.columns[name][0])]
        column |= {"path": first[0]} if first else {}
    for role in REQUIRED:
        if role not in column:
            raise _no_column(table, role, header)
    return column


def _no_column(table: Table, role: str, header: list[str]) -> DataError:
    close = closest(role, header)
    hint = f" (is it {close!r}?)" if close else ""
    examples = [f"{shown(name)} ({_shortly(table.columns[name])})" for name in header[:12]]
    told = command("data", "inspect", table.file, "--columns", f"{role}={close or 'NAME'}")
    why = f"no column {role!r}{hint}; found: {', '.join(map(shown, header)) or 'nothing'}"
    return _bad(
        table.file,
        why + (f"\nwith values such as {'; '.join(examples)}" if len(table) else ""),
        fix=f"say which column it is: {told}\n(in a run: data.columns.{role}=NAME)",
    )


def _shortly(values: Sequence[Any]) -> str:
    first = next((value for value in values if value not in (None, "")), "")
    text = "bytes" if isinstance(first, (bytes, dict)) else str(first)
    return shown(text if len(text) < 25 else f"{text[:22]}...")


def _mapping(column: Mapping[str, str]) -> tuple[str, ...]:
    """Which column was taken for what, where the name alone does not tell."""
    others = [f"{role} = {shown(name)}" for role, name in column.items() if name.lower() != role]
    return (f"columns: {', '.join(others)}",) if others else ()


def _file(table: Table, row: int, column: Mapping[str, str]) -> File:
    number = row + table.first
    cells = {role: table.columns[name][row] for role, name in column.items()}
    for role in REQUIRED:
        if cells[role] in (None, "", b""):
            raise _bad(table.file, f"row {number} has no {role}", fix="fill or remove the row")
    names = table.labels.get(column["label"])
    split, label = _split(table, number, cells), _label(table, number, cells["label"], names)
    path, content = _picture(table, number, cells["path"])
    domain, site = ("" if cells.get(key) is None else str(cells[key]) for key in ("domain", "site"))
    return File(path, label, split, domain, site, content)


def _split(table: Table, number: int, cells: Mapping[str, Any]) -> str:
    if "split" not in cells:
        return table.split
    told = str(cells["split"] or "").lower()
    if told in (*_TRAIN_NAMES, *_TEST_NAMES):
        return "train" if told in _TRAIN_NAMES else "test"
    fix = "train or test in every row, or another column (data.columns.split=NAME)"
    raise _bad(table.file, f"row {number}: split is {cells['split']!r}", fix=fix)


def _label(table: Table, number: int, value: Any, names: Sequence[str] | None) -> str:
    """The name of a class. A number is a place among ``names``, where there are any."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # a column of integers in which another row was empty
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        why = f"row {number}: the label is {shown(str(value))[:40]!r}, {type(value).__name__}"
        raise _bad(table.file, why, fix="labels as whole numbers or text")
    if names is None or isinstance(value, str):
        return str(value)
    if not 0 <= value < len(names):
        raise _bad(table.file, f"row {number}: label {value} is not among {len(names)} names", fix="correct the label")
    return names[value]


def _picture(table: Table, number: int, value: Any) -> tuple[Path, bytes | None]:
    """Where a picture lies, or what it is called and its bytes."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes):
        return Path(f"{table.file} row {number}"), value
    if not isinstance(value, str) or not value:
        why = f"row {number}: the picture is {type(value).__name__}, not a path or the bytes of a file"
        raise _bad(table.file, why, fix="a column of paths or of encoded pictures: data.columns.path=NAME")
    return table.file.parent / value, None


def _bad(path: Path, why: str, *, fix: str) -> DataError:
    return DataError(
        "E206",
        "cannot use the table" if path.suffix != ".csv" else "cannot use the CSV",
        where=str(path),
        why=why,
        fix=fix,
    )
