"""A matrix of runs in a pool of processes: one line of JSON per cell, appended as it is done; cells already in the file are skipped.

python benchmarks/poisoning.py --out results/trust/poisoning.jsonl --jobs 16 [--seeds 10,11,12]
"""

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


def each(
    about: str,
    out: str,
    seeds: str,
    cells: Callable[[int], Iterable[Cell]],
    work: Callable[[Cell], Cell],
    row: Callable[[list[Cell]], Cell],
) -> None:
    """``cells(seed)`` lists settings, ``work(cell)`` gives what to add to them; it is called in a process of its own.

    ``row(lines)`` sums up the lines of one setting, all seeds together.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "trust" / out)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", default=seeds)
    parser.add_argument("--table", action="store_true", help="run nothing")
    asked = parser.parse_args()
    done = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    if asked.table:
        groups = [
            [line for line in done if {**cell, "seed": line["seed"]}.items() <= line.items()] for cell in cells(0)
        ]
        print(markdown([row(lines) for lines in groups if lines]))
        return
    wanted = [cell for seed in map(int, asked.seeds.split(",")) for cell in cells(seed)]
    todo = [cell for cell in wanted if not any(cell.items() <= line.items() for line in done)]
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(asked.jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = {pool.submit(work, cell): cell for cell in todo}
        for number, future in enumerate(as_completed(waiting), start=1):
            line = json.dumps(waiting[future] | future.result())
            print(f"{number}/{len(todo)} {line}", flush=True)
            with asked.out.open("a") as file:
                file.write(line + "\n")


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
