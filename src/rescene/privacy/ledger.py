"""A site's memory of what it has released: one append-only file per site, on the site's own disk, and what it names.

    ledger.jsonl             what was begun and released, one line each (``ledger_file.py`` says what the lines mean)
    ledger/releases/<hash>   each release, as safetensors; it is read when its question comes again, and only then
    ledger/images/<hash>     lists of the images that charges touch, as hashes that only this site can make
    ledger/secret            what those hashes are made with
    floor.yaml               what the site allows at most (``ledger_file.py``)

The server is the one to be protected from, so the site keeps the books. Order of events: check the budget, write the intent,
draw the noise, write the release, write its line, write the mark, and only then hand it out; each is on disk before the next. So

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

:meth:`Ledger.recover` charges everything that the mark lists and the ledger has lost. It never takes a charge away. A list of
images or a secret that is lost makes the charges that need it count for every image.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pydantic import ValidationError
from safetensors.torch import load, save
from torch import Tensor

from rescene.core.documents import read_yaml
from rescene.core.errors import ConfigError, RunError, command
from rescene.core.files import US_ALONE, sync_folder, write_atomically
from rescene.privacy.ledger_file import (
    DELTA,
    Book,
    Charge,
    Declined,
    End,
    Floor,
    KeptRelease,
    Listed,
    charges_in,
    check_budget,
    counted,
    declined,
    fingerprint,
    largest_total,
)

__all__ = ["Charge", "Declined", "End", "Floor", "Ledger", "Released", "Touched"]

try:
    from fcntl import LOCK_EX, flock
except ImportError:  # not on this system: one process per ledger is then the operator's duty
    flock = None  # type: ignore[assignment]

Released = dict[str, Tensor]


class Touched(NamedTuple):
    """The images that a release touches: a digest of each one's pixels, and how they were read.

    Digests of one ``view`` can be compared with each other. Those of another, such as another size, cannot.
    """

    view: str
    digests: Sequence[bytes]


@dataclass(frozen=True)
class Mark:
    """How far a ledger had come when it last handed something out, with all that was begun by then."""

    end: End
    begun: dict[str, Charge]


class Ledger:
    """``mark`` is the path of the mark; None, as in a simulation, keeps none. ``least`` is what the server remembers."""

    def __init__(
        self, path: Path, floor: Floor | None = None, mark: Path | None = None, least: End | None = None
    ) -> None:
        self.path, self.mark_path, self.least = path, mark, least
        self.files = path.with_suffix("")
        self.given = floor  # else in the file beside
        self.handed: End | None = None  # how far the ledger goes with the newest release that this object handed out

    def once(
        self,
        charge: Charge,
        question: str,
        delta: float,
        most: int | None,
        draw: Callable[[], Released],
        images: Touched | None = None,
    ) -> Released:
        """The release at this place: the recorded one, or a new one if the budget allows it.

        ``images`` are those that ``draw`` looks at; None stands for every image of the site.
        """
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
            kept = book.releases.get(charge.key)
            found = None if kept is None else self._read_release(kept)
            if found is not None:
                return self._hand_out(book, charge, found)
            if kept is not None or charge.key in book.closed:
                raise declined(charge, "what it released in this round is lost, and it releases nothing twice")
            charge = replace(charge, delta=delta, images=self._listed(images))
            begun = book.pending(charge.key)
            if begun is None or begun.images not in (None, charge.images):  # images may have come since a crash
                earlier = list(book.begun.values())
                check_budget(charge, earlier, self._floor_in(book), delta, most, self.lists([*earlier, charge]))
                self._append(file, book, {"kind": "intent", "question": question, "charge": asdict(charge)})
            found = draw()
            data = save({name: value.detach().cpu().contiguous() for name, value in found.items()})
            where = {"file": self._write_file("releases", data), "num_bytes": len(data), "names": list(found)}
            self._append(file, book, {"kind": "release", "key": charge.key, **where})
            return self._hand_out(book, charge, found)

    def allow(self, charges: Sequence[Charge], delta: float, most: int | None) -> None:
        """Whether these could be charged one after the other; else Declined. Nothing is written."""
        book = self.book()
        floor, earlier = self._floor_in(book), list(book.begun.values())
        for charge in charges:
            if charge.key not in book.questions:  # else it is charged already
                check_budget(charge, earlier, floor, delta, most, self.lists([*earlier, charge]))
                earlier.append(charge)

    def begin(self, limits: Floor, run: str) -> bool:
        """Where nobody has set a floor, these limits of the first run become it; returns whether they did now.

        They are also written to floor.yaml, where the site's operator may change them.
        """
        with self._open() as file:
            mark = self._read_mark()
            book, num_bytes = self._checked(file, mark)
            if self._floor_in(book) is not None:
                return False
            file.truncate(num_bytes)
            self._adopt(file, book, mark)
            stated = limits.model_dump(exclude_none=True)
            self._append(file, book, {"kind": "floor", "limits": stated, "run": run})
            lines = [f"# Taken from the first run, {run}. Raise a limit here only if the site agrees to spend more."]
            lines += [f"{name}: {value!r}" for name, value in stated.items()]
            self._write_whole(self.floor_path, "\n".join(lines).encode() + b"\n")
            return True

    def recover(self) -> list[Charge]:
        """Bring the ledger up to its mark, or make a lost mark from a whole ledger; returns what was charged now.

        A damaged file is set aside and kept. Releases that are lost stay lost: their places are closed.
        """
        with self._open() as file:
            mark = None
            with contextlib.suppress(RunError):  # damaged: as good as none
                mark = self._read_mark()
            try:
                book: Book | None = self._entries(file)[0]
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
        """How often this site has answered in this task of this run."""
        return sum((charge.run, charge.task) == (run, task) for charge in self.charges())

    def charges(self) -> list[Charge]:
        """Everything that was ever begun, in order; nothing is written."""
        return list(self.book().begun.values())

    def book(self) -> Book:
        """What the ledger says; nothing is written."""
        mark = self._read_mark()  # before the ledger, which only grows
        try:
            with open(self.path, "rb") as file:
                return self._checked(file, mark)[0]
        except FileNotFoundError:
            return self._checked(io.BytesIO(), mark)[0]
        except OSError as error:
            raise self._unusable(str(error)) from None

    @property
    def floor_path(self) -> Path:
        """The file with the site's own limits, beside the ledger."""
        return self.path.parent / "floor.yaml"

    def floor(self) -> Floor | None:
        """The site's own limits; None if there are none yet."""
        return self._floor_in(self.book()) if self.given is None else self.given

    def floor_from(self, book: Book) -> str:
        """Who set the floor, and where it can be changed."""
        if self.given is not None:
            return "set in site.yaml"
        whose = "set by the operator" if book.floor is None else f"taken from the first run, {book.floor['run']}"
        return f"{whose}; to change it: {self.floor_path}"

    def _floor_in(self, book: Book) -> Floor | None:
        """Given, or in the file beside, or taken from the first run. One that cannot be understood allows nothing."""
        if self.given is not None:
            return self.given
        try:
            if self.floor_path.exists():
                return Floor.model_validate(read_yaml(self.floor_path))
            return None if book.floor is None else Floor.model_validate(book.floor["limits"])
        except (OSError, ValueError, TypeError, AttributeError, ConfigError) as error:
            lines = str(error).splitlines()
            raise RunError(
                "E411",
                "the site's privacy floor cannot be read, so nothing is sent",
                where=str(self.floor_path),
                why=" ".join(lines[1:3]) if isinstance(error, ValidationError) else str(error),
                fix=f"{', '.join(Floor.model_fields)}: positive numbers, without quotes",
            ) from None

    def _listed(self, images: Touched | None) -> str | None:
        """The name of the list of these images, which is on disk."""
        if images is None:
            return None
        key = self._key(images.view)
        hashes = sorted({hashlib.blake2b(digest, key=key, digest_size=8).hexdigest() for digest in images.digests})
        return self._write_file("images", json.dumps({"view": _name_of(key), "images": hashes}).encode())

    def lists(self, charges: Sequence[Charge]) -> Listed:
        """The lists of these charges' images. Only those of the newest view can be compared; another counts for every image."""
        found = {charge.images: self._read_list(charge.images) for charge in charges}
        newest = next((one["view"] for charge in reversed(charges) if (one := found[charge.images])), None)
        return {
            name: frozenset(one["images"]) if one is not None and one["view"] == newest else None
            for name, one in found.items()
        }

    def _read_list(self, name: str | None) -> dict[str, Any] | None:
        data = None if name is None else self._read_file("images", name)
        return None if data is None else dict(json.loads(data))

    def _key(self, view: str) -> bytes:
        """What hashes of images of this view are made with. A simulation has nothing to hide from itself."""
        return hashlib.blake2b(view.encode(), key=b"" if self.mark_path is None else self.secret()).digest()

    def secret(self) -> bytes:
        """32 bytes that never leave the site."""
        path = self.files / "secret"
        with contextlib.suppress(FileNotFoundError):
            return path.read_bytes()
        self._write_whole(path, secrets.token_bytes(32))
        return path.read_bytes()

    def _read_release(self, kept: KeptRelease) -> Released | None:
        """None if it is no longer there as it was."""
        if kept.text:
            return load(base64.b64decode(kept.text))
        data = self._read_file("releases", kept.sha256)
        if data is None:
            return None
        found = load(data)  # in any order, and an answer again must be the same answer
        return {name: found[name] for name in kept.names or found}

    def _write_file(self, kind: str, data: bytes) -> str:
        """A file named by its hash, which it returns; on disk when this returns."""
        sha256 = hashlib.sha256(data).hexdigest()
        path = self.files / kind / sha256
        if not path.exists():
            self._write_whole(path, data)
        return sha256

    def _read_file(self, kind: str, sha256: str) -> bytes | None:
        """None if there is no such file, or it has another content."""
        with contextlib.suppress(OSError):
            data = (self.files / kind / sha256).read_bytes()
            return data if hashlib.sha256(data).hexdigest() == sha256 else None
        return None

    def _write_whole(self, path: Path, data: bytes) -> None:
        """Whole or not at all, and on disk when this returns."""
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomically(path, data, mode=US_ALONE)
        except OSError as error:
            raise self._unwritten(error) from None

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
                sync_folder(self.path.parent)
            yield file

    def _checked(self, file: BinaryIO, mark: Mark | None) -> tuple[Book, int]:
        """As :meth:`_entries`, if they reach the mark and what the server remembers."""
        book, num_bytes = self._entries(file)
        if self.mark_path is not None and mark is None and book.chained:
            raise self._no_mark("it is missing, though the ledger has entries")
        if mark is not None and not book.reaches(mark.end):
            raise self._set_back("E366", "does not reach its mark", str(self.mark_path), book, mark.end)
        if self.least is not None and not book.reaches(self.least):
            raise self._set_back("E367", "lacks entries that the server knows of", "the server", book, self.least)
        return book, num_bytes

    def _entries(self, file: BinaryIO) -> tuple[Book, int]:
        """What all whole lines say, and how many bytes they are."""
        file.seek(0)
        data = file.read()
        book, whole = Book(), data[: data.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), start=1):
            try:
                book.add(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise self._unusable(f"line {number}: {error}") from None
        return book, len(whole)

    def _adopt(self, file: BinaryIO, book: Book, mark: Mark | None) -> None:
        """A new ledger gets its mark before its first entry. One from before there was a chain is taken over once, as it is,
        and an entry says so.
        """
        if mark is None:
            self._write_mark(book)
        if book.end.entries and not book.chained:
            self._append(file, book, {"kind": "chained", "entries": book.end.entries})

    def _hand_out(self, book: Book, charge: Charge, found: Released) -> Released:
        """Nothing leaves before the mark knows of it."""
        self._write_mark(book)
        end = book.releases[charge.key].end
        self.handed = max(self.handed or end, end, key=lambda one: one.entries)
        return found

    def _append(self, file: BinaryIO, book: Book, row: dict[str, Any]) -> None:
        row = book.entry(row)
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
            if row.pop("sha256") != fingerprint(row):
                raise ValueError("it does not match its fingerprint")
            return Mark(End(**row["end"]), charges_in(row["charges"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._no_mark(str(error)) from None

    def _write_mark(self, book: Book) -> None:
        """Whole or not at all."""
        if self.mark_path is None:
            return
        charges = {sha256: asdict(charge) for sha256, charge in book.begun.items()}
        row: dict[str, Any] = {"end": asdict(book.end), "charges": charges}
        row |= {"sha256": fingerprint(row)}
        self._write_whole(self.mark_path, json.dumps(row, indent=1).encode() + b"\n")

    def _set_back(self, code: str, what: str, who: str, book: Book, end: End) -> RunError:
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


def _for_us_alone(path: str, flags: int) -> int:
    return os.open(path, flags, US_ALONE)


def _name_of(key: bytes) -> str:
    """What can be said of a key without telling it."""
    return hashlib.blake2b(key, digest_size=8).hexdigest()


def ledger_facts(ledger: Ledger) -> dict[str, Any]:
    """The site's limits in words (``floor``), the ``delta`` of all figures, and a row for each of the ``releases``."""
    book = ledger.book()
    floor, charges = ledger.floor(), list(book.begun.values())
    stated = [floor.delta_max] if floor else [charge.delta for charge in charges if charge.delta]
    delta = stated[-1] if stated else DELTA
    rows = [_row(book, ledger, floor, charges[: number + 1], delta) for number in range(len(charges))]
    whose = "all releases, which share one budget" if floor and floor.one_budget else "the most-used image"
    return {"floor": _limits(ledger, floor, book), "delta": delta, "total of": whose, "releases": rows}


def _limits(ledger: Ledger, floor: Floor | None, book: Book) -> str:
    if floor is not None:
        return f"{floor.words()}; {ledger.floor_from(book)}"
    if ledger.mark_path is None:  # a simulation, or ledgers that outlive one
        return f"none. Simulated sites have one where {ledger.floor_path} says so"
    return "none yet: the first run with a guarantee sets it"


def _row(book: Book, ledger: Ledger, floor: Floor | None, charges: list[Charge], delta: float) -> dict[str, Any]:
    """The newest of these charges. Tasks and rounds count from 0, as in the file; round -1 is outside rounds."""
    charge, lists = charges[-1], ledger.lists(charges)
    kept, images = book.releases.get(charge.key), lists[charge.images]
    return {
        "number": len(charges),
        "run": charge.run,
        "task": charge.task,
        "round": charge.round,
        "asked for": charge.why or None,
        "mechanism": charge.mechanism,
        "sigma": charge.sigma,
        "steps": charge.steps,
        "images": "all" if images is None else len(images),
        "epsilon": _number(largest_total([charge], lists, delta)),
        "total": _number(largest_total(charges, counted(lists, floor), delta)),
        "released": None if kept is None else (kept.sha256 or "in its line"),
        "bytes": None if kept is None else (kept.num_bytes or len(kept.text)),
    }


def _number(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None
