"""Accuracy against leakage: how much of it rests on uploads that show real images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rescene.report.canvas import Plot, legend_above, percent_axis
from rescene.report.groups import Group, near_copies
from rescene.report.look import MUTED
from rescene.report.marks import mean_points
from rescene.report.runs import Row, Run, number


def accuracy_for_copies(groups: Sequence[Group]) -> Plot | None:
    """AA against the share of uploads that are near-copies."""
    rows = _rows(groups, "near_copies_percent", lambda run: _percent(near_copies(run)))
    if not rows:
        return None

    def draw(sheet: Any) -> None:
        axes = _scatter(sheet, groups, rows, "near_copies_percent")
        percent_axis(axes.xaxis, "uploads that are near-copies (%)")

    caption = (
        "Further left, fewer uploads show a real image; methods that upload no images are not on this figure. "
        "The raw-upload control sends real images: what it reaches needs no condensation."
    )
    return Plot("near-copies", "Accuracy against near-copies", caption, rows, draw)


def accuracy_for_distance(groups: Sequence[Group]) -> Plot | None:
    """AA against the median distance of an upload to its nearest real image."""
    rows = _rows(groups, "nearest_rms_median", lambda run: number(run.leakage.get("nearest_rms_median")))
    if not rows:
        return None

    def draw(sheet: Any) -> None:
        axes = _scatter(sheet, groups, rows, "nearest_rms_median")
        far = max(max(row["nearest_rms_median"] for row in rows), 0.02)
        axes.set_xlim(-0.08 * far, 1.15 * far)
        axes.axvline(0, color=MUTED, linewidth=0.9, linestyle=(0, (4, 4)))
        axes.text(0.012 * far, 3, "the image itself", color=MUTED, fontsize=8.5, style="italic", rotation=90)
        axes.set_xlabel("median distance to a real image (RMS)")

    caption = "RMS over pixels in units of the data's standard deviation. Distance alone is no guarantee of privacy."
    return Plot("distance", "Accuracy against distance to real images", caption, rows, draw)


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _rows(groups: Sequence[Group], key: str, pick: Callable[[Run], float | None]) -> list[Row]:
    return [
        {"method": group.label, "seed": run.seed, key: pick(run), "aa": run.number("aa")}
        for group in groups
        for run in group.finished
        if pick(run) is not None and run.number("aa") is not None
    ]


def _scatter(sheet: Any, groups: Sequence[Group], rows: Sequence[Row], key: str) -> Any:
    axes = sheet.subplots()
    mean_points(axes, groups, rows, key, "aa")
    percent_axis(axes.yaxis, "AA (%)")
    legend_above(sheet, *axes.get_legend_handles_labels())
    return axes
