"""Run folders of older versions, brought to today's format in place before a run goes on in them.

Reading an older folder (reports, tables, ``rescene.load``) needs no migration and changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rescene.core.versions import FOLDER, refuse_newer
from rescene.engine.checkpoint import write_json


def folder_format(folder: Path) -> int:
    """The format of a run folder; E414 if it is newer than this version knows."""
    path = folder / "origin.json"
    found = _read(path)
    told = found.get("schema", 1) if isinstance(found, dict) else 1
    refuse_newer(told, FOLDER, path)
    return int(told)


def migrate(folder: Path) -> bool:
    """Bring a folder to format FOLDER, step by step; whether there was something to do. A kill in between does no harm:
    the number in origin.json is written last, and a step leaves alone what is already as it should be."""
    start = folder_format(folder)
    for number in range(start, FOLDER):
        STEPS[number](folder)
        origin = _read(folder / "origin.json") or {"recipe": None, "origins": {}}
        write_json(folder / "origin.json", origin | {"schema": number + 1})
    return start < FOLDER


def _to_2(folder: Path) -> None:
    partition, pairs = _read(folder / "partition.json"), _read(folder / "surrogates.json")
    if isinstance(partition, dict):
        write_json(folder / "partition.json", {"schema": 1} | partition)
    if isinstance(pairs, list):
        write_json(folder / "surrogates.json", {"schema": 1, "pairs": pairs})


STEPS: dict[int, Callable[[Path], None]] = {1: _to_2}


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):  # missing or damaged: nothing to bring along
        return None
