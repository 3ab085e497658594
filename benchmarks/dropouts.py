"""Sites that are lost in a round or too slow for it: whether runs complete, and what it costs in accuracy and time.

python benchmarks/dropouts.py --out results/trust/dropouts.jsonl [--jobs N] [--seeds 0,1,2]

Five of ten sites are asked in a round. Time is counted in answers of an ordinary site.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cells import each, mean

Cell = dict[str, Any]
SEEDS = "0,1,2"
SLOW = [0]


def cells(seed: int) -> Iterator[Cell]:
    for method, beta in (("rescene", 0.1), ("rescene", 0.5), ("fedavg", 0.5)):
        setting = {"seed": seed, "method": method, "beta": beta, "quorum": 0.2, "slow": False, "deadline": None}
        for dropout in (0.0, 0.1, 0.3, 0.5):
            yield setting | {"dropout": dropout}
        if method == "rescene":
            yield setting | {"dropout": 0.5, "quorum": 0.5}
            yield setting | {"dropout": 0.0, "slow": True, "deadline": 2.0}
            yield setting | {"dropout": 0.3, "slow": True, "deadline": 2.0}


def measure(cell: Cell) -> Cell:
    import torch

    from rescene.config import resolve
    from rescene.core.errors import RunError
    from rescene.engine.loop import run
    from rescene.engine.run_folder import RunFolder

    torch.set_num_threads(1)
    begin = time.perf_counter()
    settings = {
        "seed": cell["seed"],
        "device": "cpu",
        "method": cell["method"],
        "federation.beta": cell["beta"],
        "federation.evaluate_every": 0,
        "federation.quorum": cell["quorum"],
        "federation.retries": 20,
        "federation.faults.dropout": cell["dropout"],
        "federation.faults.deadline": cell["deadline"],
        "federation.faults.slow": SLOW if cell["slow"] else [],
    }
    with tempfile.TemporaryDirectory() as spare:
        try:
            found = run(resolve("demo", settings), RunFolder(Path(spare) / "run"))
        except RunError as error:
            return {"completed": False, "error": error.code}
    return {
        "completed": True,
        "aa": found["aa"],
        "aia": found["aia"],
        "faults": found.get("faults", {}),
        "seconds": round(time.perf_counter() - begin),
    }


def row(lines: list[Cell]) -> Cell:
    """All seeds of one setting, for the docs."""
    first, done = lines[0], [line for line in lines if line["completed"]]
    faults = [line["faults"] for line in done]
    return {
        "method": first["method"],
        "beta": first["beta"],
        "lost": f"{first['dropout']:.0%}",
        "quorum": first["quorum"],
        "slow site": f"yes, deadline {first['deadline']:g}" if first["slow"] else "no",
        "complete": f"{len(done)} of {len(lines)}",
        "AA": mean(done, lambda line: line["aa"]),
        "AIA": mean(done, lambda line: line["aia"]),
        "rounds held again": sum(found.get("held_again", 0) for found in faults),
        "late answers": sum(found.get("late", 0) for found in faults),
        "time a round": f"{sum(found.get('time', 15) for found in faults) / 15 / len(done):.2f}",
    }


if __name__ == "__main__":
    each(__doc__ or "", "dropouts.jsonl", SEEDS, cells, measure, row)
