"""The help: a first screen with the verbs by group, a list of all verbs, and examples below the help of a verb.

The help is plain text and the same in every release of typer that is allowed: only documented settings are used.
"""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from rescene.cli.terminal import visible
from rescene.core.errors import did_you_mean

ABOUT = "Federated continual learning with server-side replay."
GROUPS: Mapping[str, tuple[str, Sequence[str]]] = {  # title: what it is for, its verbs
    "start": ("begin here", ("demo", "list", "data", "doctor")),
    "experiment": ("compare", ("run", "sweep", "resume", "continue", "rerun", "cost", "method", "lens")),
    "look": ("results", ("runs", "show", "report", "table", "plot", "sites", "leaderboard")),
    "deploy": ("real sites", ("deploy", "scale", "export", "predict", "serve")),
    "privacy": ("guarantees", ("privacy", "audit", "forget")),
    "paper": ("its tables", ("paper",)),
}
NEXT = """\
First: rescene demo. Then, with your images: rescene run own data.path=./images
More: rescene help (all verbs), rescene help VERB (one verb)"""
NOTES = """\
Overrides are dotted keys: rescene run demo data.path=./images federation.beta=0.1
--version shows the version, --debug tracebacks; NO_COLOR=1 stops colours.
--install-completion completes verbs, recipes, methods and keys on TAB.
Exit codes: 0 done, 2 recipe or usage, 3 data, 4 run failed, 5 check failed,
130 interrupted, 143 terminated."""


class Verbs(TyperGroup):
    """A group of verbs. A verb that is not there is answered once with the closest one: click and typer both do it."""

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        name = args[0]
        if name not in self.commands and not name.startswith("-") and not ctx.resilient_parsing:
            close = did_you_mean(name, [known for known, one in self.commands.items() if not one.hidden])
            ctx.fail(
                f"No such verb: {visible(name)}. "
                + (f"Did you mean '{close}'?" if close else "rescene help lists them.")
            )
        return super().resolve_command(ctx, args)


class FirstScreen(Verbs):
    """The program itself: its help is the first screen."""

    def get_help(self, ctx: typer.Context) -> str:  # type: ignore[override]
        width = max(len(", ".join(verbs)) for _, verbs in GROUPS.values())
        lines = [f"  {title:<10} {', '.join(verbs):<{width}}  {use}" for title, (use, verbs) in GROUPS.items()]
        return "\n".join([f"{ABOUT}  Usage: rescene VERB ...", "", *lines, "", NEXT])


class PlainCommand(TyperCommand):
    """A verb whose help shows brackets as they are: typer 0.20 escapes them for rich, also where no markup is used."""

    def get_help(self, ctx: typer.Context) -> str:  # type: ignore[override]
        return super().get_help(ctx).replace(r"\[", "[")


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


def use_plain_help(apps: Mapping[str, typer.Typer]) -> None:
    """Give every verb its whole sentence in lists, and its examples. ``apps``: by name, the program itself as ""."""
    known = examples()
    for group, app in apps.items():
        app.info.short_help = app.info.help
        app.info.cls = app.info.cls if group == "" else Verbs
        for command in app.registered_commands:
            name = command.name or getattr(command.callback, "__name__", "")
            lines = known.get(f"{group} {name}".strip())
            command.cls = PlainCommand
            command.short_help = inspect.getdoc(command.callback)  # typer cuts a longer help off at one line
            if lines:  # \b keeps the lines as they are
                command.epilog = "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])
