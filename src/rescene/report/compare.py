"""``rescene table``: run folders as one grid, rows by what differs, optionally one setting across.

Runs are averaged only over seeds. Asking for fewer columns than differ never melts two recipes into one row: they stay
two rows, and a note says what else differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rescene.errors import ConfigError, did_you_mean
from rescene.report.formats import NONE, Cell, Entry, Grid
from rescene.report.groups import Group, group_runs
from rescene.report.labels import SERVER_EPOCHS
from rescene.report.runs import Run
from rescene.report.tables import METRICS, NEAR_COPIES, Column, entries_of, figures, task_column
from rescene.report.traits import differing, heads, resolve_keys, telling_keys, traits


def compare(runs: Sequence[Run], by: str = "", metrics: str = "aa,aia", across: str = "") -> Grid:
    """The table of these runs: ``by`` and ``metrics`` are comma-separated names, ``across`` one setting.

    Near-copies stand beside accuracy wherever a method uploaded pictures, asked for or not.
    """
    groups = group_runs(runs)
    over = resolve_keys(across, groups)
    if len(over) > 1:
        raise ConfigError("E144", "only one setting can go across", where="--across", fix=f"--across {over[0]}")
    keys = resolve_keys(by, groups) if by else [key for key in telling_keys(groups) if key not in over]
    keys = [key for key in ("method", *(key for key in keys if key != "method")) if key not in over]
    if "seed" in [*keys, *over]:
        groups = [replace(group, runs=(run,)) for group in groups for run in group.runs]
    columns = _columns(metrics, groups)
    if "seed" in [*keys, *over]:  # raw values: one lucky seed wins nothing
        columns = [replace(column, better=0) if column.better else column for column in columns]
    notes = [*_notes(groups, columns), *_hidden([*keys, *over], groups)]
    grid = _across(groups, keys, over[0], columns) if over else _down(groups, keys, columns)
    return replace(grid, notes=(*grid.notes, *notes))


def _columns(metrics: str, groups: Sequence[Group]) -> list[Column]:
    """The columns asked for; ``tasks`` stands for all tasks, ``task0`` for one of them."""
    num_tasks = max((len(run.matrix) for group in groups for run in group.finished), default=0)
    by_task = {f"task{t}": task_column(t) for t in range(num_tasks)}
    known = METRICS | by_task
    found: list[Column] = []
    for name in filter(None, (part.strip().lower().replace("-", "_") for part in metrics.split(","))):
        if name not in known and name != "tasks":
            close = did_you_mean(name, known)
            what = f"unknown metric {name!r}" + (f"; did you mean {close}?" if close else "")
            choice = [*METRICS, "tasks", *([f"task0 to task{num_tasks - 1}"] if by_task else [])]
            raise ConfigError("E143", what, where="--metric", why=f"known are {', '.join(choice)}")
        found += by_task.values() if name == "tasks" else [known[name]]
    if NEAR_COPIES not in found and any(run.leakage for group in groups for run in group.finished):
        found.append(NEAR_COPIES)
    return list(dict.fromkeys(found))


def _title(column: Column) -> str:
    return f"{column.title} ({column.unit})"


def _down(groups: Sequence[Group], keys: Sequence[str], columns: Sequence[Column]) -> Grid:
    """One row per group: settings together, in each of them the best AA first."""
    outer = [key for key in keys if not key.startswith("method") and key != SERVER_EPOCHS]  # not every row has those
    groups = sorted(groups, key=lambda group: [_natural(traits(group).get(key, NONE)) for key in outer])
    rows = []
    for group, entries in zip(groups, entries_of(groups, columns), strict=True):
        own = traits(group)
        rows.append((*(own.get(key, NONE) for key in keys), str(len(group.finished)), *entries))
    return Grid("", (*heads(keys), "n", *map(_title, columns)), tuple(rows))


def _across(groups: Sequence[Group], keys: Sequence[str], over: str, columns: Sequence[Column]) -> Grid:
    """One row per method (and what else is asked for), the values of one setting side by side."""
    values = sorted({traits(group).get(over, NONE) for group in groups}, key=_natural)
    cells: dict[tuple[str, ...], dict[str, list[Entry]]] = {}
    owners: dict[tuple[str, ...], Group] = {}
    for group, entries in zip(groups, entries_of(groups, columns), strict=True):
        own = traits(group)
        labels, value = tuple(own.get(key, NONE) for key in keys), own.get(over, NONE)
        first = owners.setdefault((*labels, value), group)
        if first is not group:
            apart = ",".join(differing([first, group]))
            what = f"several recipes share one cell: {own['method']} at {over}={value}"
            raise ConfigError("E144", what, where="--across", why=f"they differ in {apart}", fix=f"--by {apart}")
        cells.setdefault(labels, {})[value] = entries
    missing: list[Entry] = [Cell(None, digits=column.digits) for column in columns]
    name = heads([over])[0]
    titles = [f"{column.title} {name}={value}" for value in values for column in columns]
    rows = tuple(
        (*labels, *(entry for value in values for entry in row.get(value, missing))) for labels, row in cells.items()
    )
    seeds = sorted({len(group.finished) for group in groups})
    said = f"n = {seeds[0]}" if len(seeds) == 1 else f"n from {seeds[0]} to {seeds[-1]}"
    return Grid("", (*heads(keys), *titles), rows, (f"{said} seeds per cell.",))


def _natural(text: str) -> tuple[bool, float, str]:
    """Numbers by size, words after them."""
    try:
        return (False, float(text), text)
    except ValueError:
        return (True, 0.0, text)


def _notes(groups: Sequence[Group], columns: Iterable[Column]) -> list[str]:
    columns = list(columns)
    several = any(len(group.finished) > 1 for group in groups)
    notes = ["Mean ± standard deviation (n-1) over n seeds."] if several else []
    if any(cell.best for column in columns for cell in figures(groups, column)):
        notes.append(
            "Marked: the best of a column among methods that face the same problem; reference lines never win."
        )
    if NEAR_COPIES in columns:
        notes.append("Near-copies: uploaded images with PSNR above 30 dB to a real training image.")
    going = sum(not run.finished for group in groups for run in group.runs)
    repeats = sum(len(group.repeats) for group in groups)
    notes += [f"{going} unfinished run(s) are not counted."] if going else []
    return notes + ([f"{repeats} repeated run(s) of the same recipe and seed are not counted."] if repeats else [])


def _hidden(shown: Sequence[str], groups: Sequence[Group]) -> list[str]:
    """A note if two rows look alike and yet are not."""
    alike: dict[tuple[str, ...], list[Group]] = {}
    for group in groups:
        alike.setdefault(tuple(traits(group).get(key, NONE) for key in shown), []).append(group)
    left = dict.fromkeys(key for members in alike.values() for key in differing(members))
    return [f"Rows that look alike differ in {', '.join(left)}."] if left else []
