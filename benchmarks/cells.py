"""A matrix of small experiments in a pool of processes: one JSON line per cell, cells that are in the file are skipped."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


def options(about: str, seeds: str, out: Path) -> argparse.ArgumentParser:
    """What every matrix understands."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=out, help="JSON lines; one that is there is continued")
    parser.add_argument("--jobs", type=int, default=1, help="processes, one torch thread each")
    parser.add_argument("--seeds", type=_numbers, default=seeds, help="comma-separated")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def arguments(about: str, seeds: str, out: Path) -> argparse.Namespace:
    parser = options(about, seeds, out)
    parser.add_argument("--table", action="store_true", help="run nothing, print the table")
    return parser.parse_args()


def fill(page: Path, mark: str, text: str) -> None:
    """Put a table between ``<!-- mark -->`` and ``<!-- end -->`` of a page."""
    head, begin, rest = page.read_text().partition(f"<!-- {mark} -->\n")
    assert begin, f"{page} has no <!-- {mark} -->"
    page.write_text(f"{head}{begin}{text}\n<!-- end -->{rest.partition('<!-- end -->')[2]}")


def run_cells(cells: Iterable[Cell], work: Callable[[Cell], Cell], out: Path, jobs: int) -> None:
    """``work`` of each cell, appended to ``out`` as it ends; a cell that fails is told and left out."""
    os.environ["OMP_NUM_THREADS"] = "1"  # children inherit it before torch is loaded
    out.parent.mkdir(parents=True, exist_ok=True)
    lines = out.read_text().splitlines() if out.exists() else []
    done = [json.loads(line) for line in lines]
    left = [cell for cell in cells if not any(cell.items() <= line.items() for line in done)]
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(work, cell): cell for cell in left}
        for number, future in enumerate(as_completed(futures), 1):
            cell, error = futures[future], future.exception()
            print(f"{number}/{len(left)} {cell}" + (f": {error}" if error else ""), flush=True)
            if error is None:
                with out.open("a") as file:
                    file.write(json.dumps(cell | future.result()) + "\n")


def each(
    about: str,
    out: str,
    seeds: str,
    cells: Callable[[int], Iterable[Cell]],
    work: Callable[[Cell], Cell],
    row: Callable[[list[Cell]], Cell],
) -> None:
    """``cells(seed)`` lists settings; ``row(lines)`` sums up the lines of one setting, all seeds together."""
    told = arguments(about, seeds, Path(__file__).parents[1] / "results" / "trust" / out)
    if told.table:
        done = [json.loads(line) for line in told.out.read_text().splitlines()]
        groups = [[x for x in done if {**cell, "seed": x["seed"]}.items() <= x.items()] for cell in cells(0)]
        print(markdown([row(lines) for lines in groups if lines]))
    else:
        run_cells([cell for seed in told.seeds for cell in cells(seed)], work, told.out, told.jobs)


def page(
    about: str,
    seeds: str,
    name: str,
    cells: Callable[[list[int]], list[Cell]],
    work: Callable[[Cell], Cell],
    table: Callable[[Path], str],
) -> None:
    """Fill results/<name>/cells.jsonl, or with --table the table of results/<name>/README.md from it."""
    root = Path(__file__).parents[1]
    told = arguments(about, seeds, root / "results" / name / "cells.jsonl")
    if told.table:
        made = table(told.out)
        fill(root / "results" / name / "README.md", f"{name}: table", made)
        print(made)
    else:
        run_cells(cells(told.seeds), work, told.out, told.jobs)


def markdown(rows: list[Cell]) -> str:
    names = list(rows[0])
    return "\n".join(
        f"| {' | '.join(map(str, cells))} |" for cells in (names, ["---"] * len(names), *(row.values() for row in rows))
    )


def mean(lines: list[Cell], value: Callable[[Cell], float]) -> str:
    """Mean, and the deviation where there are several.

    >>> mean([{"aa": 1.0}, {"aa": 3.0}], lambda line: line["aa"])
    '2.0 ± 1.4'
    """
    values = [value(line) for line in lines]
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"
