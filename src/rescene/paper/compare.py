"""Our runs beside the paper's numbers, and whether they lie in the band that the paper leaves."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

from rescene.paper.costs import nominal, replay
from rescene.paper.numbers import Printed, printed
from rescene.paper.recipes import FAST_LABEL, PaperCell, PaperRecipe, our_cells, paper_recipe, recipe_names
from rescene.paper.store import (
    BYTES,
    COSTS,
    FLOPS,
    NOMINAL,
    REPLAY,
    Store,
    Stored,
    has_images_of,
    over_seeds,
    read,
    relative,
)
from rescene.report.groups import Spread, spread
from rescene.report.leaderboard import InPaper
from rescene.report.load import RunRecord

# The paper's B=2000 is its full accumulation by its own words, and prints 68.36 against 69.19 (App. D.4, Table 4b).
RUN_TO_RUN = 0.83
FLOP_TOLERANCE = 0.03
KEEPERS = ("glfc", "fedcbdr", "refed")  # their clients train again on real pictures of earlier tasks


@dataclass(frozen=True)
class Line:
    """A cell, or a form of it (with E_srv=10, in another ``reading``), with our runs and what the paper prints for it."""

    cell: PaperCell
    fast: bool
    reading: str
    runs: tuple[Stored, ...]  # of every stored seed
    seeds: tuple[int, ...]  # that the table asks for
    ours: dict[str, Spread]
    measured: dict[str, Spread]  # costs as counted; in ``ours`` they follow the paper's conventions
    paper: dict[str, Printed]

    @property
    def variant(self) -> str:
        """What sets the form apart from the cell; empty for the cell itself."""
        return ", ".join(filter(None, (FAST_LABEL if self.fast else "", self.reading)))

    @property
    def name(self) -> str:
        """Of the cell and, where it is not the cell itself, of the form."""
        return " ".join(filter(None, (self.cell.name, self.variant)))

    @property
    def missing(self) -> tuple[int, ...]:
        """Seeds that have no finished run yet."""
        done = {run.seed for run in self.runs}
        return tuple(seed for seed in self.seeds if seed not in done)

    @property
    def further(self) -> tuple[int, ...]:
        """Seeds that have a finished run although the table does not ask for them."""
        return tuple(run.seed for run in self.runs if run.seed not in self.seeds)

    @property
    def other_epochs(self) -> bool:
        """Ran with E_srv=10 where the paper prints E_srv=100 only."""
        return self.fast and not any(number.setting == FAST_LABEL for number in self.paper.values())

    @property
    def near_copies(self) -> float | None:
        """Share of uploaded images that are near-copies of real ones, in percent; None if no images are sent."""
        found = spread(run.results.leakage.near_copies if run.results.leakage else None for run in self.runs)
        return None if found is None else 100 * found.mean

    def difference(self, metric: str) -> float | None:
        """Of the figures as shown, so that whoever subtracts finds the same."""
        number = self.paper.get(metric)
        if number is None or number.is_bound or metric not in self.ours:
            return None
        return round(round(self.ours[metric].mean, number.digits) - number.mean, number.digits)


def compare(recipe: PaperRecipe, store: Store, only: Iterable[str] = (), costs: bool = True) -> list[Line]:
    """One line per cell, and one for each form of it that was run. ``costs=False`` leaves the nominal ones out.

    A line has every stored seed of its experiment, also those that the paper does not have: nobody chooses among them.
    """
    lines = []
    own = {cell.experiment for cell in recipe.cells if not cell.unavailable}
    for cell in recipe.chosen(only):
        numbers = {} if recipe.lite else _with_kept(recipe, cell)
        if cell.unavailable:
            lines.append(Line(cell, False, "", (), recipe.seeds, {}, {}, numbers))
            continue
        lines.append(_line(recipe, cell, False, "", store, numbers, costs))
        # such as in Table 5: that cell has its own forms
        has_fast_cell = cell.fast is not None and cell.fast.experiment in own
        for fast, reading, form in _beside(recipe, cell):
            if not (fast and has_fast_cell) and form.experiment not in own and store.find(form.experiment):
                exact = _printed_for(cell.fast.experiment) if cell.fast and fast else {}
                exact = {metric: number for metric, number in exact.items() if metric in recipe.metrics}
                lines.append(_line(recipe, form, fast, reading, store, numbers | exact, costs))
    return lines


def our_lines(store: Store) -> Iterator[Line]:
    """Rows of our own methods that were run in the setting of the paper's main table; the paper has no figure for them."""
    for cell in our_cells():
        runs = tuple(run for run in store.find(cell.experiment) if has_images_of(cell.data, run.results))
        if runs:
            seeds, ours = tuple(run.seed for run in runs), {m: over_seeds(runs, m) for m in ("aa", "aia")}
            yield Line(cell, False, "", runs, seeds, _known(ours), {}, {})


def _beside(recipe: PaperRecipe, cell: PaperCell) -> list[tuple[bool, str, PaperCell]]:
    """Forms of a cell that may stand beside it: none in a lite form and where a table has costs alone (other readings cost
    what the paper does not count); readings once, where methods or server epochs are compared."""
    if recipe.lite or all(metric in NOMINAL for metric in recipe.metrics):
        return []
    told = not any(m in NOMINAL for m in recipe.metrics) and (not cell.setting or bool(recipe.spec.get("readings")))
    return [form for form in cell.forms(told) if form[:2] != (False, "")]


def printed_beside(folders: Iterable[Path]) -> dict[Path, dict[str, str]]:
    """AA and AIA that the paper prints for the experiments of these run folders; none for a run that is in no table."""
    store, found = Store(folders), dict[Path, dict[str, str]]()
    for recipe in map(paper_recipe, recipe_names(lite=False)):
        for line in compare(recipe, store, costs=False):
            told = {} if line.other_epochs else {m: n.text for m, n in line.paper.items() if m in ("aa", "aia")}
            for run in line.runs if told else ():
                found[run.folder.resolve()] = told | found.get(run.folder.resolve(), {})  # the first table counts
    return found


def places_in_paper(folders: Iterable[Path], loaded: Iterable[RunRecord] = ()) -> dict[Path, InPaper]:
    """How these runs' settings read the paper, and the AA that it prints for them; a run that is in no table is not here.

    ``loaded``: runs of these folders that need not be read again.
    """
    store, found = Store(folders, loaded), dict[Path, InPaper]()
    for recipe in map(paper_recipe, recipe_names(lite=False)):
        for line in compare(recipe, store, costs=False):
            number = None if line.other_epochs or line.reading else line.paper.get("aa")
            apart = line.variant if line.paper and line.other_epochs else line.reading
            place = InPaper(apart or ("paper's" if line.paper else "ours"), number.text if number else "")
            for run in line.runs:  # the first table counts, unless a later one prints a number
                before = found.get(run.folder.resolve())
                if before is None or (place.aa and not before.aa):
                    found[run.folder.resolve()] = place
    return found


def _line(
    recipe: PaperRecipe,
    cell: PaperCell,
    fast: bool,
    reading: str,
    store: Store,
    paper: dict[str, Printed],
    costs: bool,
) -> Line:
    runs = store.find(cell.experiment)
    other = recipe.reference(cell)
    if other and (fast or reading):
        alike = [form for *kind, form in other.forms() if kind == [fast, reading]]
        other = alike[0] if alike else other
    reference = store.find(other.experiment) if other else ()
    ours = _known({m: over_seeds(runs, m, reference) for m in recipe.metrics})
    measured: dict[str, Spread] = {}
    in_the_papers_way = recipe.metrics if costs and not recipe.lite else ()
    if any(m in NOMINAL for m in in_the_papers_way):
        measured = {m: value for m, value in ours.items() if m in COSTS}
        ours |= {m: value for m, value in nominal(cell, recipe.seeds, other).items() if m in recipe.metrics}
    if any(m in REPLAY for m in in_the_papers_way):
        ours |= replay(cell, recipe.seeds)
    return Line(cell, fast, reading, runs, recipe.seeds, ours, measured, paper)


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


def implied_aa(cell: PaperCell) -> float | None:
    """AA that follows from Table 7's row of tasks, which have equally many test images."""
    row = [n.mean for n in printed("per-task") if n.cell == cell.name and n.metric.startswith("task_")]
    return sum(row) / len(row) if row else None


def _known(values: dict[str, Spread | None]) -> dict[str, Spread]:
    return {key: value for key, value in values.items() if value is not None}


def _printed_for(experiment: str) -> dict[str, Printed]:
    """What the paper prints for an experiment with fewer server epochs: Table 5 has a few."""
    for cell in paper_recipe("server-epochs").cells:
        if cell.experiment == experiment:
            return {n.metric: n for n in printed("server-epochs") if n.cell == cell.name}
    return {}


def band(number: Printed) -> tuple[float, float] | None:
    """What ours may be, for every method on both sides: accuracy in the paper's spread, bytes to the digit, FLOPs in 3 %."""
    if number.metric in ("aa", "aia"):
        room = _deviation(number)
        return number.mean - room, number.mean + room
    if number.metric in BYTES:
        half = 0.5 * 10**-number.digits
        return number.mean - half, number.mean + half
    if number.metric in FLOPS and number.mean and not number.is_bound:
        return number.mean * (1 - FLOP_TOLERANCE), number.mean * (1 + FLOP_TOLERANCE)
    return None


def lies_in(figure: float, allowed: tuple[float, float]) -> bool:
    return allowed[0] - 1e-9 <= figure <= allowed[1] + 1e-9


def _deviation(number: Printed) -> float:
    """Over seeds. Most tables repeat figures of Table 1 without the deviation that stands there."""
    if number.std is None:
        same = (number.data, number.beta, number.method, number.metric, number.mean)
        first = (n for n in printed("main") if (n.data, n.beta, n.method, n.metric, n.mean) == same)
        return next((n.std for n in first if n.std is not None), RUN_TO_RUN)
    return number.std


DIFFERS = "counted otherwise"
Kind = Literal["accuracy", "formula", "measured cost"]


@dataclass(frozen=True)
class Finding:
    """One figure of ours held against its band. ``verdict``: in band, explained or open; the last may have a ``why``.

    A formula needs no run: it is the paper's way to count, applied to our recipes and splits. A measured cost is counted in
    our way, so it may differ without being wrong.
    """

    table: str
    line: Line
    metric: str
    kind: Kind
    ours: Spread
    allowed: tuple[float, float]
    verdict: str
    why: str


def findings(names: Iterable[str], store: Store) -> list[Finding]:
    """Every figure of these tables that has a band, once: a run supports the first row that it belongs to, and no other.

    A row is the paper's reading of its cell: other readings, and E_srv=10 where the paper prints E_srv=100, are not judged.
    """
    found: dict[tuple[object, ...], Finding] = {}
    for recipe in map(paper_recipe, names):
        for line in compare(recipe, store):
            if line.reading or line.other_epochs:
                continue
            for one in _held(recipe, line, store):
                where = tuple(run.folder for run in line.runs) if one.kind != "formula" else (line.cell.experiment,)
                found.setdefault((one.kind, one.metric, where), one)
    return list(found.values())


def _held(recipe: PaperRecipe, line: Line, store: Store) -> Iterator[Finding]:
    for metric, number in line.paper.items():
        allowed = band(number)
        figures: dict[Kind, Spread | None] = {"accuracy": line.ours.get(metric)}
        if metric in NOMINAL:
            figures = {"formula": line.ours.get(metric), "measured cost": line.measured.get(metric)}
        for kind, ours in figures.items():
            if allowed is None or ours is None:
                continue
            if kind == "measured cost":
                allowed = number.mean * (1 - FLOP_TOLERANCE), number.mean * (1 + FLOP_TOLERANCE)
            verdict, why = "in band", ""
            if not lies_in(ours.mean, allowed):
                place = f"{recipe.table}:{line.cell.name}"
                verdict, why = explanation(place, metric, ours.mean, store, number, kind)
                verdict = DIFFERS if kind == "measured cost" else verdict
            yield Finding(recipe.table, line, metric, kind, ours, allowed, verdict, why)


def explanation(
    where: str, metric: str, figure: float, store: Store, number: Printed | None = None, kind: str = "accuracy"
) -> tuple[str, str]:
    """("explained" or "open", why). Another figure at the same place, say of more seeds, is open until it is looked at anew.

    A cause counts as known only if it is shown: a stored run without it lies in the band, or (formulas) the paper's figure
    lies among those of many splits.
    """
    for row in _registered():
        same = row["kind"] == kind and row["metric"] == metric and fnmatch(where, row["where"])
        if same and round(figure, 2) == float(row["ours"]):
            shown = _is_shown(row, store, number)
            told = f"{row['why']} ({row['shown_by']})" if row["shown_by"] else row["why"]
            return "explained" if shown else "open", told
    return "open", ""


def _is_shown(row: Mapping[str, str], store: Store, number: Printed | None) -> bool:
    if number is None:
        return False
    if row["low"]:
        return float(row["low"]) <= number.mean <= float(row["high"])
    run = store.at(row["shown_by"]) if row["shown_by"] else None
    if run is None or not _is_of(run, number):
        return False
    value, allowed = read(run, number.metric), band(number)
    return value is not None and allowed is not None and lies_in(value, allowed)


def _is_of(run: Stored, number: Printed) -> bool:
    """Whether the run has the method, the data and the split of a printed figure, in whatever reading."""
    told = run.results.config
    ours = (told["method"]["name"], told["data"]["name"], float(told["federation"]["beta"]))
    return ours == (number.method, number.data, float(number.beta))


@lru_cache
def _registered() -> tuple[dict[str, str], ...]:
    text = (files("rescene.paper") / "explained.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(text.splitlines()))
