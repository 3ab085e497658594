"""What a ledger's lines say: one entry after the other, each bound to the one before it by a hash; and what they add up to.

intent      a participation begins: its question and its charge, which names the images it touches
release     its result is on disk, as a file that is named by its hash (in older ledgers as text in the line)
floor       the site's limits, taken from the first run because nobody had set any
recovered   charges that a lost part of the ledger held, taken from the mark
chained     the lines before this one are older than the chain

An image's total counts every charge that touches it, whatever run, task or round the server called it. A charge that does not
say which images it touches counts for all of them. A floor, which is what a site allows at most, with ``one_budget`` counts every
charge for all of them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from pydantic import ConfigDict, Field, field_validator

from rescene.core.errors import ResceneError
from rescene.core.hyperparameters import Section
from rescene.core.record import record
from rescene.privacy.accounting import Composition, total_epsilon

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


EXPONENT = re.compile(r"[0-9.]+[eE][-+]?[0-9]+")
DELTA = 1e-5  # where neither a charge nor a floor says one
Listed = Mapping[str | None, frozenset[str] | None]  # name of a charge's list -> its images; None: every image


class Declined(ResceneError):
    """The site does not take part this time (E413): its budget is spent or its floor is above what was asked."""


class Floor(Section):
    """What the site allows at most, whatever the server says. null: no limit of its own.

    A site with a floor sends nothing without a mechanism, and nothing above these limits.
    """

    model_config = ConfigDict(strict=True)

    epsilon_max: float | None = Field(None, gt=0, description="over all runs, for every image")
    min_sigma: float | None = Field(None, gt=0, description="least noise multiplier")
    max_participations: int | None = Field(None, ge=1, description="in one task")
    delta_max: float = Field(DELTA, gt=0, lt=1, description="largest delta at which epsilon is reckoned")
    evaluation_sigma: float | None = Field(
        None,
        gt=0,
        description="noise multiplier at which the site tells counts of its hold-out, each time charged to those images "
        "within epsilon_max; null: it declines to evaluate",
    )
    one_budget: bool | None = Field(
        None,
        description="true: every release counts for every image of the site, so whether it declines depends on no image; "
        "null: for the images that it touches",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _exponents(cls, value: Any) -> Any:
        """YAML reads 1e-5 as text. Other text, such as a number in quotes, is refused."""
        return float(value) if isinstance(value, str) and EXPONENT.fullmatch(value) else value

    def words(self) -> str:
        """The limits in words, for messages."""
        limits = self.model_dump(exclude_none=True, exclude={"one_budget"})
        words = [f"{name} {value:g}" for name, value in limits.items()]
        return ", ".join([*words, "one budget for all images"] if self.one_budget else words)


def check_budget(
    charge: Charge, earlier: list[Charge], floor: Floor | None, delta: float, most: int | None, listed: Listed
) -> None:
    """Whether the charge may be added; else Declined. Its words depend on the question and the floor, not on images.

    *That* it declines tells whether these images are among those of earlier charges, unless the floor has one budget for all.
    """
    floor = floor or Floor(delta_max=delta)
    if charge.mechanism != EVALUATION:
        same = [c for c in earlier if (c.run, c.task) == (charge.run, charge.task) and c.mechanism != EVALUATION]
        limits = [limit for limit in (most, floor.max_participations) if limit is not None]
        if limits and len(same) >= min(limits):
            raise declined(charge, f"{len(same)} participations in this task are all it allows")
    if floor.min_sigma is not None and charge.sigma < floor.min_sigma:
        raise declined(charge, f"noise multiplier {charge.sigma:g} is below its floor {floor.min_sigma:g}")
    if delta > floor.delta_max:
        raise declined(charge, f"delta {delta:g} is above its limit {floor.delta_max:g}")
    if floor.epsilon_max is None:
        return
    if charge.mechanism == "paper-experiment":
        raise declined(charge, "the paper's experiment promises no epsilon, and this site has a limit on it")
    if largest_total([*earlier, charge], counted(listed, floor), delta, touched_by=charge) > floor.epsilon_max:
        raise declined(charge, f"epsilon would be above its limit {floor.epsilon_max:g}")


def declined(charge: Charge, why: str) -> Declined:
    """The error by which a site refuses a charge (E413)."""
    round = f", round {charge.round + 1}" if charge.round >= 0 else ""  # people count from 1
    return Declined("E413", f"site declines: {why}", where=f"task {charge.task + 1}{round}")


def counted(listed: Listed, floor: Floor | None) -> Listed:
    """The images for which each charge counts: those it touches, or with one budget every image."""
    return dict.fromkeys(listed) if floor is not None and floor.one_budget else listed


def largest_total(charges: Iterable[Charge], listed: Listed, delta: float, touched_by: Charge | None = None) -> float:
    """Epsilon of the image that these charges touch most; ``touched_by``: among the images of this charge."""
    by_list: dict[str | None, Counter[tuple[float, float]]] = defaultdict(Counter)
    for charge in charges:
        by_list[charge.images][charge.sigma, charge.rate] += charge.steps
    histories: dict[str, list[str | None]] = defaultdict(list)
    for name in by_list:
        for image in listed[name] or ():
            histories[image].append(name)
    own = None if touched_by is None else listed[touched_by.images]
    looked_at = histories if own is None else {image: histories[image] for image in own}
    distinct = {tuple(history) for history in looked_at.values()}
    if touched_by is not None and own is not None:
        distinct.add((touched_by.images,))  # an image that is in no other list, whether there is one or not
    everywhere = [name for name in by_list if listed[name] is None]
    totals = [sum((by_list[name] for name in (*everywhere, *history)), Counter()) for history in distinct or {()}]
    return max(_epsilon(tuple(sorted(total.items())), delta) for total in totals)


@lru_cache(maxsize=4096)
def _epsilon(steps: tuple[tuple[tuple[float, float], int], ...], delta: float) -> float:
    return total_epsilon([(sigma, Composition(n, 1, rate)) for (sigma, rate), n in steps], delta) if steps else 0.0
