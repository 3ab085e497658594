"""What the paper's tables still lack, most informative first, and a queue that runs it in a given number of minutes.

Each missing run has the minutes that it is likely to take here. A queue has several processes on one device, each of which saves every
finished round.
The queue starts what is likely to end in time, the first in the list first, and fills the rest of the time with the first run
that is not done: a run that is stopped goes on next time where it was. What has ended is copied to the results at once.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from rescene.config import Resolved, resolve
from rescene.core.errors import ResceneError
from rescene.core.files import write_atomically
from rescene.core.json_files import json_object
from rescene.core.results import read_status
from rescene.core.run_state import is_done, runs_root, state_of
from rescene.engine.checkpoint import write_json
from rescene.engine.cost_ledger import nominal_cost
from rescene.paper.costs import without_pictures
from rescene.paper.numbers import packaged
from rescene.paper.recipes import FAST_LABEL, PaperCell, paper_recipe
from rescene.paper.store import FAMILY, Store, Stored


@dataclass(frozen=True)
class Missing:
    """A run that no stored folder holds yet."""

    group: str
    name: str
    cell: PaperCell
    seed: int

    @property
    def resolved(self) -> Resolved:
        return self.cell.resolve(f"seed={self.seed}")

    @property
    def folder(self) -> Path:
        """Below the folder of the runs."""
        recipe = self.resolved.recipe
        return Path(recipe.data.name) / f"{recipe.method['name']}-s{self.seed}-{self.resolved.digest()}"

    @property
    def command(self) -> list[str]:
        """The words after `rescene`, without a folder."""
        return ["run", self.cell.base, *self.cell.overrides, f"seed={self.seed}"]


def missing_cells(store: Store) -> list[Missing]:
    """Every run of queue.yaml that is not stored, once, in its order; cells that this version cannot set up are left out."""
    found: dict[tuple[str, int], Missing] = {}
    for group in _queue():
        for line in group["cells"]:
            for name, cell in _cells(line):
                for seed in line["seeds"]:
                    if not cell.unavailable and not store.find(cell.experiment, [seed]):
                        found.setdefault((cell.experiment, seed), Missing(group["group"], name, cell, seed))
    return list(found.values())


def _cells(line: dict[str, Any]) -> Iterator[tuple[str, PaperCell]]:
    for pattern in line["cells"]:
        table, _, wanted = pattern.partition(":")
        for cell in paper_recipe(table).cells:
            where = f"{table}:{cell.name}"
            if not fnmatch(cell.name, wanted) or any(fnmatch(where, other) for other in line.get("except", ())):
                continue
            form = (cell.fast if line.get("fast") else None) or cell
            for reading in line.get("readings", [""]):
                words = (where, FAST_LABEL if form is not cell else "", reading)
                yield ", ".join(filter(None, words)), form.read_as(reading) if reading else form


def _queue() -> tuple[dict[str, Any], ...]:
    return tuple(packaged("queue.yaml"))


# on another data set the formulas count memories that are never full, up to five times the work (results/cost/README.md)
OVERCOUNTED = ("glfc", "fedcbdr")
Predict = Callable[[Missing], float | None]  # minutes of a run that has the device for itself; None: not known


def predictor(store: Store, device: str) -> Predict:
    """Minutes from stored runs of the same method on the same kind of device, in proportion to the work.

    Of runs with the same network, those with the same data and server epochs count if there are any. Where it is known how
    many ran at a time, the median of what they would take alone; else the quickest, since others only slow a run down.
    Without such a run, or where the images' sizes are not known here, nothing is said.
    """
    known = [one for run in store.all() if (one := _timed(run, device))]

    def minutes(missing: Missing) -> float | None:
        recipe = missing.resolved.recipe
        method = FAMILY.get(recipe.method["name"], recipe.method["name"])
        form = (method, recipe.model.name, _norm_statistics(recipe.method))
        same = [one for one in known if (one.method, one.model, one.norm_statistics) == form]
        if method in OVERCOUNTED:
            same = [one for one in same if one.data == recipe.data.name]
        near = [one for one in same if one.server_epochs == recipe.train.server_epochs] or same
        near = [one for one in near if one.data == recipe.data.name] or near
        work = _work(missing.cell.base, missing.cell.overrides) if near else None
        return _pace(near) * work / 60 if work else None

    return minutes


@dataclass(frozen=True)
class _Timed:
    method: str
    data: str
    model: str
    norm_statistics: str
    server_epochs: int
    seconds: float
    work: float
    at_a_time: int | None  # runs on the device while it ran; None: not known


def _pace(runs: Sequence[_Timed]) -> float:
    """Seconds of a FLOP for a run that has the device for itself.

    >>> def made(seconds, at_a_time): return _Timed("m", "d", "net", "server", 10, seconds, 1.0, at_a_time)
    >>> _pace([made(30.0, None), made(20.0, None)]), _pace([made(30.0, None), made(16.0, 2), made(45.0, 3), made(59.0, 4)])
    (20.0, 20.0)
    """
    alone = [one.seconds / slower / one.work for one in runs if (slower := SLOWER.get(one.at_a_time or 0))]
    return statistics.median(alone) if alone else min(one.seconds / one.work for one in runs)


def _at_a_time(run: Path, timing: Mapping[str, Any]) -> int | None:
    """As the queue wrote it into timing.json; of older runs as a list beside the results has it (results/README.md)."""
    told = timing.get("at_a_time")
    for place in run.parents if told is None else ():
        if (listed := place / AT_A_TIME).is_file():
            told = json_object(listed, []).get(run.relative_to(place).as_posix())
    return told if isinstance(told, int) else None


def _norm_statistics(method: Mapping[str, Any]) -> str:
    """Condensation with statistics of the batch takes several times as long on a GPU, because it is not recorded as a graph."""
    return str(method.get("norm_statistics", "server"))


def _timed(run: Stored, device: str) -> _Timed | None:
    problems: list[str] = []
    env, timing = (json_object(run.folder / name, problems) for name in ("env.json", "timing.json"))
    config, seconds = run.results.config, timing.get("total_s")
    if problems or env.get("device") != device or not isinstance(seconds, (int, float)):
        return None
    name = str(config["method"]["name"])
    nominal = run.results.cost.nominal
    work = (nominal.client_flops or 0.0) + (nominal.server_flops or 0.0)
    epochs = int(config["train"]["server_epochs"])
    words = (FAMILY.get(name, name), str(config["data"]["name"]), str(config["model"]["name"]))
    at_a_time = _at_a_time(run.folder, timing)
    return _Timed(*words, _norm_statistics(config["method"]), epochs, float(seconds), work, at_a_time) if work else None


@cache
def _work(base: str, overrides: tuple[str, ...]) -> float | None:
    """FLOPs of a run by the paper's formulas."""
    try:
        found = nominal_cost(without_pictures(resolve(base, overrides).recipe, 0))
    except ResceneError:  # such as a data set of unknown sizes
        return None
    return None if found is None else found["client_flops"] + found["server_flops"]


# several runs on one GPU: how much longer each takes than alone (results/bench/README.md); more than four gain nothing
SLOWER = {1: 1.0, 2: 1.6, 3: 2.25, 4: 2.95}
AT_A_TIME = "at-a-time.json"
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
    at_a_time: list[int] = field(default_factory=list)  # how many runs were going, at each look


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
        slower = SLOWER[min(parallel, max(SLOWER))] * max(1.0, parallel / max(SLOWER))
        self.waiting = [(one, self._row(one, predict(one), slower)) for one in wanted]
        self.rows = [row for _, row in self.waiting]
        for one, row in self.waiting:
            if state_of(work / one.folder) == "running":
                row.state = "running elsewhere"
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
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            while self._fill() or self.going:
                for one in self.going:
                    one.at_a_time.append(len(self.going))
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
            chosen = next_of([row.predicted for _, row in self.waiting], left, self.least)
            if chosen is None:
                break
            self._start(*self.waiting.pop(chosen))
            started = True
        return started

    def _start(self, one: Missing, row: QueueRow) -> None:
        folder = self.work / one.folder
        begun_here = not folder.exists()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f"{folder.name}.log").open("ab") as log:
            process = subprocess.Popen(
                self.command(one, folder), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        row.state = "running"
        self.going.append(_Going(row, one, folder, process, begun_here))
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
            looks = going.at_a_time if going.begun_here else []
            _keep(going.folder, self.results / going.missing.folder, round(statistics.fmean(looks)) if looks else None)
        elif row.state == "failed":
            row.why = _last_words(going.folder.parent / f"{going.folder.name}.log")
        self._note(row)

    def _stop(self) -> None:
        for going in self.going:
            _signal(going.process, signal.SIGTERM)  # what a shell has put into the background ignores Ctrl-C
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
        write_atomically(self.results / "queue.json", json.dumps(told, indent=1).encode(), sync="none")
        self.tell(row)


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
    return min(1.0, status.done / status.steps) if status.steps else 0.0


def _keep(folder: Path, kept: Path, at_a_time: int | None) -> None:
    """The small files of a finished run; its results last, because they say that it is there. timing.json gets ``at_a_time``."""
    kept.mkdir(parents=True, exist_ok=True)
    for name in reversed(KEPT):
        if (folder / name).is_file():
            shutil.copy2(folder / name, kept / name)
            if name == "timing.json" and at_a_time is not None and (told := json_object(kept / name, [])):
                write_json(kept / name, told | {"at_a_time": at_a_time})


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)
