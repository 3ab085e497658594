"""The program: its verbs, their old names, and the entry point.

Exit codes: 0 done, 2 recipe or usage, 3 data, 4 run failed, 5 check failed, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from rescene import __version__
from rescene.cli.deploy_verbs import deploy_app, quarantine, scale
from rescene.cli.experiment_verbs import (
    continue_run,
    cost,
    explain,
    lens_app,
    method_app,
    new_method,
    rerun,
    resume,
    run,
    sweep,
)
from rescene.cli.help import ABOUT, FirstScreen, show_help, use_plain_help
from rescene.cli.leaderboard_verbs import leaderboard_app
from rescene.cli.look_verbs import plot, report, runs, show, sites, table
from rescene.cli.model_verbs import export, predict, serve
from rescene.cli.paper_verbs import paper_app, theory
from rescene.cli.privacy_verbs import audit, forget, privacy
from rescene.cli.shared_options import AsJson
from rescene.cli.start_verbs import data_app, demo, doctor, list_things, measure_speed
from rescene.cli.terminal import guard_streams, verb, warnings_for_people

app = typer.Typer(
    cls=FirstScreen,
    help=ABOUT,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=True,
)


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
    warnings_for_people()


def main() -> None:
    """Entry point of ``rescene`` and ``python -m rescene``. ``--debug`` may come anywhere."""
    if "--debug" in sys.argv:
        sys.argv.remove("--debug")
        os.environ["RESCENE_DEBUG"] = "1"
    guard_streams()
    app(prog_name="rescene")


@verb
def bench(
    out: Annotated[Path | None, typer.Option("--out", help="write the figures as JSON")] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Measure how fast this machine runs the basic steps."""
    measure_speed(device, out, as_json)


def _renamed(function: Callable[..., None], old: str, new: str) -> Callable[..., None]:
    """The verb under its old name, which says the new one on standard error."""

    @functools.wraps(function)
    def announced(*args: Any, **kwargs: Any) -> None:
        print(f"rescene {old} has a new name: rescene {new}", file=sys.stderr)
        function(*args, **kwargs)

    return announced


for one in (demo, doctor, run, sweep, resume, rerun, cost, runs, show, report, table, plot, sites):
    app.command()(one)
for one in (scale, export, predict, serve, privacy, audit, forget):
    app.command()(one)
app.command("list")(list_things)
app.command("continue")(continue_run)
app.command("help")(show_help)
GROUPED = {
    **{"data": data_app, "method": method_app, "lens": lens_app, "deploy": deploy_app},
    **{"leaderboard": leaderboard_app, "paper": paper_app},
}
for name, group in GROUPED.items():
    app.add_typer(group, name=name)
use_plain_help({"": app, **GROUPED})

# Old names. They work for one release and say the new name.
new_app = typer.Typer(hidden=True, rich_markup_mode=None)
app.add_typer(new_app, name="new", hidden=True)
new_app.command("method")(_renamed(new_method, "new method", "method new"))
for old, new, one in (
    ("bench", "doctor --speed", bench),
    ("explain", "method explain", explain),
    ("quarantine", "deploy quarantine", quarantine),
    ("theory", "paper theory", theory),
):
    app.command(old, hidden=True)(_renamed(one, old, new))
