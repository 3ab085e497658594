"""Verbs about methods: what one does, and a new one of your own."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from rescene.cli.frame import AsJson, Plugin, load_plugins, verb
from rescene.errors import command

new_app = typer.Typer(help="Start something of your own.", no_args_is_help=True, rich_markup_mode=None)


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
    print(f"try: {command('run', 'smoke', '--plugin', folder / f'{name}.py', f'method={name}')}")
    print(f"check: {shlex.join(['python', '-m', 'pytest', str(folder / f'test_{name}.py')])}")
