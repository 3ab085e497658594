"""A site's memory of what it has released: one append-only file per site, on the site's own disk.

The server is the one to be protected from, so the site keeps the books. Order of events: check the budget, write the intent,
draw the noise, write the release, write the mark, and only then hand it out; each is on disk before the next. So

- the same place asked again gets the same bytes (a resumed run replays; averaging repeated answers gains nothing);
- the same place with another question is refused; a spent budget declines; an unreadable file stops everything;
- a participation counts from its intent on, even if the machine dies before the release.

A file that was deleted, emptied, cut or put back from a backup is a budget that was set back. Three things show it:

- the chain: every entry names the hash of the one before it, so none can be changed, left out or moved;
- the mark: a small file elsewhere (at a site beside its key) that says how far the ledger goes and lists all charges.
  A ledger that does not reach its mark is refused (E366). One that is ahead of it is whole: the machine died in between,
  nothing was handed out, and the mark follows;
- ``least``: how far the ledger went when the server last got an answer, as its letter says (E367). A server that lies can
  only make a site refuse.

:meth:`Ledger.recover` charges everything that the mark lists and the ledger has lost. It never takes a charge away.

The floor (``floor.yaml`` beside the file: epsilon_max, min_sigma, max_participations) is the site's own. It can only be
stricter than what the server asks for. It counts every earlier run in the file in full, because a record may be in all of them.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

from safetensors.torch import load, save
from torch import Tensor

from rescene.documents import read_yaml
from rescene.errors import ConfigError, ResceneError, RunError, command
from rescene.privacy.accounting import Composition, total_epsilon
from rescene.record import record

try:
    from fcntl import LOCK_EX, flock
except ImportError:  # not on this system: one process per ledger is then the operator's duty
    flock = None  # type: ignore[assignment]

Released = dict[str, Tensor]


class Declined(ResceneError):
    """The site does not take part this time (E413): its budget is spent or its floor is above what was asked."""


@dataclass(frozen=True)
class Charge:
    """One participation: its place, and what it costs a record."""

    run: str
    task: int
    round: int
    mechanism: str
    sigma: float
    steps: int
    rate: float
    reuses: bool = False  # records of earlier tasks, kept in the site's memory, are used as well

    @property
    def key(self) -> str:
        return f"{self.run}/{self.task}/{self.round}"


@dataclass(frozen=True)
class Floor:
    """What the site allows at most, whatever the server says. None: no limit of its own."""

    epsilon_max: float | None = None
    min_sigma: float | None = None
    max_participations: int | None = None


@record
class End:
    """How far a ledger goes: the number of its last entry, and the hash that stands for all entries up to it."""

    entries: int = 0
    head: str = ""


@dataclass(frozen=True)
class Mark:
    """How far a ledger had come when it last handed something out, with all that was begun by then."""

    end: End
    begun: dict[str, Charge]


@dataclass
class _Book:
    """What a ledger's entries say, one after the other."""

    end: End = End()
    chained: bool = False  # whether the last entry names the one before it; entries of older versions do not
    heads: dict[int, set[str]] = field(default_factory=dict)  # the hashes that are known of an entry's number
    begun: dict[str, Charge] = field(default_factory=dict)  # every participation, by the hash of its intent
    questions: dict[str, str] = field(default_factory=dict)  # by place
    releases: dict[str, tuple[str, End]] = field(default_factory=dict)  # by place, with the ledger's end after it
    closed: set[str] = field(default_factory=set)  # places whose release may have left the site and is lost

    def add(self, row: dict[str, Any]) -> None:
        """Take the next entry; ValueError, KeyError or TypeError if it cannot be it."""
        if row["sha256"] != _fingerprint({key: value for key, value in row.items() if key != "sha256"}):
            raise ValueError("the line does not match its fingerprint")
        if (self.chained or "before" in row) and row.get("before") != self.end.head:
            raise ValueError("the line does not follow the one before it")
        self.chained = "before" in row
        number = self.end.entries + 1
        if row["kind"] == "intent":
            charge = Charge(**row["charge"])
            self.begun[row["sha256"]] = charge
            self.questions[charge.key] = row["question"]
        elif row["kind"] == "recovered":
            lost, mark = _charges(row["charges"]), End(**row["mark"])
            self.closed |= self.questions.keys() - self.releases.keys() | {charge.key for charge in lost.values()}
            self.begun |= lost
            self.heads.setdefault(mark.entries, set()).add(mark.head)
            number = max(number, mark.entries + 1)  # no number is given twice: the server compares them
        elif row["kind"] not in ("release", "chained"):
            raise ValueError(f"unknown kind {row['kind']!r}")
        head = row["sha256"] if self.chained else _fingerprint({"before": self.end.head, "sha256": row["sha256"]})
        self.end = End(number, head)
        self.heads.setdefault(number, set()).add(head)
        if row["kind"] == "release":
            self.releases[row["key"]] = (row["data"], self.end)

    def reaches(self, end: End) -> bool:
        """Whether this ledger goes on from there. Numbers that a recovery skipped have no hash to compare."""
        known = self.heads.get(end.entries)
        return end.entries <= self.end.entries and (not end.entries or known is None or end.head in known)


class Ledger:
    """``mark`` is the path of the mark; None, as in a simulation, keeps none. ``least`` is what the server remembers."""

    def __init__(
        self, path: Path, floor: Floor | None = None, mark: Path | None = None, least: End | None = None
    ) -> None:
        self.path, self.mark_path, self.least = path, mark, least
        self._floor = floor  # given, or else in the file beside
        self.handed: End | None = None  # how far the ledger goes with the newest release that this object handed out

    def once(
        self, charge: Charge, question: str, delta: float, most: int | None, draw: Callable[[], Released]
    ) -> Released:
        """The release at this place: the recorded one, or a new one if the budget allows it."""
        with self._open() as file:
            mark = self._read_mark()
            book, num_bytes = self._checked(file, mark)
            file.truncate(num_bytes)  # the rest, a line without its end, was never fsynced, so never sent
            self._adopt(file, book, mark)
            if book.questions.get(charge.key, question) != question:
                raise RunError(
                    "E412",
                    "the same round was asked twice with different questions",
                    where=f"{self.path}, {charge.key}",
                    why="a second answer about the same round is a second release that nobody accounted for",
                    fix="use the folder of the run that began this round, or start a new run",
                )
            if charge.key in book.releases:
                return self._hand_out(book, charge, _unpacked(book.releases[charge.key][0]))
            if charge.key in book.closed:
                raise self._declined(charge, "what it released in this round is lost, and it releases nothing twice")
            if charge.key not in book.questions:
                self._check_budget(charge, list(book.begun.values()), delta, most)
                self._append(file, book, {"kind": "intent", "question": question, "charge": asdict(charge)})
            found = draw()
            self._append(file, book, {"kind": "release", "key": charge.key, **_packed(found)})
            return self._hand_out(book, charge, found)

    def recover(self) -> list[Charge]:
        """Bring the ledger up to its mark, or make a lost mark from a whole ledger; returns what was charged now.

        A damaged file is set aside and kept. Releases that are lost stay lost: their places are closed.
        """
        with self._open() as file:
            mark = None
            with contextlib.suppress(RunError):  # damaged: as good as none
                mark = self._read_mark()
            try:
                book: _Book | None = self._entries(file)[0]
            except RunError:
                book = None
            if mark is None and (book is None or not book.end.entries):
                raise RunError(
                    "E369",
                    "the privacy ledger cannot be recovered",
                    where=str(self.path),
                    why="neither the ledger nor its mark is there and whole, so nobody knows what was released",
                    fix="put back the newest copy of both files and try again; without one this site stays out",
                )
            if book is None:
                content = hashlib.sha256(self.path.read_bytes()).hexdigest()
                self.path.rename(self.path.with_name(f"{self.path.name}.damaged-{content[:12]}"))
        with self._open() as file:
            book, num_bytes = self._entries(file)
            lost: dict[str, Charge] = {}
            if mark is not None and not book.reaches(mark.end):
                file.truncate(num_bytes)
                lost = {sha256: charge for sha256, charge in mark.begun.items() if sha256 not in book.begun}
                charges = {sha256: asdict(charge) for sha256, charge in lost.items()}
                self._append(file, book, {"kind": "recovered", "mark": asdict(mark.end), "charges": charges})
            self._write_mark(book)
            return list(lost.values())

    def participations(self, run: str, task: int) -> int:
        return sum((charge.run, charge.task) == (run, task) for charge in self.charges())

    def charges(self) -> list[Charge]:
        """Everything that was ever begun, in order; nothing is written."""
        mark = self._read_mark()  # before the ledger, which only grows
        try:
            with open(self.path, "rb") as file:
                return list(self._checked(file, mark)[0].begun.values())
        except FileNotFoundError:
            return list(self._checked(io.BytesIO(), mark)[0].begun.values())
        except OSError as error:
            raise self._unusable(str(error)) from None

    def floor(self) -> Floor:
        """The site's own limits; a floor that cannot be understood allows nothing."""
        path = self.path.parent / "floor.yaml"
        if self._floor is not None:
            return self._floor
        if not path.exists():
            return Floor()
        try:
            found = read_yaml(path)
            unknown = found.keys() - {field.name for field in fields(Floor)}
            if unknown or not all(float(value) > 0 for value in found.values()):
                raise ValueError(f"unknown {sorted(unknown)}" if unknown else "limits must be above 0")
            return Floor(**found)
        except (OSError, ValueError, TypeError, AttributeError, ConfigError) as error:
            raise RunError(
                "E411",
                "the site's privacy floor cannot be read, so nothing is sent",
                where=str(path),
                why=str(error),
                fix="epsilon_max, min_sigma, max_participations: positive numbers",
            ) from None

    def _check_budget(self, charge: Charge, earlier: list[Charge], delta: float, most: int | None) -> None:
        floor = self.floor()
        same = [c for c in earlier if (c.run, c.task) == (charge.run, charge.task)]
        limits = [limit for limit in (most, floor.max_participations) if limit is not None]
        if limits and len(same) >= min(limits):
            raise self._declined(charge, f"{len(same)} participations in this task are all it allows")
        if floor.min_sigma is not None and charge.sigma < floor.min_sigma:
            raise self._declined(charge, f"noise multiplier {charge.sigma:g} is below its floor {floor.min_sigma:g}")
        if floor.epsilon_max is None:
            return
        if charge.mechanism == "paper-experiment":
            raise self._declined(charge, "the paper's experiment promises no epsilon, and this site has a limit on it")
        used = [c for c in earlier if c.run != charge.run or c.task == charge.task or charge.reuses]
        steps: Counter[tuple[float, float]] = Counter()
        for c in (*used, charge):
            steps[c.sigma, c.rate] += c.steps
        spent = total_epsilon([(sigma, Composition(n, 1, rate)) for (sigma, rate), n in steps.items()], delta)
        if spent > floor.epsilon_max:
            raise self._declined(charge, f"epsilon would be {spent:.2f}, above its limit {floor.epsilon_max:g}")

    def _declined(self, charge: Charge, why: str) -> Declined:
        return Declined("E413", f"site declines: {why}", where=f"task {charge.task}, round {charge.round}")

    @contextlib.contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        """The file, locked, so that two processes cannot spend the same budget."""
        try:
            new = not self.path.exists()
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            file = open(self.path, "a+b", opener=_for_us_alone)  # noqa: SIM115 - closed below, errors of opening are told apart
        except OSError as error:
            raise self._unwritten(error) from None
        with file:
            if flock is not None:
                flock(file, LOCK_EX)
            if new:
                _sync_folder(self.path.parent)
            yield file

    def _checked(self, file: BinaryIO, mark: Mark | None) -> tuple[_Book, int]:
        """As :meth:`_entries`, if they reach the mark and what the server remembers."""
        book, num_bytes = self._entries(file)
        if self.mark_path is not None and mark is None and book.chained:
            raise self._no_mark("it is missing, though the ledger has entries")
        if mark is not None and not book.reaches(mark.end):
            raise self._set_back("E366", "does not reach its mark", str(self.mark_path), book, mark.end)
        if self.least is not None and not book.reaches(self.least):
            raise self._set_back("E367", "lacks entries that the server knows of", "the server", book, self.least)
        return book, num_bytes

    def _entries(self, file: BinaryIO) -> tuple[_Book, int]:
        """What all whole lines say, and how many bytes they are."""
        file.seek(0)
        data = file.read()
        book, whole = _Book(), data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                book.add(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise self._unusable(f"line {number}: {error}") from None
        return book, len(whole)

    def _adopt(self, file: BinaryIO, book: _Book, mark: Mark | None) -> None:
        """A new ledger gets its mark before its first entry. One from before there was a chain is taken over once, as it is,
        and an entry says so.
        """
        if mark is None:
            self._write_mark(book)
        if book.end.entries and not book.chained:
            self._append(file, book, {"kind": "chained", "entries": book.end.entries})

    def _hand_out(self, book: _Book, charge: Charge, found: Released) -> Released:
        """Nothing leaves before the mark knows of it."""
        self._write_mark(book)
        end = book.releases[charge.key][1]
        self.handed = max(self.handed or end, end, key=lambda one: one.entries)
        return found

    def _append(self, file: BinaryIO, book: _Book, row: dict[str, Any]) -> None:
        row |= {"before": book.end.head}
        row |= {"sha256": _fingerprint(row)}
        try:
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            raise self._unwritten(error) from None
        book.add(row)

    def _read_mark(self) -> Mark | None:
        if self.mark_path is None:
            return None
        try:
            row = json.loads(self.mark_path.read_bytes())
            if row.pop("sha256") != _fingerprint(row):
                raise ValueError("it does not match its fingerprint")
            return Mark(End(**row["end"]), _charges(row["charges"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._no_mark(str(error)) from None

    def _write_mark(self, book: _Book) -> None:
        """Whole or not at all."""
        if self.mark_path is None:
            return
        charges = {sha256: asdict(charge) for sha256, charge in book.begun.items()}
        row: dict[str, Any] = {"end": asdict(book.end), "charges": charges}
        row |= {"sha256": _fingerprint(row)}
        temporary = self.mark_path.with_name(f".{self.mark_path.name}.tmp")
        try:
            with open(temporary, "wb", opener=_for_us_alone) as file:
                file.write(json.dumps(row, indent=1).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.mark_path)
            _sync_folder(self.mark_path.parent)
        except OSError as error:
            raise self._unwritten(error) from None

    def _set_back(self, code: str, what: str, who: str, book: _Book, end: End) -> RunError:
        have = f"ends at entry {book.end.entries}" if end.entries > book.end.entries else "has another one there"
        return RunError(
            code,
            f"the privacy ledger {what}, so nothing is sent",
            where=str(self.path),
            why=f"{who} names entry {end.entries}, the ledger {have}: it was deleted, cut or put back from a backup",
            fix=self._remedy(),
        )

    def _no_mark(self, why: str) -> RunError:
        return RunError(
            "E368",
            "the mark of the privacy ledger cannot be read, so nothing is sent",
            where=str(self.mark_path),
            why=why,
            fix=self._remedy(),
        )

    def _unwritten(self, error: OSError) -> RunError:
        return self._unusable(str(error), "make room, or make the folder writable; what is on disk stays good")

    def _unusable(self, why: str, fix: str | None = None) -> RunError:
        return RunError(
            "E411",
            "the privacy ledger cannot be used, so nothing is sent",
            where=str(self.path),
            why=why,
            fix=fix or self._remedy(),
        )

    def _remedy(self) -> str:
        if self.mark_path is None:
            return "restore the file from a backup; without it the site cannot know what it has already released"
        newest = "if there is a newer copy of this file and of its mark, put back both"
        return f"{newest}; then: {command('deploy', 'recover-ledger', self.mark_path.parent)}"


def _charges(rows: dict[str, Any]) -> dict[str, Charge]:
    return {sha256: Charge(**row) for sha256, row in rows.items()}


def _for_us_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _sync_folder(path: Path) -> None:
    """A new name must survive a crash too."""
    if hasattr(os, "O_DIRECTORY"):
        folder = os.open(path, os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _fingerprint(row: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()


def _packed(tensors: Released) -> dict[str, Any]:
    plain = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    return {"data": base64.b64encode(save(plain)).decode()}


def _unpacked(data: str) -> Released:
    return load(base64.b64decode(data))
