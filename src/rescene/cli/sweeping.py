"""Sweeps: a grid of overrides times seeds, one run folder per cell, finished cells skipped."""

from __future__ import annotations

import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import clear_frames
from typing import Any

from rescene.api import Result, default_folder, execute, load
from rescene.cli.costing import NO_FORECAST, Priced, load_or_stand_in, plan_columns, plan_words, price
from rescene.cli.frame import busy
from rescene.cli.listing import Row, print_rows
from rescene.cli.live import watch
from rescene.cli.livepage import open_page
from rescene.cli.running import print_summary
from rescene.config import Resolved, resolve
from rescene.engine import Streams, attempt, pick_device
from rescene.errors import ConfigError, ResceneError, for_people
from rescene.methods import method_names
from rescene.methods.registry import ORDER
from rescene.report import write_report
from rescene.run_state import is_done

REFERENCES = ("joint", "local", "raw-upload")


@dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    overrides: tuple[str, ...]
    resolved: Resolved
    folder: Path
    fix: str | None = None  # of what keeps it from running, where the command cannot do all that the error proposes

    @property
    def done(self) -> bool:
        return is_done(self.folder)


def run_sweep(
    recipe: str,
    overrides: list[str],
    seeds: str,
    out: Path | None,
    plan: bool,
    quiet: bool,
    as_json: bool,
    jobs: int = 1,
) -> int:
    """Run every cell that is not done; a cell that fails is listed and the rest goes on. Returns the number that failed."""
    cells = grid(recipe, overrides, seeds, out)
    if plan:
        print_plan(cells, as_json)
        return 0
    page = _common(cells) / "report.html"
    results, failures = run_cells(cells, quiet, as_json, page, jobs)
    if results:
        write_report([result.folder for result in results], page)
    if as_json:
        print_rows([*({"folder": str(r.folder), **_headline(r)} for r in results), *failures], as_json=True)
        return len(failures)
    if results:
        print_summary(results, page, settings=_settings(cells, results))
    if failures:
        print_rows(failures)
    return len(failures)


def run_cells(
    cells: Sequence[Cell], quiet: bool, as_json: bool, page: Path | None = None, jobs: int = 1
) -> tuple[list[Result], list[Row]]:
    """Results of all cells that are done or could be run, and a row with the reason and the fix for each that failed.

    While cells run, ``page`` shows those that are there; without a page, each run has its own.
    """
    results: list[Result] = []
    failures: list[Row] = []
    outcomes = _in_turn(cells, quiet, as_json, page) if jobs == 1 else _side_by_side(cells, quiet, jobs)
    for cell, outcome in outcomes:
        match outcome:
            case Result():
                results.append(outcome)
            case ResceneError():
                error = f"[{outcome.code}] {outcome.what}"
                failures.append({"cell": " ".join(cell.overrides), "error": error, "fix": outcome.fix or ""})
            case _:
                raise outcome
    return results, failures


Outcomes = Iterator[tuple[Cell, Result | Exception]]


def _in_turn(cells: Sequence[Cell], quiet: bool, as_json: bool, page: Path | None) -> Outcomes:
    whole = open_page([cell.folder for cell in cells], page) if page else nullcontext()
    with whole as common:
        for number, cell in enumerate(cells, start=1):
            if not quiet:
                state = "done before" if cell.done else ""
                print(f"[{number}/{len(cells)}] {' '.join(cell.overrides)} {state}", file=sys.stderr)
            if cell.done:
                yield cell, attempt(load, cell.folder)
                continue
            own = cell.folder / "report.html"
            one = nullcontext(common) if common else open_page([cell.folder], own)
            with watch(quiet or as_json) as show, one as live:
                outcome = _outcome(cell, live.after(show))
            if page is None and isinstance(outcome, Result):
                write_report([cell.folder], own)
            yield cell, outcome


def _outcome(cell: Cell, progress: Callable[[dict[str, Any]], None] = lambda event: None) -> Result | Exception:
    """What a cell gave, or what stopped it."""
    found = attempt(partial(execute, cell.resolved, cell.folder), progress)
    if isinstance(found, Result):
        return found
    clear_frames(found.__traceback__)  # an error keeps what its frames held, and so memory that the next cell needs
    return for_people(found)


def _side_by_side(cells: Sequence[Cell], quiet: bool, jobs: int) -> Outcomes:
    """Several at a time on one GPU, a thread and a stream for each."""
    device = pick_device(cells[0].resolved.recipe.device)
    if device.type != "cuda":
        raise ConfigError(
            "E119",
            f"--jobs {jobs} needs a GPU",
            why="on a CPU one run at a time already uses all cores",
            fix="leave --jobs out",
        )

    def result(cell: Cell) -> Result | Exception:
        return attempt(load, cell.folder) if cell.done else _outcome(cell)

    streams = Streams(device, jobs)
    try:
        outcomes = streams.outcomes(result, cells)
        for number, (cell, outcome) in enumerate(zip(cells, outcomes, strict=True), start=1):
            if not quiet:
                print(f"[{number}/{len(cells)}] {' '.join(cell.overrides)}", file=sys.stderr)
            yield cell, outcome
    except KeyboardInterrupt:
        print("interrupted; the same command continues every cell where it stands", file=sys.stderr)
        os._exit(130)  # threads cannot be interrupted, and a run can be stopped at any moment without loss


def print_plan(cells: Sequence[Cell], as_json: bool, refused: Sequence[Row] = ()) -> None:
    """Every cell with its state, its cost and its time here, and the sums over those not done; problems with their fix."""
    rows: list[dict[str, Any]] = []
    totals: dict[str, dict[Path, dict[str, float]]] = {"to run": {}, "cannot run": {}}  # a folder is run once
    problems: dict[str, str] = {}
    unpriced: list[str] = []
    for cell in _one_by_one(cells):
        row: dict[str, Any] = {"cell": " ".join(cell.overrides), "folder": str(cell.folder)}
        problem: ResceneError | None
        priced = _priced(cell)
        if isinstance(priced, Priced):
            figures, problem = plan_columns(priced), priced.missing
        else:
            figures, problem = {}, priced
            if priced.code == NO_FORECAST:  # it may run all the same
                problem = _missing(cell)
                unpriced.append(priced.why or "")
        if problem is not None and not cell.done:
            row["state"] = f"cannot run: {problem.code}"
            fix = cell.fix or problem.fix
            problems[f"[{problem.code}] {problem.what}"] = fix or ""
            if as_json:
                row |= {"problem": problem.what, "fix": fix}
        else:
            row["state"] = "done" if cell.done else "to run"
        rows.append(row | (figures if as_json or not figures else plan_words(figures)))
        if figures and not cell.done:
            totals["cannot run" if problem else "to run"][cell.folder] = figures
    if not as_json:
        rows += [
            {"cell": f"in all, {state}", "folder": "", "state": ""} | plan_words(_sum(found.values()))
            for state, found in totals.items()
            if found
        ]
    print_rows([*rows, *refused], as_json)
    if not as_json:
        for what, fix in problems.items():
            print(f"{what}\n  fix: {fix}")
        for why, num in Counter(unpriced).items():
            print(f"No cost in advance for {num} of {len(cells)} cells: {why}.")


def _priced(cell: Cell) -> Priced | ResceneError:
    """A cell's cost, or why it has none; measuring the device may show that the cell is too large for it."""
    found = attempt(price, cell.resolved)
    if isinstance(found, Priced):
        return found
    told = for_people(found)
    if not isinstance(told, ResceneError):
        raise found
    return told


def _sum(columns: Collection[dict[str, float]]) -> dict[str, float]:
    return {key: sum(own[key] for own in columns) for key in next(iter(columns))}


def _missing(cell: Cell) -> ResceneError | None:
    """The complaint about a cell's images, if they are not here."""
    try:
        return load_or_stand_in(cell.resolved.recipe.images)[1]
    except ResceneError as error:
        return error


def _one_by_one(cells: Sequence[Cell]) -> Iterator[Cell]:
    """The cells, each announced while it is priced."""
    with busy("measuring this device") as status:
        for number, cell in enumerate(cells, start=1):
            yield cell
            status.update(f"pricing cell {number} of {len(cells)} ...")


def grid(recipe: str, overrides: list[str], seeds: str, out: Path | None) -> list[Cell]:
    """Every combination of comma-separated values; ``method=all`` stands for the ten methods and the reference lines."""
    axes = [_axis(text) for text in overrides] + [[f"seed={seed}" for seed in read_seeds(seeds)]]
    cells = []
    for combination in itertools.product(*axes):
        resolved = resolve(recipe, combination)
        folder = default_folder(resolved)
        cells.append(Cell(combination, resolved, out / folder.name if out else folder))
    return cells


def read_seeds(text: str) -> tuple[int, ...]:
    """Seeds as given to ``--seeds``, each once: a seed given twice is the same run.

    >>> read_seeds("2, 0,2")
    (2, 0)
    """
    try:
        return tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise ConfigError("E106", f"cannot read the seeds {text!r}", fix="--seeds 0,1,2") from None


def _axis(text: str) -> list[str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(
            "E106", f"cannot read the override {text!r}", why="overrides look like key=value or key=a,b,c"
        )
    if key == "seed":  # --seeds would overrule it, and all its values be one run
        raise ConfigError("E106", f"a sweep takes its seeds from --seeds, not from {text!r}", fix=f"--seeds {value}")
    if key in ("method", "method.name") and value == "all":
        known = method_names()
        return [f"{key}={name}" for name in (*ORDER, *REFERENCES) if name in known]
    return [f"{key}={part}" for part in dict.fromkeys(_split(value))]


def _split(value: str) -> list[str]:
    """Commas separate values except inside brackets: [a,b],[c] are two."""
    parts, depth = [""], 0
    for character in value:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _settings(cells: Sequence[Cell], results: Sequence[Result]) -> list[dict[str, str]]:
    """Of each result, the overrides that the sweep varies, by the last part of their key; the method has its own column."""
    chosen = {cell.folder: dict(text.split("=", 1) for text in cell.overrides) for cell in cells}
    varied = {key for key in chosen[cells[0].folder] if len({own[key] for own in chosen.values()}) > 1}
    varied -= {"method", "method.name"}
    return [
        {key.rpartition(".")[2]: value for key, value in chosen[result.folder].items() if key in varied}
        for result in results
    ]


def _common(cells: list[Cell]) -> Path:
    return cells[0].folder.parent


def _headline(result: Result) -> dict[str, Any]:
    keys = ("method", "seed", "aa", "aia", "old", "recent", "forgetting")
    leakage = result.values["leakage"] or {}
    return {key: result.values[key] for key in keys} | {"near_copies": leakage.get("near_copies")}
