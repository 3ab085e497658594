"""Reading a run folder: files in, one frozen record out. Nothing of the engine is imported.

A folder is a run folder if it holds ``results.json``, ``status.json``, ``metrics.jsonl`` or ``config.yaml``. Only
``results.json`` must be readable where it exists; every other file may be missing or damaged, and what could not be
read is listed in ``Run.problems`` and shown on the page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rescene.errors import DataError, ResceneError
from rescene.report.reading import Row, json_lines, json_object, text_of, yaml_object
from rescene.run_state import State, read_object, state_of
from rescene.versions import RESULTS, as_it_was, refuse_newer

MARKS = ("results.json", "status.json", "metrics.jsonl", "config.yaml")


@dataclass(frozen=True)
class Run:
    """One run folder, parsed. Empty dicts and tuples stand for files that are not there (yet)."""

    folder: Path
    method: str
    seed: int | None
    state: State
    results: Row  # empty while the run is going
    status: Row
    timing: Row
    env: Row
    config: Row
    partition: Row
    rounds: tuple[Row, ...]  # one per (task, round), in order
    task_rows: tuple[Row, ...]  # one per finished task, in order
    events: tuple[Row, ...]
    command: str
    problems: tuple[str, ...]
    audit: Row  # what attacks on it showed, if somebody made them (rescene audit)
    withdrawal: Row = field(default_factory=dict)  # a comparison with the run that never saw a site (rescene forget)
    recipe: str = ""  # its name; empty: not recorded

    @property
    def finished(self) -> bool:
        return bool(self.results)

    @property
    def cost(self) -> Row:
        return table(self.results, "cost")

    @property
    def leakage(self) -> Row:
        return table(self.results, "leakage")

    @property
    def privacy(self) -> Row:
        return table(self.results, "privacy")

    @property
    def images(self) -> str:
        """How the images that were compared with real ones came to the server: uploaded, or drawn from noised sums."""
        return str(self.privacy.get("images") or "uploaded")

    @property
    def tasks(self) -> list[Row]:
        told = self.results.get("tasks")
        return [task for task in told if isinstance(task, dict)] if isinstance(told, list) else []

    def number(self, key: str) -> float | None:
        """A scalar of results.json, or None if it is missing or not finite."""
        return number(self.results.get(key))

    @property
    def matrix(self) -> np.ndarray:
        """Accuracy [stage, task] in percent, NaN above the diagonal; a run still going gives its finished stages."""
        rows = self.results.get("accuracy_matrix") or [row.get("accuracy") for row in self.task_rows]
        return triangle(rows)

    @property
    def incremental(self) -> np.ndarray:
        """Accuracy on all seen classes after each (finished) task, in percent."""
        values = self.results.get("incremental_accuracy") or [row.get("aa") for row in self.task_rows]
        return vector(values)

    @property
    def upload_bytes(self) -> float | None:
        """Mean bytes one client sends in one round it takes part in.

        All bytes sent up, divided by the number of participations; the mean message size if rounds were not recorded.
        The two differ for methods that send something at the beginning or end of a task.
        """
        measured = table(self.cost, "measured")
        total = number(measured.get("uplink_bytes"))
        if total is None and self.rounds:
            total = sum(number(row.get("uplink_bytes")) or 0.0 for row in self.rounds)
        turns = sum(len(row.get("participants") or ()) for row in self.rounds)
        return total / turns if total is not None and turns else number(measured.get("uplink_bytes_per_message"))


def number(value: Any) -> float | None:
    """The value as a finite float, or None.

    >>> number(3), number(float("nan")), number("3"), number(True)
    (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


def table(parent: Row, key: str) -> Row:
    """A nested object, or an empty one if it is missing or null."""
    value = parent.get(key)
    return value if isinstance(value, dict) else {}


def vector(values: Any) -> np.ndarray:
    """Numbers as floats, NaN for what is missing."""
    found = [number(value) for value in values] if isinstance(values, list) else []
    return np.array([math.nan if value is None else value for value in found], dtype=float)


def triangle(rows: list[Any]) -> np.ndarray:
    """Ragged or null-padded rows as a square array, NaN where nothing was measured. No rows: shape [0, 0]."""
    parsed = [vector(row) for row in rows]
    square = np.full((len(parsed), len(parsed)), math.nan)
    for i, row in enumerate(parsed):
        square[i, : len(row)] = row[: len(parsed)]
    return square


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in MARKS)


def load_run(folder: Path) -> Run:
    """Parse one run folder; DataError E213 if it is none, or if its results.json is damaged."""
    folder = Path(folder)
    if not is_run(folder):
        raise _not_a_run(folder)
    problems: list[str] = []
    results = _results(folder)
    status = json_object(folder / "status.json", problems)
    config = as_it_was(table(results, "config") or yaml_object(folder / "config.yaml", problems))
    metrics = json_lines(folder / "metrics.jsonl", problems)
    audit = json_object(folder / "audit.json", problems)
    return Run(
        folder=folder,
        method=_method(folder, results, config),
        seed=_seed(folder, results, config),
        state=state_of(folder),
        results=results,
        status=status,
        timing=json_object(folder / "timing.json", problems),
        env=json_object(folder / "env.json", problems),
        config=config,
        partition=json_object(folder / "partition.json", problems),
        rounds=_in_order(metrics, "round", ("task", "round")),
        task_rows=_in_order(metrics, "task", ("task",)),
        events=tuple(json_lines(folder / "events.jsonl", problems)),
        command=text_of(folder / "command.txt"),
        problems=tuple(problems),
        audit=audit,
        withdrawal=json_object(folder / "withdrawal.json", problems),
        recipe=str(json_object(folder / "origin.json", problems).get("recipe") or ""),
    )


def load_runs(folders: Iterable[Path]) -> tuple[list[Run], dict[Path, ResceneError]]:
    """All runs that can be read, and for each other folder the reason: one damaged run does not hide the others.

    If none can be read, the first reason is raised.
    """
    runs: list[Run] = []
    unreadable: dict[Path, ResceneError] = {}
    for folder in folders:
        try:
            runs.append(load_run(folder))
        except ResceneError as error:
            unreadable[folder] = error
    if unreadable and not runs:
        raise next(iter(unreadable.values()))
    return runs, unreadable


def _not_a_run(folder: Path) -> DataError:
    inside = sorted(path.parent for name in MARKS for path in folder.glob(f"*/{name}")) if folder.is_dir() else []
    return DataError(
        "E213",
        f"'{folder}' is not a run folder",
        where=str(folder),
        why="there is no such folder" if not folder.is_dir() else f"it holds none of {', '.join(MARKS)}",
        fix=f"name the runs inside it, for example {inside[0]}" if inside else "rescene runs   lists the run folders",
    )


def _results(folder: Path) -> Row:
    path = folder / "results.json"
    if not path.is_file():
        return {}
    try:
        found = read_object(path)
    except (OSError, ValueError) as error:
        fix = "leave this folder out, or run the experiment again"
        what = f"'{folder}' holds a damaged results.json"
        raise DataError("E213", what, where=str(path), why=str(error), fix=fix) from None
    refuse_newer(found.get("schema"), RESULTS, path)
    return found


def _in_order(rows: list[Row], kind: str, keys: tuple[str, ...]) -> tuple[Row, ...]:
    """Rows of one kind, sorted; a round written twice (a resumed run) counts once, the later one wins."""
    last: dict[tuple[float, ...], Row] = {}
    for row in rows:
        place = tuple(found for key in keys if (found := number(row.get(key))) is not None)
        if row.get("kind") == kind and len(place) == len(keys):
            last[place] = row if isinstance(row.get("participants", []), list) else row | {"participants": []}
    return tuple(last[place] for place in sorted(last))


def _method(folder: Path, results: Row, config: Row) -> str:
    told = results.get("method") or config.get("method")
    if isinstance(told, dict):
        told = told.get("name")
    return str(told or re.split(r"-s\d", folder.name)[0])


def _seed(folder: Path, results: Row, config: Row) -> int | None:
    told = number(results.get("seed", config.get("seed")))
    if told is not None:
        return int(told)
    match = re.search(r"-s(\d+)(?:-|$)", folder.name)
    return int(match.group(1)) if match else None
