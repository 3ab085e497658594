"""Figures about cost: accuracy for the bytes sent and the work done, and where the time went."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from rescene.report.canvas import Plot, legend_above, percent_axis, thinned
from rescene.report.groups import Group, spread
from rescene.report.look import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, VERMILLION, YELLOW
from rescene.report.marks import mean_points, name_rows
from rescene.report.runs import Row, Run, number, table
from rescene.report.words import bytes_text, flops_text, seconds_text

_PHASES = {
    "client": (SKY, "sites"),
    "server": (BLUE, "server"),
    "evaluate": (GREEN, "evaluation"),
    "checkpoint": (ORANGE, "checkpoints"),
    "leakage": (PURPLE, "leakage check"),
    "theory": (YELLOW, "theory"),
    "other": (GREY, "other"),
}
_LETTERS = 32  # of labels side by side below the narrowest panel


def accuracy_for_upload(groups: Sequence[Group]) -> Plot | None:
    """AA against the bytes a site sends per round."""
    caption = (
        "Further left sends less, further up knows more. "
        "How much of what is sent resembles real images is another question (see Privacy)."
    )
    return _accuracy_for(
        groups, "upload", "Accuracy for the bytes sent", caption, "upload_bytes", lambda run: run.upload_bytes,
        "upload per site and round (log scale)", bytes_text,
    )  # fmt: skip


def accuracy_for_compute(groups: Sequence[Group]) -> Plot | None:
    """AA against the floating-point operations of all sites."""
    caption = "Operations of all sites over the whole run, as measured. Further left asks less of the sites."
    return _accuracy_for(
        groups, "compute", "Accuracy for the work of the sites", caption, "client_flops",
        lambda run: number(table(run.cost, "measured").get("client_flops")),
        "operations of all sites (log scale)", flops_text,
    )  # fmt: skip


def _accuracy_for(
    groups: Sequence[Group],
    name: str,
    title: str,
    caption: str,
    key: str,
    pick: Callable[[Run], float | None],
    xlabel: str,
    show: Callable[[float | None], str],
) -> Plot | None:
    """AA against a cost, on a logarithmic axis: whoever pays nothing is not on it."""
    rows: list[Row] = [
        {"method": group.label, "seed": run.seed, key: pick(run), "aa": run.number("aa")}
        for group in groups
        for run in group.finished
        if pick(run) and run.number("aa") is not None
    ]
    if not rows:
        return None
    free = [group.label for group in groups if group.finished and all(pick(run) == 0 for run in group.finished)]
    if free:  # said at the axis: a figure in a file has no caption, and its legend may name them for another panel
        more = f" and {len(free) - 3} more" if len(free) > 3 else ""
        xlabel += "\n" + textwrap.fill(f"not drawn, at 0: {', '.join(free[:3])}{more}", 40)

    def draw(sheet: Any) -> None:
        from matplotlib.ticker import LogLocator, NullFormatter

        axes = sheet.subplots()
        axes.set_xscale("log")
        mean_points(axes, groups, rows, key, "aa")
        sizes = [row[key] for row in rows]
        axes.set_xlim(min(sizes) / 2.5, max(sizes) * 2.5)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3) if max(sizes) < 8 * min(sizes) else (1,), numticks=99))
        axes.xaxis.set_major_formatter(_thin(axes.get_xlim(), lambda value: re.sub(r"\.0+ ", " ", show(value))))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(xlabel)
        percent_axis(axes.yaxis, "AA (%)")
        legend_above(sheet, *axes.get_legend_handles_labels())

    return Plot(name, title, caption, rows, draw)


def _thin(limits: tuple[float, float], show: Callable[[float], str]) -> Callable[[float, int], str]:
    """Labels for an axis of powers of ten, on every second or third of them where more have no room side by side."""
    first, last = math.ceil(math.log10(limits[0])), math.floor(math.log10(limits[1]))
    longest = max((len(show(10.0**power)) for power in range(first, last + 1)), default=1)
    step = thinned(max(last - first + 1, 1), _LETTERS // longest)
    return lambda value, _: "" if (math.floor(math.log10(value) + 1e-9) - first) % step else show(value)


def timing(groups: Sequence[Group]) -> Plot | None:
    """Wall-clock seconds by phase, averaged over seeds."""
    rows = []
    for group in groups:
        phases = [table(run.timing, "phases") for run in group.shown]
        names = dict.fromkeys([*_PHASES, *(name for found in phases for name in found)])
        row: dict[str, Any] = {"method": group.label}
        for name in names:
            mean = spread(number(found.get(name)) for found in phases)
            row[f"{name}_s"] = mean.mean if mean else 0.0
        if any(value for key, value in row.items() if key != "method"):
            rows.append(row)
    if not rows:
        return None
    keys = list(dict.fromkeys(key for row in rows for key in row if key != "method"))
    drawn = [group for group in groups if any(row["method"] == group.label for row in rows)]

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        left = [0.0] * len(rows)
        for key in keys:
            colour, label = _PHASES.get(key[:-2], (VERMILLION, key[:-2]))
            widths = [row.get(key, 0.0) for row in rows]
            if any(widths):
                axes.barh(range(len(rows)), widths, left=left, height=0.56, color=colour, label=label)
                left = [a + b for a, b in zip(left, widths, strict=True)]
        for y, total in enumerate(left):
            axes.text(total + 0.015 * max(left), y, seconds_text(total), va="center", color=INK, fontsize=9)
        axes.set_xlim(0, max(left) * 1.2)
        axes.set_xlabel("seconds")
        name_rows(axes, drawn)
        legend_above(sheet, *axes.get_legend_handles_labels())

    caption = "Seconds on the machine that simulated all sites together, not what one site would need."
    return Plot("timing", "Where the time went", caption, rows, draw, height_in=1.5 + 0.42 * len(rows))
