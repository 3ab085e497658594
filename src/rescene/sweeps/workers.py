"""Runs side by side on this machine, each in a process of its own, with a GPU each in turn.

A run that fails, even one whose process dies, does not touch the others. A sweep that is stopped stops its runs first, and each
of them continues from its last round when the sweep is started again.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rescene.api import Result, load
from rescene.core.errors import ConfigError, ResceneError, RunError, command, error_in, for_people, lines_of
from rescene.sweeps.grid import SweepCell
from rescene.sweeps.one_run import Order

PATIENCE_S = 60  # a run that is asked to stop finishes writing; then it is killed
LOGS = "sweep-logs"
_TAIL = 20_000  # characters at the end of a log in which an error is looked for
CellOutcome = tuple[int, Result | Exception]


def slots(jobs: int | None, gpus: str, num_cores: int, num_gpus: int) -> list[dict[str, str]]:
    """The environment of each of the processes that run at the same time.

    >>> slots(3, "0,1", num_cores=8, num_gpus=2)[2]
    {'CUDA_VISIBLE_DEVICES': '0', 'OMP_NUM_THREADS': '2'}
    >>> len(slots(None, "0,1", num_cores=8, num_gpus=2)), slots(2, "", num_cores=8, num_gpus=0)[0]
    (2, {'OMP_NUM_THREADS': '4'})
    """
    names = read_gpus(gpus, num_gpus)
    count = jobs or len(names) or 1
    threads = {"OMP_NUM_THREADS": str(max(1, num_cores // count))}
    return [({"CUDA_VISIBLE_DEVICES": names[i % len(names)]} if names else {}) | threads for i in range(count)]


def read_gpus(text: str, num_gpus: int) -> list[str]:
    """The GPUs that ``--gpus`` names: numbers, or identifiers as nvidia-smi -L shows them."""
    names = [name.strip() for name in text.split(",")] if text.strip() else []
    for name in names:
        if not re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", name):
            raise ConfigError("E119", f"{name!r} names no GPU", where="--gpus", fix="numbers such as --gpus 0,1")
        if name.isdigit() and int(name) >= num_gpus:
            why = f"torch sees {num_gpus} here" if num_gpus else "torch sees no GPU here"
            fix = f"--gpus {','.join(map(str, range(num_gpus)))}" if num_gpus else "leave --gpus out"
            raise ConfigError("E119", f"there is no GPU {name}", where="--gpus", why=why, fix=fix)
    return names


def in_processes(
    cells: Sequence[SweepCell],
    orders: Sequence[Order],
    environments: Sequence[Mapping[str, str]],
    started: Callable[[int], None] = lambda number: None,
) -> Iterator[CellOutcome]:
    """(number of a cell, its result or what stopped it), in the order in which they end. Finished cells come first.

    ``environments``: one for each process that may run at the same time. ``started`` is told when a cell begins.
    """
    done = [number for number, one in enumerate(cells) if one.done]
    yield from ((number, loaded(cells[number])) for number in done)
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(len(cells)):
        if number not in set(done):
            waiting.put(number)
    ended: queue.SimpleQueue[CellOutcome] = queue.SimpleQueue()
    crew = _Crew(cells, orders, waiting, ended, started)
    threads = [threading.Thread(target=crew.work, args=(own,), daemon=True) for own in environments]
    for thread in threads:
        thread.start()
    try:
        for _ in range(len(cells) - len(done)):
            yield ended.get()
    finally:  # also when the sweep is interrupted
        crew.stop()
        for thread in threads:
            thread.join(PATIENCE_S + 10)


class _Crew:
    """The processes of a sweep. ``stop`` ends them; no new one is started after that."""

    def __init__(
        self,
        cells: Sequence[SweepCell],
        orders: Sequence[Order],
        waiting: queue.SimpleQueue[int],
        ended: queue.SimpleQueue[CellOutcome],
        started: Callable[[int], None],
    ) -> None:
        self.cells, self.orders, self.waiting, self.ended, self.started = cells, orders, waiting, ended, started
        self.lock, self.stopped = threading.Lock(), False
        self.running: set[subprocess.Popen[bytes]] = set()

    def work(self, environment: Mapping[str, str]) -> None:
        """Take one cell after the other."""
        while True:
            try:
                number = self.waiting.get_nowait()
            except queue.Empty:
                return
            try:
                outcome: Result | Exception = self._run(number, environment)
            except Exception as error:  # such as a full disk: it belongs to this cell
                outcome = error
            self.ended.put((number, outcome))

    def _run(self, number: int, environment: Mapping[str, str]) -> Result | Exception:
        cell, log = self.cells[number], log_file(self.cells[number].folder)
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "wb") as file, self.lock:
            if self.stopped:
                return InterruptedRun(cell.folder)
            self.started(number)
            process = subprocess.Popen(
                self.orders[number].command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl-C reaches the sweep, which stops its runs in order
            )
            self.running.add(process)
        code = process.wait()
        with self.lock:
            self.running.discard(process)
        return outcome_of(cell.folder, code, log)

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
            left = list(self.running)
        for process in left:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in left:
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()


class InterruptedRun(RunError):
    """A run that was stopped with its sweep."""

    def __init__(self, folder: Path) -> None:
        super().__init__("E325", "the run was interrupted", where=str(folder), fix="the same command continues it")


def log_file(folder: Path) -> Path:
    """Where the process of a run writes what it says: beside the run folder, which is the run's own."""
    return folder.parent / LOGS / f"{folder.name}.log"


def outcome_of(folder: Path, code: int, log: Path) -> Result | Exception:
    """What became of the process of a run."""
    if code == 0:
        return load(folder)
    text = log.read_text("utf-8", "replace")[-_TAIL:] if log.is_file() else ""
    if code in (130, 143):
        return InterruptedRun(folder)
    if (known := error_in(text)) is not None:
        return known
    last = next((line for line in reversed(text.splitlines()) if line.strip()), "it said nothing")
    why = f"signal {-code} ended it; 9 often means that memory ran out" if code < 0 else last[:300]
    what = f"the process of a run ended with code {code}"
    return RunError("E326", what, where=str(folder), why=why, fix=_after_reading(log, folder))


def unexpected(folder: Path, error: Exception) -> ResceneError:
    """An error for the table of failures from one that nobody foresaw: a mistake in code. Its traceback is kept in the run's log."""
    known = for_people(error)
    if isinstance(known, ResceneError):
        return known
    log = log_file(folder)
    with suppress(OSError):  # a full disk, say: the error is told in any case
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("".join(traceback.format_exception(error)), "utf-8")
    what = f"a run ended with {type(error).__name__}: {lines_of(error)[0]}"
    return RunError("E326", what, where=str(folder), fix=_after_reading(log, folder))


def _after_reading(log: Path, folder: Path) -> str:
    return f"read {log}; the same command tries again. Only this run: {command('resume', folder)}"


def loaded(cell: SweepCell) -> Result | Exception:
    try:
        return load(cell.folder)
    except ResceneError as error:
        return error
