"""Our runs beside the paper's numbers, and whether they lie in the band that the paper leaves."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from rescene.paper.costs import nominal, replay
from rescene.paper.metrics import BYTES, COSTS, FLOPS, NOMINAL, REPLAY, over_seeds, relative
from rescene.paper.numbers import Printed, printed
from rescene.paper.recipes import FAST_LABEL, FIXED_LABEL, PaperCell, PaperRecipe, paper_recipe, recipe_names
from rescene.paper.store import Store, Stored
from rescene.report.groups import Spread, spread

# The paper's B=2000 is its full accumulation by its own words, and prints 68.36 against 69.19 (App. D.4, Table 4b).
RUN_TO_RUN = 0.83
FLOP_TOLERANCE = 0.03


@dataclass(frozen=True)
class Line:
    """A cell, or a form of it (``variant``: E_srv=10, fixed steps), with our runs and what the paper prints for it."""

    cell: PaperCell
    variant: str
    runs: tuple[Stored, ...]
    seeds: tuple[int, ...]
    ours: dict[str, Spread]
    measured: dict[str, Spread]  # costs as counted; in ``ours`` they follow the paper's conventions
    paper: dict[str, Printed]

    @property
    def missing(self) -> tuple[int, ...]:
        done = {run.seed for run in self.runs}
        return tuple(seed for seed in self.seeds if seed not in done)

    @property
    def fast(self) -> bool:
        return FAST_LABEL in self.variant

    @property
    def fixed_steps(self) -> bool:
        return FIXED_LABEL in self.variant

    @property
    def other_epochs(self) -> bool:
        """Ran with E_srv=10 where the paper prints E_srv=100 only."""
        return self.fast and not any(number.setting == FAST_LABEL for number in self.paper.values())

    @property
    def near_copies(self) -> float | None:
        """Share of uploaded images that are near-copies of real ones, in percent; None if no images are sent."""
        found = spread((run.results.get("leakage") or {}).get("near_copies") for run in self.runs)
        return None if found is None else 100 * found.mean

    def difference(self, metric: str) -> float | None:
        """Of the figures as shown, so that whoever subtracts finds the same."""
        number = self.paper.get(metric)
        if number is None or number.is_bound or metric not in self.ours:
            return None
        return round(round(self.ours[metric].mean, number.digits) - number.mean, number.digits)


def compare(recipe: PaperRecipe, store: Store, only: Iterable[str] = (), costs: bool = True) -> list[Line]:
    """One line per cell, and one for each form of it that was run. ``costs=False`` leaves the nominal ones out."""
    lines = []
    own = {cell.experiment for cell in recipe.cells if not cell.unavailable}
    # Where a table has costs alone, other steps cost the same, and other epochs what the paper does not count.
    only_costs = all(metric in NOMINAL for metric in recipe.metrics)
    for cell in recipe.chosen(only):
        numbers = {} if recipe.lite else _with_kept(recipe, cell)
        if cell.unavailable:
            lines.append(Line(cell, "", (), recipe.seeds, {}, {}, numbers))
            continue
        lines.append(_line(recipe, cell, "", store, numbers, costs))
        for label, form in {} if recipe.lite or only_costs else cell.variants.items():
            if form.experiment in own or not store.find(form.experiment, recipe.seeds):
                continue
            if FIXED_LABEL in label and (cell.setting or any(m in NOMINAL for m in recipe.metrics)):
                continue  # told once, where methods are compared
            exact = _printed_for(cell.fast.experiment) if cell.fast and FAST_LABEL in label else {}
            exact = {metric: number for metric, number in exact.items() if metric in recipe.metrics}
            lines.append(_line(recipe, form, label, store, numbers | exact, costs))
    return lines


def printed_beside(folders: Iterable[Path]) -> dict[Path, dict[str, str]]:
    """AA and AIA that the paper prints for the experiments of these run folders; none for a run that is in no table."""
    store, found = Store(folders), dict[Path, dict[str, str]]()
    for recipe in map(paper_recipe, recipe_names(lite=False)):
        for line in compare(recipe, store, costs=False):
            told = {} if line.other_epochs else {m: n.text for m, n in line.paper.items() if m in ("aa", "aia")}
            for run in line.runs if told else ():
                found[run.folder.resolve()] = told | found.get(run.folder.resolve(), {})  # the first table counts
    return found


def _line(
    recipe: PaperRecipe, cell: PaperCell, variant: str, store: Store, paper: dict[str, Printed], costs: bool
) -> Line:
    runs = store.find(cell.experiment, recipe.seeds)
    other = recipe.reference(cell)
    if other and variant:
        other = other.variants.get(variant, other)
    reference = store.find(other.experiment, recipe.seeds) if other else ()
    ours = _known({m: over_seeds(runs, m, reference) for m in recipe.metrics})
    measured: dict[str, Spread] = {}
    in_the_papers_way = recipe.metrics if costs and not recipe.lite else ()
    if any(m in NOMINAL for m in in_the_papers_way):
        measured = {m: value for m, value in ours.items() if m in COSTS}
        ours |= {m: value for m, value in nominal(cell, recipe.seeds, other).items() if m in recipe.metrics}
    if any(m in REPLAY for m in in_the_papers_way):
        ours |= replay(cell, recipe.seeds)
    return Line(cell, variant, runs, recipe.seeds, ours, measured, paper)


def _with_kept(recipe: PaperRecipe, cell: PaperCell) -> dict[str, Printed]:
    """What the paper prints for a cell, and the share of AA that follows from it where the recipe asks for one."""
    numbers = dict(_by_cell(recipe.table).get(cell.name, {}))
    other = recipe.reference(cell)
    if other and "aa_kept" in recipe.metrics:
        base = _by_cell(recipe.table)[other.name]["aa"]
        kept = relative("aa_kept", numbers["aa"].mean, base.mean)
        numbers["aa_kept"] = replace(numbers["aa"], metric="aa_kept", mean=round(kept or 0.0, 1), digits=1)
    return numbers


@lru_cache
def _by_cell(table: str) -> dict[str, dict[str, Printed]]:
    """The numbers of a table by cell and metric."""
    found: dict[str, dict[str, Printed]] = {}
    for number in printed(table):
        found.setdefault(number.cell, {})[number.metric] = number
    return found


def _known(values: dict[str, Spread | None]) -> dict[str, Spread]:
    return {key: value for key, value in values.items() if value is not None}


def _printed_for(experiment: str) -> dict[str, Printed]:
    """What the paper prints for an experiment with fewer server epochs: Table 5 has a few."""
    for cell in paper_recipe("server-epochs").cells:
        if cell.experiment == experiment:
            return {n.metric: n for n in printed("server-epochs") if n.cell == cell.name}
    return {}


def band(number: Printed) -> tuple[float, float] | None:
    """What ours may be: ReSCENE not below the paper's spread, a baseline inside it, bytes to the digit, FLOPs in 3 %."""
    if number.metric in ("aa", "aia"):
        room = _deviation(number)
        return number.mean - room, math.inf if number.method == "rescene" else number.mean + room
    if number.metric in BYTES:
        half = 0.5 * 10**-number.digits
        return number.mean - half, number.mean + half
    if number.metric in FLOPS and number.mean and not number.is_bound:
        return number.mean * (1 - FLOP_TOLERANCE), number.mean * (1 + FLOP_TOLERANCE)
    return None


def _deviation(number: Printed) -> float:
    """Over seeds. Most tables repeat figures of Table 1 without the deviation that stands there."""
    if number.std is None:
        same = (number.data, number.beta, number.method, number.metric, number.mean)
        first = (n for n in printed("main") if (n.data, n.beta, n.method, n.metric, n.mean) == same)
        return next((n.std for n in first if n.std is not None), RUN_TO_RUN)
    return number.std


@dataclass(frozen=True)
class Finding:
    """One stored figure held against its band. ``verdict``: in band, explained or out of band; the last may have a ``why``."""

    table: str
    line: Line
    metric: str
    allowed: tuple[float, float]
    verdict: str
    why: str


def findings(recipe: PaperRecipe, store: Store) -> list[Finding]:
    """Every stored figure of a table that has a band."""
    found = []
    for line in compare(recipe, store):
        for metric, number in line.paper.items():
            allowed = band(number)
            if allowed is None or metric not in line.ours:
                continue
            figure = line.ours[metric].mean
            verdict, why = "in band", ""
            if not allowed[0] - 1e-9 <= figure <= allowed[1] + 1e-9:
                registered = explanation(f"{recipe.table}:{line.cell.name}", metric, figure)
                verdict, why = "explained" if registered.is_known else "out of band", registered.why
            found.append(Finding(recipe.table, line, metric, allowed, verdict, why))
    return found


@dataclass(frozen=True)
class Explanation:
    """What is registered of a difference: its cause is known, or (``why`` says what is) still open."""

    is_known: bool = False
    why: str = ""


def explanation(where: str, metric: str, figure: float) -> Explanation:
    """What is registered of this figure. Another figure at the same place, say of more seeds, needs to be explained anew."""
    for row in _registered():
        if row["metric"] == metric and fnmatch(where, row["where"]) and round(figure, 2) == float(row["ours"]):
            is_known = row["cause"] == "known"
            return Explanation(is_known, row["why"] if is_known else f"cause open: {row['why']}")
    return Explanation()


@lru_cache
def _registered() -> tuple[dict[str, str], ...]:
    text = (files("rescene.paper") / "explained.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))
