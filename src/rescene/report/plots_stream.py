"""A stream without announced tasks: when each class was there, and when its buffer closed."""

from __future__ import annotations

from typing import Any

import numpy as np

from rescene.report.canvas import Plot
from rescene.report.groups import Group
from rescene.report.look import MUTED, plain
from rescene.report.runs import Row, number, table


def stream(group: Group | None) -> Plot | None:
    """One line per class of the headline's first finished run; nothing where tasks were announced."""
    found = table(group.finished[0].results, "stream") if group and group.finished else {}
    rows = [row for one in found.get("classes") or () if isinstance(one, dict) and (row := _row(one))]
    if not rows or group is None:
        return None
    look = group.look
    per_task, total = int(number(found.get("rounds_per_task")) or 1), int(number(found.get("num_rounds")) or 1)

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        for i, row in enumerate(rows):
            axes.barh(
                i, row["leaves"] - row["arrives"] + 1, left=row["arrives"] - 0.5, height=0.5, color=MUTED, alpha=0.35
            )
            axes.plot(
                row["closed"], [i] * len(row["closed"]), look.marker, color=look.colour, markersize=7, clip_on=False
            )
        for boundary in range(per_task, total, per_task):
            axes.axvline(boundary + 0.5, color=MUTED, linewidth=0.8)
        axes.set_yticks(range(len(rows)), [row["class"] for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_xlim(0.5, total + 0.5)
        axes.set_xlabel("round of the stream")

    told = [{**row, "closed": " ".join(map(str, row["closed"]))} for row in rows]
    drift = int(number(found.get("drift")) or 0)
    caption = (
        f"Bars: rounds in which sites hold images of the class; each line is a true boundary, after which new classes drift "
        f"in over {drift} rounds. Markers: when {group.label}, which is told none of it, closed the buffer."
    )
    height = float(np.clip(1.3 + 0.24 * len(rows), 2.4, 7.0))
    return Plot("stream", "When classes came, and when buffers closed", caption, told, draw, height_in=height)


def _row(one: Row) -> Row | None:
    first, last = number(one.get("arrives")), number(one.get("leaves"))
    if first is None or last is None:
        return None
    closed = [int(n) for value in one.get("closed") or () if (n := number(value)) is not None]
    name, task = plain(one.get("class", "?"), 40), number(one.get("task"))
    return {"class": name, "task": task, "arrives": int(first), "leaves": int(last), "closed": closed}
