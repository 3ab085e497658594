"""Help of the verbs as plain text, the same in every release of typer that is allowed: only its documented settings are used."""

from __future__ import annotations

import inspect

import typer
from typer.core import TyperCommand


class PlainCommand(TyperCommand):
    """A verb whose help shows brackets as they are: typer 0.20 escapes them for rich, also where no markup is used."""

    def get_help(self, ctx: typer.Context) -> str:
        return super().get_help(ctx).replace(r"\[", "[")


def use_plain_help(*apps: typer.Typer) -> None:
    """Lists of verbs are in whole sentences (typer cuts each off at one line unless it has a ``short_help``)."""
    for app in apps:
        app.info.short_help = app.info.help
        for command in app.registered_commands:
            command.cls = PlainCommand
            command.short_help = inspect.getdoc(command.callback)
