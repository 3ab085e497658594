"""JSON files as typed records: what is missing takes its default, what is damaged takes its default and is noted once.

A record is a frozen dataclass. Its type hints say what may stand in the file: ``str``, ``bool``, ``int``, ``float`` (finite),
``T | None``, ``tuple[T, ...]``, ``dict[str, T]``, other records, or ``Any``. A field without a default must be there; a row of
a list that lacks one is left out. ``field(metadata={"key": "class"})`` names a key that Python cannot.

A record is also what a file is written from (``row_of``, ``as_json``). Each field is written, unless its metadata says otherwise:
``LEFT_OUT`` leaves out a value that stands at its default, ``NULL`` writes null for such a value, and ``beside("mechanism")``
writes the value only where the field ``mechanism`` does not stand at its default.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from rescene.core.documents import read_yaml
from rescene.core.errors import ConfigError
from rescene.core.run_state import read_object

T = TypeVar("T")
Row = dict[str, Any]
LEFT_OUT = {"left_out": True}
NULL = {"null": True}
_NAMED = 3  # damaged places that a note names


def beside(name: str) -> dict[str, str]:
    """Metadata of a field that is written only where the field ``name`` does not stand at its default."""
    return {"beside": name}


class _Misfit(Exception):
    """The value is not what its type says."""


def record_of(kind: type[T], row: Row, damaged: list[str]) -> T:
    """The row as a record of this kind. Places that do not fit are added to ``damaged``; ValueError if one was needed."""
    try:
        return _record(kind, row, damaged, "")
    except _Misfit as misfit:
        raise ValueError(f"{misfit} is missing or damaged") from None


def record_file(kind: type[T], path: Path, problems: list[str]) -> T:
    """A JSON file as a record whose fields all have defaults; the empty record if the file is missing or damaged."""
    damaged: list[str] = []
    found = record_of(kind, json_object(path, problems), damaged)
    problems += noted(path.name, damaged)
    return found


def records_of(kind: type[T], rows: Sequence[Row], name: str, problems: list[str]) -> list[T]:
    """Rows of one file as records; rows that lack what they need are left out, and the file is noted once."""
    found: list[T] = []
    damaged: list[str] = []
    for i, row in enumerate(rows):
        try:
            found.append(_record(kind, row, damaged, f"row {i + 1}"))
        except _Misfit as misfit:
            damaged.append(str(misfit))
    problems += noted(name, damaged)
    return found


def row_of(record: Any) -> Row:
    """A record as the row that a file has of it. Values stay as they are (``as_json``)."""
    declared: Any = type(record)
    known = {field.name: field for field in fields(declared)}
    row = {}
    for field, key, _ in _fields(declared):
        told = field.metadata
        is_default = _is_default(record, known[told.get("beside", field.name)])
        if not is_default or not told.keys() & {"left_out", "beside"}:
            row[key] = None if is_default and "null" in told else getattr(record, field.name)
    return row


def _is_default(record: Any, field: Field[Any]) -> bool:
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return bool(getattr(record, field.name) == default)


def as_json(value: Any, digits: int | None = None) -> Any:
    """A value as JSON can hold it: records are rows, tuples are lists, NaN and infinity are null. Floats have so many decimals.

    >>> as_json({"aa": 33.333333333333336, "bwt": float("nan"), "rows": (1, 2)}, digits=10)
    {'aa': 33.3333333333, 'bwt': None, 'rows': [1, 2]}
    """
    if is_dataclass(value):
        value = row_of(value)
    if isinstance(value, dict):
        return {key: as_json(own, digits) for key, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(own, digits) for own in value]
    if isinstance(value, float):
        return None if not math.isfinite(value) else value if digits is None else round(value, digits)
    return value


def noted(name: str, damaged: Sequence[str]) -> list[str]:
    """One sentence about all damaged places of a file; none if there are none.

    >>> noted("results.json", ["aa", "old"])
    ['results.json: aa, old could not be read']
    """
    more = f" and {len(damaged) - _NAMED} more places" if len(damaged) > _NAMED else ""
    return [f"{name}: {', '.join(damaged[:_NAMED])}{more} could not be read"] if damaged else []


def _record(kind: type[T], row: Any, damaged: list[str], where: str) -> T:
    if not isinstance(row, dict):
        raise _Misfit(where)
    values = {}
    declared: Any = kind
    for field, key, hint in _fields(declared):
        place = f"{where}.{key}" if where else key
        needed = field.default is MISSING and field.default_factory is MISSING
        try:
            if row.get(key) is not None:
                values[field.name] = _value(hint, row[key], damaged, place)
            elif needed:
                raise _Misfit(place)
        except _Misfit:
            if needed:
                raise
            damaged.append(place)
    return kind(**values)


@cache
def _fields(kind: Any) -> list[tuple[Field[Any], str, Any]]:
    hints = get_type_hints(kind)
    return [(field, field.metadata.get("key", field.name), hints[field.name]) for field in fields(kind)]


@cache
def _shape(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    """Origin and arguments of a hint; asked a million times for a few hundred runs."""
    return get_origin(hint), get_args(hint)


def _value(hint: Any, value: Any, damaged: list[str], where: str) -> Any:
    origin, inner = _shape(hint)
    if origin in (Union, types.UnionType):
        return _value(next(one for one in inner if one is not type(None)), value, damaged, where)
    if origin is tuple:
        return _items(inner[0], value, damaged, where)
    if origin is dict:
        return _entries(inner[1], value, damaged, where)
    if is_dataclass(hint):
        return _record(hint, value, damaged, where)  # type: ignore[arg-type]
    return _scalar(hint, value, where)


def _scalar(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return value
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if hint is int and isinstance(value, (int, float)) and not isinstance(value, bool) and value == value // 1:
        return int(value)
    if hint in (str, bool) and isinstance(value, hint):
        return value
    raise _Misfit(where)


def _entries(hint: Any, values: Any, damaged: list[str], where: str) -> Row:
    """The values of an object; null and damaged ones are left out."""
    if not isinstance(values, dict):
        raise _Misfit(where)
    found = {}
    for key, value in values.items():
        try:
            if value is not None:
                found[key] = _value(hint, value, damaged, f"{where}.{key}")
        except _Misfit as misfit:
            damaged.append(str(misfit))
    return found


def _items(hint: Any, values: Any, damaged: list[str], where: str) -> tuple[Any, ...]:
    """The items of a list. A damaged one is None where that is allowed, and else left out."""
    if not isinstance(values, list):
        raise _Misfit(where)
    if Any in (kinds := _shape(hint)[1]):
        return tuple(values)
    if (numbers := _numbers(hint, values)) is not None:
        return numbers
    nullable, found = type(None) in kinds, []
    for i, value in enumerate(values):
        try:
            if value is None and not nullable:
                raise _Misfit(f"{where}[{i}]")
            found.append(None if value is None else _value(hint, value, damaged, f"{where}[{i}]"))
        except _Misfit as misfit:
            damaged.append(str(misfit))
            found += [None] if nullable else []
    return tuple(found)


def _numbers(hint: Any, values: list[Any]) -> tuple[Any, ...] | None:
    """Values that are all numbers of the type, or None where that is allowed, at one look: such lists are long. Else None.

    >>> _numbers(float, [0.5, 1]), _numbers(float | None, [0.5, None]), _numbers(float, [None]), _numbers(float, [math.nan])
    ((0.5, 1.0), (0.5, None), None, None)
    """
    kinds = set(_shape(hint)[1]) or {hint}
    number = next((kind for kind in (float, int) if kind in kinds), None)
    if number is None or not kinds <= {number, type(None)}:
        return None
    found = set(map(type, values))
    if not found <= (kinds | {int}) or float in found and not all(map(math.isfinite, filter(None, values))):
        return None
    return tuple(values) if found <= {number} else tuple(None if value is None else number(value) for value in values)


def json_object(path: Path, problems: list[str]) -> Row:
    """A JSON object as it is; empty if the file is missing, empty and noted if it is damaged."""
    try:
        return read_object(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} could not be read ({getattr(error, 'strerror', None) or error})")
    return {}


def yaml_object(path: Path, problems: list[str]) -> Row:
    """A YAML mapping as it is; empty if the file is missing, empty and noted if it is damaged."""
    try:
        found = read_yaml(path)
    except FileNotFoundError:
        return {}
    except (OSError, RecursionError, ConfigError):
        found = None
    if not isinstance(found, dict):
        problems.append(f"{path.name} could not be read")
        return {}
    return found


def json_lines(path: Path, problems: list[str]) -> list[Row]:
    """JSON lines. The last one may be half written while a run is going; a bad line elsewhere is noted."""
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    rows, bad = [], []
    for i, line in enumerate(lines):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        elif line.strip():
            bad.append(i)
    if bad and bad != [len(lines) - 1]:
        problems.append(f"{path.name}: {len(bad)} unreadable line(s) left out")
    return rows
