"""Figures over time: each task at the end, everything seen after each task, round by round.

Each function takes the groups and returns a Plot, or None where the runs hold nothing to draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rescene.report.canvas import Plot, legend_above, percent_axis, thinned
from rescene.report.groups import Group
from rescene.report.look import MUTED
from rescene.report.marks import band, mean_line, stroke
from rescene.report.runs import Row, Run, number, table


def ended(groups: Sequence[Group]) -> Sequence[Group]:
    """The finished groups, or all while none has finished: a run in its second task has had no time to forget."""
    return [group for group in groups if group.finished] or groups


def task_curve(groups: Sequence[Group]) -> Plot | None:
    """Accuracy on each task after the last one."""
    title = "Each task, after the last one" if any(group.finished for group in groups) else "Each task, so far"
    caption = (
        "Asked at the end about each task in turn, without telling the model which task it is. "
        "A method that forgets is high only at the right."
    )
    return _curves("tasks", title, caption, ended(groups), _final_row, "task (T0 was learned first)")


def _final_row(run: Run) -> np.ndarray:
    return run.matrix[-1] if len(run.matrix) else np.zeros(0)


def incremental_curve(groups: Sequence[Group]) -> Plot | None:
    """Accuracy on everything seen so far, after each task; its mean is AIA."""
    caption = "Accuracy on all classes seen so far, after each task. The mean of a curve is its AIA, its last point AA."
    title = "Everything seen so far, after each task"
    return _curves("incremental", title, caption, groups, lambda run: run.incremental, "after task")


def _curves(
    name: str, title: str, caption: str, groups: Sequence[Group], pick: Callable[[Run], np.ndarray], xlabel: str
) -> Plot | None:
    """One line per method over the tasks."""
    drawn = [(group, group.stack(pick)) for group in groups]
    drawn = [(group, stack) for group, stack in drawn if stack.shape[1] and np.isfinite(stack).any()]
    rows = [
        {"method": group.label, "seed": run.seed, "task": t, "accuracy": float(value)}
        for group, stack in drawn
        for run, values in zip(group.alike(pick), stack, strict=True)
        for t, value in enumerate(values)
        if np.isfinite(value)
    ]
    if not rows:
        return None

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        for group, stack in drawn:
            mean_line(axes, group, stack)
        num = max(stack.shape[1] for _, stack in drawn)
        ticks = range(0, num, thinned(num))
        axes.set_xticks(ticks, [f"T{t}" for t in ticks])
        axes.set_xlim(-0.25, num - 0.75)
        axes.set_xlabel(xlabel)
        percent_axis(axes.yaxis, "accuracy (%)")
        axes.grid(False, axis="x")
        legend_above(sheet, *axes.get_legend_handles_labels())

    return Plot(name, title, caption, rows, draw)


def rounds_curve(groups: Sequence[Group]) -> Plot | None:
    """Accuracy on the seen classes round by round."""

    def scale(axes: Any) -> None:
        percent_axis(axes.yaxis, "accuracy on seen classes (%)")
        axes.set_ylim(-3, 110)

    caption = "On all classes seen so far; each vertical line is a new task, where the question becomes harder."
    return _rounds("rounds", "Round by round", caption, groups, "accuracy", scale)


def matching_curve(groups: Sequence[Group]) -> Plot | None:
    """What condensation has left of the difference between surrogates and real images, round by round."""

    def scale(axes: Any) -> None:
        from matplotlib.ticker import LogLocator, NullFormatter

        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # a loss may stay within one power of ten
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())  # matplotlib's own are mathtext, which canvas leaves unread
        axes.set_ylabel("matching loss (log scale)")

    caption = "Loss at the last condensation step, mean over classes and sites; networks differ between rounds."
    return _rounds("matching", "How well surrogates match", caption, groups, "matching_loss", scale)


def _rounds(
    name: str, title: str, caption: str, groups: Sequence[Group], key: str, scale: Callable[[Any], None]
) -> Plot | None:
    rows = [_round_row(group, run, row) for group in groups for run in group.shown for row in run.rounds]
    rows = rows if key == "accuracy" else [row for row in rows if row[key]]
    if not any(row[key] is not None for row in rows):
        return None
    place = {step: i for i, step in enumerate(sorted({(row["task"], row["round"]) for row in rows}), start=1)}
    starts = {task: i for (task, _), i in reversed(place.items())}

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        scale(axes)
        for task, start in starts.items():
            axes.axvline(start - 0.5, color=MUTED, linewidth=0.6, alpha=0.5)
            if task % thinned(len(starts)) == 0:
                above = axes.get_xaxis_transform()  # x in rounds, y in the height of the axes
                axes.text(start - 0.35, 0.98, f"T{task}", transform=above, color=MUTED, fontsize=8.5, va="top")
        for group in groups:
            _round_line(axes, group, [row for row in rows if row["method"] == group.label], place, key)
        axes.set_xlabel("communication round")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(False, axis="x")
        legend_above(sheet, *axes.get_legend_handles_labels())

    return Plot(name, title, caption, rows, draw, height_in=4.0)


def _round_row(group: Group, run: Run, row: Row) -> Row:
    return {
        "method": group.label,
        "seed": run.seed,
        "task": int(row["task"]),
        "round": int(row["round"]),
        "accuracy": number(row.get("accuracy")),
        "matching_loss": number(table(row, "notes").get("matching_loss")),
        "participants": len(row.get("participants") or ()),
        "uplink_bytes": row.get("uplink_bytes"),
        "downlink_bytes": row.get("downlink_bytes"),
    }


def _round_line(axes: Any, group: Group, rows: Sequence[Row], place: dict[tuple[int, int], int], key: str) -> None:
    """Mean over seeds with its band, of logarithms on a logarithmic axis.

    Rounds that were not evaluated are bridged; of many rounds only some carry a marker.
    """
    values: dict[int, list[float]] = {}
    for row in rows:
        if row[key] is not None:
            values.setdefault(place[row["task"], row["round"]], []).append(row[key])
    if not values:
        return
    x = sorted(values)
    style = stroke(group, 4) | ({"markevery": thinned(len(x), 10)} if len(x) > 40 else {})
    there, back = (np.log, np.exp) if axes.get_yscale() == "log" else (np.asarray, np.asarray)
    mean = np.array([np.mean(there(values[i])) for i in x])
    axes.plot(x, back(mean), label=group.label, **style)
    if min(len(values[i]) for i in x) > 1:
        std = np.array([np.std(there(values[i]), ddof=1) for i in x])
        band(axes, group, x, back(mean - std), back(mean + std))
