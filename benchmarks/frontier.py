"""The stored points of the frontier figure, from the runs under results/: writes src/rescene/report/frontier.csv and the table
in results/frontier/README.md.

    python benchmarks/frontier.py [PATTERN ...]        of run folders, if not those below

The picture of the same runs: rescene plot frontier with the same folders and --out docs/frontier.png
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

from rescene.core.method_style import style_of
from rescene.report import load_run
from rescene.report.figures_tradeoffs import Point, point_row, points_of
from rescene.report.groups import group_runs
from rescene.report.tables import csv_text

ROOT = Path(__file__).parents[1]
MARKED = re.compile(r"(<!-- benchmarks/frontier.py -->\n).*?(<!-- end -->)", re.DOTALL)
FOLDERS = (
    "results/frontier/*-s*",
    "results/lens/fashion-mini-*",
    *(f"results/private/dp/{name}-*" for name in ("fedavg", "fedcbdr", "refed")),
)


def markdown(points: list[Point]) -> str:
    """Guarantees first, the smallest epsilon first."""
    lines = ["| method | mode | n | AA | near-copies | RMS to real | epsilon |", "|---|---|---|---|---|---|---|"]
    for p in sorted(points, key=lambda p: (p.epsilon or math.inf, -p.aa)):
        std = "" if p.aa_std is None else f" +- {p.aa_std:.1f}"
        style = style_of(p.method)
        sent = (style.without_images(), "-")
        if p.nearest_rms is not None:
            sent = (f"{p.near_copies_percent:.0f} %", f"{p.nearest_rms:.2f}")
        known = f"{p.epsilon:g}" if p.epsilon else "none"
        lines.append(
            f"| {style.label} | {p.mode or 'real images'} | {p.num} | {p.aa:.1f}{std} | {sent[0]} | {sent[1]} | {known} |"
        )
    return "\n".join(lines) + "\n"


def main(*patterns: str) -> None:
    runs = [load_run(run) for pattern in patterns or FOLDERS for run in sorted(ROOT.glob(pattern))]
    points = points_of(group_runs(runs))
    rows = [{key: value for key, value in point_row(p).items() if key != "stored"} for p in points]
    rows = [{key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()} for row in rows]
    (ROOT / "src/rescene/report/frontier.csv").write_text(csv_text(rows), "utf-8", newline="")
    page = ROOT / "results/frontier/README.md"
    page.write_text(MARKED.sub(rf"\g<1>{markdown(points)}\g<2>", page.read_text("utf-8")), "utf-8")
    print(f"{len(rows)} points of {len(runs)} runs")


if __name__ == "__main__":
    main(*sys.argv[1:])
