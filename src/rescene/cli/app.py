"""The verbs. Exit codes: 0 ok, 2 recipe or usage, 3 data, 4 run failed, 5 check failed, 130 interrupted, 143 terminated."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from rescene import __version__
from rescene.cli.data_verbs import data_app
from rescene.cli.deploying import deploy_app
from rescene.cli.estimate_verbs import audit, bench, cost, privacy, scale
from rescene.cli.examples import add_examples
from rescene.cli.frame import warnings_for_people
from rescene.cli.help import use_plain_help
from rescene.cli.lens_verbs import lens_app
from rescene.cli.look_verbs import doctor, list_things, quarantine, report, runs, show, theory
from rescene.cli.method_verbs import explain, new_app
from rescene.cli.papers import paper_app
from rescene.cli.presenting import plot, table
from rescene.cli.run_verbs import demo, forget, rerun, resume, run, sweep
from rescene.cli.terminal import guard_streams
from rescene.cli.using import export, predict

app = typer.Typer(
    epilog="Overrides are dotted keys: rescene run demo data.path=./images federation.beta=0.1. --debug shows tracebacks, "
    "NO_COLOR=1 stops colours. Exit codes: 0 done, 2 recipe or usage, 3 data, 4 run failed, 5 check failed, 130 interrupted.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=True,
)
app.add_typer(data_app, name="data")
app.add_typer(lens_app, name="lens")
app.add_typer(paper_app, name="paper")
app.add_typer(deploy_app, name="deploy")
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
    warnings_for_people()


def main() -> None:
    """Entry point of ``rescene`` and ``python -m rescene``. ``--debug`` may stand anywhere."""
    if "--debug" in sys.argv:
        sys.argv.remove("--debug")
        os.environ["RESCENE_DEBUG"] = "1"
    guard_streams()
    app()


# in the order of the help
for one in (demo, run, sweep, bench, cost, scale, privacy, audit, explain, resume, rerun, forget):
    app.command()(one)
app.command("list")(list_things)
for one in (show, report, table, plot, export, predict, theory, quarantine, runs, doctor):
    app.command()(one)
add_examples(app)
use_plain_help(app, data_app, lens_app, paper_app, deploy_app, new_app)
