"""``rescene theory``: the assumptions and bounds of temporal herding, measured, as tables and sentences."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from pathlib import Path

from rescene.cli.listing import Row, print_rows
from rescene.cli.presenting import loaded
from rescene.errors import ConfigError
from rescene.report.theory import COLUMNS, VERDICTS, cells, class_rows, findings


def print_theory(folder: Path, as_json: bool) -> None:
    """Every run below the folder that recorded theory: its classes, then what holds and what does not."""
    runs = [run for run in loaded([folder]) if class_rows([run])]
    if not runs:
        raise ConfigError(
            "E160",
            "no theory was recorded there",
            where=str(folder),
            why="the run is unfinished or older than this record, or its method keeps no buffer on the server",
            fix="rescene run demo method=rescene",
        )
    if as_json:
        facts = [
            {
                "run": str(run.folder),
                "theory": run.results["theory"],
                "findings": [asdict(one) for one in findings(class_rows([run]))],
            }
            for run in runs
        ]
        print(json.dumps(facts))
        return
    for run in runs:
        print(f"{run.folder}\n")
        print_rows([_row(row) for row in class_rows([run])])
        print()
    rows = class_rows(runs)
    if len(runs) > 1:
        print(f"All {len(runs)} runs together, {len(rows)} classes:\n")
    for one in findings(rows):
        print(f"{one.statement}: {VERDICTS[one.verdict]}")
        print(textwrap.fill(one.text, 110, initial_indent="  ", subsequent_indent="  "))
    print("\nAll distances are between mean unit-length features; definitions in docs/theory.md.")


def _row(row: Row) -> Row:
    titles = [title for _, title, _ in COLUMNS]
    return {"class": f"T{row['task']} {row['class']}", **dict(zip(titles, cells(row), strict=True))}
