"""What a ledger's lines say: one entry after the other, each bound to the one before it by a hash.

intent      a participation begins: its question and its charge, which names the images it touches
release     its result is on disk, as a file that is named by its hash (in older ledgers as text in the line)
floor       the site's limits, taken from the first run because nobody had set any
recovered   charges that a lost part of the ledger held, taken from the mark
chained     the lines before this one are older than the chain
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from rescene.core.record import record

EVALUATION = "evaluation"  # in the place of a mechanism: noised counts of a hold-out


@dataclass(frozen=True)
class Charge:
    """One participation: its place, and what it costs each image that it touches."""

    run: str
    task: int
    round: int
    mechanism: str
    sigma: float
    steps: int
    rate: float
    reuses: bool = False  # records of earlier tasks, kept in the site's memory, are used as well
    delta: float | None = None  # at which epsilon is reckoned; older ledgers do not say
    images: str | None = None  # name of the list of the images it touches; None, as in older ledgers: every image
    why: str = ""  # what the server asked for

    @property
    def key(self) -> str:
        """The place of the charge: run, task and round; an evaluation is marked as one."""
        place = f"{self.run}/{self.task}/{self.round}"
        return f"{place}/{EVALUATION}" if self.mechanism == EVALUATION else place


@record
class End:
    """How far a ledger goes: the number of its last entry, and the hash that stands for all entries up to it."""

    entries: int = 0
    head: str = ""


@dataclass(frozen=True)
class KeptRelease:
    """Where a release is: a file with this hash, or the text of an older line. ``end`` is the ledger's end after it."""

    end: End
    sha256: str = ""
    num_bytes: int = 0
    text: str = ""
    names: tuple[str, ...] = ()  # of its tensors, in the order in which they were drawn; older lines do not say


@dataclass
class Book:
    """What the entries of a ledger say together."""

    end: End = End()
    chained: bool = False  # whether the last entry names the one before it; entries of older versions do not
    heads: dict[int, set[str]] = field(default_factory=dict)  # the hashes that are known of an entry's number
    begun: dict[str, Charge] = field(default_factory=dict)  # every participation, by the hash of its intent
    questions: dict[str, str] = field(default_factory=dict)  # by place
    releases: dict[str, KeptRelease] = field(default_factory=dict)  # by place
    closed: set[str] = field(default_factory=set)  # places whose release may have left the site and is lost
    floor: dict[str, Any] | None = None  # limits taken from the first run, and its name

    def add(self, row: dict[str, Any]) -> None:
        """Take the next entry; ValueError, KeyError or TypeError if it cannot be it."""
        if row["sha256"] != fingerprint({key: value for key, value in row.items() if key != "sha256"}):
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
            lost, mark = charges_in(row["charges"]), End(**row["mark"])
            self.closed |= self.questions.keys() - self.releases.keys() | {charge.key for charge in lost.values()}
            self.begun |= lost
            self.heads.setdefault(mark.entries, set()).add(mark.head)
            number = max(number, mark.entries + 1)  # no number is given twice: the server compares them
        elif row["kind"] == "floor":
            self.floor = {"limits": dict(row["limits"]), "run": str(row["run"])}
        elif row["kind"] not in ("release", "chained"):
            raise ValueError(f"unknown kind {row['kind']!r}")
        head = row["sha256"] if self.chained else fingerprint({"before": self.end.head, "sha256": row["sha256"]})
        self.end = End(number, head)
        self.heads.setdefault(number, set()).add(head)
        if row["kind"] == "release":
            where = {"text": row["data"]} if "data" in row else {"sha256": row["file"], "num_bytes": row["num_bytes"]}
            self.releases[row["key"]] = KeptRelease(self.end, **where, names=tuple(row.get("names", ())))

    def entry(self, row: dict[str, Any]) -> dict[str, Any]:
        """The row as the next entry."""
        row = row | {"before": self.end.head}
        return row | {"sha256": fingerprint(row)}

    def pending(self, key: str) -> Charge | None:
        """The newest charge of this place."""
        return next((charge for charge in reversed(self.begun.values()) if charge.key == key), None)

    def reaches(self, end: End) -> bool:
        """Whether this ledger goes on from there. Numbers that a recovery skipped have no hash to compare."""
        known = self.heads.get(end.entries)
        return end.entries <= self.end.entries and (not end.entries or known is None or end.head in known)


def charges_in(rows: dict[str, Any]) -> dict[str, Charge]:
    """Charges from the rows of the file, by hash."""
    return {sha256: Charge(**row) for sha256, row in rows.items()}


def fingerprint(row: dict[str, Any]) -> str:
    """SHA-256 of one row of the ledger."""
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()
