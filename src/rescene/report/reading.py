"""Files of a run folder as plain values: what is missing is empty, what is damaged is empty and noted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rescene.documents import read_yaml
from rescene.errors import ConfigError
from rescene.run_state import read_object

Row = dict[str, Any]


def json_object(path: Path, problems: list[str]) -> Row:
    """A JSON object; empty if the file is missing, empty and noted if it is damaged."""
    try:
        return read_object(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} could not be read ({getattr(error, 'strerror', None) or error})")
    return {}


def yaml_object(path: Path, problems: list[str]) -> Row:
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


def text_of(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""
