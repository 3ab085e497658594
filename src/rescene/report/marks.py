"""How a group of runs is drawn in any figure: its marker, its line, its place in a list of names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rescene.report.groups import Group
from rescene.report.labels import visible
from rescene.report.look import CARD, INK, YELLOW
from rescene.report.runs import Row

_FILLS = ("full", "none", "left", "top", "right", "bottom")
_DASHES: tuple[Any, ...] = ("-", (0, (3, 1)), (0, (1, 1)), (0, (4, 1, 1, 1)), (0, (6, 2)), (0, (3, 1, 1, 1, 1, 1)))
_SHADES = ((0.0, 0), (0.5, 255), (0.45, 0))  # how much of which grey is mixed in: none, paler, darker


def colour_of(group: Group) -> str:
    """The method's colour; the variants beyond those that fills and dashes tell apart get it paler, then darker.

    The neutral colours stay: on the page they are the theme's.
    """
    share, grey = _SHADES[group.variant // len(_FILLS) % len(_SHADES)]
    colour = group.look.colour
    if not share or colour == INK:
        return colour
    return "#" + "".join(f"{round((1 - share) * int(colour[i : i + 2], 16) + share * grey):02x}" for i in (1, 3, 5))


def mark(group: Group, size: float) -> dict[str, Any]:
    """Marker of a group: variants of one method (a sweep) share colour and shape and differ in how it is filled."""
    look, colour = group.look, colour_of(group)
    haloed = look.marker in "osD" and group.variant == 0  # a halo would eat up thin shapes
    return {
        "marker": look.marker,
        "markersize": size + (2 if group.ours else 0) + (3 if look.marker == "*" else 0) - (0 if group.competes else 2),
        "color": colour,
        "fillstyle": _FILLS[group.variant % len(_FILLS)],
        "markerfacecoloralt": CARD,
        "markeredgecolor": CARD if haloed else INK if look.colour == YELLOW else colour,
        "markeredgewidth": 0.8 if group.variant == 0 else 1.2,
        "zorder": 5 if group.ours else 4 if group.competes else 6,  # references are small and may lie on top
    }


def stroke(group: Group, size: float) -> dict[str, Any]:
    """Line with markers; ReSCENE's is the strong one, reference lines are thin, dashed and on top."""
    if not group.competes:
        return {**mark(group, size + 1), "linewidth": 1.2, "linestyle": (0, (2, 1.5))}
    return {**mark(group, size), "linewidth": 2.6 if group.ours else 1.5, "linestyle": _dash(group)}


def _dash(group: Group) -> Any:
    """Line style of a variant: as many as there are fills, so that lines without markers differ as well."""
    return _DASHES[group.variant % len(_DASHES)]


def mean_points(axes: Any, groups: Sequence[Group], rows: Sequence[Row], x: str, y: str) -> None:
    """Seeds as small dots, their mean as the method's marker."""
    for group in groups:
        own = [row for row in rows if row["method"] == group.label]
        if not own:
            continue
        xs, ys = [row[x] for row in own], [row[y] for row in own]
        if len(own) > 1:
            axes.scatter(xs, ys, s=9, color=colour_of(group), alpha=0.45, linewidths=0)
        axes.plot(np.mean(xs), np.mean(ys), label=group.label, **{**mark(group, 9), "linestyle": "none"})


def mean_line(axes: Any, group: Group, stack: np.ndarray) -> None:
    """Mean over seeds of [seed, task] as a line, with a band of one deviation (n-1) if there are several."""
    mean, x = np.mean(stack, axis=0), np.arange(stack.shape[1])
    axes.plot(x, mean, label=group.label, **stroke(group, 6))
    if len(stack) > 1:
        std = np.std(stack, axis=0, ddof=1)
        band(axes, group, x, mean - std, mean + std)


def band(axes: Any, group: Group, x: Any, low: np.ndarray, high: np.ndarray) -> None:
    """What a deviation around a mean covers."""
    axes.fill_between(x, low, high, color=colour_of(group), alpha=0.16, linewidth=0)


def name_rows(axes: Any, groups: Sequence[Group]) -> None:
    """Method names down the left side, first one on top."""
    axes.set_yticks(range(len(groups)), visible([group.label for group in groups], 26))
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
