"""The verbs of `rescene paper`: the paper's tables and figures with our numbers beside them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rescene.cli.frame import AsJson, Jobs, Quiet, busy, interruptible, verb
from rescene.errors import ConfigError

if TYPE_CHECKING:
    from rescene.cli.sweeping import Cell
    from rescene.paper import PaperCell, Store

paper_app = typer.Typer(
    help="Every table and figure of the paper: run it, and see ours beside it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Name = Annotated[str, typer.Argument(help="table of the paper (rescene paper list), with -lite for the small form")]
Only = Annotated[
    list[str] | None, typer.Option("--only", help="cells by name or pattern, e.g. 'cifar10/*/rescene'; may be repeated")
]
Runs = Annotated[
    list[Path] | None, typer.Option("--runs", help="where results lie (default: results/ and runs/); may be repeated")
]
Format = Annotated[str, typer.Option("--format", help="text, markdown, latex, csv, html or json")]
READING = "reading the stored results"
Written = Annotated[Path | None, typer.Option("--out", help="file; its ending chooses the format")]


@paper_app.command("list")
@verb
def paper_list(
    runs: Runs = None,
    lite: Annotated[bool, typer.Option("--lite", help="with the small forms")] = False,
    kind: Format = "text",
) -> None:
    """The tables: where they stand in the paper, cells, runs done, command."""
    with busy(READING):
        from rescene.paper.tables import status_grid
        from rescene.report.formats import render

        text = render(status_grid(_store(runs), lite), kind)
    print(text, end="")


@paper_app.command("run")
@verb
def paper_run(
    name: Name,
    only: Only = None,
    seeds: Annotated[
        str | None, typer.Option("--seeds", help="comma-separated (default: 0,1,2 as in the paper)")
    ] = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="E_srv=10 where the paper has 100: a tenth of the server's work")
    ] = False,
    jobs: Jobs = 1,
    plan: Annotated[bool, typer.Option("--plan", help="list the cells and run nothing")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="folder for the runs (default: runs/<data set>)")] = None,
    runs: Runs = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Run the cells that are not done yet; what cannot run here is listed with its fix (exit code 4)."""
    from rescene.cli.listing import print_rows
    from rescene.cli.sweeping import print_plan, read_seeds, run_cells
    from rescene.paper import paper_recipe
    from rescene.paper.tables import NOT_COMPARABLE, table_grid
    from rescene.report.formats import render

    recipe = paper_recipe(name)
    store = _store(runs, out)
    numbers = read_seeds(seeds) if seeds else recipe.seeds
    refused = [cell for cell in recipe.chosen(only or ()) if cell.unavailable]
    wanted = [(fast and cell.fast) or cell for cell in recipe.chosen(only or ()) if not cell.unavailable]
    if plan:
        runs_to_plan = [_sweep_cell(cell, seed, store, out) for cell in wanted for seed in numbers]
        print_plan(runs_to_plan, as_json, _refused_rows(refused))
        if not as_json:
            print(NOT_COMPARABLE if recipe.lite else f"A small form: rescene paper run {recipe.name}-lite --plan")
        return
    ready: list[Cell] = []
    for cell in wanted:
        planned = [_sweep_cell(cell, seed, store, out) for seed in numbers]
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
            print(render(table_grid(recipe, _store(runs, out), only or ()), "text"), end="")
        if failures and not as_json:
            print_rows(failures)
        return 4 if refused or failures else 0

    interruptible(work, "the same command")


@paper_app.command("table")
@verb
def paper_table(
    name: Name,
    only: Only = None,
    runs: Runs = None,
    kind: Format = "",
    out: Written = None,
) -> None:
    """Ours, paper, difference, seeds done, and the command for what is missing."""
    from rescene.cli.presenting import format_for, put

    kind = format_for(kind, out)
    with busy(READING):
        from rescene.paper import paper_recipe
        from rescene.paper.tables import table_grid
        from rescene.report.formats import render

        text = render(table_grid(paper_recipe(name), _store(runs), only or (), commands=kind != "latex"), kind)
    put(text, out)


@paper_app.command("check")
@verb
def paper_check(
    name: Annotated[str, typer.Argument(help="a table, claims, or all")] = "all",
    everything: Annotated[bool, typer.Option("--all", help="list the figures inside their band, too")] = False,
    runs: Runs = None,
    kind: Format = "text",
) -> None:
    """Hold stored results against the paper's bands, and its claims against our results; exit code 5 where one fails."""
    with busy(READING):
        from rescene.paper import paper_recipe, recipe_names
        from rescene.paper.checks import band_grid, claims_grid, failed
        from rescene.paper.claims import OurBook, judge
        from rescene.paper.compare import findings
        from rescene.paper.recipes import check_name
        from rescene.report.formats import render

        if name not in (also := ("claims", "all")):
            check_name(name.removeprefix("paper/"), also)
        store = _store(runs)
        names = recipe_names(lite=False) if name == "all" else [] if name == "claims" else [name]
        book = OurBook(store)
        found = [finding for table in names for finding in findings(paper_recipe(table), store)]
        verdicts = judge(book) if name in ("all", "claims") else []
        grids = [band_grid(found, everything)] if names else []
        grids += [claims_grid(verdicts, book.stand_ins)] if verdicts else []
        parts = [render(grid, kind) for grid in grids]
    several = kind == "json" and len(parts) > 1
    print(f"[{','.join(parts)}]\n" if several else "\n".join(parts), end="")
    if failed([*found, *verdicts]):
        raise typer.Exit(5)


@paper_app.command("figure")
@verb
def paper_figure(
    name: Annotated[str, typer.Argument(help="old-recent or task-curves")],
    out: Annotated[
        Path,
        typer.Option("--out", help="folder for the .png, .svg and .csv, or one .png, .pdf or .svg, its .csv beside it"),
    ] = Path("figures"),
    runs: Runs = None,
) -> None:
    """A figure of the paper: its values hollow, ours filled."""
    from rescene.cli.presenting import writing

    with busy(READING):
        from rescene.paper.figures import figure
        from rescene.report.canvas import checked_ending, render, save

        one_file = bool(out.suffix) and not out.is_dir()
        if one_file:
            checked_ending(out)
        plot = figure(name, _store(runs))
        drawn = out if one_file else out / f"{plot.name}.png"
        with writing(drawn):
            save(plot, out) if one_file else render(plot, out)
    print(drawn, drawn.with_suffix(".csv"), sep="\n")


@paper_app.command("readme")
@verb
def paper_readme(
    write: Annotated[
        Path, typer.Option("--write", help="document with <!-- rescene paper: results --> ... <!-- end -->")
    ],
    runs: Annotated[list[Path] | None, typer.Option("--runs", help="where results lie (default: results)")] = None,
) -> None:
    """Make the tables in a document anew from the stored results."""
    from rescene.paper.pages import refreshed

    if not write.is_file():
        raise ConfigError("E152", "there is no such document", where=str(write))
    write.write_text(refreshed(write.read_text(encoding="utf-8"), _store(runs or [Path("results")])), encoding="utf-8")
    print(write)


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
    return Store([*(runs or default_roots()), *([out] if out else [])])


def _sweep_cell(cell: PaperCell, seed: int, store: Store, out: Path | None) -> Cell:
    """A run of this cell: the stored one if there is one, else a folder to make."""
    from rescene.api import default_folder
    from rescene.cli.sweeping import Cell

    resolved = cell.resolve(f"seed={seed}")
    found = store.find(cell.experiment, [seed])
    folder = default_folder(resolved)
    place = found[0].folder if found else out / folder.name if out else folder
    obstacle = cell.obstacle  # its words fit a command without overrides
    return Cell((cell.name, f"seed={seed}"), resolved, place, obstacle.fix if obstacle else None)
