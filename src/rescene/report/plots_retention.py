"""Figures about what is kept and lost: old against recent tasks, forgetting, errors inside and between tasks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rescene.report.canvas import Plot, legend_above, percent_axis
from rescene.report.groups import Group
from rescene.report.look import CARD, GREY, INK, MUTED, text_on
from rescene.report.marks import mean_points, name_rows
from rescene.report.plots_curves import ended
from rescene.report.runs import Row, Run, number, vector
from rescene.report.words import percent


def old_recent(groups: Sequence[Group]) -> Plot | None:
    """Final accuracy on old against recent tasks, one point per method (the paper's old-versus-recent figure)."""
    rows = [
        {"method": group.label, "seed": run.seed, "recent": run.number("recent"), "old": run.number("old")}
        for group in groups
        for run in group.finished
        if run.number("old") is not None and run.number("recent") is not None and len(run.matrix) > 1
    ]
    if not rows:
        return None

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        axes.plot([0, 100], [0, 100], color=MUTED, linewidth=0.9, linestyle=(0, (4, 4)))
        axes.text(97, 4, "forgets old tasks", ha="right", color=MUTED, fontsize=8.5, style="italic")
        axes.text(3, 96, "learns new tasks poorly", va="top", color=MUTED, fontsize=8.5, style="italic")
        axes.set_aspect("equal")
        mean_points(axes, groups, rows, "recent", "old")
        percent_axis(axes.xaxis, "accuracy on recent tasks (%)")
        percent_axis(axes.yaxis, "accuracy on old tasks (%)")
        legend_above(sheet, *axes.get_legend_handles_labels())

    caption = "Up and to the right is better; on the dashed line old and recent tasks do equally well."
    if len(rows) > len({row["method"] for row in rows}):
        caption += " Small dots are single seeds."
    return Plot("old-recent", "Old tasks against recent tasks", caption, rows, draw, height_in=4.9)


def lost_per_task(run: Run) -> np.ndarray:
    """Forgetting of every task but the last: its best accuracy at any stage minus its final one."""
    matrix = run.matrix
    known = [t for t in range(len(matrix) - 1) if np.isfinite(matrix[-1, t])]
    return np.array([np.nanmax(matrix[t:, t]) - matrix[-1, t] for t in known])


def forgetting_bars(groups: Sequence[Group]) -> Plot | None:
    """Mean forgetting per method, with a dot for each task."""
    lost = [(group, np.mean(group.stack(lost_per_task), axis=0)) for group in ended(groups)]
    lost = [(group, values) for group, values in lost if len(values)]
    rows: list[Row] = [
        {"method": group.label, "task": t, "forgetting": float(value)}
        for group, values in lost
        for t, value in enumerate(values)
    ]
    if not rows:
        return None

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        for y, (group, values) in enumerate(lost):
            told = group.spread(lambda run: run.number("forgetting"))  # the table's, which may round the other way
            mean = told.mean if told else float(np.mean(values))
            axes.barh(y, mean, height=0.56, color=group.look.colour)
            axes.scatter(values, np.full(len(values), y), s=16, facecolor=CARD, edgecolor=INK, linewidths=0.8, zorder=4)
            axes.text(104, y, percent(mean), va="center", fontweight="bold" if group.ours else "normal")
        name_rows(axes, [group for group, _ in lost])
        percent_axis(axes.xaxis, "points lost from each task's best accuracy")

    caption = "Shorter is better. Bars (and the numbers at the right) are means over tasks, circles are single tasks."
    return Plot("forgetting", "Forgetting", caption, rows, draw, height_in=1.1 + 0.42 * len(lost))


def within_mean(run: Run) -> float | None:
    """Within-task accuracy over all test images (tasks weighted by test size; equally if unknown, or for domains)."""
    within = vector(run.results.get("within_task"))
    if not len(within) or not np.isfinite(within).all():
        return None
    sizes = [number(task.get("test_size")) for task in run.tasks]
    domains = any(task.get("domain") for task in run.tasks)  # their AA is the unweighted mean, too
    known = len(sizes) == len(within) and all(sizes) and not domains
    return float(np.average(within, weights=np.array(sizes, dtype=float) if known else None))


def inside_between(groups: Sequence[Group]) -> Plot | None:
    """Where the errors are: right, wrong task, wrong class inside the task."""
    rows: list[Row] = []
    drawn = []
    for group in groups:
        aa, within = group.spread(lambda run: run.number("aa")), group.spread(within_mean)
        if aa and within:
            parts = {"right": aa.mean, "lost_between_tasks": max(within.mean - aa.mean, 0.0)}
            rows.append({"method": group.label, **parts, "lost_inside_tasks": 100 - sum(parts.values())})
            drawn.append(group)
    if not rows:
        return None

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        for y, (group, row) in enumerate(zip(drawn, rows, strict=True)):
            _three_parts(axes, y, group.look.colour, list(row.values())[1:])
        name_rows(axes, drawn)
        axes.grid(False)
        percent_axis(axes.xaxis, "share of test images (%)")

    caption = (
        "Full colour: right. Pale: wrong, but right once the task is known (lost between tasks). "
        "Grey: wrong even then (lost inside tasks)."
    )
    return Plot("inside-between", "Inside tasks or between them", caption, rows, draw, height_in=1.1 + 0.42 * len(rows))


def _three_parts(axes: Any, y: int, colour: str, widths: Sequence[float]) -> None:
    """One bar of 100 %: full colour, pale, grey."""
    left = 0.0
    for width, fill, alpha in zip(widths, (colour, colour, GREY), (1.0, 0.35, 0.22), strict=True):
        axes.barh(y, width, left=left, height=0.56, color=fill, alpha=alpha, linewidth=0)
        if width >= 7:
            ink = text_on(colour) if alpha == 1.0 else INK
            axes.text(left + width / 2, y, f"{width:.0f}", ha="center", va="center", color=ink, fontsize=9)
        left += width
