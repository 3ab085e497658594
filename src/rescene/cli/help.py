"""Help of the verbs as plain text, whichever releases of typer and click meet.

Newer clicks (8.5 is one) take an argument's help away from typer 0.20 and list arguments themselves, and typer escapes
square brackets for rich although no markup is used here. Neither package has a setting for it.
"""

from __future__ import annotations

from typing import Any

import click
import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.utils import get_params_from_function


class PlainCommand(TyperCommand):
    """A verb whose arguments keep their help and whose brackets are not escaped."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.callback is not None
        told = get_params_from_function(self.callback)
        for param in self.params:
            if isinstance(param, TyperArgument) and not param.help and param.name in told:
                param.help = getattr(told[param.name].default, "help", None)

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """They stand with the options below."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record:
                section = "Arguments" if isinstance(param, TyperArgument) else "Options"
                sections[section].append((record[0], record[1].replace(r"\[", "[")))
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class PlainGroup(TyperGroup):
    """A list of verbs in whole sentences; click would cut each off at one line."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, (command.help or "").strip()) for name, command in commands if command])


def use_plain_help(*apps: typer.Typer) -> None:
    for app in apps:
        app.info.cls = PlainGroup
        for command in app.registered_commands:
            command.cls = PlainCommand
