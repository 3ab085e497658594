"""Figures about the theory of temporal herding: how well a buffer stands for its class, and whether uploads grow stale."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rescene.report.canvas import Plot, legend_above, thinned
from rescene.report.look import BLUE, CARD, MUTED, ORANGE, SKY
from rescene.report.runs import Row
from rescene.report.theory import round_rows


def plots(rows: Sequence[Row]) -> list[Plot | None]:
    return [distance_plot(rows), picks_plot(rows), staleness_plot(rows)] if rows else []


def distance_plot(rows: Sequence[Row]) -> Plot:
    """Does the buffer represent the class better than what it is compared with? One mark per class and rival."""
    keys = ("seed", "task", "class", "herded_to_real", "pool_to_real", "full_pool_to_real")

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        y = [row["herded_to_real"] for row in rows]
        ends = [0.0, 1.08 * max([*y, *(row[key] for row in rows for key in keys[4:])])]
        axes.plot(ends, ends, color=MUTED, linewidth=0.9, linestyle=(0, (4, 4)))
        axes.scatter(
            [row["pool_to_real"] for row in rows], y, s=34, color=BLUE, label="against the whole pool", zorder=4
        )
        axes.scatter(
            [row["full_pool_to_real"] for row in rows],
            y,
            s=34,
            facecolor=CARD,
            edgecolor=ORANGE,
            linewidths=1.4,
            label="against full-pool herding",
            zorder=3,
        )
        axes.set(xlim=ends, ylim=ends, xlabel="‖m − μ‖ of the rival", ylabel="‖m_H − μ‖ of temporal herding")
        axes.set_aspect("equal")
        axes.locator_params(nbins=6)
        legend_above(sheet, *axes.get_legend_handles_labels())

    caption = (
        "Distance of mean features to those of the real images, one mark per class. Below the dashed line the herded "
        "buffer stands for the class better than its rival."
    )
    kept = [{key: row[key] for key in keys} for row in rows]
    return Plot("theory-distance", "Buffer against the real class mean", caption, kept, draw, height_in=4.9)


def picks_plot(rows: Sequence[Row]) -> Plot | None:
    """Which rounds the buffers come from, and which of them formed the target; None for runs that did not record it."""
    steps = [step for row in rows for step in round_rows(row) if step.get("num_kept") is not None]
    numbers = sorted({step["round"] for step in steps})
    if len(numbers) < 2:
        return None
    sums = [
        {"round": r, **{key: sum(step[key] for step in steps if step["round"] == r) for key in ("num", "num_kept")}}
        for r in numbers
    ]
    recent = [step["round"] for step in steps if step["recent"]]

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        axes.axvspan(min(recent) - 0.5, numbers[-1] + 0.5, color=MUTED, alpha=0.12, linewidth=0, label="target window")
        axes.bar(numbers, [s["num"] for s in sums], 0.8, color=SKY, label="uploaded")
        axes.bar(numbers, [s["num_kept"] for s in sums], 0.8, color=BLUE, label="kept")
        axes.set_xlim(numbers[0] - 0.5, numbers[-1] + 0.5)
        _by_round(sheet, axes, numbers, "surrogates")

    caption = (
        "All classes and tasks together. Herding aims at the mean of the shaded rounds, the last ⌈λR⌉, and may pick from all "
        "of them; where a class has no more uploads than the budget, everything is kept."
    )
    return Plot("theory-picks", "Which rounds the buffer comes from", caption, sums, draw)


def staleness_plot(rows: Sequence[Row]) -> Plot | None:
    """Error by round, under the final model and under the one of its own time."""
    kept = [
        {"seed": row["seed"], "task": row["task"], "class": row["class"], **step}
        for row in rows
        for step in round_rows(row)
    ]
    steps = sorted({step["round"] for step in kept})
    if len(steps) < 2:
        return None
    lines = (
        ("task_end_error", "under the final model", BLUE, "o", "-"),
        ("matching_error", "under the model of that round", ORANGE, "s", "-"),
        ("bias", "fitted stale bias a_r", SKY, "^", "--"),
    )

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        for key, label, colour, marker, dash in lines:
            means = [(r, [s[key] for s in kept if s["round"] == r and s[key] is not None]) for r in steps]
            points = [(r, statistics.fmean(values)) for r, values in means if values]
            if points:
                axes.plot(
                    *zip(*points, strict=True), label=label, color=colour, marker=marker, markersize=5, linestyle=dash
                )
        axes.set_ylim(bottom=0)
        _by_round(sheet, axes, steps, "distance to the real mean")

    caption = (
        "Mean over classes of ‖m_r − μ‖. If uploads grow stale, those of early rounds are further from the real images "
        "under the final model than those of late rounds."
    )
    return Plot("theory-staleness", "Do uploads grow stale?", caption, kept, draw)


def _by_round(sheet: Any, axes: Any, rounds: Sequence[int], ylabel: str) -> None:
    """What figures over the rounds of a task share."""
    axes.set_xticks(rounds[:: thinned(len(rounds))])
    axes.set(xlabel="round of the uploads", ylabel=ylabel)
    axes.grid(False, axis="x")
    legend_above(sheet, *axes.get_legend_handles_labels())
