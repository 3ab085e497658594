"""The comparison as grids: a table of the paper with our figures beside it, the status of all tables, stored results."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rescene.core.method_style import style_of
from rescene.paper.compare import Line, compare, implied_aa, our_lines
from rescene.paper.numbers import printed
from rescene.paper.recipes import FAST_LABEL, PaperRecipe, paper_recipe, recipe_names
from rescene.paper.store import NOMINAL, REPLAY, Store, label
from rescene.report.groups import Spread
from rescene.report.tables import TableCell, TableEntry, TableGrid

SIDE_BY_SIDE = 2  # more metrics than this, and ours and the paper's stand one below the other
DATA = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "tinyimagenet": "TinyImageNet", "office31": "Office-31"}
OURS = " (ours)"  # after the name of a method that the paper does not have
NOT_COMPARABLE = "A lite form: small images, few tasks and rounds. Not comparable with the paper."
LIST_NOTES = (
    "Each also has a small form, not comparable with the paper: rescene paper run main-lite (office31-lite needs Office-31)",
    "Before running: --plan; ours beside the paper's: rescene paper table main; its figures: rescene paper figure old-recent",
)
OTHER_EPOCHS = "E_srv=10 beside a figure marked E_srv=100: the paper prints no other there."
READINGS = "A setting after the method is another reading of the paper (docs/paper.md): it stands beside the row and is no part of it."
BEST = (
    "Marked (*, bold): our best among the paper's rows that were run in one setting. Methods that the paper's table does not "
    "have, other readings and other server epochs never win."
)
FIRST_TASK = "T0 is the first task, as in the paper; runs and reports call it T1."
BY_FORMULA = "ours, by the paper's formula"
COSTS_BY_FORMULA = "ours, costs by the paper's formula"
COPIES = "near-copies: uploaded images with PSNR > 30 dB to a real training image; read accuracy together with it."


def table_grid(
    recipe: PaperRecipe, store: Store, only: Iterable[str] = (), commands: bool = True, everything: bool = True
) -> TableGrid:
    """Ours, the paper's and the difference, cell by cell. ``commands``: with a column that says how to run what is missing.
    ``everything``: also cells without a figure of ours, as long as there are others.
    """
    found = compare(recipe, store, only)
    lines = [line for line in found if everything or line.ours] or found
    shown = {metric for line in lines for metric in (*line.ours, *line.paper)}  # some data sets have fewer tasks
    metrics = [metric for metric in recipe.metrics if metric in shown] or list(recipe.metrics)
    best = _best(recipe, lines, metrics)
    if len(metrics) <= SIDE_BY_SIDE:
        columns, rows = _side_by_side(recipe, lines, metrics, best)
    else:
        columns, rows = _stacked(recipe, lines, metrics, best)
    if not commands:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    title = f"paper/{recipe.name}: {recipe.title} ({recipe.place})"
    notes = [*_notes(recipe, lines, bool(best)), *(_state(recipe, found, store, only) if commands else ())]
    if len(lines) < len(found):
        notes.append(f"{len(found) - len(lines)} cells have no figure of ours yet: --all shows them too.")
    return TableGrid(title, tuple(columns), tuple(map(tuple, rows)), tuple(notes))


def command(recipe: PaperRecipe, line: Line) -> str:
    """How to run what is missing of a line, or why that cannot be done; empty when nothing is."""
    if not line.missing or line.reading:  # those stand for comparison
        return ""
    if line.cell.unavailable:
        return "not available yet"
    return _run(recipe, [line.cell.name]) + (" --fast" if line.fast else "")


def _run(recipe: PaperRecipe, only: Iterable[str]) -> str:
    """The command that runs these cells with the seeds that the table asks for."""
    usual = recipe.seeds == paper_recipe(recipe.name).seeds
    seeds = "" if usual else f" --seeds {','.join(map(str, recipe.seeds))}"
    return f"rescene paper run {recipe.name}" + "".join(f" --only {shlex.quote(text)}" for text in only) + seeds


def _head(line: Line) -> list[TableEntry]:
    setting = " ".join(filter(None, (line.cell.setting, line.variant)))
    return [DATA.get(line.cell.data, line.cell.data), line.cell.beta, style_of(line.cell.method).label, setting]


def _tail(recipe: PaperRecipe, line: Line) -> list[TableEntry]:
    seeds = f"{len(line.runs)}/{len(line.runs) + len(line.missing)}"
    return [seeds, copies(line), command(recipe, line)]


# how well images come back, by method and data: results/privacy/glfc-reconstruction.jsonl, measured nowhere else
ATTACKED = {("glfc", "cifar10"): "9 of 10 at 46 to 50 dB"}


def copies(line: Line) -> str:
    """The share of near-copies among the uploads, or in words why there is none."""
    if not line.runs:
        return "–"
    style = style_of(line.cell.method)
    found = ATTACKED.get((line.cell.method, line.cell.data)) if style.reconstructs else None
    words = style.without_images() + (f" ({found})" if found else "")
    return words if line.near_copies is None else f"{line.near_copies:.0f} %"


_HEAD = ["data", "beta", "method", "setting"]
_TAIL = ["seeds", "near-copies", "to run"]


def _side_by_side(
    recipe: PaperRecipe, lines: Sequence[Line], metrics: Sequence[str], best: set[Any]
) -> tuple[Any, Any]:
    columns = list(_HEAD)
    for m in metrics:
        columns += [label(m)] if recipe.lite else [label(m), f"paper {label(m)}", f"{label(m)} diff"]
    rows = []
    for line in lines:
        row = _head(line)
        for m in metrics:
            row.append(_ours(line.ours.get(m), (id(line), m) in best))
            if not recipe.lite:
                row += [_paper(line, m, "E_srv=100" if line.other_epochs else ""), _difference(line, m)]
        rows.append(row + _tail(recipe, line))
    return [*columns, *_TAIL], rows


def _stacked(recipe: PaperRecipe, lines: Sequence[Line], metrics: Sequence[str], best: set[Any]) -> tuple[Any, Any]:
    """Rows ours, paper, difference; costs also as measured, since in the row of ours they follow the paper's formulas."""
    rows: list[list[TableEntry]] = []
    for line in lines:
        tail: list[TableEntry] = _tail(recipe, line)
        blank: list[TableEntry] = ["" for _ in tail]
        own = [_ours(line.ours.get(m), (id(line), m) in best, _digits(line, m)) for m in metrics]
        rows.append([*_head(line), _whose_ours(recipe), *own, *tail])
        if line.measured:
            rows.append(
                [
                    *_head(line),
                    "measured",
                    *(_ours(line.measured.get(m), False, _digits(line, m)) for m in metrics),
                    *blank,
                ]
            )
        if not recipe.lite:
            rows.append([*_head(line), _whose_paper(line), *(_paper(line, m) for m in metrics), *blank])
            if line.ours:
                rows.append([*_head(line), "difference", *(_difference(line, m) for m in metrics), *blank])
    return [*_HEAD, "whose", *map(label, metrics), *_TAIL], rows


def _whose_ours(recipe: PaperRecipe) -> str:
    """Says whether costs are computed from a formula; in a lite form they are measured."""
    computed = [metric in NOMINAL for metric in recipe.metrics]
    if recipe.lite or not any(computed):
        return "ours"
    return BY_FORMULA if all(computed) else COSTS_BY_FORMULA


def _whose_paper(line: Line) -> str:
    return "paper, E_srv=100" if line.other_epochs else "paper"


def _ours(value: Spread | None, best: bool, digits: int = 2) -> TableCell:
    return (
        TableCell(value.mean, value.std, value.num, best=best, digits=digits)
        if value
        else TableCell(None, digits=digits)
    )


def _paper(line: Line, metric: str, note: str = "") -> TableCell:
    number = line.paper.get(metric)
    if number is None:
        return TableCell(None)
    if number.is_bound:
        return TableCell(number.mean, digits=number.digits, bound=number.bound)
    return TableCell(number.mean, number.std, note=note, digits=number.digits)


def _difference(line: Line, metric: str) -> TableCell:
    value = line.difference(metric)
    return TableCell(0.0 if value == 0 else value, digits=_digits(line, metric))  # no -0.00


def _digits(line: Line, metric: str) -> int:
    """Decimals to show: those of the paper; without a figure of the paper two, or two significant digits below 0.1."""
    number, ours = line.paper.get(metric), line.ours.get(metric)
    if number:
        return number.digits
    if ours and 0 < abs(ours.mean) < 0.1:
        return 1 - math.floor(math.log10(abs(ours.mean)))
    return 0 if metric in REPLAY else 2


def _best(recipe: PaperRecipe, lines: Sequence[Line], metrics: Sequence[str]) -> set[tuple[int, str]]:
    """Our best AA and AIA among the paper's rows of one setting (among settings, where a table has a single method).

    Nothing is the best of itself: at least two of these rows must have a value.
    """
    rows = [line for line in lines if _is_the_papers(recipe, line)]
    one_method = len({line.cell.method for line in rows}) == 1
    found = set()
    for metric in (m for m in metrics if m in ("aa", "aia")):
        groups: dict[Any, list[Line]] = {}
        for line in (line for line in rows if metric in line.ours):
            key = (line.cell.data, line.cell.beta, "" if one_method else line.cell.setting)
            groups.setdefault(key, []).append(line)
        for group in (group for group in groups.values() if len(group) > 1):
            found.add((id(max(group, key=lambda line: line.ours[metric].mean)), metric))
    return found


def _is_the_papers(recipe: PaperRecipe, line: Line) -> bool:
    """Whether a line is the paper's own row: no other form of it, and not a method that the paper's table does not have."""
    return not line.variant and line.cell.method in {number.method for number in printed(recipe.table)}


def _notes(recipe: PaperRecipe, lines: Sequence[Line], marked: bool) -> Iterable[str]:
    """What the table's marks and columns mean."""
    if recipe.lite:
        yield NOT_COMPARABLE
    if marked:
        yield BEST
    tasks = [
        n for line in lines for n in line.paper.values() if n.metric.startswith("task_") and n.metric[5:].isdigit()
    ]
    if tasks:
        yield FIRST_TASK
    domains = dict.fromkeys(f"{label(n.metric)} {n.note}" for n in tasks if n.note)
    if domains:
        yield f"Domains: {', '.join(domains)}."
    if any(line.other_epochs for line in lines):
        yield OTHER_EPOCHS
    if any(line.reading for line in lines):
        yield READINGS
    if not recipe.lite and any(metric in NOMINAL for metric in recipe.metrics):
        yield "Costs: ours by the paper's formula, on our split, which needs no run; measured is what our runs counted."
    if not recipe.lite and any(metric in REPLAY for metric in recipe.metrics):
        yield "Budget and images: ours as the paper counts them, on our split, which needs no run."
    if any(line.near_copies is not None for line in lines):
        yield COPIES


def _state(recipe: PaperRecipe, lines: Sequence[Line], store: Store, only: Iterable[str]) -> Iterable[str]:
    """What is stored and what can be run here."""
    exact = [line for line in lines if not line.variant]
    done, wanted = _done_and_wanted(exact)
    beside = _beside(lines)
    yield f"{done} of {wanted} runs are stored" + (f", and {beside}." if beside else ".")
    if done < wanted and not all(line.cell.unavailable for line in exact):
        yield f"The rest: {_run(recipe, only)}"
    for obstacle in dict.fromkeys(line.cell.obstacle for line in exact if line.missing):
        if obstacle:
            yield f"cannot run here: {obstacle.reason}. fix: {obstacle.fix}"
    if unread := [*store.unreadable, *store.foreign]:
        names = ", ".join(map(str, unread))
        yield f"not read (damaged, of another version, or of a method or network of your own): {names}"


def _done_and_wanted(lines: Sequence[Line]) -> tuple[int, int]:
    """Of the paper's own cells and seeds; where a table is not the paper's (a lite form), of all cells. Each run counts once."""
    own = _once(line for line in lines if line.paper) or _once(lines)
    wanted = sum(len(line.seeds) for line in own)
    return wanted - sum(len(line.missing) for line in own), wanted


def _once(lines: Iterable[Line]) -> list[Line]:
    """One line of each experiment: a table can print one experiment in two cells, such as Re-Fed's in Table 8."""
    return list({(line.cell.base, line.cell.overrides): line for line in lines}.values())


def _beside(lines: Sequence[Line]) -> str:
    """How many runs there are of other forms and seeds."""
    lines = _once(lines)
    printed_ones = any(line.paper for line in lines)
    own = [line for line in lines if not line.variant and (line.paper or not printed_ones)]
    further = sum(len(line.further) for line in own)
    other = sum(len(line.runs) for line in lines if line.reading)
    fast = sum(len(line.runs) for line in lines if line.fast and not line.reading)
    extra = sum(len(line.runs) for line in lines if not line.variant and printed_ones and not line.paper)
    told = {"with further seeds": further, f"at {FAST_LABEL}": fast}
    told |= {"in other readings": other, "not in the paper's table": extra}
    return ", ".join(f"{number} {what}" for what, number in told.items() if number)


def status_grid(store: Store, lite: bool = False) -> TableGrid:
    """Every table of the paper, and how much of it is there."""
    rows: list[tuple[TableEntry, ...]] = []
    for name in recipe_names(lite):
        recipe = paper_recipe(name)
        lines = compare(recipe, store, costs=False)
        done, wanted = _done_and_wanted([line for line in lines if not line.variant])
        waiting = all(line.cell.unavailable for line in lines)
        to_run = "not available yet" if waiting else f"rescene paper run {name}" if done < wanted else ""
        shown = f"{done}/{wanted}" + (f" (+{beside})" if (beside := _beside(lines)) else "")
        rows.append((f"paper/{name}", recipe.place, recipe.title, str(len(recipe.cells)), shown, to_run))
    return TableGrid("", ("recipe", "in the paper", "what", "cells", "runs done", "command"), tuple(rows), LIST_NOTES)


def results_grid(store: Store) -> TableGrid:
    """Every stored run that is a cell of the paper, once, in the paper's order; then our own methods in its setting."""
    rows: list[tuple[TableEntry, ...]] = []
    seen: set[Any] = set()
    for name in recipe_names(lite=False):
        for line in compare(paper_recipe(name), store, costs=False):
            key = tuple(run.folder for run in line.runs)
            if key and key not in seen and any(n.metric == "aa" for n in printed(name)):
                seen.add(key)
                rows.append(_result(line))
    rows += [_result(line, OURS) for line in our_lines(store)]
    columns = ("data", "beta", "method", "setting", "seeds", "AA", "AIA", "paper AA / AIA", "near-copies", "where")
    return TableGrid("", columns, tuple(rows))


def _result(line: Line, mark: str = "") -> tuple[TableEntry, ...]:
    data, beta, method, setting = _head(line)
    figures = [_ours(line.ours.get(m), best=False) for m in ("aa", "aia")]
    told = (_told(line), copies(line), folders(line))
    return (data, beta, f"{method}{mark}", setting, str(len(line.runs)), *figures, *told)


def _told(line: Line) -> str:
    """AA and AIA that the paper prints for a line; AA from its row of tasks where that is all it prints."""
    if "aa" in line.paper:
        epochs = " at E_srv=100" if line.other_epochs else ""
        return f"{line.paper['aa'].mean:.2f} / {line.paper['aia'].mean:.2f}{epochs}"
    implied = implied_aa(line.cell)
    return "–" if implied is None else f"{implied:.2f} (mean of Table 7's row) / –"


def folders(line: Line) -> str:
    """Where the runs of a line lie."""
    return _together(sorted({_from_results(run.folder) for run in line.runs}))


def _from_results(folder: Path) -> str:
    """The folder from ``results`` on: the same text on every machine."""
    parts = folder.parts
    return "/".join(parts[parts.index("results") :] if "results" in parts else parts[-2:])


def _together(places: list[str]) -> str:
    """Folders that differ at their end only, as one text.

    >>> _together(["results/a-s0", "results/a-s1"]), _together(["results/a-s0"]), _together(["a/x", "b/x"])
    ('results/a-s{0,1}', 'results/a-s0', 'a/x, b/x')
    """
    shared = os.path.commonprefix(places)
    if len(places) < 2 or "/" not in shared:
        return ", ".join(places)
    return f"{shared}{{{','.join(place.removeprefix(shared) for place in places)}}}"
