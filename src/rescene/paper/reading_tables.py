"""Readings of the paper beside its rows, task by task, and what is still to be run: tables for docs/paper.md and README."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from rescene.core.method_style import style_of
from rescene.paper.compare import Line, compare
from rescene.paper.missing_cells import Missing, missing_cells, predictor
from rescene.paper.numbers import printed
from rescene.paper.paper_tables import DATA, copies, folders
from rescene.paper.recipes import paper_recipe
from rescene.paper.store import Store
from rescene.paper.table_columns import over_seeds
from rescene.report.table_formats import Entry, TableGrid

TABLES = ("main", "safl", "server-epochs")
CARD = "NVIDIA H200"  # the stored runs on a GPU were made on it
TAKEN = "taken"
SUMMED = ("", "no augmentation", "ReSCENE+'s settings")  # in the short table
DETAILED = "abce"  # groups that settle the question; of the others only the sum is told


def lines_with_runs(store: Store) -> Iterator[Line]:
    """Every row of methods or server epochs that was run, in any reading, once."""
    seen = set()
    for name in TABLES:
        for line in compare(paper_recipe(name), store, costs=False):
            where = tuple(run.folder for run in line.runs)
            if where and where not in seen:
                seen.add(where)
                yield line


def readings_grid(store: Store) -> TableGrid:
    """Our rows, task by task, beside the paper's; ``distance``: root mean square over the tasks, in points."""
    rows: list[tuple[Entry, ...]] = []
    for line in lines_with_runs(store):
        ours, paper = _tasks(line), _printed_tasks(line)
        apart = _distance(ours, paper)
        rows.append(
            (
                f"{DATA.get(line.cell.data, line.cell.data)}, {line.cell.beta}",
                style_of(line.cell.method).label,
                str(line.cell.resolve().recipe.train.server_epochs) if _server_trains(line) else "",
                line.reading or TAKEN,
                str(len(line.runs)),
                _row(ours),
                _row(paper) if paper else "–",
                "–" if apart is None else f"{apart:.1f}",
                _pair(line),
                _papers_pair(line),
                folders(line),
            )
        )
    columns = (
        "data, beta",
        "method",
        "E_srv",
        "reading",
        "n",
        "each task",
        "paper",
        "distance",
        "AA / AIA",
        "paper AA / AIA",
        "where",
    )
    return TableGrid("", columns, tuple(rows))


def open_grid(store: Store) -> TableGrid:
    """What the queue would run, group by group, with minutes on a card of which timings are stored."""
    predict = predictor(store, CARD)
    rows: list[tuple[Entry, ...]] = []
    for group, members in groupby(missing_cells(store), key=lambda one: one.group):
        for name, runs in groupby(members, key=lambda one: one.name if group[0] in DETAILED else ""):
            own = list(runs)
            known = [value for value in map(predict, own) if value is not None]
            unknown = f", {len(own) - len(known)} not known" if len(known) < len(own) else ""
            minutes = f"{sum(known):.0f}{unknown}" if known else "not known"
            command = _command(own[0]) if name else "rescene paper run --queue --plan"
            rows.append((group, name or "all of the group", str(len(own)), minutes, command))
    columns = ("group", "cell", "runs", f"minutes, alone on one {CARD}", "command (first seed)")
    return TableGrid("", columns, tuple(rows))


def summary_grid(store: Store) -> TableGrid:
    """README's table: every method in the reading taken, or the nearest that was run, with n and spread."""
    rows: list[tuple[Entry, ...]] = []
    for line in lines_with_runs(store):
        if line.reading in SUMMED and not line.cell.setting and not style_of(line.cell.method).reference:
            epochs = line.cell.resolve().recipe.train.server_epochs if _server_trains(line) else ""
            reading = ", ".join(filter(None, (f"E_srv={epochs}" if epochs else "", line.reading or TAKEN)))
            label = style_of(line.cell.method).label
            rows.append(
                (label, line.cell.beta, reading, str(len(line.runs)), _pair(line), _papers_pair(line), copies(line))
            )
    columns = ("method", "beta", "reading", "n", "AA / AIA", "paper AA / AIA", "near-copies among uploads")
    return TableGrid("", columns, tuple(rows))


def _server_trains(line: Line) -> bool:
    return style_of(line.cell.method).server_trains


def _tasks(line: Line) -> list[float]:
    found = (over_seeds(line.runs, f"task_{t}") for t in range(100))
    return [value.mean for value in iter(lambda: next(found), None)]


def _printed_tasks(line: Line) -> list[float]:
    """Table 7's row, which is of E_srv=100; none for other epochs and for what is not the paper's method."""
    if _server_trains(line) and line.cell.resolve().recipe.train.server_epochs != 100:
        return []
    name = replace(line.cell, setting="").name
    return [n.mean for n in printed("per-task") if n.cell == name and n.metric.startswith("task_")]


def _distance(ours: list[float], paper: list[float]) -> float | None:
    """
    >>> _distance([3.0, 4.0], [0.0, 0.0]), _distance([3.0], [])
    (3.5355339059327378, None)
    """
    if not paper or len(ours) != len(paper):
        return None
    return math.sqrt(sum((a - b) ** 2 for a, b in zip(ours, paper, strict=True)) / len(ours))


def _row(tasks: list[float]) -> str:
    return " ".join(f"{value:.0f}" for value in tasks)


def _pair(line: Line) -> str:
    figures = [over_seeds(line.runs, metric) for metric in ("aa", "aia")]
    return " / ".join(f"{f.mean:.2f}" + (f" ± {f.std:.2f}" if f.std is not None else "") for f in figures if f)


def _papers_pair(line: Line) -> str:
    if "aa" in line.paper and not line.other_epochs:
        return " / ".join(line.paper[metric].text for metric in ("aa", "aia") if metric in line.paper)
    row = _printed_tasks(line)
    return f"{sum(row) / len(row):.2f} (mean of its tasks) / –" if row and not line.fast else "–"


def _command(one: Missing) -> str:
    return " ".join(["rescene", *one.command])
