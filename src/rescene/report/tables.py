"""The comparison table: one row per method and recipe, one figure per metric, best in bold, leakage beside accuracy.

Everything the page, ``rescene table`` and the downloads print comes from ``figures``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rescene.report.canvas import csv_text, data_uri
from rescene.report.formats import Cell, Entry, Grid, render
from rescene.report.groups import Group, near_copies, same_problem
from rescene.report.plots_retention import within_mean
from rescene.report.runs import Row, Run, number, table
from rescene.report.words import bytes_text, percent


@dataclass(frozen=True)
class Column:
    """A metric. ``better``: +1 more is better, -1 less is better, 0 no winner is named; ``show``: as the page says it."""

    key: str
    title: str
    unit: str
    better: int
    pick: Callable[[Run], float | None]
    show: Callable[[float | None], str] = percent
    digits: int = 2


def _result(key: str) -> Callable[[Run], float | None]:
    return lambda run: run.number(key)


def _measured(key: str, scale: float) -> Callable[[Run], float | None]:
    return lambda run: _times(number(table(run.cost, "measured").get(key)), 1 / scale)


def _leaked(key: str) -> Callable[[Run], float | None]:
    return lambda run: number(run.leakage.get(key))


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


# No winner among near-copies: where nothing was measured nothing can win, and a low share is no guarantee.
NEAR_COPIES = Column(
    "near_copies", "Near-copies", "% of uploads", 0, lambda run: _times(near_copies(run), 100),
    lambda value: percent(value, 0), 0,
)  # fmt: skip
_ALL = (
    Column("aa", "AA", "%", 1, _result("aa")),
    Column("aia", "AIA", "%", 1, _result("aia")),
    Column("old", "Old tasks", "%", 1, _result("old")),
    Column("recent", "Recent tasks", "%", 1, _result("recent")),
    Column("forgetting", "Forgetting", "points", -1, _result("forgetting")),
    Column("bwt", "BWT", "points", 1, _result("bwt")),
    Column("worst_task", "Worst task", "%", 1, _result("worst_task")),
    Column("within_task", "Within task", "%", 1, within_mean),
    Column("balanced_accuracy", "Balanced", "%", 1, _result("balanced_accuracy")),
    Column("upload", "Upload", "MB per site and round", -1, lambda run: _times(run.upload_bytes, 1e-6),
           lambda value: bytes_text(_times(value, 1e6)), 3),
    Column("uplink", "Uplink", "MB, whole run", -1, _measured("uplink_bytes", 1e6)),
    Column("downlink", "Downlink", "MB, whole run", -1, _measured("downlink_bytes", 1e6)),
    Column("client_flops", "Site compute", "TFLOP, all sites", -1, _measured("client_flops", 1e12)),
    Column("server_flops", "Server compute", "TFLOP", -1, _measured("server_flops", 1e12)),
    Column("client_state", "Site memory", "MB", -1, _measured("client_state_bytes", 1e6)),
    Column("server_state", "Server memory", "MB", -1, _measured("server_state_bytes", 1e6)),
    Column("epsilon", "ε", "whole run, most-used record", 0, lambda run: number(run.privacy.get("epsilon"))),
    NEAR_COPIES,
    Column("nearest_rms", "Nearest real image", "median RMS", 0, _leaked("nearest_rms_median"), digits=3),
    Column("nearest_psnr", "Nearest real image", "median PSNR, dB", 0, _leaked("nearest_psnr_median_db"), digits=1),
)  # fmt: skip
METRICS = {column.key: column for column in _ALL}
PAGE = (  # leakage right beside accuracy: a narrow screen shows the first columns only
    *(replace(METRICS[key], digits=1) for key in ("aa", "aia")),
    NEAR_COPIES,
    *(replace(METRICS[key], digits=1) for key in ("old", "recent", "forgetting")),
    METRICS["upload"],
)


def task_column(task: int) -> Column:
    """Final accuracy on one task."""

    def pick(run: Run) -> float | None:
        matrix = run.matrix
        return number(float(matrix[-1, task])) if run.finished and task < len(matrix) else None

    return Column(f"task{task}", f"T{task}", "%", 1, pick)


def figures(groups: Sequence[Group], column: Column) -> list[Cell]:
    """One cell per group, the best marked: among competitors that face the same problem, if there are at least two.

    Reference lines (joint, local, raw upload) frame the comparison and never win. Cells that print the same share the
    honour.
    """
    cells = [_cell(group, column) for group in groups]
    if not column.better:
        return cells
    rivals = [i for i, cell in enumerate(cells) if cell.mean is not None and groups[i].competes]
    marked = list(cells)
    for i in rivals:
        pool = [cells[j] for j in rivals if same_problem(groups[i], groups[j])]
        top = max(pool, key=lambda cell: column.better * (cell.mean or 0.0))
        marked[i] = replace(cells[i], best=len(pool) > 1 and cells[i].text == top.text)
    return marked


def _cell(group: Group, column: Column) -> Cell:
    found = group.spread(column.pick)
    if found is None:
        return Cell(None, digits=column.digits)
    return Cell(found.mean, found.std, found.num, digits=column.digits)


def leak_entry(group: Group, cell: Cell) -> Entry:
    """A near-copy figure, or in words why there is none."""
    if cell.mean is not None or not group.finished:
        return cell
    return "not measured" if "images" in (group.look.sends or "") else "no images"


def comparison_grid(groups: Sequence[Group]) -> Grid:
    """The page's comparison as a grid."""
    heads = ("Method", "n", *(f"{column.title} ({column.unit})" for column in PAGE))
    rows = [
        (group.label, str(len(group.finished)), *own)
        for group, own in zip(groups, entries_of(groups, PAGE), strict=True)
    ]
    return Grid("", heads, tuple(rows))


def entries_of(groups: Sequence[Group], columns: Sequence[Column]) -> list[list[Entry]]:
    """Figures, or words where there is none, [group][column]."""
    found: list[list[Entry]] = [[] for _ in groups]
    for column in columns:
        for own, group, cell in zip(found, groups, figures(groups, column), strict=True):
            own.append(leak_entry(group, cell) if column is NEAR_COPIES else cell)
    return found


def downloads(groups: Sequence[Group], rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The table for other programs: (file name, data URI), nothing to fetch."""
    texts = {
        "comparison.csv": ("text/csv", csv_text(rows)),
        "comparison.json": ("application/json", json.dumps(rows, indent=1)),
        "comparison.tex": ("application/x-tex", render(comparison_grid(groups), "latex")),
    }
    return [(name, data_uri(kind, text.encode("utf-8"))) for name, (kind, text) in texts.items()]


@dataclass(frozen=True)
class Shown:
    """A figure as the page prints it; ``value`` is what its column is sorted by."""

    text: str
    std: str
    best: bool
    value: float | None


def page_cells(groups: Sequence[Group]) -> list[list[Shown]]:
    """Cells [group][column of PAGE]."""
    return [[shown(entry, column) for entry, column in zip(row, PAGE, strict=True)] for row in entries_of(groups, PAGE)]


def shown(entry: Entry, column: Column) -> Shown:
    """No deviation is shown for one seed, nor for counts that are the same in all seeds."""
    if isinstance(entry, str):
        return Shown(entry, "", False, None)
    std = "" if entry.std is None or column.show(entry.std) in ("0", "0 B") else column.show(entry.std)
    return Shown(column.show(entry.mean), std, entry.best, entry.mean)
