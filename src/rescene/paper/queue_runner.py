"""Runs of what the paper's tables lack, several processes on one device, in a given number of minutes.

The queue starts what is likely to end in time, the first in the list first, and fills the rest of the time with the first run
that is not done: a run that is stopped goes on next time where it was, since each saves every finished round. What has ended is
copied to the results at once; what an earlier queue could not copy any more, because it was killed, is copied first.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from rescene.core.errors import ResceneError
from rescene.core.files import unique_draft, write_atomically
from rescene.core.json_files import json_object
from rescene.core.results import read_status, results_row
from rescene.core.run_state import runs_root, state_of
from rescene.engine.checkpoint import write_json
from rescene.paper.missing_runs import Missing, Predict, slower
from rescene.paper.store import Store

KEPT = ("results.json", "config.yaml", "env.json", "timing.json", "metrics.jsonl", "command.txt", "origin.json")
ELSEWHERE = "running elsewhere"
# beside Ctrl-C; SIGHUP: the terminal is closed
ENDING = (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
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
    # waiting, running, running elsewhere, done, stopped, failed, or cannot run (``why`` says what helps); in a plan
    # would end, would begin (and go on next time) or later
    state: str = "waiting"
    predicted: float | None = None
    used: float | None = None
    why: str = ""


@dataclass
class _Going:
    row: QueueRow
    missing: Missing
    folder: Path
    process: subprocess.Popen[bytes]
    begun_here: bool  # not in an earlier queue, of which nobody knows what ran beside it
    since: float = field(default_factory=time.monotonic)
    at_a_time: list[int] = field(default_factory=list)  # how many runs were going, other queues' too, at each look


def run_folders() -> Path:
    """Where the queue's runs are made; the next queue finds them there."""
    return runs_root() / "queue"


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
        self.waiting = [(one, self._row(one, predict(one), slower(parallel))) for one in wanted]
        self.rows = [row for _, row in self.waiting]
        for one, row in self.waiting:
            if state_of(work / one.folder) == "running":
                row.state = ELSEWHERE
            elif obstacle := one.cell.obstacle:
                row.state, row.why = "cannot run", f"{obstacle.reason}: {obstacle.fix.partition(';')[0]}"
        self.waiting = [(one, row) for one, row in self.waiting if row.state == "waiting"]
        self.going: list[_Going] = []

    def plan(self) -> list[QueueRow]:
        """The rows, as if the queue had been run: what would end, what would only be begun, and what is for later."""
        waiting = [row for _, row in self.waiting]
        told = states([row.predicted for row in waiting], self.minutes, self.parallel, self.least)
        known = {id(row): state for row, state in zip(waiting, told, strict=True)}
        return [replace(row, state=known.get(id(row), row.state)) for row in self.rows]

    def run(self) -> list[QueueRow]:
        """Until the minutes are over, or nothing is left. Ctrl-C and SIGTERM stop the runs; every finished round is kept."""
        self._catch_up()
        with _signals(signal.default_int_handler, ENDING):
            try:
                while self._fill() or self.going:
                    at_a_time = len(self.going) + self._running_elsewhere()
                    for one in self.going:
                        one.at_a_time.append(at_a_time)
                    time.sleep(LOOK_S)
                    self._collect()
                    if time.monotonic() >= self.end:
                        break
            finally:
                self._stop()
        if any(row.state == ELSEWHERE for row in self.rows):
            self._catch_up()
        for _, row in self.waiting:
            row.why = (
                "its minutes are not known, and too few are left"
                if row.predicted is None
                else "too few minutes are left"
            )
        self._report()
        return self.rows

    def _catch_up(self) -> None:
        """Copy what has ended in the folder of the runs and is not in the results, because its queue was killed or is another."""
        done = Store([self.work])
        kept = Store([self.results] if done.runs else [])
        for experiment, of_seeds in done.runs.items():
            for seed, run in of_seeds.items():
                if not kept.find(experiment, [seed]):
                    with suppress(OSError):  # such as a full disk: the next queue tries again
                        _keep(run.folder, self.results / run.folder.relative_to(self.work), None)
        for row in self.rows:
            if row.state == ELSEWHERE and _is_whole(self.work / row.folder):
                row.state = "done"

    def _row(self, one: Missing, alone: float | None, factor: float) -> QueueRow:
        left = 1 - _share_done(self.work / one.folder)
        predicted = None if alone is None else round(alone * factor * left, 2)
        return QueueRow(one.name, one.seed, one.group, str(one.folder), predicted=predicted)

    def _fill(self) -> bool:
        """Start runs in the free places; whether any was started."""
        started = False
        while self.waiting and len(self.going) < self.parallel and (left := (self.end - time.monotonic()) / 60) > 0:
            chosen = next_of([row.predicted for _, row in self.waiting], left, self.least)
            if chosen is None:
                break
            self._start(*self.waiting.pop(chosen))
            started = True
        return started

    def _start(self, one: Missing, row: QueueRow) -> None:
        folder = self.work / one.folder
        if state_of(folder) == "running":
            row.state = ELSEWHERE  # another queue has begun it meanwhile
            self._note(row)
            return
        begun_here = not folder.exists()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f"{folder.name}.log").open("ab") as log:
            process = subprocess.Popen(
                self.command(one, folder), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        row.state = "running"
        self.going.append(_Going(row, one, folder, process, begun_here))
        self._note(row)

    def _running_elsewhere(self) -> int:
        """How many runs another queue has going on this machine, on whatever device, and whether this one lists them or not."""
        own = {one.folder for one in self.going}
        return sum(state_of(folder) == "running" for folder in self.work.glob("*/*") if folder not in own)

    def _collect(self) -> None:
        """Take what has ended out of the places, keep its results, and note a failure with its last words."""
        for going in [one for one in self.going if one.process.poll() is not None]:
            self.going.remove(going)
            self._end(going, "failed")

    def _end(self, going: _Going, otherwise: str) -> None:
        row = going.row
        row.used = round((time.monotonic() - going.since) / 60, 2)
        row.state = "done" if _is_whole(going.folder) else otherwise
        if row.state == "done":
            looks = going.at_a_time if going.begun_here else []
            try:
                at_a_time = round(statistics.fmean(looks)) if looks else None
                _keep(going.folder, self.results / going.missing.folder, at_a_time)
            except OSError as error:
                row.why = f"its results could not be copied from {going.folder}: {error.strerror}; the next queue will"
        elif row.state == "failed":
            row.why = _last_words(going.folder.parent / f"{going.folder.name}.log")
        self._note(row)

    def _stop(self) -> None:
        """End all runs and keep what is done. Further signals wait, so that no run is left behind."""
        with _signals(signal.SIG_IGN, (signal.SIGINT, *ENDING)):
            for going in self.going:
                _signal(going.process, signal.SIGTERM)  # what a shell has put into the background ignores Ctrl-C
            until = time.monotonic() + GRACE_S
            for going in self.going:
                try:
                    going.process.wait(max(0.1, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    _signal(going.process, signal.SIGKILL)
                    going.process.wait()
            for going in self.going:
                self._end(going, "stopped")
            self.going = []

    def _note(self, row: QueueRow) -> None:
        self._report()
        self.tell(row)

    def _report(self) -> None:
        """The report so far, in one piece: a kill in between leaves the one before. A full disk stops no run."""
        told = {"schema": 1, "minutes": self.minutes, "parallel": self.parallel, "runs": list(map(asdict, self.rows))}
        report = self.results / "queue.json"
        with suppress(OSError):
            self.results.mkdir(parents=True, exist_ok=True)
            write_atomically(report, json.dumps(told, indent=1).encode(), sync="none", draft=unique_draft(report))


def next_of(predicted: Sequence[float | None], left: float, least: float) -> int | None:
    """Which of the waiting runs to start with so many minutes left: the first that ends in time, or stands before it and has
    no prediction. If none ends in time, the first of all, as long as ``least`` minutes are left: it goes on next time.

    >>> next_of([9, 5, 1], 6, 2), next_of([9, None, 1], 6, 2), next_of([9, 8], 6, 2), next_of([9, 8], 1, 2)
    (1, 1, 0, None)
    """
    ends = next((i for i, minutes in enumerate(predicted) if minutes is not None and minutes <= left), None)
    if left < least:
        return ends
    unknown = (i for i, minutes in enumerate(predicted) if minutes is None and (ends is None or i < ends))
    return next(unknown, ends or 0)


ENDS, BEGINS, LATER = "would end", "would begin", "later"


def states(predicted: Sequence[float | None], minutes: float, parallel: int, least: float) -> list[str]:
    """What a queue of so many minutes would do with each run. One without a prediction is taken to need all that is left.

    >>> states([5, 9, None, 1], 6, 1, 2), states([5, 9, None, 1], 6, 2, 2)
    (['would end', 'later', 'later', 'would end'], ['would end', 'later', 'would begin', 'would end'])
    """
    told = [LATER] * len(predicted)
    waiting, free_at = list(range(len(predicted))), [0.0] * parallel
    while waiting and (left := minutes - min(free_at)) > 0:
        chosen = next_of([predicted[i] for i in waiting], left, least)
        if chosen is None:
            break
        run, place = waiting.pop(chosen), free_at.index(min(free_at))
        takes = predicted[run]
        told[run] = ENDS if takes is not None and takes <= left else BEGINS
        free_at[place] += left if takes is None else min(takes, left)
    return told


def _share_done(folder: Path) -> float:
    """How much of a run that was stopped is saved."""
    status = read_status(folder)
    return min(1.0, max(0, status.done) / status.steps) if status.steps else 0.0


def _is_whole(folder: Path) -> bool:
    """Whether the run has ended and its results can be read."""
    try:
        results_row(folder / "results.json")
    except ResceneError:
        return False
    return True


def _keep(folder: Path, kept: Path, at_a_time: int | None) -> None:
    """The small files of a finished run; its results last, because they say that it is there. timing.json gets ``at_a_time``.

    What is there already, because another queue has copied it, stays as it is.
    """
    made, copied = folder / "results.json", kept / "results.json"
    if copied.is_file() and copied.read_bytes() == made.read_bytes():
        return
    kept.mkdir(parents=True, exist_ok=True)
    for name in reversed(KEPT):
        if not (folder / name).is_file():
            continue
        if name == "timing.json" and at_a_time is not None and (told := json_object(folder / name, [])):
            write_json(kept / name, told | {"at_a_time": at_a_time})
        elif name == "command.txt":
            write_atomically(kept / name, _without_out((folder / name).read_text("utf-8")).encode())
        else:
            write_atomically(kept / name, (folder / name).read_bytes())


def _without_out(command: str) -> str:
    """The command of a run without its ``--out``, which names a folder of this machine; what cannot be read stays.

    >>> _without_out("rescene run cifar10 seed=0 --out '/home/me/my runs/queue/a' --quiet")
    'rescene run cifar10 seed=0 --quiet\\n'
    """
    try:
        words = shlex.split(command)
    except ValueError:
        return command
    if "--out" in words:
        at = words.index("--out")
        del words[at : at + 2]
    return f"{shlex.join(words)}\n"


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error[")]
    return (errors or lines)[-1][:200] if lines else "it said nothing"


@contextmanager
def _signals(handler: signal.Handlers | Callable[..., object], numbers: Sequence[int]) -> Iterator[None]:
    """These signals have this handler meanwhile; one that is ignored (as under nohup) stays ignored."""
    before = {number: signal.getsignal(number) for number in numbers}
    used = [number for number, old in before.items() if old != signal.SIG_IGN]
    try:
        for number in used:
            signal.signal(number, handler)
        yield
    finally:
        for number in used:
            signal.signal(number, before[number])


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)
