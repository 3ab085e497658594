"""The verbs of `rescene data`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rescene.cli.frame import AsJson, verb
from rescene.errors import ConfigError

Layout = Annotated[
    str, typer.Option("--layout", help="classes or domains: what the first folders are, where they do not tell")
]
COLUMNS, ROWS = 12, 8  # of a contact sheet
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


@data_app.command("draw")
@verb
def data_draw(
    what: Annotated[str, typer.Argument(help="leaves: the procedural pictures that the lens was made from")],
    out: Annotated[Path, typer.Option("--out", help="folder for the contact sheet")],
    seed: Annotated[int, typer.Option(help="which pictures")] = 0,
) -> None:
    """A contact sheet of procedural pictures, to look at."""
    import torch
    from PIL import Image

    from rescene.lens.leaves import VERSION, draw_leaves

    if what != "leaves":
        raise ConfigError("E109", f"cannot draw {what!r}", fix="rescene data draw leaves --out DIR")
    out.mkdir(parents=True, exist_ok=True)
    pictures = draw_leaves(COLUMNS * ROWS, torch.Generator().manual_seed(seed))
    side = pictures.shape[-1]
    sheet = (
        pictures.reshape(ROWS, COLUMNS, 3, side, side).permute(0, 3, 1, 4, 2).reshape(ROWS * side, COLUMNS * side, 3)
    )
    path = out / f"leaves-v{VERSION}-seed{seed}.png"
    Image.fromarray(sheet.numpy()).save(path)
    print(f"{path}: {len(pictures)} pictures of {side} x {side} pixels")
