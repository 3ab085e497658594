"""Heat maps: accuracy by stage and task, images by site and class, who took part, which classes are confused.

Cells are one blue with varying opacity: faint cells take the colour of the sheet, so the maps read the same on white
and on dark. Small maps carry their numbers; large ones are drawn as a bitmap inside the SVG to keep the page light.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rescene.report.canvas import Plot, thinned
from rescene.report.groups import Group
from rescene.report.look import BLUE, INK, MUTED, WHITE, plain
from rescene.report.runs import Run, number, triangle

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


def _names(axis: Any, names: Sequence[str], most: int = 24, **style: Any) -> None:
    """Tick labels; with too many to read, every n-th."""
    shown = range(0, len(names), thinned(len(names), most))
    axis.set_ticks(shown, [plain(names[i], 14) for i in shown], **style)


def accuracy_matrix(group: Group) -> Plot | None:
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
        _names(axes.xaxis, [f"T{j}" for j in range(num)])
        _names(axes.yaxis, [f"T{i}" for i in range(num)])
        axes.set_xlabel("accuracy on task")
        axes.set_ylabel("after task")
        axes.set_aspect("equal")

    return Plot(f"matrix-{group.slug}", group.label, "", rows, draw, height_in=3.4, width_in=3.6)


def sites_by_class(run: Run) -> Plot | None:
    """Training images of each class at each site, from partition.json."""
    names = [plain(name, 60) for name in run.partition.get("classes") or []]
    columns: list[tuple[int, str, list[int]]] = []
    for task in run.partition.get("tasks") or []:
        per_site = task.get("counts") or []
        for j, c in enumerate(task.get("classes") or []):
            name = names[c] if c < len(names) else f"class {c}"
            columns.append((int(task.get("task", 0)), name, [int(row[j]) for row in per_site if j < len(row)]))
    columns = [column for column in columns if len(column[2]) == len(columns[0][2])]
    if not columns or not columns[0][2]:
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
        _names(
            axes.xaxis, [name for _, name, _ in columns], rotation=38, ha="right", rotation_mode="anchor", fontsize=8.5
        )
        _names(axes.yaxis, [str(k) for k in range(len(values))])
        axes.set_ylabel("site")
        starts = [j for j in range(1, len(columns)) if columns[j][0] != columns[j - 1][0]]
        for j in starts:
            axes.axvline(j - 0.5, color=MUTED, linewidth=0.8)

    height = float(np.clip(1.3 + 0.26 * len(values), 2.4, 6.0))
    caption = (
        "Training images of each class at each site; vertical lines separate tasks. "
        f"{int((values == 0).sum())} of {values.size} cells are empty."
    )
    return Plot("sites", "Who holds what", caption, rows, draw, height_in=height)


def participation(run: Run) -> Plot | None:
    """Which site took part in which round."""
    seen = [[k for k in row.get("participants") or () if isinstance(k, int) and k >= 0] for row in run.rounds]
    most = max((k for row in seen for k in row), default=-1) + 1
    num_sites = max(int(number(run.partition.get("num_clients")) or 0), most)
    if not most or num_sites > MOST_SITES:  # a row for each could not be read
        return None
    values = np.zeros((num_sites, len(seen)))
    for i, row in enumerate(seen):
        values[row, i] = 1.0
    rows = [
        {"site": k, "task": row.get("task"), "round": row.get("round"), "took_part": int(values[k, i])}
        for i, row in enumerate(run.rounds)
        for k in range(num_sites)
    ]
    starts = [i for i in range(len(seen)) if i == 0 or run.rounds[i].get("task") != run.rounds[i - 1].get("task")]

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        _grid(axes, values, 1.25)
        named = starts[:: thinned(len(starts))]
        axes.set_xticks([i - 0.5 for i in named], [f"T{run.rounds[i].get('task')}" for i in named], ha="left")
        _names(axes.yaxis, [str(k) for k in range(num_sites)])
        axes.set_ylabel("site")
        axes.set_xlabel("communication round, by task")
        for i in starts[1:]:
            axes.axvline(i - 0.5, color=MUTED, linewidth=0.8)

    height = float(np.clip(1.3 + 0.26 * num_sites, 2.4, 6.0))
    return Plot(
        "participation",
        "Who took part",
        "A filled cell is a site that was asked in that round.",
        rows,
        draw,
        height_in=height,
    )


def confusion(group: Group) -> Plot | None:
    """Final confusion in percent of each true class, averaged over seeds."""
    found = [triangle(run.results.get("confusion") or []) for run in group.finished]
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
        _names(axes.xaxis, names, rotation=38, ha="right", rotation_mode="anchor", fontsize=8.5)
        _names(axes.yaxis, names, fontsize=8.5)
        axes.set_ylabel("true class")
        axes.set_xlabel("answer of the model")

    caption = f"{group.label}, after the last task, in percent of each true class. Off the diagonal are its mistakes."
    return Plot("confusion", "Which classes are mistaken for which", caption, rows, draw, height_in=4.4)


def _class_names(run: Run, num: int) -> list[str]:
    """Class names in the order they were learned (the order of the outputs); numbers if they do not fit."""
    learned = [plain(name, 60) for task in run.tasks for name in task.get("classes") or []]
    names = list(dict.fromkeys(learned)) if len(learned) != num else learned
    return names if len(names) == num else [str(c) for c in range(num)]
