"""The verbs. Exit codes: 0 ok, 2 recipe or usage, 3 data, 4 run failed, 5 check failed, 130 interrupted, 143 terminated."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rescene import __version__
from rescene.cli.data_verbs import data_app
from rescene.cli.deploying import deploy_app
from rescene.cli.examples import add_examples
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
    busy,
    interruptible,
    load_plugins,
    verb,
)
from rescene.cli.help import use_plain_help
from rescene.cli.papers import paper_app
from rescene.cli.presenting import plot, table
from rescene.cli.using import export, predict
from rescene.errors import ConfigError, did_you_mean

ServerGflops = Annotated[
    float | None, typer.Option("--server-gflops", help="the server's speed, GFLOP/s (default: this device's)")
]

app = typer.Typer(
    epilog="Overrides are dotted keys: rescene run demo data.path=./images federation.beta=0.1. --debug shows tracebacks, "
    "NO_COLOR=1 stops colours. Exit codes: 0 done, 2 recipe or usage, 3 data, 4 run failed, 5 check failed, 130 interrupted.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=True,
)
app.add_typer(data_app, name="data")
app.add_typer(paper_app, name="paper")
app.add_typer(deploy_app, name="deploy")
new_app = typer.Typer(help="Start something of your own.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(new_app, name="new")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"rescene {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Federated continual learning with server-side replay. Start with: rescene demo"""


def main() -> None:
    """Entry point of ``rescene`` and ``python -m rescene``. ``--debug`` may stand anywhere."""
    if "--debug" in sys.argv:
        sys.argv.remove("--debug")
        os.environ["RESCENE_DEBUG"] = "1"
    app()


@app.command()
@verb
def demo(
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option("--out", help="folder for the runs (default: runs/demo)")] = None,
    private: Annotated[
        bool,
        typer.Option("--private", help="ReSCENE with real starts, without (private), with a guarantee (private-dp)"),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """FedAvg forgets, ReSCENE does not: both on embedded real images, minutes on a laptop, with a report."""
    from rescene.cli.running import run_demo

    again = "rescene demo --private" if private else "rescene demo"
    interruptible(lambda: run_demo(list(overrides or []), out, quiet, private), again)


@app.command()
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


@app.command()
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

    def work() -> None:
        if run_sweep(recipe, list(overrides or []), seeds, out, plan, quiet, as_json, jobs):
            raise typer.Exit(4)

    interruptible(work, "the same command")


@app.command()
@verb
def bench(
    out: Annotated[Path | None, typer.Option("--out", help="write the figures as JSON")] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N")] = "auto",
    as_json: AsJson = False,
) -> None:
    """How fast this machine runs the steps everything consists of, also as a share of its matrix rate."""
    from rescene.cli.benching import run_bench

    run_bench(device, out, as_json)


@app.command()
@verb
def cost(
    recipe: RecipeName,
    overrides: Overrides = None,
    uplink_mbps: Annotated[float, typer.Option("--uplink-mbps", help="a site's upload speed, Mbit/s")] = 20.0,
    client_gflops: Annotated[
        float | None, typer.Option("--client-gflops", help="a site's speed, GFLOP/s (default: this device's)")
    ] = None,
    server_gflops: ServerGflops = None,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """What a run will cost, before it runs: FLOPs, bytes, state, seconds per round, time on this device."""
    load_plugins(plugin)
    from rescene.cli.costing import show_cost
    from rescene.config import resolve

    show_cost(resolve(recipe, overrides or []), uplink_mbps, client_gflops, server_gflops, as_json)


@app.command()
@verb
def scale(
    recipe: RecipeName,
    overrides: Overrides = None,
    clients: Annotated[str, typer.Option("--clients", help="sites: 10..1000000 or 10,500")] = "10..1000000",
    per_round: Annotated[
        str | None, typer.Option("--per-round", help="sites in a round: 20 or 10% (default: the recipe's, and 10%)")
    ] = None,
    server_mbps: Annotated[float, typer.Option("--server-mbps", help="the server's line, Mbit/s")] = 1000.0,
    server_gflops: ServerGflops = None,
    server_gb: Annotated[float, typer.Option("--server-gb", help="the server's memory, GB")] = 64.0,
    as_json: AsJson = False,
) -> None:
    """What 10 to 1,000,000 sites would cost the server: bytes, pool, training, herding, and what breaks first."""
    from rescene.cli.scaling import show_scale
    from rescene.config import resolve

    show_scale(resolve(recipe, overrides or []), clients, per_round, server_mbps, server_gflops, server_gb, as_json)


@app.command()
@verb
def privacy(
    recipe: RecipeName,
    overrides: Overrides = None,
    epsilon: Annotated[float | None, typer.Option("--epsilon", help="target: which noise multiplier keeps it?")] = None,
    sigma: Annotated[float | None, typer.Option("--sigma", help="noise multiplier: which epsilon results?")] = None,
    delta: Annotated[float | None, typer.Option("--delta", help="default: the recipe's privacy.delta")] = None,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """What a record is guaranteed over the whole run: epsilon for a noise multiplier and back, and why."""
    load_plugins(plugin)
    from rescene.cli.privacy import show_privacy
    from rescene.config import resolve

    show_privacy(resolve(recipe, overrides or []), epsilon, sigma, delta, as_json)


@app.command()
@verb
def audit(
    what: Annotated[str, typer.Argument(help="recipe, recipe file or run folder")] = "demo",
    overrides: Overrides = None,
    controls: Annotated[bool, typer.Option("--controls", help="break privacy in five ways: are they noticed?")] = False,
    canaries: Annotated[int, typer.Option("--canaries", min=20, help="of each kind; more can show more")] = 200,
    shadows: Annotated[int, typer.Option("--shadows", min=8, help="shadow condensations")] = 64,
    targets: Annotated[int, typer.Option("--targets", min=2, help="images whose membership is guessed")] = 64,
    participations: Annotated[
        int | None, typer.Option("--participations", min=1, help="to attack (default: all that are promised)")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="JSON file (default: audit.json in a run folder)")] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    plugin: Plugin = None,
) -> None:
    """Attack what sites upload; exit code 5 if a promise is contradicted or a control does not fire."""
    load_plugins(plugin)
    from rescene.audit import Scale
    from rescene.cli.auditing import run_audit

    scale = Scale(canaries, shadows, targets, participations)
    if not run_audit(what, list(overrides or []), controls, scale, out, quiet, as_json):
        raise typer.Exit(5)


@app.command()
@verb
def explain(
    method: Annotated[str, typer.Argument(help="name of a method")], as_json: AsJson = False, plugin: Plugin = None
) -> None:
    """A method: what it does, its hyperparameters with their place in the paper, what leaves the site."""
    load_plugins(plugin)
    from rescene.cli.extending import explain as explain_method
    from rescene.cli.listing import print_rows

    facts, rows = explain_method(method)
    if as_json:
        print(json.dumps({**facts, "hyperparameters": rows}))
        return
    for key, value in facts.items():
        print(f"{key}: {value}")
    print()
    print_rows(rows)


@new_app.command("method")
@verb
def new_method(
    name: Annotated[str, typer.Argument(help="lower-case name")],
    folder: Annotated[Path, typer.Option("--in", help="where to write the two files")] = Path("."),
) -> None:
    """A method in one file, and its test."""
    from rescene.cli.extending import new_method as write_method

    for path in write_method(name, folder):
        print(path)
    print(f"try: rescene run smoke --plugin {folder / name}.py method={name}")
    print(f"check: python -m pytest {folder / f'test_{name}.py'}")


@app.command()
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
        f"rescene resume {folder}",
    )


@app.command()
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

    def work() -> None:
        if not repeat(folder, out, quiet, as_json):
            raise typer.Exit(5)

    interruptible(work, "the same command")


@app.command()
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


@app.command("list")
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


@app.command()
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


@app.command()
@verb
def report(
    folders: Annotated[list[Path], typer.Argument(help="run folders, or a folder that holds some")],
    out: Annotated[Path | None, typer.Option("--out", help="HTML file (default: report.html beside the runs)")] = None,
    open_page: Annotated[bool, typer.Option("--open", help="open it in a browser")] = False,
) -> None:
    """One self-contained HTML page from run folders."""
    from rescene.cli.listing import find_runs
    from rescene.report import write_report

    found = [run for folder in folders for run in find_runs(folder)]
    if not found:
        raise ConfigError("E108", "no run folder there", where=", ".join(map(str, folders)), fix="rescene runs")
    with busy(f"drawing the page of {len(found)} runs"):
        page = write_report(found, out or folders[0] / "report.html")
    print(page)
    if open_page:
        typer.launch(str(page))


app.command()(table)
app.command()(plot)
app.command()(export)
app.command()(predict)


@app.command()
@verb
def theory(
    folder: Annotated[Path, typer.Argument(help="finished run, or a folder that holds some")], as_json: AsJson = False
) -> None:
    """What the paper proves about the buffer, measured: which assumptions hold, which bounds say something."""
    from rescene.cli.theory import print_theory

    print_theory(folder, as_json)


@app.command()
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


@app.command()
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


@app.command()
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


add_examples(app)
use_plain_help(app, data_app, paper_app, deploy_app, new_app)
