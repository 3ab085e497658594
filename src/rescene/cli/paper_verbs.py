"""The paper: its tables and figures with our numbers beside them, and its theory measured."""

from __future__ import annotations

import json
import sys
import textwrap
import warnings
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rescene.cli.look_verbs import format_for, loaded, put
from rescene.cli.shared_options import AsJson, Quiet, verb_group
from rescene.cli.terminal import busy, interruptible, print_rows, writing
from rescene.core.errors import ConfigError, ResceneWarning
from rescene.core.json_files import Row
from rescene.core.run_state import read_object, runs_root

if TYPE_CHECKING:
    from rescene.core.results import ClassTheory
    from rescene.paper import PaperCell, Store
    from rescene.paper.queue_runner import QueueRow
    from rescene.sweeps.grid import SweepCell

paper_app = verb_group("Run the tables and figures of the paper, and see our numbers beside them.")
TABLE = typer.Argument(help="table of the paper (rescene paper list), with -lite for the small form")
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        help="cells by name or pattern, e.g. 'cifar10/*/rescene' (of a queue also a group's letter); may be repeated",
    ),
]
Runs = Annotated[
    list[Path] | None,
    typer.Option("--runs", help="where the results are (default: results/ and runs/); may be repeated"),
]
Format = Annotated[str, typer.Option("--format", help="text, markdown, latex, csv, html or json")]
READING = "reading the stored results"


@paper_app.command("list")
def paper_list(
    runs: Runs = None,
    lite: Annotated[bool, typer.Option("--lite", help="also list the small forms")] = False,
    kind: Format = "text",
) -> None:
    """List the tables: their place in the paper, cells, finished runs, command."""
    with busy(READING):
        from rescene.paper.paper_tables import status_grid
        from rescene.report.tables import render

        text = render(status_grid(_results(runs), lite), kind)
    print(text, end="")


@paper_app.command("run")
def paper_run(
    name: Annotated[str | None, TABLE] = None,
    only: Only = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", help="seeds, separated by commas (default: 0,1,2 as in the paper)")
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="E_srv=10 where the paper has 100: a tenth of the work of the server")
    ] = False,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="how many cells run at the same time on one GPU")] = 1,
    queue: Annotated[
        bool, typer.Option("--queue", help="run what is missing of all tables, most informative first")
    ] = False,
    minutes: Annotated[float | None, typer.Option("--minutes", help="with --queue: stop after so many minutes")] = None,
    parallel: Annotated[int, typer.Option("--parallel", min=1, help="with --queue: runs at a time on the device")] = 1,
    plan: Annotated[bool, typer.Option("--plan", help="list the cells; run nothing")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="folder for the runs (default: runs/<data set>; -lite: runs/paper-lite; --queue: results)"
        ),
    ] = None,
    runs: Runs = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run the cells that are not done yet. Cells that cannot run here are listed with a fix (exit code 4)."""
    if queue or name is None:
        idle = {"--seeds": seeds is not None, "--fast": fast, "--jobs": jobs != 1}
        _refuse_idle(
            idle, "a queue knows seeds and epochs; --only picks from it, and --parallel runs several at a time"
        )
        _run_queue(name, only or [], minutes, parallel, plan, out, runs, as_json)
    else:
        _refuse_idle({"--minutes": minutes is not None, "--parallel": parallel != 1}, "they belong to --queue")
        _run_table(name, only or [], seeds, fast, jobs, plan, out, runs, quiet, as_json)


def _refuse_idle(given: dict[str, bool], why: str) -> None:
    """Options that would be ignored are an error."""
    if idle := [option for option, is_given in given.items() if is_given]:
        fix = "leave it out" if len(idle) == 1 else "leave them out"
        raise ConfigError("E501", f"{', '.join(idle)} would have no effect here", why=why, fix=fix)


def _run_table(
    name: str,
    only: list[str],
    seeds: str | None,
    fast: bool,
    jobs: int,
    plan: bool,
    out: Path | None,
    runs: list[Path] | None,
    quiet: bool,
    as_json: bool,
) -> None:
    """The cells of one table: plan them, or run those that are not done yet."""
    from rescene.cli.running import print_plan, run_cells
    from rescene.paper import paper_recipe
    from rescene.paper.paper_tables import NOT_COMPARABLE, table_grid
    from rescene.report.tables import render
    from rescene.sweeps.grid import read_seeds

    recipe = paper_recipe(name)
    store = _store(runs, out)
    numbers = read_seeds(seeds) if seeds else recipe.seeds
    refused = [cell for cell in recipe.chosen(only) if cell.unavailable]
    wanted = [(fast and cell.fast) or cell for cell in recipe.chosen(only) if not cell.unavailable]
    place = out or (runs_root() / "paper-lite" if recipe.lite else None)  # runs of `rescene demo` lie in runs/demo
    if plan:
        runs_to_plan = [_sweep_cell(cell, seed, store, place) for cell in wanted for seed in numbers]
        print_plan(runs_to_plan, as_json, _refused_rows(refused))
        if not as_json:
            print(NOT_COMPARABLE if recipe.lite else f"A small form: rescene paper run {recipe.name}-lite --plan")
        return
    ready: list[SweepCell] = []
    for cell in wanted:
        planned = [_sweep_cell(cell, seed, store, place) for seed in numbers]
        if cell.obstacle and not all(run.done for run in planned):
            refused.append(cell)
            planned = [run for run in planned if run.done]
        ready += planned

    def work() -> int:
        results, failures = run_cells(ready, quiet, as_json, jobs=jobs)
        if as_json:
            rows = [{"folder": str(r.folder), "aa": r.aa, "aia": r.aia} for r in results]
            print_rows([*rows, *_refused_rows(refused), *failures], as_json)
        else:
            print(render(table_grid(recipe, _store(runs, out), only), "text"), end="")
        if failures and not as_json:
            print_rows(failures)
        return 4 if refused or failures else 0

    interruptible(work)


def _run_queue(
    name: str | None,
    only: list[str],
    minutes: float | None,
    parallel: int,
    plan: bool,
    out: Path | None,
    runs: list[Path] | None,
    as_json: bool,
) -> None:
    """Run what is missing for so many minutes; exit code 4 if a run failed."""
    if name is not None or (minutes is None and not plan) or (minutes is not None and not minutes > 0):
        raise ConfigError(
            "E501",
            "this is no table and no queue",
            why="a queue takes a number of minutes above 0 and no table; without --queue a table is needed",
            fix="rescene paper run --queue --minutes 60, or rescene paper run main",
        )
    with busy(READING):
        from rescene.engine.experiment import pick_device
        from rescene.engine.run_folder import made_on
        from rescene.paper.missing_runs import missing_cells, picked, predictor
        from rescene.paper.queue_runner import Queue, run_folders

        store, results = _store(runs, out), out or Path("results")
        wanted = picked(missing_cells(store), only)
        predict = predictor(store, made_on(pick_device("auto"))["device"])
        found = Queue(wanted, predict, minutes or 0.0, run_folders(), results, parallel, tell=_tell_row)
    if plan:
        _print_plan(found.plan() if minutes else found.rows, minutes, parallel, as_json)
        return
    rows: list[QueueRow] = []

    def work() -> None:
        rows.extend(found.run())

    interruptible(work)
    print_rows([asdict(row) if as_json else _queue_cells(row) for row in rows], as_json)
    if any(row.state == "failed" for row in rows):
        raise typer.Exit(4)


def _print_plan(rows: list[QueueRow], minutes: float | None, parallel: int, as_json: bool) -> None:
    """What a queue would do, and the sum."""
    if as_json:
        print_rows([asdict(row) for row in rows], as_json)
        return
    shown = ("cell", "seed", "group", "folder", "state", "predicted")
    print_rows([{key: cell for key, cell in _queue_cells(row).items() if key in shown} for row in rows])
    for why, num in Counter(row.why for row in rows if row.why).items():
        print(f"{num} cannot run: {why}")
    print(_plan_words(rows, minutes, parallel))


def _plan_words(rows: list[QueueRow], minutes: float | None, parallel: int) -> str:
    """The plan in a sentence: how many runs are in each state, with the sum of their predicted minutes."""
    from rescene.paper.queue_runner import BEGINS, ENDS, LATER

    counts = Counter(row.state for row in rows)
    order = [state for state in dict.fromkeys([ENDS, BEGINS, LATER, *counts]) if counts[state]]
    told = [f"{counts[state]} {state}{_summed(rows, state)}" for state in order]
    if minutes and not counts[ENDS] + counts[BEGINS]:
        told = ["no run would start", *told]
    within = f"In {minutes:g} minutes, " if minutes else ""
    return f"{within}{parallel} at a time: {', '.join(told) or 'nothing is missing'}."


def _summed(rows: list[QueueRow], state: str) -> str:
    """Predicted minutes of the runs in one state, and of how many they are not known; nothing for what cannot run."""
    own = [row.predicted for row in rows if row.state == state and not row.why]
    known = [minutes for minutes in own if minutes is not None]
    told = [f"{sum(known):.0f} minutes"] if known else []
    told += [f"{len(own) - len(known)} not known"] if len(known) < len(own) else []
    return f" ({', '.join(told)})" if told else ""


def _queue_cells(row: QueueRow) -> Row:
    """A run of the queue for people."""
    return asdict(row) | {"predicted": "not known" if row.predicted is None else row.predicted}


def _tell_row(row: QueueRow) -> None:
    minutes = "" if row.used is None else f"{row.used:g} min, "
    predicted = "minutes not known" if row.predicted is None else f"predicted {row.predicted:g} min"
    print(f"{row.state}: {row.cell}, seed {row.seed} ({minutes}{predicted}) {row.why}", file=sys.stderr)


@paper_app.command("table")
def paper_table(
    name: Annotated[str, TABLE],
    only: Only = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", help="count these seeds alone, such as 0,1,2 (default: every stored one)")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="on a terminal too: also cells that have no figure of ours")
    ] = False,
    runs: Runs = None,
    kind: Format = "",
    out: Annotated[Path | None, typer.Option("--out", help="file; its ending chooses the format")] = None,
) -> None:
    """Compare our numbers with the paper's, and give the command for what is missing."""
    kind = format_for(kind, out)
    with busy(READING):
        from rescene.paper import paper_recipe
        from rescene.paper.paper_tables import table_grid
        from rescene.report.tables import render
        from rescene.sweeps.grid import read_seeds

        recipe, store = paper_recipe(name), _results(runs)
        if seeds:
            recipe = replace(recipe, seeds=read_seeds(seeds))
            store = store.of_seeds(recipe.seeds)
        whole = everything or kind != "text" or bool(only)
        text = render(table_grid(recipe, store, only or (), commands=kind != "latex", everything=whole), kind)
    put(text, out)


@paper_app.command("check")
def paper_check(
    name: Annotated[str, typer.Argument(help="a table, claims, or all")] = "all",
    everything: Annotated[bool, typer.Option("--all", help="also list the figures inside their band")] = False,
    known_open: Annotated[
        bool, typer.Option("--known-open", help="fail only on what is not in the list of what is known to be open")
    ] = False,
    accept_open: Annotated[
        bool, typer.Option("--accept-open", help="write that list anew from what is open now; it explains nothing")
    ] = False,
    runs: Runs = None,
    kind: Format = "text",
) -> None:
    """Check our results against the paper's numbers and claims; exit code 5 if one fails."""
    if name != "all" and (known_open or accept_open):
        why = "a run stands once in the list, in the first table that it belongs to"
        fix = "rescene paper check --known-open"
        raise ConfigError("E533", "the list of what is known to be open is one of all tables", why=why, fix=fix)
    with busy(READING):
        from rescene.paper import known_open as known_list
        from rescene.paper import recipe_names
        from rescene.paper.claims import OurBook, judge
        from rescene.paper.compare import findings
        from rescene.paper.pages import band_grid, claims_grid
        from rescene.paper.recipes import check_name
        from rescene.report.tables import render

        if name not in (also := ("claims", "all")):
            check_name(name.removeprefix("paper/"), also)
        store = _results(runs)
        names = recipe_names(lite=False) if name == "all" else [] if name == "claims" else [name]
        found = findings(names, store)
        verdicts = judge(OurBook(store)) if name in ("all", "claims") else []
        gone: list[str] = []
        if accept_open:
            with writing(known_list.FILE):
                known_list.write_known([*found, *verdicts], known_list.FILE)
        if known_open:
            known = known_list.read_known(known_list.FILE)
            gone = known_list.no_longer_open([*found, *verdicts], known)
            found, verdicts = known_list.told_as_known(found, known), known_list.told_as_known(verdicts, known)
        grids = [band_grid(found, everything)] if names else []
        grids += [claims_grid(verdicts)] if verdicts else []
        parts = [render(grid, kind) for grid in grids]
    several = kind == "json" and len(parts) > 1
    print(f"[{','.join(parts)}]\n" if several else "\n".join(parts), end="")
    told = [f"no longer open, so --accept-open takes it out of the list: {place}" for place in gone]
    told += [f"written: {known_list.FILE}"] if accept_open else []
    if told:
        print(*told, sep="\n", file=sys.stderr)
    if store.contradicting or store.unreadable or known_list.failing([*found, *verdicts]):
        raise typer.Exit(5)


@paper_app.command("figure")
def paper_figure(
    name: Annotated[str, typer.Argument(help="old-recent or task-curves")],
    out: Annotated[
        Path,
        typer.Option("--out", help="folder for the .png, .svg and .csv, or one .png, .pdf or .svg, its .csv beside it"),
    ] = Path("figures"),
    runs: Runs = None,
) -> None:
    """Draw a figure of the paper: its values hollow, ours filled."""
    with busy(READING):
        from rescene.paper.figures import figure
        from rescene.report.drawing import checked_ending, render, save

        one_file = bool(out.suffix) and not out.is_dir()
        if one_file:
            checked_ending(out)
        plot = figure(name, _results(runs))
        drawn = out if one_file else out / f"{plot.name}.png"
        with writing(drawn):
            save(plot, out) if one_file else render(plot, out)
    endings = [drawn.suffix, ".csv"] if one_file else [".png", ".svg", ".csv"]
    print(*(drawn.with_suffix(ending) for ending in endings), sep="\n")


@paper_app.command("readme")
def paper_readme(
    write: Annotated[
        Path, typer.Option("--write", help="document with <!-- rescene paper: results --> ... <!-- end -->")
    ],
    runs: Annotated[list[Path] | None, typer.Option("--runs", help="where the results are (default: results)")] = None,
) -> None:
    """Write the tables in a document again from the stored results."""
    from rescene.paper.pages import refreshed

    if not write.is_file():
        raise ConfigError("E152", "there is no such document", where=str(write))
    write.write_text(refreshed(write.read_text(encoding="utf-8"), _store(runs or [Path("results")])), encoding="utf-8")
    print(write)


@paper_app.command("theory")
def theory(
    folder: Annotated[Path, typer.Argument(help="finished run, or a folder that holds some")], as_json: AsJson = False
) -> None:
    """Check on runs what the paper proves about the buffer: which assumptions hold, which bounds are tight."""
    from rescene.report.figures_theory import VERDICTS, class_rows, findings

    runs = [run for run in loaded([folder]) if class_rows([run])]
    if not runs:
        raise ConfigError(
            "E160",
            "no theory was recorded there",
            where=str(folder),
            why="the run is unfinished or older than this record, or its method keeps no buffer on the server",
            fix="rescene run demo",
        )
    if as_json:
        facts = [
            {
                "run": str(run.folder),
                "theory": read_object(run.folder / "results.json")["theory"],
                "findings": [asdict(one) for one in findings(class_rows([run]))],
            }
            for run in runs
        ]
        print(json.dumps(facts))
        return
    for run in runs:
        print(f"{run.folder}\n")
        print_rows([_theory_row(row) for row in class_rows([run])])
        print()
    rows = class_rows(runs)
    if len(runs) > 1:
        print(f"All {len(runs)} runs together, {len(rows)} classes:\n")
    for one in findings(rows):
        print(f"{one.statement}: {VERDICTS[one.verdict]}")
        print(textwrap.fill(one.text, 110, initial_indent="  ", subsequent_indent="  "))
    print("\nAll distances are between mean unit-length features; definitions in docs/theory.md.")


def _theory_row(row: ClassTheory) -> Row:
    from rescene.report.figures_theory import COLUMNS, cells

    titles = [title for _, title, _ in COLUMNS]
    return {"class": f"T{row.task + 1} {row.class_name}", **dict(zip(titles, cells(row), strict=True))}


def _refused_rows(cells: list[PaperCell]) -> list[dict[str, str]]:
    """Cells that cannot run here, with the reason and the fix."""
    told = [(cell, cell.obstacle) for cell in cells]
    return [
        {"cell": cell.name, "state": "cannot run", "problem": why.reason, "fix": why.fix} for cell, why in told if why
    ]


def _store(runs: list[Path] | None, out: Path | None = None) -> Store:
    from rescene.paper import Store
    from rescene.paper.store import default_roots

    for root in runs or ():
        if not root.is_dir() and root != out:  # which will be made
            raise ConfigError("E108", "there is no such folder", where=str(root), fix="--runs takes a folder of runs")
    store = Store([*(runs or default_roots()), *([out] if out else [])])
    told = {folder: f"its numbers do not agree: {wrong[0]}" for folder, wrong in store.contradicting.items()}
    told |= dict.fromkeys(store.unreadable, "its results.json is damaged or of a newer version")
    told |= {folder: f"more happened in it than its recipe tells ({what})" for folder, what in store.changed.items()}
    for folder, why in told.items():
        warnings.warn(ResceneWarning("W550", f"{folder} does not count: {why}"), stacklevel=2)
    return store


def _results(runs: list[Path] | None) -> Store:
    """The same for what only shows results; where none are stored, a line says so, or zeros would look like findings."""
    from rescene.paper.store import default_roots

    store, searched = _store(runs), runs or default_roots()[:-1]  # the last holds the user's own runs
    if not any(True for root in searched for _ in root.rglob("results.json")):
        places = ", ".join(map(str, searched))
        fix = "run this in a checkout of rescene, or give --runs FOLDER"
        print(f"no stored results in {places}: {fix}", file=sys.stderr)
    return store


def _sweep_cell(cell: PaperCell, seed: int, store: Store, out: Path | None) -> SweepCell:
    """A run of this cell: the stored one if there is one, else a folder to make."""
    from rescene.api import default_folder
    from rescene.sweeps.grid import SweepCell

    resolved = cell.resolve(f"seed={seed}")
    found = store.find(cell.experiment, [seed])
    folder = default_folder(resolved)
    place = found[0].folder if found else out / folder.name if out else folder
    obstacle = cell.obstacle  # its words fit a command without overrides
    return SweepCell((cell.name, f"seed={seed}"), resolved, place, obstacle.fix if obstacle else None)
