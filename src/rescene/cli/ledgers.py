"""``rescene privacy --ledger FOLDER``: every release of a site, or of a run's simulated sites, with its cost, and the floor."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rescene.cli.listing import print_rows
from rescene.deploy.holding import ledger_of
from rescene.deploy.site import Site
from rescene.errors import RunError
from rescene.privacy.book import Book, Charge
from rescene.privacy.budget import DELTA, largest_total
from rescene.privacy.ledger import Ledger


def show_ledger(folder: Path, as_json: bool) -> None:
    """One table per site: what left it, who asked, what it cost, and what that adds up to for the most-used image."""
    told = {name: _facts(ledger) for name, ledger in _ledgers(folder).items()}
    if as_json:
        print(json.dumps(told))
        return
    for name, facts in told.items():
        print(f"{name}. Floor: {facts['floor']}")
        if facts["releases"]:
            print(f"epsilon and total are at delta {facts['delta']:g}; the total is that of the most-used image\n")
            print_rows([_shown(row) for row in facts["releases"]])
        else:
            print("nothing was released")
        print()


def _ledgers(folder: Path) -> dict[str, Ledger]:
    """The ledger of a site's folder, or those of a run folder; by name."""
    if (folder / "site.yaml").is_file():
        site = Site.open(folder)
        return {f"site {site.section.client}": ledger_of(site.section, folder)}
    place = folder / "ledgers" if (folder / "ledgers").is_dir() else folder
    paths = sorted(place.glob("client-*.jsonl"), key=lambda path: (len(path.name), path.name))
    if not paths:
        raise RunError(
            "E425",
            "no privacy ledger is here",
            where=str(folder),
            fix="the folder of a site (with site.yaml), or of a run that had a privacy mechanism",
        )
    return {path.stem.replace("-", " "): Ledger(path) for path in paths}


def _facts(ledger: Ledger) -> dict[str, Any]:
    book = ledger.book()
    floor, charges = ledger.floor(), list(book.begun.values())
    stated = [floor.delta_max] if floor else [charge.delta for charge in charges if charge.delta]
    delta = stated[-1] if stated else DELTA
    rows = [_row(book, ledger, charges[: number + 1], delta) for number in range(len(charges))]
    limits = (
        f"{floor.words()}; {ledger.floor_from(book)}" if floor else "none yet: the first run with a guarantee sets it"
    )
    return {"floor": limits, "delta": delta, "releases": rows}


def _row(book: Book, ledger: Ledger, charges: list[Charge], delta: float) -> dict[str, Any]:
    """The newest of these charges."""
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
        "total": _number(largest_total(charges, lists, delta)),
        "released": None if kept is None else (kept.sha256 or "in its line"),
        "bytes": None if kept is None else (kept.num_bytes or len(kept.text)),
    }


def _number(epsilon: float) -> float | None:
    return epsilon if math.isfinite(epsilon) else None


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    short = {"released": "not sent" if row["released"] is None else row["released"][:12]}
    numbers = {key: "no bound" if row[key] is None else f"{row[key]:.4g}" for key in ("epsilon", "total")}
    size = {"bytes": "-" if row["bytes"] is None else f"{row['bytes']:,}"}
    return row | short | numbers | size | {"sigma": f"{row['sigma']:.4g}"}
