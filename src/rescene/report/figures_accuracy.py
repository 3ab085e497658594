"""Figures about accuracy: over tasks and rounds, what is kept and lost, and maps of stages, sites and classes.

Each function takes groups or a run and returns a Plot, or None where the runs hold nothing to draw. Cells of the maps are one
blue with varying opacity: faint cells take the colour of the sheet, so the maps read the same on white and on dark. Small
maps carry their numbers; large ones are drawn as a bitmap inside the SVG to keep the page light.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rescene.core.json_files import Row
from rescene.core.method_style import BLUE, GREY, INK
from rescene.core.results import RoundRecord
from rescene.report.drawing import (
    ASIDE,
    BORDER,
    CARD,
    GUIDE,
    MUTED,
    SLANTED,
    WHITE,
    Plot,
    band,
    mean_line,
    mean_points,
    name_rows,
    name_ticks,
    percent_axis,
    percent_span,
    seed_rows,
    set_percent_limits,
    stroke,
    text_on,
    thinned,
)
from rescene.report.formatting import percent, plain, task_name
from rescene.report.groups import RunGroup
from rescene.report.load import RunRecord, triangle


def ended(groups: Sequence[RunGroup]) -> Sequence[RunGroup]:
    """The finished groups, or all while none has finished: a run in its second task has had no time to forget."""
    return [group for group in groups if group.finished] or groups


def task_curve(groups: Sequence[RunGroup]) -> Plot | None:
    """Accuracy on each task after the last one."""
    title = "Each task, after the last one" if any(group.finished for group in groups) else "Each task, so far"
    caption = (
        "Asked at the end about each task in turn, without telling the model which task it is. "
        "A method that forgets is high only at the right."
    )
    return _curves("tasks", title, caption, ended(groups), _final_row, "task (T1 was learned first)")


def _final_row(run: RunRecord) -> np.ndarray:
    return run.matrix[-1] if len(run.matrix) else np.zeros(0)


def incremental_curve(groups: Sequence[RunGroup]) -> Plot | None:
    """Accuracy on everything seen so far, after each task; its mean is AIA."""
    caption = "The mean of a curve is its AIA, its last point AA."
    title = "Accuracy on all classes seen so far"
    guess = groups[0].shown[0].guessing
    caption += " Dotted: guessing among the classes seen." if guess else ""
    return _curves("incremental", title, caption, groups, lambda run: run.incremental, "after task", guess)


def _curves(
    name: str,
    title: str,
    caption: str,
    groups: Sequence[RunGroup],
    pick: Callable[[RunRecord], np.ndarray],
    xlabel: str,
    guess: Sequence[float] = (),
) -> Plot | None:
    """One line per method over the tasks, if there are two: a single point is no curve."""
    drawn = [(group, group.stack(pick)) for group in groups]
    drawn = [(group, stack) for group, stack in drawn if stack.shape[1] and np.isfinite(stack).any()]
    rows = [
        {"method": group.label, "seed": run.seed, "task": t, "accuracy": float(value)}
        for group, stack in drawn
        for run, values in zip(group.alike(pick), stack, strict=True)
        for t, value in enumerate(values)
        if np.isfinite(value)
    ]
    num = max((stack.shape[1] for _, stack in drawn), default=0)
    if num < 2:
        return None

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        for group, stack in drawn:
            mean_line(axes, group, stack)
        if guess:
            axes.plot(range(len(guess[:num])), guess[:num], color=MUTED, linestyle=":", linewidth=1.2, label="guessing")
        name_ticks(axes.xaxis, [*map(task_name, range(num))], most=12)
        axes.set_xlim(-0.25, num - 0.75)
        axes.set_xlabel(xlabel)
        percent_axis(axes.yaxis, "accuracy (%)")
        axes.grid(False, axis="x")

    return Plot(name, title, caption, rows, draw, height_in=3.1)


def rounds_curve(groups: Sequence[RunGroup]) -> Plot | None:
    """Accuracy on the seen classes round by round."""

    def scale(axes: Any) -> None:
        percent_axis(axes.yaxis, "accuracy on seen classes (%)")
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + 0.07 * (high - low))  # room for the names of the tasks

    caption = "On all classes seen so far; each vertical line is a new task, where the question becomes harder."
    return _rounds("rounds", "Round by round", caption, groups, "accuracy", scale)


def matching_curve(groups: Sequence[RunGroup]) -> Plot | None:
    """What condensation has left of the difference between surrogates and real images, round by round."""

    def scale(axes: Any) -> None:
        from matplotlib.ticker import LogLocator, NullFormatter

        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # a loss may stay within one power of ten
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())  # matplotlib's own are mathtext, which drawing.py leaves unread
        axes.set_ylabel("matching loss (log scale)")

    caption = "Loss at the last condensation step, mean over classes and sites; networks differ between rounds."
    return _rounds("matching", "How well surrogates match", caption, groups, "matching_loss", scale)


def _rounds(
    name: str, title: str, caption: str, groups: Sequence[RunGroup], key: str, scale: Callable[[Any], None]
) -> Plot | None:
    rows = [_round_row(group, run, row) for group in groups for run in group.shown for row in run.rounds]
    rows = rows if key == "accuracy" else [row for row in rows if row[key]]
    if not any(row[key] is not None for row in rows):
        return None
    place = {step: i for i, step in enumerate(sorted({(row["task"], row["round"]) for row in rows}), start=1)}
    starts = {task: i for (task, _), i in reversed(place.items())}

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        axes.set_yscale("log" if key == "matching_loss" else "linear")
        for task, start in starts.items():
            axes.axvline(start - 0.5, color=MUTED, linewidth=0.6, alpha=0.5)
            if task % thinned(len(starts)) == 0:
                above = axes.get_xaxis_transform()  # x in rounds, y in the height of the axes
                axes.text(start - 0.35, 0.98, task_name(task), transform=above, color=MUTED, fontsize=8.5, va="top")
        for group in groups:
            _round_line(axes, group, [row for row in rows if row["method"] == group.label], place, key)
        scale(axes)
        axes.set_xlabel("communication round")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(False, axis="x")

    return Plot(name, title, caption, rows, draw, height_in=4.0)


def _round_row(group: RunGroup, run: RunRecord, row: RoundRecord) -> Row:
    return {
        "method": group.label,
        "seed": run.seed,
        "task": row.task,
        "round": row.round,
        "accuracy": row.accuracy,
        "matching_loss": row.matching_loss,
        "participants": len(row.participants),
        "uplink_bytes": row.uplink_bytes,
        "downlink_bytes": row.downlink_bytes,
    }


def _round_line(axes: Any, group: RunGroup, rows: Sequence[Row], place: dict[tuple[int, int], int], key: str) -> None:
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
        band(axes, group, x, back(mean - std), back(mean + std), top=100.0 if key == "accuracy" else np.inf)


def old_recent(groups: Sequence[RunGroup]) -> Plot | None:
    """Final accuracy on old against recent tasks, one point per method (the paper's old-versus-recent figure)."""

    def of_several(run: RunRecord) -> float | None:
        return run.results.recent if len(run.matrix) > 1 else None

    rows = seed_rows(groups, recent=of_several, old=lambda run: run.results.old)
    if not rows:
        return None

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        mean_points(axes, groups, rows, "recent", "old")
        values = [row[key] for row in rows for key in ("recent", "old")]
        set_percent_limits([axes.xaxis, axes.yaxis], *percent_span(min(values), max(values)))
        whole = {"transform": axes.transAxes}
        axes.plot([0, 1], [0, 1], **whole, **GUIDE)
        axes.text(0.97, 0.04, "forgets old tasks", ha="right", **whole, **ASIDE)
        axes.text(0.03, 0.97, "learns new tasks poorly", va="top", **whole, **ASIDE)
        axes.set(aspect="equal", xlabel="accuracy on recent tasks (%)", ylabel="accuracy on old tasks (%)")

    caption = "Up and to the right is better; on the dashed line old and recent tasks do equally well."
    if len(rows) > len({row["method"] for row in rows}):
        caption += " Small dots are single seeds."
    return Plot("old-recent", "Old tasks against recent tasks", caption, rows, draw, height_in=4.9)


def lost_per_task(run: RunRecord) -> np.ndarray:
    """Forgetting of every task but the last: its best accuracy at any stage minus its final one."""
    matrix = run.matrix
    known = [t for t in range(len(matrix) - 1) if np.isfinite(matrix[-1, t])]
    return np.array([np.nanmax(matrix[t:, t]) - matrix[-1, t] for t in known])


def forgetting_bars(groups: Sequence[RunGroup]) -> Plot | None:
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
        at_end = {"transform": axes.get_yaxis_transform(), "va": "center"}  # x in the width of the axes
        for y, (group, values) in enumerate(lost):
            told = group.mean(lambda run: run.results.forgetting)  # the table's, which may round the other way
            mean = float(np.mean(values)) if told is None else told
            axes.barh(y, mean, height=0.56, color=group.style.colour)
            axes.scatter(values, np.full(len(values), y), s=16, facecolor=CARD, edgecolor=INK, linewidths=0.8, zorder=4)
            axes.text(1.02, y, percent(mean), fontweight="bold" if group.hero else "normal", **at_end)
        percent_axis(axes.xaxis, "points lost from each task's best accuracy", zero=True)
        name_rows(axes, [group for group, _ in lost])

    caption = "Shorter is better. Bars (and the numbers at the right) are means over tasks, circles are single tasks."
    return Plot("forgetting", "Forgetting", caption, rows, draw, height_in=1.1 + 0.42 * len(lost))


def inside_between(groups: Sequence[RunGroup]) -> Plot | None:
    """Where the errors are: right, wrong task, wrong class inside the task."""
    rows: list[Row] = []
    drawn = []
    for group in groups:
        within = group.mean(lambda run: run.within_task)
        if group.aa and within is not None:
            parts = {"right": group.aa.mean, "lost_between_tasks": max(within - group.aa.mean, 0.0)}
            rows.append({"method": group.label, **parts, "lost_inside_tasks": 100 - sum(parts.values())})
            drawn.append(group)
    if not rows:
        return None

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        for y, (group, row) in enumerate(zip(drawn, rows, strict=True)):
            _three_parts(axes, y, group.style.colour, list(row.values())[1:])
        name_rows(axes, drawn)
        axes.grid(False)
        percent_axis(axes.xaxis, "share of test images (%)", zero=True)

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


_BITMAP_FROM = 1500  # cells
MOST_SITES = 1000


def _grid(axes: Any, values: np.ndarray, top: float, text: str = "") -> None:
    """Fill the axes with cells [row, column] whose opacity is value / top; NaN stays empty. ``text``: number format."""
    strength = np.clip(values / top, 0, 1) if top else np.zeros_like(values)
    (_cells if values.size < _BITMAP_FROM else _bitmap)(axes, strength)
    for i, j in np.argwhere(np.isfinite(values)) if text else ():
        colour = WHITE if strength[i, j] > 0.55 else INK
        axes.text(j, i, format(values[i, j], text), ha="center", va="center", color=colour, fontsize=9)
    axes.set(xlim=(-0.5, values.shape[1] - 0.5), ylim=(values.shape[0] - 0.5, -0.5))
    axes.grid(False)
    axes.spines[:].set_visible(False)


def _rgba(strength: np.ndarray) -> np.ndarray:
    """Blue with the opacity of the value, [..., 4]; never quite absent, so that an empty cell is seen to be a cell."""
    blue = [int(BLUE[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    colours = np.empty((*strength.shape, 4))
    colours[..., :3] = blue
    colours[..., 3] = np.where(np.isfinite(strength), 0.05 + 0.95 * np.nan_to_num(strength), 0.0)
    return colours


def _cells(axes: Any, strength: np.ndarray, gap: float = 0.06) -> None:
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    places = np.argwhere(np.isfinite(strength))
    boxes = [Rectangle((j - 0.5 + gap / 2, i - 0.5 + gap / 2), 1 - gap, 1 - gap) for i, j in places]
    axes.add_collection(PatchCollection(boxes, facecolors=_rgba(strength)[np.isfinite(strength)], linewidths=0))


def _bitmap(axes: Any, strength: np.ndarray) -> None:
    axes.imshow(_rgba(strength), aspect="auto", interpolation="none")


def accuracy_matrix(group: RunGroup) -> Plot | None:
    """Accuracy after each task (rows) on each task (columns), averaged over seeds."""
    stack = group.stack(lambda run: run.matrix)
    if not stack.shape[1] or not np.isfinite(stack).any():
        return None
    mean, num = np.mean(stack, axis=0), stack.shape[1]
    rows = [
        {"method": group.label, "after_task": i, "task": j, "accuracy": float(mean[i, j])}
        for i in range(num)
        for j in range(num)
        if np.isfinite(mean[i, j])
    ]

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        _grid(axes, mean, 100.0, ".0f" if num <= 10 else "")
        for axis in (axes.xaxis, axes.yaxis):
            name_ticks(axis, [*map(task_name, range(num))])
        axes.set(xlabel="accuracy on task", ylabel="after task", aspect="equal")

    return Plot(f"matrix-{group.slug}", group.label, "", rows, draw, height_in=3.4, width_in=3.6)


def sites_by_class(run: RunRecord) -> Plot | None:
    """Training images of each class at each site, from partition.json."""
    names = [plain(name, 60) for name in run.partition.classes]
    columns = [
        (task.task, names[c] if c < len(names) else f"class {c}", own)
        for task in run.partition.tasks
        for c, own in zip(task.classes, zip(*task.counts, strict=False), strict=False)
    ]
    columns = [column for column in columns if len(column[2]) == len(columns[0][2])]
    if not columns:
        return None
    values = np.array([column[2] for column in columns], dtype=float).T  # [site, class]
    rows = [
        {"site": k, "task": task, "class": name, "images": own[k]}
        for task, name, own in columns
        for k in range(len(own))
    ]

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        _grid(axes, values, float(values.max()), ".0f" if values.size <= 220 and len(columns) <= 12 else "")
        name_ticks(axes.xaxis, [name for _, name, _ in columns], **SLANTED)
        name_ticks(axes.yaxis, _site_names(run, len(values)))
        axes.set_ylabel("site")
        for j in _starts([task for task, _, _ in columns])[1:]:
            axes.axvline(j - 0.5, **BORDER)

    caption = (
        "Training images of each class at each site; vertical lines separate tasks. "
        f"{int((values == 0).sum())} of {values.size} cells are empty."
    )
    return Plot("sites", "Who holds what", caption, rows, draw, height_in=_height(len(values)))


def _starts(tasks: Sequence[int]) -> list[int]:
    """Where each task begins."""
    return [i for i, task in enumerate(tasks) if i == 0 or task != tasks[i - 1]]


def _height(num_lines: int, each_in: float = 0.26, most_in: float = 6.0) -> float:
    return float(np.clip(1.3 + each_in * num_lines, 2.4, most_in))


def _site_names(run: RunRecord, num: int) -> list[str]:
    """What sites are called: by their own names, else by their numbers."""
    return (
        [plain(name, 24) for name in run.partition.sites]
        if len(run.partition.sites) == num
        else [*map(str, range(num))]
    )


def participation(run: RunRecord) -> Plot | None:
    """Which site took part in which round."""
    seen = [[k for k in row.asked if k >= 0] for row in run.rounds]
    most = max((k for row in seen for k in row), default=-1) + 1
    num_sites = max(run.partition.num_clients or 0, most)
    if not most or num_sites > MOST_SITES:  # a row for each could not be read
        return None
    values = np.zeros((num_sites, len(seen)))
    for i, row in enumerate(seen):
        values[row, i] = 1.0
    rows = [
        {"site": k, "task": row.task, "round": row.round, "took_part": int(values[k, i])}
        for i, row in enumerate(run.rounds)
        for k in range(num_sites)
    ]
    starts = _starts([row.task for row in run.rounds])

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        _grid(axes, values, 1.25)
        named = starts[:: thinned(len(starts))]
        axes.set_xticks([i - 0.5 for i in named], [task_name(run.rounds[i].task) for i in named], ha="left")
        name_ticks(axes.yaxis, _site_names(run, num_sites))
        axes.set(xlabel="communication round, by task", ylabel="site")
        for i in starts[1:]:
            axes.axvline(i - 0.5, **BORDER)

    who = run.style.label
    caption = f"A filled cell is a site that {who} asked in that round."
    if any(len(asked) > len(row.participants) for asked, row in zip(seen, run.rounds, strict=True)):
        caption += f" {who} also asks sites that were not drawn for the round."
    return Plot("participation", "Who took part", caption, rows, draw, height_in=_height(num_sites))


def confusion(group: RunGroup) -> Plot | None:
    """Final confusion in percent of each true class, averaged over seeds."""
    found = [triangle(run.results.confusion) for run in group.finished]
    found = [counts for counts in found if counts.size and counts.shape == found[0].shape and np.isfinite(counts).all()]
    if not found:
        return None
    share = np.mean([100 * counts / np.maximum(counts.sum(axis=1, keepdims=True), 1) for counts in found], axis=0)
    names = _class_names(group.finished[0], len(share))
    rows = [
        {"method": group.label, "truth": names[i], "answer": names[j], "percent": float(share[i, j])}
        for i in range(len(share))
        for j in range(len(share))
    ]

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        _grid(axes, share, 100.0, ".0f" if len(share) <= 12 else "")
        name_ticks(axes.xaxis, names, **SLANTED)
        name_ticks(axes.yaxis, names, fontsize=8.5)
        axes.set(xlabel="answer of the model", ylabel="true class")

    caption = f"{group.label}, after the last task, in percent of each true class. Off the diagonal are its mistakes."
    return Plot("confusion", "Which classes are mistaken for which", caption, rows, draw, height_in=4.4)


def _class_names(run: RunRecord, num: int) -> list[str]:
    """Class names in the order they were learned (the order of the outputs); numbers if they do not fit."""
    learned = [plain(name, 60) for task in run.tasks for name in task.classes]
    names = list(dict.fromkeys(learned)) if len(learned) != num else learned
    return names if len(names) == num else [str(c) for c in range(num)]


def stream(group: RunGroup | None) -> Plot | None:
    """One line per class of the headline's first finished run; nothing where tasks were announced."""
    found = group.finished[0].results.stream if group and group.finished else None
    if group is None or found is None or not found.classes:
        return None
    style, classes, per_task, total = group.style, found.classes, found.rounds_per_task, found.num_rounds
    names = [plain(one.class_name, 40) for one in classes]
    rows: list[Row] = [
        {"class": name, "task": one.task, "arrives": one.arrives, "leaves": one.leaves}
        | {"closed": " ".join(map(str, one.closed))}
        for name, one in zip(names, classes, strict=True)
    ]

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        for i, one in enumerate(classes):
            num = one.leaves - one.arrives + 1
            axes.barh(i, num, left=one.arrives - 0.5, height=0.5, color=MUTED, alpha=0.35)
            marks = {"color": style.colour, "markersize": 7, "clip_on": False}
            axes.plot(one.closed, [i] * len(one.closed), style.marker, **marks)
        for boundary in range(per_task, total, per_task):
            axes.axvline(boundary + 0.5, **BORDER)
        axes.set_yticks(range(len(names)), names)
        axes.set(xlim=(0.5, total + 0.5), ylim=(len(names) - 0.5, -0.5), xlabel="round of the stream")

    caption = (
        f"Bars: rounds in which sites hold images of the class; each line is a true boundary, after which new classes drift "
        f"in over {found.drift} rounds. Markers: when {group.label}, which is told none of it, closed the buffer."
    )
    height = _height(len(rows), each_in=0.24, most_in=7.0)
    return Plot("stream", "When classes came, and when buffers closed", caption, rows, draw, height_in=height)
