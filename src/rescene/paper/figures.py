"""The paper's two figures of results: its values as hollow marks, ours filled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rescene.core.errors import ConfigError, with_guess
from rescene.core.json_files import Row
from rescene.core.method_style import INK, YELLOW, style_of
from rescene.functional import old_and_recent
from rescene.paper.compare import compare
from rescene.paper.paper_tables import DATA, FIRST_TASK
from rescene.paper.recipes import FAST_LABEL, paper_recipe
from rescene.paper.store import Store
from rescene.report.drawing import CARD, GUIDE, Plot, percent_span, set_percent_limits

SETS = ("cifar10", "cifar100", "tinyimagenet")
BETAS = ("0.1", "0.5", "1.0")
SKEWED = "0.1"


def figure(name: str, store: Store) -> Plot:
    """``old-recent`` (Figure 3) or ``task-curves`` (Figure 4)."""
    if name not in FIGURES:
        what = with_guess(f"unknown figure {name!r}", name, FIGURES)
        raise ConfigError("E153", what, why=f"known: {', '.join(FIGURES)}")
    return FIGURES[name](store)


def old_recent(store: Store) -> Plot:
    """Accuracy of old and of recent tasks at the end, method by method."""
    rows: list[Row] = []
    for row in _final_rows(store):
        if row["beta"] == SKEWED:
            old, recent = old_and_recent([row["final"]] * len(row["final"]))
            rows.append({**_without_final(row), "recent": recent, "old": old})

    def draw(sheet: Any) -> None:
        panels = sheet.subplots(1, len(SETS))
        for axes, data in zip(panels, SETS, strict=True):
            own = [row for row in rows if row["data"] == data]
            top = 10 * (1 + max(int(max(row["old"], row["recent"])) for row in own) // 10)
            axes.plot([0, top], [0, top], **GUIDE)
            for row in own:
                axes.plot(row["recent"], row["old"], **_mark(row, 8))
            axes.set(
                title=f"{DATA[data]}, beta {SKEWED}",
                xlim=(-0.04 * top, 1.04 * top),
                ylim=(-0.04 * top, 1.04 * top),
                aspect="equal",
            )
            axes.set_xlabel("accuracy on recent tasks (%)")
        panels[0].set_ylabel("accuracy on old tasks (%)")
        _legend(sheet, rows)

    caption = "Final accuracy at beta 0.1. On the dashed line old and recent tasks do equally well."
    return Plot("paper-old-recent", "Old tasks against recent tasks", caption, rows, draw, height_in=4.0, width_in=10.0)


def task_curves(store: Store) -> Plot:
    """Accuracy of each task at the end (the paper's Figure 4)."""
    # Figure 4 has Table 1's methods
    finals = [row for row in _final_rows(store) if row["method"] not in ("feddm", "fedaf")]
    rows = [
        {**_without_final(row), "task": t, "accuracy": value} for row in finals for t, value in enumerate(row["final"])
    ]

    def draw(sheet: Any) -> None:
        panels = sheet.subplots(len(BETAS), len(SETS), sharey=True)
        for i, beta in enumerate(BETAS):
            for j, data in enumerate(SETS):
                axes = panels[i][j]
                for row in finals:
                    if (row["data"], row["beta"]) == (data, beta):
                        ours = row["whose"] == "ours"
                        dash = ":" if not ours else "--" if row["setting"] else "-"
                        style = {"linestyle": dash, "linewidth": 2.2 if ours else 1.2}
                        axes.plot(range(len(row["final"])), row["final"], **{**_mark(row, 5), **style})
                num = max(len(row["final"]) for row in finals if row["data"] == data)
                axes.set_xticks(range(num), [f"T{t}" for t in range(num)])
                axes.grid(False, axis="x")
                if j == 0:
                    axes.set_ylabel(f"beta {beta}: accuracy (%)")
                if i == 0:
                    axes.set_title(DATA[data])
        shown = [row["accuracy"] for row in rows]
        set_percent_limits([axes.yaxis for axes in panels.flat], *percent_span(min(shown), max(shown)))
        _legend(sheet, finals)

    caption = f"Final accuracy of each task. {FIRST_TASK}"
    return Plot("paper-task-curves", "Each task, after the last one", caption, rows, draw, height_in=9.0, width_in=11.0)


FIGURES: dict[str, Callable[[Store], Plot]] = {"old-recent": old_recent, "task-curves": task_curves}


def _final_rows(store: Store) -> list[Row]:
    """Final accuracy per task: one row for the paper's and one for ours of each cell of Table 7.

    Other readings are shown only where nothing else was run.
    """
    rows: list[Row] = []
    lines = compare(paper_recipe("per-task"), store)
    shown = {line.cell.name for line in lines if line.runs and not line.reading}
    for line in (line for line in lines if not line.reading or line.cell.name not in shown):
        head = {"data": line.cell.data, "beta": line.cell.beta, "method": line.cell.method}
        if not line.variant:
            rows.append({**head, "whose": "paper", "setting": "", "seeds": "", "final": _final(line.paper)})
        if line.runs:
            seeds = {"whose": "ours", "setting": line.variant, "seeds": len(line.runs)}
            rows.append({**head, **seeds, "final": _final(line.ours)})
    return rows


def _without_final(row: Row) -> Row:
    return {key: value for key, value in row.items() if key != "final"}


def _final(values: Mapping[str, Any]) -> list[float]:
    return [values[f"task_{t}"].mean for t in range(len(values)) if f"task_{t}" in values]


def _mark(row: Row, size: float) -> dict[str, Any]:
    """The method's colour and marker: filled for ours, half of it for another form of the cell, hollow for the paper's."""
    look, ours = style_of(row["method"]), row["whose"] == "ours"
    fill = "left" if row["setting"] == FAST_LABEL else "bottom"
    half = {"fillstyle": fill, "markerfacecoloralt": CARD} if row["setting"] else {}
    return {
        **half,
        "marker": look.marker,
        "color": look.colour,
        "markersize": size + 2 * (row["method"] == "rescene") + 3 * (look.marker == "*"),
        "markerfacecolor": look.colour if ours else CARD,
        "markeredgecolor": INK if look.colour == YELLOW else look.colour,
        "markeredgewidth": 1.2,
        "linestyle": "none",
        "zorder": 5 if ours else 3,
    }


def _legend(sheet: Any, rows: list[Row]) -> None:
    """One entry per method, the paper's first, above the panels."""
    from matplotlib.lines import Line2D

    entries: dict[str, Line2D] = {}
    for row in sorted(rows, key=lambda row: row["whose"] == "ours"):
        whose = ", ".join(filter(None, (row["whose"], row["setting"])))
        entries.setdefault(f"{style_of(row['method']).label} ({whose})", Line2D([], [], **_mark(row, 8)))
    sheet.legend(entries.values(), entries.keys(), loc="outside upper left", ncols=5, columnspacing=1.2, labelcolor=INK)
