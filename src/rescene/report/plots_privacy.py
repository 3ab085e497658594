"""Accuracy against leakage: how much of it rests on uploads that show real images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rescene.report.canvas import Plot, legend_above, percent_axis
from rescene.report.groups import Group, guaranteed, near_copies
from rescene.report.look import CARD, MUTED, look_of, plain
from rescene.report.marks import mean_points
from rescene.report.plots_frontier import mode_of, problem_of
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


def accuracy_for_noise(groups: Sequence[Group]) -> Plot | None:
    """AA against sigma, a line for every method and mechanism that was run with several."""
    lines: dict[tuple[str, ...], list[Row]] = {}
    for group in groups:
        aa, sigma = (group.spread(pick) for pick in (lambda run: run.number("aa"), _sigma))
        if aa and sigma:
            run = group.finished[0]
            row = {
                "method": group.method,
                "mode": _kind_of_noise(run),
                "mechanism": run.privacy.get("mechanism"),
                "sigma": sigma.mean,
                "aa": aa.mean,
            }
            row |= {"aa_std": aa.std, "num_seeds": aa.num, "epsilon": guaranteed(run)}
            lines.setdefault((group.method, _kind_of_noise(run), problem_of(run)), []).append(row)
    drawn = [sorted(rows, key=lambda row: row["sigma"]) for rows in lines.values()]
    drawn = [rows for rows in drawn if rows[0]["sigma"] < rows[-1]["sigma"]]
    if not drawn:
        return None

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        for rows in drawn:
            look, kind = look_of(rows[0]["method"]), rows[0]["mode"]
            xs, ys, bars = ([row[key] for row in rows] for key in ("sigma", "aa", "aa_std"))
            style = {
                "color": look.colour,
                "marker": look.marker,
                "markerfacecolor": look.colour if rows[0]["epsilon"] else CARD,
            }
            axes.errorbar(
                xs, ys, yerr=[bar or 0.0 for bar in bars], elinewidth=1, label=f"{look.label}, {kind}", **style
            )
        axes.set_xlabel("noise multiplier σ")
        percent_axis(axes.yaxis, "AA (%)")
        legend_above(sheet, *axes.get_legend_handles_labels())

    names = "; ".join(f"{look_of(rows[0]['method']).label} under {rows[0]['mode']}" for rows in drawn)
    caption = (
        f"{names}. Further right, more noise is added to what leaves a site. "
        "Filled points have a guarantee, hollow ones none."
    )
    return Plot("noise", "Accuracy against noise", caption, [row for rows in drawn for row in rows], draw)


def _kind_of_noise(run: Run) -> str:
    """What a line joins: runs of one mode, which differ in the amount of noise only."""
    kind, _, guarantee = mode_of(run).partition(" ε=")
    return kind if guarantee else plain(run.privacy.get("mechanism"), 20)


def _sigma(run: Run) -> float | None:
    return number(run.privacy.get("noise_multiplier"))


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
