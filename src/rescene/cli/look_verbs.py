"""Verbs that look at what is there: choices, recipes, runs, this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from rescene.cli.frame import AsJson, Overrides, Plugin, busy, load_plugins, verb
from rescene.errors import ConfigError, did_you_mean


@verb
def list_things(
    what: Annotated[str, typer.Argument(help="methods, recipes, datasets, models or buffers")],
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """What there is to choose from."""
    load_plugins(plugin)
    from rescene.cli.listing import LISTS, print_rows

    if what not in LISTS:
        close = did_you_mean(what, LISTS)
        raise ConfigError(
            "E109", f"cannot list {what!r}" + (f"; did you mean {close}?" if close else ""), why=", ".join(LISTS)
        )
    print_rows(LISTS[what](), as_json)
    if what == "recipes" and not as_json:
        print("The paper's tables are recipes of many cells: rescene paper list")


@verb
def show(
    recipe: Annotated[str, typer.Argument(help="recipe name, recipe file or run folder")],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """The resolved recipe, with the origin of every value."""
    from rescene.cli.listing import print_rows
    from rescene.config import resolve

    config = Path(recipe) / "config.yaml"
    resolved = resolve(config if config.is_file() else recipe, overrides or [])
    if as_json:
        print(
            json.dumps(
                {k: {"value": v, "origin": resolved.origins.get(k, "default")} for k, v in resolved.flat().items()}
            )
        )
        return
    print_rows(
        [{"key": k, "value": v, "origin": resolved.origins.get(k, "default")} for k, v in resolved.flat().items()]
    )


@verb
def report(
    folders: Annotated[list[Path], typer.Argument(help="run folders, or a folder that holds some")],
    out: Annotated[Path | None, typer.Option("--out", help="HTML file (default: report.html beside the runs)")] = None,
    open_page: Annotated[bool, typer.Option("--open", help="open it in a browser")] = False,
    paper: Annotated[
        bool, typer.Option("--paper", help="the paper's AA and AIA beside runs that are in its tables")
    ] = False,
) -> None:
    """One self-contained HTML page from run folders."""
    from rescene.cli.listing import find_runs
    from rescene.cli.presenting import tell_unreadable, writing
    from rescene.report.page import write_page
    from rescene.report.runs import load_runs

    found = [run for folder in folders for run in find_runs(folder)]
    if not found:
        raise ConfigError("E108", "no run folder there", where=", ".join(map(str, folders)), fix="rescene runs")
    out = out or folders[0] / "report.html"
    with busy(f"drawing the page of {len(found)} runs"):
        printed = None
        if paper:
            from rescene.paper.compare import printed_beside

            printed = printed_beside(found)
        runs, unreadable = load_runs(found)
        with writing(out):
            page = write_page(runs, unreadable, out, printed)
    tell_unreadable(unreadable)
    print(page)
    if open_page:
        typer.launch(str(page))


@verb
def theory(
    folder: Annotated[Path, typer.Argument(help="finished run, or a folder that holds some")], as_json: AsJson = False
) -> None:
    """What the paper proves about the buffer, measured: which assumptions hold, which bounds say something."""
    from rescene.cli.theory import print_theory

    print_theory(folder, as_json)


@verb
def quarantine(
    folder: Annotated[Path, typer.Argument(help="run with federation.screen=features")],
    admit: Annotated[list[str] | None, typer.Option("--admit", help="a name of the table; may be repeated")] = None,
    sheet: Annotated[Path | None, typer.Option("--sheet", help="write the pictures to this image file")] = None,
    as_json: AsJson = False,
) -> None:
    """Uploads that a run's screen put apart, and why; --admit lets some into the next round of their task."""
    from rescene.cli.quarantine import quarantined

    quarantined(folder, list(admit or []), sheet, as_json)


@verb
def runs(
    folder: Annotated[Path | None, typer.Argument(help="where to look (default: $RESCENE_RUNS or runs)")] = None,
    prune: Annotated[
        str | None, typer.Option("--prune", help="remove checkpoints (of finished runs), interrupted, failed")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="with --prune: do not ask")] = False,
    as_json: AsJson = False,
) -> None:
    """All runs under a folder, with state, size and accuracy; --prune makes room."""
    from rescene.cli.keeping import prune as remove
    from rescene.cli.keeping import show_runs

    root = folder or Path(os.environ.get("RESCENE_RUNS", "runs"))
    if prune is not None:
        remove(root, prune, yes)
    else:
        show_runs(root, as_json)


@verb
def doctor(as_json: AsJson = False) -> None:
    """Check this machine: versions, device, data, disk, extras; exit code 5 if something needs fixing."""
    from rescene.cli.checks import machine_checks
    from rescene.cli.listing import print_rows

    rows = machine_checks()
    print_rows(rows, as_json)
    problems = sum(bool(row["problem"]) for row in rows)
    if not as_json:
        print(f"\n{problems} of {len(rows)} checks need something done" if problems else "\nall is well")
    if problems:
        raise typer.Exit(5)
