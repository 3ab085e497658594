"""Figures about accuracy: old against recent, per task, over time, forgetting, inside and between tasks.

Each function takes the groups and returns a Plot, or None where the runs hold nothing to draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rescene.report.canvas import Plot, legend_above, percent_axis
from rescene.report.groups import Group
from rescene.report.look import CARD, GREY, INK, MUTED, dash_of, plain
from rescene.report.runs import Row, Run, number, vector


def old_recent(groups: Sequence[Group]) -> Plot | None:
    """Final accuracy on old against recent tasks, one point per method (Fig. "old versus recent" of the paper)."""
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
        legend_above(sheet, len(axes.get_legend_handles_labels()[0]))

    caption = "Up and to the right is better; on the dashed line old and recent tasks do equally well. Small dots are single seeds."
    return Plot("old-recent", "Old tasks against recent tasks", caption, rows, draw, height_in=4.6)


def mean_points(axes: Any, groups: Sequence[Group], rows: Sequence[Row], x: str, y: str) -> None:
    """Seeds as small dots, their mean as the method's marker."""
    for group in groups:
        own = [row for row in rows if row["method"] == group.label]
        if not own:
            continue
        xs, ys = [row[x] for row in own], [row[y] for row in own]
        if len(own) > 1:
            axes.scatter(xs, ys, s=9, color=group.look.colour, alpha=0.45, linewidths=0)
        axes.plot(np.mean(xs), np.mean(ys), linestyle="none", label=group.label, zorder=5 if group.ours else 4, **_mark(group, 9))


def _mark(group: Group, size: float) -> dict[str, Any]:
    """Marker of a group: variants of one method share it but are drawn hollow after the first."""
    look = group.look
    face = look.colour if group.variant == 0 else CARD
    edge = CARD if group.variant == 0 and look.label != "FedAF" else INK if look.label == "FedAF" else look.colour
    return {
        "marker": look.marker,
        "markersize": size + (2 if group.ours else 0),
        "color": look.colour,
        "markerfacecolor": face,
        "markeredgecolor": edge,
        "markeredgewidth": 1.0,
    }


def _curves(name: str, title: str, caption: str, groups: Sequence[Group], pick: Any, xlabel: str, ylabel: str) -> Plot | None:
    """One line per method over the tasks, with a band of one deviation where there are several seeds."""
    drawn = [(group, group.stack(pick)) for group in groups]
    drawn = [(group, stack) for group, stack in drawn if stack.shape[1] and np.isfinite(stack).any()]
    rows = [
        {"method": group.label, "seed": run.seed, "task": t, "accuracy": float(value)}
        for group, stack in drawn
        for run, values in zip(group.shown, stack, strict=False)
        for t, value in enumerate(values)
        if np.isfinite(value)
    ]
    if not rows:
        return None

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        for group, stack in drawn:
            _line(axes, group, np.arange(stack.shape[1]), stack)
        num = max(stack.shape[1] for _, stack in drawn)
        axes.set_xticks(range(num), [f"T{t}" for t in range(num)])
        axes.set_xlim(-0.25, num - 0.75)
        axes.set_xlabel(xlabel)
        percent_axis(axes.yaxis, ylabel)
        axes.grid(False, axis="x")
        legend_above(sheet, len(drawn))

    return Plot(name, title, caption, rows, draw)


def _line(axes: Any, group: Group, x: np.ndarray, stack: np.ndarray) -> None:
    mean, colour = np.mean(stack, axis=0), group.look.colour
    style = {**_mark(group, 6), "linewidth": 2.6 if group.ours else 1.5, "linestyle": dash_of(group.variant)}
    axes.plot(x, mean, label=group.label, zorder=5 if group.ours else 3, **style)
    if len(stack) > 1:
        std = np.std(stack, axis=0, ddof=1)
        axes.fill_between(x, mean - std, mean + std, color=colour, alpha=0.16, linewidth=0)


def task_curve(groups: Sequence[Group]) -> Plot | None:
    """Accuracy on each task after the last one."""
    caption = "Asked at the end about each task in turn, without telling the model which task. A method that forgets is high only at the right."
    return _curves(
        "tasks",
        "Each task, after the last one",
        caption,
        groups,
        lambda run: run.matrix[-1] if len(run.matrix) else np.zeros(0),
        "task (T0 was learned first)",
        "accuracy (%)",
    )


def incremental_curve(groups: Sequence[Group]) -> Plot | None:
    """Accuracy on everything seen so far, after each task; its mean is AIA."""
    caption = "Accuracy on all classes seen so far, after each task. The mean of a curve is its AIA, its last point AA."
    title = "Everything seen so far, after each task"
    return _curves("incremental", title, caption, groups, lambda run: run.incremental, "after task", "accuracy (%)")


def rounds_curve(groups: Sequence[Group]) -> Plot | None:
    """Accuracy on the seen classes round by round."""
    rows = [
        {
            "method": group.label,
            "seed": run.seed,
            "task": row.get("task"),
            "round": row.get("round"),
            "accuracy": number(row.get("accuracy")),
            "participants": len(row.get("participants") or ()),
            "uplink_bytes": row.get("uplink_bytes"),
            "downlink_bytes": row.get("downlink_bytes"),
        }
        for group in groups
        for run in group.shown
        for row in run.rounds
    ]
    if not any(row["accuracy"] is not None for row in rows):
        return None
    steps = sorted({(row["task"], row["round"]) for row in rows})
    place = {step: i for i, step in enumerate(steps)}
    starts = {t: i for (t, _), i in reversed(place.items())}

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        for t, start in starts.items():
            axes.axvline(start - 0.5, color=MUTED, linewidth=0.6, alpha=0.5)
            axes.text(start - 0.35, 101, f"T{t}", color=MUTED, fontsize=8.5, va="bottom")
        for group in groups:
            own = {}
            for row in rows:
                if row["method"] == group.label and row["accuracy"] is not None:
                    own.setdefault(place[row["task"], row["round"]], []).append(row["accuracy"])
            _round_line(axes, group, own)
        axes.set_xlabel("communication round")
        axes.grid(False, axis="x")
        percent_axis(axes.yaxis, "accuracy on seen classes (%)")
        axes.set_ylim(-3, 110)
        legend_above(sheet, len(groups))

    caption = "Measured on all classes seen so far; each vertical line is a new task, where the question becomes harder."
    return Plot("rounds", "Round by round", caption, rows, draw)


def _round_line(axes: Any, group: Group, values: dict[int, list[float]]) -> None:
    x = sorted(values)
    mean = [float(np.mean(values[i])) for i in x]
    style = {**_mark(group, 4), "linewidth": 2.4 if group.ours else 1.4, "linestyle": dash_of(group.variant)}
    if len(x) > 40:
        style["marker"] = ""
    axes.plot(x, mean, label=group.label, zorder=5 if group.ours else 3, **style)


def lost_per_task(run: Run) -> np.ndarray:
    """Forgetting of every task but the last: its best accuracy at any stage minus its final one."""
    matrix = run.matrix
    return np.array([np.nanmax(matrix[t:, t]) - matrix[-1, t] for t in range(len(matrix) - 1) if np.isfinite(matrix[t:, t]).any()])


def forgetting_bars(groups: Sequence[Group]) -> Plot | None:
    """Mean forgetting per method, with a dot for each task."""
    lost = [(group, np.mean(group.stack(lost_per_task), axis=0)) for group in groups]
    lost = [(group, values) for group, values in lost if len(values)]
    rows = [
        {"method": group.label, "task": t, "forgetting": float(value)} for group, values in lost for t, value in enumerate(values)
    ]
    if not rows:
        return None

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        for y, (group, values) in enumerate(lost):
            mean = float(np.mean(values))
            axes.barh(y, mean, height=0.56, color=group.look.colour, alpha=0.9 if group.ours else 0.6)
            axes.scatter(values, np.full(len(values), y), s=16, facecolor=CARD, edgecolor=INK, linewidths=0.8, zorder=4)
            axes.text(104, y, f"{mean:.1f}", va="center", fontweight="bold" if group.ours else "normal")
        name_rows(axes, [group for group, _ in lost])
        percent_axis(axes.xaxis, "points lost from the best accuracy each task once had")

    caption = "Shorter is better. Bars are means over tasks (numbers at the right), circles are single tasks, averaged over seeds."
    return Plot("forgetting", "Forgetting", caption, rows, draw, height_in=1.1 + 0.42 * len(lost))


def name_rows(axes: Any, groups: Sequence[Group]) -> None:
    """Method names down the left side, first one on top."""
    axes.set_yticks(range(len(groups)), [plain(group.label, 26) for group in groups])
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)


def within_mean(run: Run) -> float | None:
    """Within-task accuracy over all test images (tasks weighted by their test sizes, equally if these are missing)."""
    within = vector(run.results.get("within_task"))
    if not len(within) or not np.isfinite(within).all():
        return None
    sizes = [number(task.get("test_size")) for task in run.tasks]
    domains = any(task.get("domain") for task in run.tasks)  # AA of domains is the unweighted mean
    known = len(sizes) == len(within) and all(sizes) and not domains
    return float(np.average(within, weights=sizes if known else None))


def inside_between(groups: Sequence[Group]) -> Plot | None:
    """Where the errors are: right, wrong task, wrong class inside the task."""
    rows = []
    for group in groups:
        aa, within = group.spread(lambda run: run.number("aa")), group.spread(within_mean)
        if aa and within:
            between = max(within.mean - aa.mean, 0.0)
            rows.append({"method": group.label, "right": aa.mean, "lost_between_tasks": between, "lost_inside_tasks": 100 - within.mean})
    if not rows:
        return None
    drawn = [group for group in groups if any(row["method"] == group.label for row in rows)]

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        for y, (group, row) in enumerate(zip(drawn, rows, strict=True)):
            left = 0.0
            for key, colour, alpha in (("right", group.look.colour, 0.95), ("lost_between_tasks", group.look.colour, 0.35), ("lost_inside_tasks", GREY, 0.22)):
                axes.barh(y, row[key], left=left, height=0.56, color=colour, alpha=alpha, linewidth=0)
                if row[key] >= 7:
                    ink = "#fefefe" if key == "right" else INK
                    axes.text(left + row[key] / 2, y, f"{row[key]:.0f}", ha="center", va="center", color=ink, fontsize=9)
                left += row[key]
        name_rows(axes, drawn)
        percent_axis(axes.xaxis, "share of test images (%)")

    caption = "Full colour: right. Pale: wrong, but right once the task is known (lost between tasks). Grey: wrong even then (lost inside tasks)."
    return Plot("inside-between", "Inside tasks or between them", caption, rows, draw, height_in=1.1 + 0.42 * len(rows))
