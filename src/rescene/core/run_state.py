"""The state of a run folder: one definition for everybody who asks.

A process that works in a run folder holds a lock on ``run.lock`` there. The system releases the lock when the process ends,
however it ends, so the lock says whether a run is going. Where there is no lock (a folder of an older version, a file system
without locks) the process number in ``status.json`` or ``run.lock`` has to do, which is right on this machine only.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from io import RawIOBase
from pathlib import Path
from typing import IO, Any, Literal

try:
    import fcntl
except ImportError:  # not a Unix: process numbers have to do
    fcntl = None  # type: ignore[assignment]

State = Literal["running", "done", "failed", "interrupted", "unknown"]
LOCK = "run.lock"
FINISHED = "finished"  # folder inside a run folder
DEEPEST = 100  # levels of a file of ours; results.json has about ten
_TRIES, _PAUSE_S = 20, 0.05  # a reader that asks for the state holds the lock for a moment


class Busy(Exception):
    """Another process works in the folder. The text says which one, as far as it is known."""


def runs_root() -> Path:
    """Where runs lie unless somebody says otherwise."""
    return Path(os.environ.get("RESCENE_RUNS", "runs"))


def is_done(folder: Path) -> bool:
    """Whether the run has ended well. Its results are written when all else is, so they decide, whatever the status says."""
    return os.path.isfile(folder / "results.json")


def finished_in(folder: Path) -> Path:
    """Where the newest finished results and model of a run folder are: in itself, or aside while it learns a new task."""
    aside = folder / FINISHED
    return aside if is_done(aside) and not is_done(folder) else folder


def state_of(folder: Path, mine: bool = False) -> State:
    """What became of the run in this folder. ``mine``: the caller holds its lock, so nobody else works in it.

    running: a process works in it. done: its results are there. failed: an error stopped it. interrupted: its process was
    stopped or killed. unknown: no status can be read, because the run never finished a step or the file is damaged.
    """
    status = _status(folder)
    told, going = status.get("state"), False if mine else _is_held(folder)
    if going:
        return "running"
    if is_done(folder):
        return "done"
    if told is None:
        return "unknown"
    if going is None and told == "running" and ("pid" not in status or is_alive(status["pid"])):
        return "running"
    return "failed" if told == "failed" else "interrupted"


@contextlib.contextmanager
def working_in(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder. Busy if another process holds it, OSError if the folder cannot be written.

    On a file system without locks another process on this machine is still noticed, by the number in ``run.lock``; one on
    another machine is not.
    """
    path = folder / LOCK
    with _locked(path) as file:
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the folder may be gone, or read-only by now; what holds is the lock
                path.unlink()


def is_alive(pid: Any) -> bool:
    """Whether a process of this number is there."""
    try:
        os.kill(int(pid), 0)
    except PermissionError:  # somebody else's
        return True
    except (OSError, TypeError, ValueError, OverflowError):
        return False
    return True


def read_object(path: Path) -> dict[str, Any]:
    """A file that holds a JSON object. OSError if it cannot be read, ValueError (with the reason) if it holds something else.

    Files nested deeper than ours are refused too: they would break whoever walks through them.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict) or not found:
        raise ValueError("it is empty or not a JSON object")
    level: list[Any] = [found]
    for _ in range(DEEPEST):
        level = [inner for value in level for inner in _children(value)]
        if not level:
            return found
    raise ValueError("it is nested too deeply")


def _children(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [one for one in inner if isinstance(one, (dict, list))]


def _status(folder: Path) -> dict[str, Any]:
    try:
        return read_object(folder / "status.json")
    except (OSError, ValueError):
        return {}


def _is_held(folder: Path) -> bool | None:
    """Whether a process holds the lock; None if that cannot be told."""
    try:
        with open(folder / LOCK, "rb") as file:
            return not _try(file, shared=True)
    except OSError:  # there is none, it cannot be opened, or there are no locks here
        return None


def _try(file: IO[bytes] | RawIOBase, shared: bool = False) -> bool:
    """Take the lock now, if it is free. OSError where there are no locks."""
    if fcntl is None:
        raise OSError("no locks on this system")
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[RawIOBase]:
    """The lock file, locked. Whoever held it before removes it, so a lock on a removed file is none: then again."""
    for _ in range(_TRIES):
        with open(path, "ab+", buffering=0) as file:
            try:
                free = _try(file)
            except OSError:
                free = not _is_named_alive(file)
            if free and _is_at(file, path):
                yield file
                return
        if not free:
            time.sleep(_PAUSE_S)
    raise Busy(_named(path))


def _is_at(file: RawIOBase, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _owner(text: bytes) -> tuple[int | None, str | None]:
    try:
        found = json.loads(text)
        return int(found["pid"]), str(found["host"])
    except (ValueError, KeyError, TypeError):
        return None, None


def _is_named_alive(file: RawIOBase) -> bool:
    file.seek(0)
    pid, host = _owner(file.read() or b"")
    return host == socket.gethostname() and is_alive(pid)


def _named(path: Path) -> str:
    with contextlib.suppress(OSError):
        pid, host = _owner(path.read_bytes())
        if pid is not None:
            return f"process {pid} on {host}" if host != socket.gethostname() else f"process {pid}"
    return "its number is not known"
