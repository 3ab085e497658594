"""Tables on the terminal, or the same rows as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from rescene.cli.terminal import console

Row = dict[str, Any]


def print_rows(rows: Iterable[Row], as_json: bool = False) -> None:
    """One table from rows that share their keys; nothing is cut off, long cells wrap."""
    rows = list(rows)
    if as_json:
        print(json.dumps(rows))
        return
    if not rows:
        print("nothing here")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_text(row.get(column)) for column in columns))
    console(width=None if console().is_terminal else 160).print(table)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value)
    return str(value)


def methods() -> list[Row]:
    from rescene.methods import method_class, method_names

    classes = [method_class(name) for name in method_names()]
    return [
        {
            "name": c.name,
            "title": c.title,
            "paper": c.paper,
            "leaves the site": c.leaves_site,
            "client remembers": c.remembers,
        }
        for c in classes
    ]


def recipes() -> list[Row]:
    from rescene.config import recipe_names, recipe_text

    return [{"name": n, "about": recipe_text(n).splitlines()[0].lstrip("# ")} for n in recipe_names()]


def datasets() -> list[Row]:
    from rescene.data import available

    return available()


def models() -> list[Row]:
    from rescene.nets import NAMES, Arch, forward_flops, state_bytes

    archs = [(name, Arch(name, 32)) for name in NAMES]
    return [
        {
            "name": name,
            "MB at 100 classes": round(state_bytes(arch.skeleton(100).state_dict()) / 1e6, 2),
            "GFLOP per image at 32 px": round(forward_flops(arch, 100) / 1e9, 3),
        }
        for name, arch in archs
    ]


def buffers() -> list[Row]:
    meaning = {
        "temporal": "herd towards the mean of the recent rounds (the paper)",
        "full-pool": "herd towards the mean of all rounds",
        "earliest": "the first B surrogates of a class",
        "latest": "the last B surrogates of a class",
        "random": "B surrogates at random",
        "keep-all": "everything: full accumulation",
        "none": "nothing is kept of finished tasks",
    }
    return [{"name": name, "keeps": text} for name, text in meaning.items()]


LISTS: dict[str, Callable[[], list[Row]]] = {
    "methods": methods,
    "recipes": recipes,
    "datasets": datasets,
    "models": models,
    "buffers": buffers,
}


def find_runs(folder: Path) -> list[Path]:
    """The folder itself if it is a run, else every run below it, in name order."""
    if (folder / "config.yaml").is_file():
        return [folder]
    return sorted(path.parent for path in folder.rglob("config.yaml")) if folder.is_dir() else []
