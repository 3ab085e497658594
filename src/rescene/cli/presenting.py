"""Tables and figures from run folders."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rescene.cli.frame import verb
from rescene.errors import ConfigError

if TYPE_CHECKING:
    from rescene.report import Run

Runs = Annotated[list[Path], typer.Argument(help="run folders, or folders that hold some")]
_KINDS = {".txt": "text", ".md": "markdown", ".tex": "latex", ".csv": "csv", ".html": "html", ".json": "json"}


def loaded(folders: list[Path]) -> list[Run]:
    """Every run in these folders, each once."""
    from rescene.cli.listing import find_runs
    from rescene.report import load_run

    found: dict[Path, None] = {}
    for folder in folders:
        runs = find_runs(folder)
        if not runs:
            why = "it holds no run" if folder.is_dir() else "there is no such folder"
            raise ConfigError("E108", "no run folder there", where=str(folder), why=why, fix="rescene runs")
        found |= dict.fromkeys(runs)
    return [load_run(run) for run in found]


@verb
def table(
    folders: Runs,
    by: Annotated[
        str, typer.Option("--by", help="settings that head the rows, e.g. beta,lr (default: what differs)")
    ] = "",
    metric: Annotated[str, typer.Option("--metric", help="aa, aia, old, recent, forgetting, upload, ...")] = "aa,aia",
    across: Annotated[str, typer.Option("--across", help="one setting whose values stand side by side")] = "",
    kind: Annotated[str, typer.Option("--format", help="text, markdown, latex, csv, html or json")] = "",
    out: Annotated[Path | None, typer.Option("--out", help="file; its ending chooses the format")] = None,
) -> None:
    """Mean and deviation over seeds, best in bold, leakage beside accuracy."""
    from rescene.report.compare import compare
    from rescene.report.formats import render

    kind = kind or _KINDS.get(out.suffix if out else ".txt", "")
    if not kind:
        why = f"known endings are {', '.join(_KINDS)}"
        raise ConfigError("E140", f"no table format ends in '{out.suffix}'", where="--out", why=why, fix="--format csv")  # type: ignore[union-attr]
    text = render(compare(loaded(folders), by, metric, across), kind)
    if out is None:
        print(text, end="")
        return
    _writable(out).write_text(text, "utf-8", newline="")
    print(out)


@verb
def plot(
    folders: Runs,
    kind: Annotated[
        str, typer.Option("--kind", help="old-recent, curves, matrix, rounds, cost, privacy or surrogates")
    ],
    out: Annotated[Path | None, typer.Option("--out", help="file.png, .pdf or .svg (default: <kind>.png)")] = None,
) -> None:
    """A figure for a paper or a talk, and the CSV behind it."""
    from rescene.report.figure import figure
    from rescene.report.groups import differing_settings, group_runs

    groups = group_runs(loaded(folders))
    for path in figure(groups, kind, _writable(out or Path(f"{kind}.png"))):
        print(path)
    apart = differing_settings(groups)
    if apart:
        print(f"note: these runs do not share one setting: {', '.join(apart[:6])}", file=sys.stderr)


def _writable(path: Path) -> Path:
    """The path, with its folder made; a message instead of a traceback where that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("E147", f"cannot write '{path}'", where="--out", why=str(error.strerror)) from error
    if path.is_dir():
        raise ConfigError("E147", f"cannot write '{path}'", where="--out", why="it is a folder", fix="name a file")
    return path
