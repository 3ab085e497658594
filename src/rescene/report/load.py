"""Reading a run folder: files in, one frozen record out. Nothing of the engine is imported.

A folder is a run folder if it holds ``results.json``, ``status.json``, ``metrics.jsonl`` or ``config.yaml``. Only
``results.json`` must be readable where it exists. Every other file may be missing or damaged; what could not be read is
listed in ``RunRecord.problems`` and shown on the page.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rescene.core.errors import DataError, ResceneError
from rescene.core.json_files import Row, json_object, record_file, yaml_object
from rescene.core.method_style import MethodStyle, style_of
from rescene.core.recipe_keys import Flat, flatten
from rescene.core.results import (
    Audit,
    ClassTheory,
    EventRecord,
    FederationRecord,
    Leakage,
    Numbers,
    Origin,
    Partition,
    Privacy,
    Results,
    RoundRecord,
    SiteHeads,
    Status,
    TaskFacts,
    TaskRecord,
    Timing,
    WithdrawalCheck,
    read_events,
    read_metrics,
    results_of_row,
    results_row,
)
from rescene.core.run_state import State, state_of
from rescene.core.versions import as_it_was

MARKS = ("results.json", "status.json", "metrics.jsonl", "config.yaml")


@dataclass(frozen=True)
class RunRecord:
    """One run folder. Empty records and tuples stand for files that are not there (yet)."""

    folder: Path
    method: str
    style: MethodStyle
    seed: int | None
    state: State
    finished: bool
    results: Results  # empty while the run is going
    raw: Row  # results.json as it stands, for whoever checks it
    status: Status
    timing: Timing
    env: Row  # shown as it is
    config: Row  # the recipe, as sections
    settings: Flat  # the recipe, as dotted keys
    partition: Partition
    rounds: tuple[RoundRecord, ...]  # one per (task, round), in order
    task_rows: tuple[TaskRecord, ...]  # one per finished task, in order
    events: tuple[EventRecord, ...]
    command: str
    problems: tuple[str, ...]
    audit: Audit  # what attacks on it showed, if somebody made them (rescene audit)
    site_heads: SiteHeads  # heads that sites tuned, if somebody did so (rescene sites --tune)
    withdrawal: WithdrawalCheck  # a comparison with the run that never saw a site (rescene forget)
    federation: FederationRecord  # of a run across sites
    recipe: str  # its name; empty: not recorded

    @property
    def leakage(self) -> Leakage | None:
        """What the run recorded about near-copies, if it did."""
        return self.results.leakage

    @property
    def privacy(self) -> Privacy:
        """What the run says about privacy."""
        return self.results.privacy

    @property
    def tasks(self) -> tuple[TaskFacts, ...]:
        """The tasks with their classes."""
        return self.results.tasks

    @property
    def data(self) -> str:
        """What the images are called; empty if nobody wrote it down."""
        return str(self.env.get("data") or "")

    @property
    def lens(self) -> bool:
        """Whether pictures were seen through a lens, whose work no FLOP count has."""
        return bool(self.settings.get("model.lens"))

    @property
    def matrix(self) -> np.ndarray:
        """Accuracy [stage, task] in percent, NaN above the diagonal; a run still going gives its finished stages."""
        return triangle(self.results.accuracy_matrix or [row.accuracy for row in self.task_rows])

    @property
    def incremental(self) -> np.ndarray:
        """Accuracy on all seen classes after each (finished) task, in percent."""
        return vector(self.results.incremental_accuracy or tuple(row.aa for row in self.task_rows))

    @property
    def near_copies(self) -> float | None:
        """Share (0 to 1) of uploaded images that are near-copies of a real one; None where it was not measured."""
        return self.leakage.near_copies if self.leakage else None

    @property
    def nearest_rms(self) -> float | None:
        """Median distance of an uploaded image to the nearest real one; None where it was not measured."""
        return self.leakage.nearest_rms_median if self.leakage else None

    @property
    def epsilon(self) -> float | None:
        """Epsilon over the whole run, to two decimals; None where nothing is guaranteed."""
        return None if self.privacy.epsilon is None else round(self.privacy.epsilon, 2)

    @property
    def upload_bytes(self) -> float | None:
        """Mean bytes that a site sends for each round in which it is asked, at the ends of tasks too."""
        return self.results.cost.measured.uplink_bytes_per_turn(self.rounds)

    @property
    def within_task(self) -> float | None:
        """Within-task accuracy over all test images (tasks weighted by test size; equally if unknown, or for domains)."""
        within = vector(self.results.within_task)
        if not len(within) or not np.isfinite(within).all():
            return None
        sizes = [task.test_size for task in self.tasks]
        domains = any(task.domain for task in self.tasks)  # their AA is the unweighted mean, too
        known = len(sizes) == len(within) and all(sizes) and not domains
        return float(np.average(within, weights=np.array(sizes, dtype=float) if known else None))

    @property
    def guessing(self) -> list[float]:
        """Accuracy of guessing among all classes seen, after each task, in percent; empty where classes are not recorded."""
        seen: set[str] = set()
        levels = []
        for task in self.tasks:
            seen |= set(task.classes)
            levels.append(100 / len(seen) if seen else 0.0)
        return levels if all(levels) else []

    @property
    def class_theory(self) -> list[ClassTheory]:
        """The theory of each class's buffer, with the run's seed."""
        return [replace(row, seed=self.seed) for row in self.results.theory.classes]


def vector(values: Numbers) -> np.ndarray:
    """Numbers as floats, NaN for what is missing."""
    return np.array(values, dtype=float)


def triangle(rows: Sequence[Numbers]) -> np.ndarray:
    """Ragged or null-padded rows as a square array, NaN where nothing was measured. No rows: shape [0, 0]."""
    square = np.full((len(rows), len(rows)), math.nan)
    for i, row in enumerate(rows):
        square[i, : len(row)] = vector(row)[: len(rows)]
    return square


def is_run(folder: Path) -> bool:
    """Whether the folder holds a run."""
    return any((folder / name).is_file() for name in MARKS)


def load_run(folder: Path) -> RunRecord:
    """Parse one run folder; DataError E213 if it is none, or if its results.json is damaged."""
    folder = Path(folder)
    if not is_run(folder):
        raise _not_a_run(folder)
    problems: list[str] = []
    finished = (folder / "results.json").is_file()
    raw = results_row(folder / "results.json") if finished else {}
    results = results_of_row(raw, problems)
    config = results.config or as_it_was(yaml_object(folder / "config.yaml", problems))
    origin = record_file(Origin, folder / "origin.json", problems)
    method, (rounds, tasks) = _method(folder, results, config), read_metrics(folder, problems)
    return RunRecord(
        folder=folder,
        method=method,
        style=style_of(method, results.style or origin.style),
        seed=_seed(folder, results, config),
        state=state_of(folder),
        finished=finished,
        results=results,
        raw=raw,
        status=record_file(Status, folder / "status.json", problems),
        timing=record_file(Timing, folder / "timing.json", problems),
        env=json_object(folder / "env.json", problems),
        config=config,
        settings=flatten(config),
        partition=record_file(Partition, folder / "partition.json", problems),
        rounds=rounds,
        task_rows=tasks,
        events=read_events(folder, problems),
        command=text_of(folder / "command.txt"),
        audit=record_file(Audit, folder / "audit.json", problems),
        site_heads=record_file(SiteHeads, folder / "site_heads.json", problems),
        withdrawal=record_file(WithdrawalCheck, folder / "withdrawal.json", problems),
        federation=record_file(FederationRecord, folder / "sites.json", problems),
        recipe=origin.recipe,
        problems=tuple(problems),
    )


def load_runs(folders: Iterable[Path]) -> tuple[list[RunRecord], dict[Path, ResceneError]]:
    """All runs that can be read, and for each other folder the reason: one damaged run does not hide the others.

    If none can be read, the first reason is raised.
    """
    runs: list[RunRecord] = []
    unreadable: dict[Path, ResceneError] = {}
    for folder in folders:
        try:
            runs.append(load_run(folder))
        except ResceneError as error:
            unreadable[folder] = error
    if unreadable and not runs:
        raise next(iter(unreadable.values()))
    return runs, unreadable


def text_of(path: Path) -> str:
    """A text file; empty if it cannot be read."""
    try:
        return path.read_text("utf-8", errors="replace").strip()
    except OSError:
        return ""


def _not_a_run(folder: Path) -> DataError:
    inside = sorted(path.parent for name in MARKS for path in folder.glob(f"*/{name}")) if folder.is_dir() else []
    return DataError(
        "E213",
        f"'{folder}' is not a run folder",
        where=str(folder),
        why="there is no such folder" if not folder.is_dir() else f"it holds none of {', '.join(MARKS)}",
        fix=f"name the runs inside it, for example {inside[0]}" if inside else "rescene runs   lists the run folders",
    )


def _method(folder: Path, results: Results, config: Row) -> str:
    told = results.method or config.get("method")
    if isinstance(told, dict):
        told = told.get("name")
    return str(told or re.split(r"-s\d", folder.name)[0])


def _seed(folder: Path, results: Results, config: Row) -> int | None:
    told = config.get("seed") if results.seed is None else results.seed
    match = re.search(r"-s(\d+)(?:-|$)", folder.name)
    return told if isinstance(told, int) else int(match.group(1)) if match else None
