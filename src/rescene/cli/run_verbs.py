"""Verbs that run experiments: one, many, again, or without a site."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rescene.cli.frame import (
    AsJson,
    Elsewhere,
    Jobs,
    Log,
    Out,
    Overrides,
    Plugin,
    Quiet,
    RecipeName,
    interruptible,
    load_plugins,
    verb,
)
from rescene.errors import ConfigError, command


@verb
def demo(
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option("--out", help="folder for the runs (default: runs/demo)")] = None,
    privacy: Annotated[
        bool,
        typer.Option(
            "--privacy",
            help="three uploads: near-copies (demo), drawn pictures, not private either (waves), a guarantee (waves-dp)",
        ),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """FedAvg forgets, ReSCENE and Moments do not: all on embedded real images, minutes on a laptop, with a report."""
    from rescene.cli.running import run_demo

    interruptible(lambda: run_demo(list(overrides or []), out, quiet, privacy), "the same command")


@verb
def run(
    recipe: RecipeName,
    overrides: Overrides = None,
    out: Out = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show what would run, and run nothing")] = False,
    log: Log = "",
    elsewhere: Elsewhere = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """Run one experiment; an interrupted one continues by itself."""
    load_plugins(plugin)
    from rescene.cli.running import plan_run, run_one
    from rescene.config import resolve

    resolved = resolve(recipe, overrides or [])
    if dry_run:
        plan_run(resolved, out, as_json)
        return
    interruptible(lambda: run_one(resolved, out, quiet, as_json, log=log, elsewhere=elsewhere), "the same command")


@verb
def sweep(
    recipe: RecipeName,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=a,b,c: every combination; method=all")] = None,
    seeds: Annotated[str, typer.Option("--seeds", help="comma-separated")] = "0",
    out: Annotated[Path | None, typer.Option("--out", help="folder for the cells (default: runs/<recipe>)")] = None,
    jobs: Jobs = 1,
    plan: Annotated[
        bool, typer.Option("--plan", help="list the cells with what they will cost, and run nothing")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """A grid of experiments times seeds; finished cells are skipped, failing ones listed (exit code 4)."""
    load_plugins(plugin)
    from rescene.cli.sweeping import run_sweep

    asked = list(overrides or [])
    interruptible(
        lambda: 4 if run_sweep(recipe, asked, seeds, out, plan, quiet, as_json, jobs) else 0, "the same command"
    )


@verb
def resume(
    folder: Annotated[Path, typer.Argument(help="run folder to continue")],
    log: Log = "",
    elsewhere: Elsewhere = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """Continue an interrupted run."""
    load_plugins(plugin)
    from rescene.cli.running import run_one
    from rescene.config import resolve

    config = folder / "config.yaml"
    if not config.is_file():
        raise ConfigError(
            "E108", "not a run folder", where=str(folder), why="it has no config.yaml", fix="rescene runs"
        )
    interruptible(
        lambda: run_one(resolve(config), folder, quiet, as_json, log=log, elsewhere=elsewhere),
        command("resume", folder),
    )


@verb
def rerun(
    folder: Annotated[Path, typer.Argument(help="finished run folder")],
    out: Annotated[Path | None, typer.Option("--out", help="folder for the repetition (default: RUN-again)")] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """Run the same recipe again and compare every number; exit code 5 if one differs."""
    load_plugins(plugin)
    from rescene.cli.keeping import rerun as repeat

    interruptible(lambda: 0 if repeat(folder, out, quiet, as_json) else 5, "the same command")


@verb
def forget(
    folder: Annotated[Path, typer.Argument(help="run folder; also one of a federation's server")],
    client: Annotated[str, typer.Option("--client", help="the site that leaves: its number, or its name")],
    check: Annotated[
        bool, typer.Option("--check", help="also run the recipe as if the site had never been there, and compare")
    ] = False,
    out: Annotated[Path | None, typer.Option("--out", help="new run folder (default: RUN-forgot-<site>)")] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """A site withdraws: remove its uploads, train anew on what remains; it is never asked again."""
    load_plugins(plugin)
    from rescene.cli.forgetting import forget as withdraw

    interruptible(lambda: withdraw(folder, client, check, out, quiet, as_json), "the same command")
