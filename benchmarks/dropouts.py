"""Sites that are lost in a round or too slow for it: whether runs complete, and what it costs in accuracy and time.

python benchmarks/dropouts.py --out results/trust/dropouts.jsonl [--jobs N] [--seeds 0,1,2]

Five of ten sites are asked in a round. Time is counted in answers of an ordinary site.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

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
    from rescene.engine.folder import RunFolder
    from rescene.engine.loop import run
    from rescene.errors import RunError

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


if __name__ == "__main__":
    from cells import arguments, run_cells

    told = arguments(__doc__ or "", SEEDS)
    run_cells([cell for seed in told.seeds for cell in cells(seed)], measure, told.out, told.jobs)
