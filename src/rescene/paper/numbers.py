"""What the paper prints: one CSV per table, one line per number.

data, beta, method, setting   the cell         metric         what was measured (see metrics.py)
mean, std                     as printed       place, note    where it stands, and what the table says beside it
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from rescene.core.documents import parse_yaml


@dataclass(frozen=True)
class Printed:
    """One number of the paper. ``std`` is None where none is printed; ``digits``: decimals of the printed mean."""

    table: str
    data: str
    beta: str
    method: str
    setting: str
    metric: str
    mean: float
    std: float | None
    digits: int
    place: str
    note: str

    @property
    def cell(self) -> str:
        """The name of the cell that this number belongs to."""
        return cell_name(self.data, self.beta, self.method, self.setting)

    @property
    def text(self) -> str:
        """As it is printed."""
        mean = f"{self.bound}{self.mean:.{self.digits}f}"
        return mean if self.std is None else f"{mean} ± {self.std:.{self.digits}f}"

    @property
    def is_bound(self) -> bool:
        """Printed as less or more than ``mean``, as in "<0.01": nothing to take a difference from."""
        return bool(self.bound)

    @property
    def bound(self) -> str:
        """``<`` or ``>`` where the paper prints such a bound; else empty."""
        return {"less than": "<", "more than": ">"}.get(self.note.removeprefix("printed as "), "")


def cell_name(data: str, beta: str, method: str, setting: str = "") -> str:
    """The name a cell goes by on the command line.

    >>> cell_name("cifar10", "0.5", "rescene", "B=500")
    'cifar10/0.5/rescene/B=500'
    """
    return "/".join(part for part in (data, beta, method, setting) if part)


@lru_cache
def packaged(name: str) -> Any:
    """A YAML file of this package, read once; nobody changes it."""
    return parse_yaml((files("rescene.paper") / name).read_text(encoding="utf-8"), name)


def table_names() -> list[str]:
    """The paper's tables that are stored here."""
    folder = files("rescene.paper") / "numbers"
    return sorted(entry.name.removesuffix(".csv") for entry in folder.iterdir() if entry.name.endswith(".csv"))


@lru_cache
def printed(table: str) -> tuple[Printed, ...]:
    """Every number of one table, in the paper's order."""
    text = (files("rescene.paper") / "numbers" / f"{table}.csv").read_text(encoding="utf-8")
    return tuple(_printed(table, row) for row in csv.DictReader(text.splitlines()))


def _printed(table: str, row: dict[str, str]) -> Printed:
    std = float(row["std"]) if row["std"] else None
    digits = len(row["mean"].partition(".")[2])
    words = {key: row[key] for key in ("data", "beta", "method", "setting", "metric", "place", "note")}
    return Printed(table=table, mean=float(row["mean"]), std=std, digits=digits, **words)
