"""The verbs of `rescene data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rescene.cli.frame import AsJson, verb

Layout = Annotated[
    str, typer.Option("--layout", help="classes or domains: what the first folders are, where they do not tell")
]
data_app = typer.Typer(help="Look at, prepare and check image data.", no_args_is_help=True, rich_markup_mode=None)


@data_app.command("list")
@verb
def data_list(as_json: AsJson = False) -> None:
    """Known data sets and where they were found."""
    from rescene.cli.listing import LISTS, print_rows

    print_rows(LISTS["datasets"](), as_json)


@data_app.command("inspect")
@verb
def data_inspect(
    path: Annotated[str, typer.Argument(help="folder, file, or name of a known data set")],
    layout: Layout = "auto",
    as_json: AsJson = False,
) -> None:
    """Classes, counts, proposed tasks, warnings (files not read, tiny classes, repeated images), and the command to run."""
    from rescene.cli.inspecting import show_inspection

    show_inspection(path, layout, as_json)


@data_app.command("prepare")
@verb
def data_prepare(
    name: Annotated[str, typer.Argument(help="cifar10, cifar100, tinyimagenet, office31, folder, ...")],
    source: Annotated[Path, typer.Option("--from", help="archive or folder to read")],
    out: Annotated[
        Path | None, typer.Option("--out", help="folder for the prepared file (default: the user cache)")
    ] = None,
    layout: Layout = "auto",
) -> None:
    """Decode once, so that later runs start at once."""
    from rescene.data import prepare

    print(prepare(name, source, out, layout=layout))


@data_app.command("verify")
@verb
def data_verify(
    name: Annotated[str, typer.Argument(help="name of a data set")],
    path: Annotated[Path | None, typer.Option("--path", help="where it is, if not in the usual places")] = None,
    layout: Layout = "auto",
    as_json: AsJson = False,
) -> None:
    """Check counts, unreadable files and duplicates; exit code 5 if something is wrong."""
    from rescene.cli.listing import print_rows
    from rescene.data import verify

    rows = verify(name, path, layout)
    print_rows(rows, as_json)
    if any(row.get("problem") for row in rows):
        raise typer.Exit(5)
