"""What every part of a run shares: its experiment, its folder, what it found out, where it is, and how it tells of it."""

from __future__ import annotations

import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rescene.core.errors import ResceneWarning
from rescene.core.json_files import json_lines, records_of
from rescene.core.results import ClassTheory, Forgotten, Grown, Leakage, Moved, Quarantined

if TYPE_CHECKING:
    from rescene.config import Resolved
    from rescene.engine.experiment import Experiment
    from rescene.engine.run_folder import RunFolder


@dataclass
class Facts:
    """What a run found out so far, part of every checkpoint: plain values, and records of results.json."""

    matrix: list[list[float]] = field(default_factory=list)
    incremental: list[float] = field(default_factory=list)
    within_task: list[float] = field(default_factory=list)
    confusion: list[list[int]] = field(default_factory=list)
    recall: list[float] = field(default_factory=list)
    test_sizes: list[int] = field(default_factory=list)
    by_site: list[list[float]] = field(default_factory=list)  # after each task, on what each site has met (own orders)
    leakage: list[Leakage] = field(default_factory=list)  # of each task
    theory: list[ClassTheory] = field(default_factory=list)
    elsewhere: list[Moved] = field(default_factory=list)  # where the run went on with other code or machine
    continued: list[Grown] = field(default_factory=list)  # when tasks were added to a finished run
    filtered_by: list[str] = field(default_factory=list)  # observers of a user that decide what the server learns from
    faults: dict[str, float] = field(default_factory=dict)  # counts of what was simulated
    late_answers: dict[str, int] = field(default_factory=dict)  # counts, with federation.delay
    attack_success: float | None = None
    quarantine: list[Quarantined] = field(default_factory=list)
    judged: dict[str, int] = field(default_factory=dict)  # by client: groups of one class and round that were screened
    forgotten: list[Forgotten] = field(default_factory=list)  # sites whose uploads were removed (withdrawal.py)
    closings: list[list[int]] = field(default_factory=list)  # label, round of the stream (observers/counts.py)
    num_client_failures: int = 0
    num_fallbacks: int = 0
    num_withheld: int = 0
    num_declined: int = 0
    num_suppressed: int = 0


RECORDS: dict[str, type[Any]] = {
    "leakage": Leakage,
    "theory": ClassTheory,
    "elsewhere": Moved,
    "continued": Grown,
    "quarantine": Quarantined,
    "forgotten": Forgotten,
}  # kinds of the records among the facts


def restored(facts: dict[str, Any]) -> Facts:
    """From a checkpoint, in which records are rows and NaN is null."""

    def back(value: Any) -> Any:
        return [back(v) for v in value] if isinstance(value, list) else math.nan if value is None else value

    names = ("matrix", "incremental", "within_task", "recall", "by_site")
    numbers = {name: back(facts.get(name, [])) for name in names}
    records = {name: records_of(kind, facts.get(name, []), name, []) for name, kind in RECORDS.items()}
    return Facts(**facts | numbers | records)


def notes_of(state: Any, uploads: Any) -> dict[str, float]:
    """Numbers worth logging: the server's own, and the mean of each of the clients'."""
    gathered: dict[str, list[float]] = {}
    for upload in uploads.values():
        for key, value in upload.get("notes", {}).items():
            gathered.setdefault(key, []).append(float(value))
    means = {key: sum(values) / len(values) for key, values in gathered.items()}
    return {key: value for key, value in (means | getattr(state, "notes", {})).items() if math.isfinite(value)}


Progress = Callable[[dict[str, Any]], None]


def with_site_names(text: str, names: Sequence[str]) -> str:
    """The text with the name of a site in the place of its number, where it is known.

    >>> with_site_names("waiting for site 0, site 7", ["leeds", "lyon"])
    'waiting for site leeds, site 7'
    """

    def named(found: re.Match[str]) -> str:
        number = int(found[1])
        return f"site {names[number]}" if number < len(names) else found[0]

    return re.sub(r"\bsite (\d+)\b", named, text) if names else text


class RunContext:
    """``place`` is the task and round the run is in, -1 between rounds. ``experiment`` comes once it is prepared.

    ``names`` are those of the sites, across real ones; events then speak of sites by name.
    """

    experiment: Experiment
    names: Sequence[str] = ()

    def __init__(self, resolved: Resolved, folder: RunFolder, progress: Progress) -> None:
        self.resolved, self.folder, self.progress = resolved, folder, progress
        self.timer, self.facts, self.place = Timer(), Facts(), (0, -1)
        self._early: list[dict[str, Any]] = []

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """Every key with its value."""
        return self.resolved.flat()

    @property
    def setting(self) -> dict[str, Any]:
        """What every status and every event says of the run."""
        e = self.experiment
        rounds = e.recipe.federation.num_rounds
        return {"method": e.method.title, "num_tasks": len(e.tasks), "num_rounds": rounds}

    def note(self, level: str, code: str, message: str, client: int | None = None, tell: bool = True) -> None:
        """Write an event; failures of clients are counted. ``tell=False``: the caller raises the same error, which is shown."""
        if client is not None and level == "error":
            self.facts.num_client_failures += 1
        task, round = self.place
        message = with_site_names(message, self.names)
        row = {"task": task, "round": round, "level": level, "code": code, "message": message, "client": client}
        self.folder.append("events.jsonl", row)
        if tell:
            self.tell("event", **row)

    def note_later(self, level: str, code: str, message: str) -> None:
        """Keep an event until the run knows which of its earlier events stand."""
        self._early.append({"level": level, "code": code, "message": message})

    def note_kept(self) -> None:
        """Write the events that waited. A warning that an earlier part of the run gave already is not repeated."""
        said = {(row.get("code"), row.get("message")) for row in json_lines(self.folder.path / "events.jsonl", [])}
        for event in self._early:
            words = (event["code"], with_site_names(event["message"], self.names))
            if event["level"] != "warning" or words not in said:
                self.note(**event)

    def tell(self, what: str, **fields: Any) -> None:
        """Tell whoever follows the progress."""
        self.progress({"event": what, "place": self.place, "elapsed_s": self.timer.total(), **self.setting, **fields})


class Timer:
    """Seconds per phase; phases do not nest, the inner one counts and the outer one waits."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.aside: dict[str, float] = {}  # work in other threads, which goes on during some phase
        self.memory_mb: list[int] = []  # held after each round
        self._open: list[tuple[str, float]] = []
        self._begin = time.perf_counter()
        self._parts = 1

    def resume(self, earlier: dict[str, Any]) -> None:
        """Go on from the report of an earlier part of the same run."""
        self._begin -= earlier["total_s"]
        self._parts += earlier["parts"]
        for name, value in earlier["phases"].items():
            if name != "other":
                self.seconds[name] = self.seconds.get(name, 0.0) + value
        self.aside = dict(earlier.get("aside", {}))
        self.memory_mb = list(earlier.get("memory_mb", []))

    @contextmanager
    def beside(self, name: str) -> Iterator[None]:
        """Seconds of a thread beside the loop (one thread per name)."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.aside[name] = self.aside.get(name, 0.0) + time.perf_counter() - begin

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._pause()
        self._open.append((name, time.perf_counter()))
        try:
            yield
        finally:
            self._pause()
            self._open.pop()
            if self._open:
                self._open[-1] = (self._open[-1][0], time.perf_counter())

    def _pause(self) -> None:
        if self._open:
            name, since = self._open[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - since
            self._open[-1] = (name, time.perf_counter())

    def total(self) -> float:
        return time.perf_counter() - self._begin

    def report(self) -> dict[str, Any]:
        total = self.total()
        rounded = {name: round(value, 3) for name, value in sorted(self.seconds.items())}
        return {
            "schema": 1,
            "total_s": round(total, 3),
            "parts": self._parts,
            "phases": rounded | {"other": round(total - sum(self.seconds.values()), 3)},
            "aside": {name: round(value, 3) for name, value in self.aside.items()},
            "memory_mb": self.memory_mb,
        }


def memory_mb(device: torch.device) -> int:
    """What this process holds now: of the GPU's memory, or of the machine's (0 where the system does not say)."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device) >> 20
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


_listener: ContextVar[Callable[..., None] | None] = ContextVar("listener", default=None)  # of the run at work here
_show = warnings.showwarning


def _forward(message: Any, category: Any, filename: str, lineno: int, *rest: Any, **more: Any) -> None:
    note = _listener.get()
    if note is not None and isinstance(message, ResceneWarning):
        note("warning", message.code, message.told)
    else:
        _show(message, category, filename, lineno, *rest, **more)


@contextmanager
def warnings_to(note: Callable[..., None]) -> Iterator[None]:
    """Our own warnings become events as they happen; everybody else's stay warnings.

    Python has one place for all threads where warnings are shown. What stands there looks up whose context it is in, so
    runs in several threads hear their own warnings only; a thread that a run starts must be given its context.
    """
    global _show
    if warnings.showwarning is not _forward:  # it stays there: another run may need it when this one is done
        _show, warnings.showwarning = warnings.showwarning, _forward
    warnings.simplefilter("always", ResceneWarning)
    token = _listener.set(note)
    try:
        yield
    finally:
        _listener.reset(token)
