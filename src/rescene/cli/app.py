"""The program: its verbs, its help, their old names, and the entry point.

The help is a first screen with the verbs by group, a list of all verbs, and examples below the help of a verb. It is plain text
and the same in every release of typer that is allowed: only documented settings are used.

Exit codes: 0 done, 2 recipe or usage, 3 data, 4 run failed, 5 check failed, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from rescene import __version__
from rescene.cli.deploy_verbs import deploy_app, export, predict, quarantine, scale, serve
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
from rescene.cli.look_verbs import leaderboard_app, plot, report, runs, show, sites, table
from rescene.cli.paper_verbs import paper_app, theory
from rescene.cli.privacy_verbs import audit, forget, privacy
from rescene.cli.shared_options import AsJson, load_plugins, name_plugins
from rescene.cli.start_verbs import data_app, demo, doctor, list_things, measure_speed
from rescene.cli.terminal import guard_streams, visible, warnings_for_people
from rescene.core.errors import ResceneError, closest, for_people

ABOUT = "Federated continual learning with server-side replay."
GROUPS: Mapping[str, tuple[str, Sequence[str]]] = {  # title: what it is for, its verbs
    "start": ("begin here", ("demo", "list", "data", "doctor")),
    "experiment": ("compare", ("run", "sweep", "resume", "continue", "rerun", "cost", "method", "lens")),
    "look": ("results", ("runs", "show", "report", "table", "plot", "sites", "leaderboard")),
    "deploy": ("real sites", ("deploy", "scale", "export", "predict", "serve")),
    "privacy": ("guarantees", ("privacy", "audit", "forget")),
    "paper": ("its tables", ("paper",)),
}
SETTINGS = ("seed", "device", "method", "data", "model")  # keys of a recipe without a dot
NEXT = """\
First: rescene demo. Then, with your images: rescene run own data.path=./images
More: rescene help (all verbs), rescene help VERB (one verb)"""
NOTES = """\
Overrides are dotted keys: rescene run demo data.path=./images federation.beta=0.1
--version shows the version, --debug tracebacks; NO_COLOR=1 stops colours.
--install-completion completes verbs, recipes, methods and keys on TAB.
Exit codes: 0 done, 2 recipe or usage, 3 data, 4 run failed, 5 check failed,
130 interrupted, 143 terminated."""


def main() -> None:
    """Entry point of ``rescene`` and ``python -m rescene``. ``--debug`` may come anywhere."""
    if "--debug" in sys.argv:
        sys.argv.remove("--debug")
        os.environ["RESCENE_DEBUG"] = "1"
    guard_streams()
    app(prog_name="rescene")


class Verb(TyperCommand):
    """A verb. Its ``--plugin`` is loaded before it begins. Errors meant for people become a message and an exit code."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # click's NoSuchOption, which typer does not name
            word = str(getattr(error, "option_name", "")).lstrip("-")
            takes_settings = any(one.name == "overrides" for one in self.params)
            if takes_settings and not getattr(error, "possibilities", None) and (word in SETTINGS or "." in word):
                ctx.fail(
                    f"No such option: --{visible(word)}. It is a setting, written without dashes: {visible(word)}=VALUE"
                )
            raise

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        try:
            load_plugins(map(Path, ctx.params.get("plugin") or ()))
            return super().invoke(ctx)
        except Exception as error:
            _stop(name_plugins(for_people(error), ctx.params))

    def get_help(self, ctx: typer.Context) -> str:  # type: ignore[override]
        """With brackets as they are: typer 0.20 escapes them for rich, also where no markup is used."""
        return super().get_help(ctx).replace(r"\[", "[")


def _stop(error: Exception) -> NoReturn:
    if os.environ.get("RESCENE_DEBUG") or not isinstance(error, ResceneError):
        raise error
    print(error, file=sys.stderr)
    raise typer.Exit(error.exit_code)


class Verbs(TyperGroup):
    """A group of verbs. A verb that is not there is answered once with the closest one: click and typer both do it."""

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        name = args[0]
        if name not in self.commands and not name.startswith("-") and not ctx.resilient_parsing:
            close = closest(name, [known for known, one in self.commands.items() if not one.hidden])
            words = f"Did you mean '{close}'?" if close else "rescene help lists them."
            ctx.fail(f"No such verb: {visible(name)}. {words}")
        return super().resolve_command(ctx, args)


class FirstScreen(Verbs):
    """The program itself: its help is the first screen."""

    def get_help(self, ctx: typer.Context) -> str:  # type: ignore[override]
        width = max(len(", ".join(verbs)) for _, verbs in GROUPS.values())
        lines = [f"  {title:<10} {', '.join(verbs):<{width}}  {use}" for title, (use, verbs) in GROUPS.items()]
        return "\n".join([f"{ABOUT}  Usage: rescene VERB ...", "", *lines, "", NEXT])


def show_help(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[VERB]...", help="a verb, such as run or data inspect")
    ] = None,
) -> None:
    """List every verb, or show the help of one."""
    assert ctx.parent is not None
    program: Any = ctx.parent.command
    if words:
        program.main([*words, "--help"], prog_name=ctx.parent.info_name)
    print(all_verbs(program))


def all_verbs(program: Any) -> str:
    """Every verb with its sentence, by group, as wide as the terminal."""
    width = min(shutil.get_terminal_size().columns, 120)
    lines = [f"{ABOUT}  Usage: rescene VERB ..."]
    for title, (use, verbs) in GROUPS.items():
        found = [leaf for name in verbs for leaf in leaves(program.commands[name], name)]
        margin = max(len(name) for name, _ in found) + 4
        lines += ["", f"{title}: {use}"]
        for name, command in found:
            first = f"  {name}".ljust(margin)
            lines.append(textwrap.fill(first + command.help, width, subsequent_indent=" " * margin))
    return "\n".join([*lines, "", NOTES])


def leaves(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every verb below a command that does something and is not hidden, with its full name."""
    if command.hidden:
        return
    if not hasattr(command, "commands"):
        yield name, command
        return
    for key, inner in command.commands.items():
        yield from leaves(inner, f"{name} {key}".lstrip())


def examples() -> dict[str, list[str]]:
    """Examples by verb, from examples.txt. A test parses every one of them."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in (files("rescene.cli") / "examples.txt").read_text("utf-8").splitlines():
        if line.startswith(" "):
            found[name].append(line.strip())
        else:
            name = line
            found[name] = []
    return found


def finish(apps: Mapping[str, typer.Typer]) -> None:
    """Make every command a ``Verb`` with its whole sentence in lists, and its examples. ``apps``: by name, the program as ""."""
    known = examples()
    for group, one in apps.items():
        one.info.short_help = one.info.help
        one.info.cls = FirstScreen if group == "" else Verbs
        for command in one.registered_commands:
            name = command.name or getattr(command.callback, "__name__", "")
            lines = known.get(f"{group} {name}".strip())
            command.cls = Verb
            command.short_help = inspect.getdoc(command.callback)  # typer cuts a longer help off at one line
            if lines:  # \b keeps the lines as they are
                command.epilog = "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


app = typer.Typer(
    help=ABOUT, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=True
)
new_app = typer.Typer(hidden=True, rich_markup_mode=None)  # an old name, too


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


VERBS: Sequence[Callable[..., None]] = (
    *(demo, doctor, run, sweep, resume, rerun, cost, runs, show, report, table, plot, sites),
    *(scale, export, predict, serve, privacy, audit, forget),
)
for verb in VERBS:
    app.command()(verb)
app.command("list")(list_things)
app.command("continue")(continue_run)
app.command("help")(show_help)
GROUPED = {
    **{"data": data_app, "method": method_app, "lens": lens_app, "deploy": deploy_app},
    **{"leaderboard": leaderboard_app, "paper": paper_app, "new": new_app},
}
for name, group in GROUPED.items():
    app.add_typer(group, name=name)
OLD_NAMES: Mapping[str, tuple[str, Callable[..., None]]] = {  # they work for one release and say the new name
    "bench": ("doctor --speed", bench),
    "explain": ("method explain", explain),
    "quarantine": ("deploy quarantine", quarantine),
    "theory": ("paper theory", theory),
}
for old, (new, function) in OLD_NAMES.items():
    app.command(old, hidden=True)(_renamed(function, old, new))
new_app.command("method")(_renamed(new_method, "new method", "method new"))
finish({"": app, **GROUPED})
