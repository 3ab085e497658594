"""A matrix of runs in a pool of processes: one line of JSON per cell, appended as it is done; cells already in the file are skipped.

python benchmarks/poisoning.py --out results/trust/poisoning.jsonl --jobs 16 [--seeds 10,11,12]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

Cell = dict[str, Any]


def each(
    about: str, out: str, seeds: str, cells: Callable[[int], Iterable[Cell]], work: Callable[[Cell], Cell]
) -> None:
    """``cells(seed)`` lists settings, ``work(cell)`` gives what to add to them; it is called in a fresh process."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "trust" / out)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", default=seeds)
    asked = parser.parse_args()
    done = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
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
