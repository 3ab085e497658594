"""``rescene plot``: one figure file from run folders, drawn by the functions that draw the page."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rescene.core.errors import ConfigError, did_you_mean
from rescene.core.method_style import INK
from rescene.report import figures_accuracy, figures_tradeoffs
from rescene.report.drawing import Plot, checked_ending, legend_above, save
from rescene.report.formatting import wrapped
from rescene.report.groups import RunGroup
from rescene.report.uploads import contact_sheet

Groups = Sequence[RunGroup]
_PANEL_IN = 3.6  # two of them are as wide as a printed page


def _curves(groups: Groups) -> list[Plot | None]:
    return [figures_accuracy.task_curve(groups), figures_accuracy.incremental_curve(groups)]


def _cost(groups: Groups) -> list[Plot | None]:
    return [figures_tradeoffs.accuracy_for_upload(groups), figures_tradeoffs.accuracy_for_compute(groups)]


def _privacy(groups: Groups) -> list[Plot | None]:
    return [
        figures_tradeoffs.accuracy_for_copies(groups),
        figures_tradeoffs.accuracy_for_distance(groups),
        figures_tradeoffs.accuracy_for_noise(groups),
    ]


def _frontier(groups: Groups) -> list[Plot]:
    return figures_tradeoffs.frontier(figures_tradeoffs.points_of(groups))


# kind: (what draws its panels, how many stand side by side, what the runs must hold)
KINDS: dict[str, tuple[Callable[[Groups], Iterable[Plot | None]], int, str]] = {
    "old-recent": (lambda groups: [figures_accuracy.old_recent(groups)], 1, "a finished run of two or more tasks"),
    "curves": (_curves, 2, "a finished task"),
    "matrix": (lambda groups: map(figures_accuracy.accuracy_matrix, groups), 3, "a finished task"),
    "rounds": (lambda groups: [figures_accuracy.rounds_curve(groups)], 1, "metrics.jsonl with an evaluated round"),
    "cost": (_cost, 2, "results.json with measured cost"),
    "privacy": (_privacy, 2, "a finished run of a method that uploads images"),
    "frontier": (_frontier, 3, "finished runs in two modes of privacy"),
    "surrogates": (lambda groups: map(contact_sheet, groups), 1, "surrogates.safetensors and surrogates.json"),
}


def figure(groups: Groups, kind: str, out: Path) -> list[Path]:
    """Draw one kind into ``out`` (.png, .pdf or .svg), with the numbers behind it as CSV; returns both paths."""
    if kind not in KINDS:
        close = did_you_mean(kind, KINDS)
        what = f"unknown kind of figure {kind!r}" + (f"; did you mean {close}?" if close else "")
        raise ConfigError("E145", what, where="the first word, or --kind", why=f"known are {', '.join(KINDS)}")
    checked_ending(out)
    panels, across, needs = KINDS[kind]
    plots = [plot for plot in panels(groups) if plot]
    if not plots:
        raise ConfigError("E146", f"nothing to draw for {kind}", where="these runs", why=f"it needs {needs}")
    drawn = plots[0] if len(plots) == 1 else together(plots, across)
    rows = [{"panel": plot.name, **row} for plot in plots for row in plot.rows]
    return save(replace(drawn, rows=rows), out)


def together(plots: Sequence[Plot], across: int) -> Plot:
    """Several plots as panels of one, each under its title; a legend they share stands once, above them."""
    across = min(across, len(plots))
    down = -(-len(plots) // across)
    wide = max(plot.width_in for plot in plots) if across == 1 else min(_PANEL_IN, plots[0].width_in)
    heights = [max(plot.height_in for plot in plots[i : i + across]) for i in range(0, len(plots), across)]

    def draw(sheet: Any) -> None:
        parts = sheet.subfigures(down, across, squeeze=False, height_ratios=heights).ravel()
        for part, plot in zip(parts, plots, strict=False):
            plot.draw(part)
            part.suptitle(wrapped(plot.title, 44), fontsize=10, color=INK)
        _one_legend(sheet, parts)

    return replace(plots[0], draw=draw, width_in=wide * across, height_in=sum(heights) + 0.3 * down)


def _one_legend(sheet: Any, parts: Iterable[Any]) -> None:
    entries: dict[str, Any] = {}
    for part in parts:
        for axes in part.axes:
            entries |= dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    legend_above(sheet, list(entries.values()), list(entries))
