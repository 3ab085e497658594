"""Runs of a queue in a given number of minutes: several processes on one device, each of which saves every finished round.

The queue starts what is likely to end in time, the first in the list first, and fills the rest of the time with the first run
that is not done: a run that is stopped goes on next time where it was. What has ended is copied to the results at once.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rescene.core.json_files import json_object
from rescene.core.run_state import is_done, state_of
from rescene.paper.missing_cells import Missing, Predict

# several runs on one GPU: how much longer each takes than alone (docs/performance.md); more than four gain nothing
SLOWER = {1: 1.0, 2: 1.6, 3: 2.25, 4: 2.95}
KEPT = ("results.json", "config.yaml", "env.json", "timing.json", "metrics.jsonl", "command.txt", "origin.json")
GRACE_S = 60.0  # for a run to stop: it ends within the round that it is in or is killed; finished rounds are saved
LOOK_S = 0.5
Command = Callable[[Missing, Path], list[str]]


@dataclass
class QueueRow:
    """One run of the queue, for the report. Minutes are of this session; ``predicted`` counts those that run beside it."""

    cell: str
    seed: int
    group: str
    folder: str
    state: str = "waiting"  # waiting, running, running elsewhere, done, stopped or failed
    predicted: float | None = None
    used: float | None = None
    why: str = ""


@dataclass
class _Going:
    row: QueueRow
    missing: Missing
    folder: Path
    process: subprocess.Popen[bytes]
    since: float = field(default_factory=time.monotonic)


def run_folders() -> Path:
    """Where the queue's runs are made; the next queue finds them there."""
    return Path(os.environ.get("RESCENE_RUNS", "runs")) / "queue"


def rescene_run(missing: Missing, folder: Path) -> list[str]:
    return [sys.executable, "-m", "rescene", *missing.command, "--out", str(folder), "--quiet", "--elsewhere"]


class Queue:
    """``work``: where runs are made, with their checkpoints. ``results``: where what has ended is kept. ``least``: minutes
    for which a run that will not end is still begun."""

    def __init__(
        self,
        wanted: Sequence[Missing],
        predict: Predict,
        minutes: float,
        work: Path,
        results: Path,
        parallel: int = 1,
        least: float = 2.0,
        command: Command = rescene_run,
        tell: Callable[[QueueRow], None] = lambda row: None,
    ) -> None:
        self.work, self.results, self.parallel, self.command, self.tell = work, results, parallel, command, tell
        self.least, self.minutes, self.end = least, minutes, time.monotonic() + 60 * minutes
        slower = SLOWER[min(parallel, max(SLOWER))] * max(1.0, parallel / max(SLOWER))
        self.waiting = [(one, self._row(one, predict(one), slower)) for one in wanted]
        self.rows = [row for _, row in self.waiting]
        for one, row in self.waiting:
            row.state = "running elsewhere" if state_of(work / one.folder) == "running" else row.state
        self.waiting = [(one, row) for one, row in self.waiting if row.state == "waiting"]
        self.going: list[_Going] = []

    def run(self) -> list[QueueRow]:
        """Until the minutes are over, or nothing is left. Ctrl-C and SIGTERM stop the runs; every finished round is kept."""
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            while self._fill() or self.going:
                time.sleep(LOOK_S)
                self._collect()
                if time.monotonic() >= self.end:
                    break
        finally:
            self._stop()
            signal.signal(signal.SIGTERM, before)
        return self.rows

    def _row(self, one: Missing, alone: float | None, slower: float) -> QueueRow:
        left = 1 - _share_done(self.work / one.folder)
        predicted = None if alone is None else round(alone * slower * left, 2)
        return QueueRow(one.name, one.seed, one.group, str(one.folder), predicted=predicted)

    def _fill(self) -> bool:
        """Start runs in the free places; whether any was started."""
        started = False
        while self.waiting and len(self.going) < self.parallel and (left := (self.end - time.monotonic()) / 60) > 0:
            ends = (i for i, (_, row) in enumerate(self.waiting) if row.predicted is not None and row.predicted <= left)
            chosen = next(ends, None)
            if left >= self.least:  # worth a run that may not end: it goes on next time
                unknown = (
                    i
                    for i, (_, row) in enumerate(self.waiting)
                    if row.predicted is None and (chosen is None or i < chosen)
                )
                chosen = next(unknown, chosen or 0)
            if chosen is None:
                break
            self._start(*self.waiting.pop(chosen))
            started = True
        return started

    def _start(self, one: Missing, row: QueueRow) -> None:
        folder = self.work / one.folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f"{folder.name}.log").open("ab") as log:
            process = subprocess.Popen(
                self.command(one, folder), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        row.state = "running"
        self.going.append(_Going(row, one, folder, process))
        self._note(row)

    def _collect(self) -> None:
        """Take what has ended out of the places, keep its results, and note a failure with its last words."""
        for going in [one for one in self.going if one.process.poll() is not None]:
            self.going.remove(going)
            self._end(going, "failed")

    def _end(self, going: _Going, otherwise: str) -> None:
        row = going.row
        row.used = round((time.monotonic() - going.since) / 60, 2)
        row.state = "done" if is_done(going.folder) else otherwise
        if row.state == "done":
            _keep(going.folder, self.results / going.missing.folder)
        elif row.state == "failed":
            row.why = _last_words(going.folder.parent / f"{going.folder.name}.log")
        self._note(row)

    def _stop(self) -> None:
        for going in self.going:
            _signal(going.process, signal.SIGINT)
        until = time.monotonic() + GRACE_S
        for going in self.going:
            try:
                going.process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                _signal(going.process, signal.SIGKILL)
                going.process.wait()
            self._end(going, "stopped")
        self.going = []

    def _note(self, row: QueueRow) -> None:
        """The report so far, in one piece: a kill in between leaves the one before."""
        told = {"schema": 1, "minutes": self.minutes, "parallel": self.parallel, "runs": list(map(asdict, self.rows))}
        self.results.mkdir(parents=True, exist_ok=True)
        half = self.results / "queue.json.part"
        half.write_text(json.dumps(told, indent=1), encoding="utf-8")
        os.replace(half, self.results / "queue.json")
        self.tell(row)


def _share_done(folder: Path) -> float:
    """How much of a run that was stopped is saved."""
    status = json_object(folder / "status.json", [])
    done, steps = status.get("done"), status.get("steps")
    return min(1.0, done / steps) if isinstance(done, int) and isinstance(steps, int) and steps else 0.0


def _keep(folder: Path, kept: Path) -> None:
    """The small files of a finished run; its results last, because they say that it is there."""
    kept.mkdir(parents=True, exist_ok=True)
    for name in reversed(KEPT):
        if (folder / name).is_file():
            shutil.copy2(folder / name, kept / name)


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)
