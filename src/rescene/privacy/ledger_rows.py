"""A ledger as rows: every release of a site, what it cost, and what that adds up to for the most-used image."""

from __future__ import annotations

import math
from typing import Any

from rescene.privacy.budget import DELTA, Floor, counted, largest_total
from rescene.privacy.ledger import Ledger
from rescene.privacy.ledger_file import Book, Charge


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
