"""The imbalance of what the server trains on, and what balanced sampling makes of it (Sec. 3.4)."""

from __future__ import annotations

from typing import Any

from rescene.report.canvas import Plot, legend_above, thinned
from rescene.report.look import BLUE, MUTED, SKY, plain
from rescene.report.runs import Row, Run, number, table
from rescene.report.theory import class_rows


def pool_balance(run: Run) -> Plot | None:
    """Shares of the classes while the last task ends: pi_c in buffers and pool, q_c ~ n_c^alpha among what is drawn."""
    alpha = number(table(run.config, "method").get("alpha"))
    held = _held(run)
    if alpha is None or len(held) < 2:
        return None
    whole, drawn = sum(held.values()), sum(n**alpha for n in held.values())
    rows: list[Row] = [
        {"class": name, "n_c": n, "pi_c": 100 * n / whole, "q_c": 100 * n**alpha / drawn} for name, n in held.items()
    ]

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        axes.bar([i - 0.2 for i in range(len(rows))], [row["pi_c"] for row in rows], 0.4, color=SKY, label="held, π_c")
        axes.bar([i + 0.2 for i in range(len(rows))], [row["q_c"] for row in rows], 0.4, color=BLUE, label="drawn, q_c")
        axes.axhline(100 / len(rows), color=MUTED, linewidth=0.9, linestyle=(0, (4, 4)))
        ticks = range(0, len(rows), thinned(len(rows)))
        axes.set_xticks(ticks, [plain(rows[i]["class"], 14) for i in ticks], rotation=40, ha="right", fontsize=8.5)
        axes.set_ylabel("share of the images (%)")
        axes.grid(False, axis="x")
        legend_above(sheet, *axes.get_legend_handles_labels())

    caption = (
        "At the end of the last task: each class's share of the images on the server, where earlier classes have their "
        f"buffer and the newest every upload, and of those drawn for training (α = {alpha:g}). Dashed: equal shares. "
        f"n_c, the images held of a class, runs from {min(held.values()):g} to {max(held.values()):g}."
    )
    return Plot("pool", "What the server trains on", caption, rows, draw)


def _held(run: Run) -> dict[str, float]:
    """Images of each class on the server when the last task ends; classes of several tasks (domains) add up."""
    rows, held = class_rows([run]), dict[str, float]()
    everything = table(run.config, "method").get("buffer") == "keep-all"
    for row in rows:
        newest = row["task"] == max(other["task"] for other in rows)
        held[row["class"]] = held.get(row["class"], 0) + row["num_pool" if newest or everything else "num_kept"]
    return held
