"""Tables and figures from run folders."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rescene.cli.frame import verb
from rescene.errors import ConfigError, ResceneError, command

if TYPE_CHECKING:
    from rescene.report import Run

Runs = Annotated[list[Path], typer.Argument(help="run folders, or folders that hold some")]
_KINDS = {".txt": "text", ".md": "markdown", ".tex": "latex", ".csv": "csv", ".html": "html", ".json": "json"}


def loaded(folders: list[Path]) -> list[Run]:
    """Every run in these folders, each once; those that cannot be read are named and left out."""
    from rescene.cli.listing import find_runs
    from rescene.report.runs import load_runs

    found: dict[Path, None] = {}
    for folder in folders:
        runs = find_runs(folder)
        if not runs:
            why = "it holds no run" if folder.is_dir() else "there is no such folder"
            raise ConfigError("E108", "no run folder there", where=str(folder), why=why, fix="rescene runs")
        found |= dict.fromkeys(runs)
    read, unreadable = load_runs(found)
    tell_unreadable(unreadable)
    return read


def tell_unreadable(unreadable: Mapping[Path, ResceneError]) -> None:
    for folder, error in unreadable.items():
        why = f": {error.why}" if error.why else ""
        print(f"left out: {folder}: [{error.code}] {error.what}{why}", file=sys.stderr)


@verb
def table(
    folders: Runs,
    by: Annotated[
        str, typer.Option("--by", help="settings that head the rows, e.g. beta,lr (default: what differs)")
    ] = "",
    metric: Annotated[
        str, typer.Option("--metric", help="aa, aia, old, recent, forgetting, tasks, task0, within_task, upload, ...")
    ] = "aa,aia",
    across: Annotated[str, typer.Option("--across", help="one setting whose values stand side by side")] = "",
    kind: Annotated[str, typer.Option("--format", help="text, markdown, latex, csv, html or json")] = "",
    out: Annotated[Path | None, typer.Option("--out", help="file; its ending chooses the format")] = None,
) -> None:
    """Mean and deviation over seeds, best in bold, leakage beside accuracy."""
    from rescene.report.compare import compare
    from rescene.report.formats import render

    kind = format_for(kind, out)
    put(render(compare(loaded(folders), by, metric, across), kind), out)


def format_for(kind: str, out: Path | None) -> str:
    """The format that was asked for, or else the one of the file's ending."""
    ending = out.suffix if out else ".txt"
    kind = kind or _KINDS.get(ending, "")
    if not kind:
        why = f"known endings are {', '.join(_KINDS)}"
        raise ConfigError("E140", f"no table format ends in '{ending}'", where="--out", why=why, fix="--format csv")
    return kind


def put(text: str, out: Path | None) -> None:
    """To the terminal or into a file, whose name is printed."""
    if out is None:
        print(text, end="")
        return
    with writing(out):
        out.write_text(text, "utf-8", newline="")
    print(out)


@verb
def plot(
    folders: Annotated[
        list[Path], typer.Argument(help="run folders, or folders that hold some; the kind may stand first")
    ],
    kind: Annotated[
        str, typer.Option("--kind", help="old-recent, curves, matrix, rounds, cost, privacy, frontier or surrogates")
    ] = "",
    out: Annotated[Path | None, typer.Option("--out", help="file.png, .pdf or .svg (default: <kind>.png)")] = None,
) -> None:
    """A figure for a paper or a talk, and the CSV behind it."""
    from rescene.report.figure import KINDS, figure
    from rescene.report.groups import differing_settings, group_runs

    if not kind:  # rescene plot frontier RUNS
        kind, *folders = str(folders[0]), *folders[1:]
        if kind not in KINDS and Path(kind).is_dir():
            raise ConfigError(
                "E145",
                "which figure?",
                why=f"known are {', '.join(KINDS)}",
                fix=command("plot", kind, "--kind", "curves"),
            )
        if not folders:
            raise ConfigError(
                "E108", "of which runs?", where="after the kind of figure", fix=command("plot", kind, "runs/...")
            )
    groups = group_runs(loaded(folders))
    out = out or Path(f"{kind}.png")
    with writing(out):
        paths = figure(groups, kind, out)
    print(*paths, sep="\n")
    apart = differing_settings(groups)
    if apart:
        print(f"note: these runs do not share one setting: {', '.join(apart[:6])}", file=sys.stderr)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """The folder is made; what cannot be written gets a message instead of a traceback."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError("E147", f"cannot write '{path}'", where="--out", why=error.strerror) from error
