"""The stored points of the frontier figure, from the runs under results/: writes src/rescene/report/frontier.csv.

    python benchmarks/frontier.py [PATTERN ...]        of run folders, if not those below

The picture of the same runs: rescene plot frontier results/frontier results/private/dp/{fedavg,fedcbdr,refed}-* --out docs/frontier.png
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

from rescene.report import load_run
from rescene.report.canvas import csv_text
from rescene.report.groups import group_runs
from rescene.report.plots_frontier import points_of

ROOT = Path(__file__).parents[1]
FOLDERS = ("results/frontier/*", *(f"results/private/dp/{name}-*" for name in ("fedavg", "fedcbdr", "refed")))


def main(*patterns: str) -> None:
    runs = [load_run(run) for pattern in patterns or FOLDERS for run in sorted(ROOT.glob(pattern))]
    rows = [{key: value for key, value in asdict(p).items() if key != "stored"} for p in points_of(group_runs(runs))]
    rows = [{key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()} for row in rows]
    (ROOT / "src/rescene/report/frontier.csv").write_text(csv_text(rows), "utf-8", newline="")
    print(f"{len(rows)} points of {len(runs)} runs")


if __name__ == "__main__":
    main(*sys.argv[1:])
