"""The comparison and cost tables: cells for the page, and the same numbers as CSV, JSON and LaTeX."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rescene.report.canvas import csv_text, data_uri
from rescene.report.groups import Group
from rescene.report.runs import Row, number, table
from rescene.report.words import NONE, bytes_text, flops_text, percent


@dataclass(frozen=True)
class Cell:
    """A number as text, its deviation as text ("" if n = 1), and whether it is the best of its column."""

    text: str
    std: str = ""
    best: bool = False


@dataclass(frozen=True)
class Column:
    """A column of the comparison table. ``better``: +1 more is better, -1 less is better, 0 no winner is named."""

    key: str
    title: str
    unit: str
    better: int
    show: Callable[[float | None], str]


def _share(value: float | None) -> str:
    return NONE if value is None else percent(100 * value, 0)


COLUMNS = (
    Column("aa", "AA", "%", 1, percent),
    Column("aia", "AIA", "%", 1, percent),
    Column("old", "Old tasks", "%", 1, percent),
    Column("recent", "Recent tasks", "%", 1, percent),
    Column("forgetting", "Forgetting", "points", -1, percent),
    Column("upload_bytes", "Upload", "per site and round", -1, bytes_text),
    # No winner: where nothing was measured nothing can win, and a low share is no guarantee.
    Column("near_copies", "Near-copies", "% of uploaded images", 0, _share),
)


def cells_of(rows: Sequence[Row]) -> list[list[Cell]]:
    """Cells [row][column] of the comparison table; the best of a column is marked if at least two rows compete."""
    winners = {column.key: _winner(rows, column) for column in COLUMNS}
    return [[_cell(row, column, winners[column.key]) for column in COLUMNS] for row in rows]


def _winner(rows: Sequence[Row], column: Column) -> str | None:
    """The best value as printed: rows that print the same share the honour."""
    found = [row[column.key] for row in rows if row[column.key] is not None]
    if len(found) < 2 or not column.better:
        return None
    return column.show(max(found) if column.better > 0 else min(found))


def _cell(row: Row, column: Column, winner: str | None) -> Cell:
    text = column.show(row[column.key])
    return Cell(text, std_text(row, column.key, column.show), text != NONE and text == winner)


def std_text(row: Row, key: str, show: Callable[[float | None], str]) -> str:
    """Deviation as text; nothing for one seed, nor for counts that are the same in all seeds."""
    std = row[f"{key}_std"]
    return "" if std is None or show(std) in ("0", "0 B") else show(std)


def downloads(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The table for other programs: (file name, data URI), nothing to fetch."""
    texts = {
        "comparison.csv": ("text/csv", csv_text(rows)),
        "comparison.json": ("application/json", json.dumps(rows, indent=1)),
        "comparison.tex": ("application/x-tex", latex(rows)),
    }
    return [(name, data_uri(kind, text.encode("utf-8"))) for name, (kind, text) in texts.items()]


def latex(rows: Sequence[Row]) -> str:
    """A booktabs table: best in bold, deviation after the mean."""
    titles = " & ".join(["Method", "$n$", *(f"{column.title} ({_tex(column.unit)})" for column in COLUMNS)])
    lines = [r"\begin{tabular}{lr" + "r" * len(COLUMNS) + "}", r"\toprule", titles + r" \\", r"\midrule"]
    for row, cells in zip(rows, cells_of(rows), strict=True):
        texts = [_tex_cell(cell) for cell in cells]
        lines.append(" & ".join([_tex(row["label"]), str(row["num_seeds"]), *texts]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _tex_cell(cell: Cell) -> str:
    if cell.text == NONE:
        return "--"
    mean = rf"\textbf{{{_tex(cell.text)}}}" if cell.best else _tex(cell.text)
    return rf"{mean} $\pm$ {_tex(cell.std)}" if cell.std else mean


def _tex(text: str) -> str:
    """Escape what LaTeX would act on.

    >>> _tex("a_b & 5%")
    'a\\\\_b \\\\& 5\\\\%'
    """
    named = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return re.sub(r"[\\~^&%$#_{}]", lambda match: named.get(match[0], "\\" + match[0]), text)


_COSTS: tuple[tuple[str, str, str, Callable[[float | None], str]], ...] = (
    ("uplink_bytes_per_message", "Up", "per message", bytes_text),
    ("downlink_bytes_per_message", "Down", "per message", bytes_text),
    ("uplink_bytes", "Up", "whole run", bytes_text),
    ("downlink_bytes", "Down", "whole run", bytes_text),
    ("client_state_bytes", "Site memory", "largest state kept", bytes_text),
    ("server_state_bytes", "Server memory", "largest state kept", bytes_text),
    ("client_flops", "Site compute", "all sites, whole run", flops_text),
    ("server_flops", "Server compute", "whole run", flops_text),
)


@dataclass(frozen=True)
class CostRow:
    """Measured and nominal texts of one method, column by column ("" where no nominal figure exists)."""

    group: Group
    cells: tuple[tuple[str, str], ...]


def cost_titles() -> list[tuple[str, str]]:
    return [(title, unit) for _, title, unit, _ in _COSTS]


def cost_rows(groups: Sequence[Group]) -> list[CostRow]:
    """One row per method that measured anything, averaged over seeds."""
    rows = []
    for group in groups:
        cells = tuple(_cost_cell(group, key, show) for key, _, _, show in _COSTS)
        if any(measured != NONE or nominal for measured, nominal in cells):
            rows.append(CostRow(group, cells))
    return rows


def _cost_cell(group: Group, key: str, show: Callable[[float | None], str]) -> tuple[str, str]:
    measured = group.spread(lambda run: number(table(run.cost, "measured").get(key)))
    nominal = group.spread(lambda run: number(table(run.cost, "nominal").get(key)))
    return show(measured.mean if measured else None), show(nominal.mean) if nominal else ""
