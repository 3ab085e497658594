"""10,000 sites, 100 of them in a round, in one process: memory after every round, and the calculator's prediction beside it.

    python benchmarks/scale_simulation.py

Sites are drawn when they take part (`federation.partition=lazy-dirichlet`). Three methods, each in a process of its own: FedAvg
(nobody remembers anything), ReSCENE (the server's pool grows by design), FedEWC (sites remember). Resident memory is read after
each round, when the allocator has given back what is free, with caches of 16 compiled convolutions (by default oneDNN keeps 1,024, one for
every batch size it meets). Speed is measured in CPU-seconds, which others at work on the machine disturb little. Writes
results/scale/simulation.json.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rescene.config import resolve
from rescene.core.record import Tree, num_bytes, tensors
from rescene.data import LazySplit
from rescene.engine import cost_ledger as ledger
from rescene.engine import forecast as speed
from rescene.engine.forecast import forecast
from rescene.engine.loop import Run
from rescene.engine.run_folder import RunFolder
from rescene.engine.scaling import Means, scale

OUT = Path(__file__).parents[1] / "results" / "scale" / "simulation.json"
N, K, WARM_UP = 10_000, 100, 5
RECIPE = [f"federation.num_clients={N}", f"federation.per_round={K}", "federation.partition=lazy-dirichlet"]
RECIPE += ["federation.min_size=40", "federation.evaluate_every=0", "tasks.limit=5", "model.width=8", "device=cpu"]
RECIPE += ["train.local_epochs=1", "train.server_epochs=2"]
OWN = {  # the guard withholds images that are still real: how many, no forecast can know
    "fedavg": ["federation.num_rounds=5"],
    "rescene": ["federation.num_rounds=6", "method.ipc=2", "method.num_steps=5", "method.budget=200", "method.guard=false"],
    "fedewc": ["federation.num_rounds=4", "tasks.limit=2"],
}  # fmt: skip


def tensor_bytes(tree: Tree) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors(tree))


def resident_mb() -> float:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def simulate(method: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    resolved = resolve("demo", [f"method={method}", *RECIPE, *OWN[method]])
    builds, draw = [0], LazySplit._draw

    def counted(self: LazySplit, client: int) -> np.ndarray:
        builds[0] += 1
        return draw(self, client)

    LazySplit._draw = counted  # type: ignore[method-assign]
    ledger.num_bytes = tensor_bytes  # type: ignore[attr-defined]  # without the few numbers for the log in each message
    with tempfile.TemporaryDirectory() as spare:
        rows: list[dict[str, float]] = []
        pools: list[int] = []

        def look(event: dict[str, Any]) -> None:
            if event["event"] == "round":
                state, sites = num_bytes(run.parts.state) / 1e6, run.federation.client_states
                kept = sum(map(num_bytes, sites.values())) / 1e6
                pools.append(int(event["notes"].get("pool_size", 0)))
                rows.append(
                    {
                        "rss_mb": resident_mb(),
                        "server_state_mb": state,
                        "client_states_mb": kept,
                        "s": run.context.timer.total(),
                    }
                )

        run = Run(resolved, RunFolder(Path(spare) / "run"), look)
        speed.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[assignment]
        rates = speed.measured_rates(run.context.experiment)
        begin = time.process_time()
        results = run.complete()
        seconds = time.process_time() - begin
        files = {path.name: path.stat().st_size for path in (Path(spare) / "run" / "checkpoints").iterdir()}
    measured, predicted = results["cost"]["measured"], forecast(run.context.experiment)
    assert predicted is not None
    row = scale(resolved.recipe, run.context.experiment.dataset, N, K, Means())
    assert row is not None
    told, flops = predicted.measured(), predicted.evaluation_flops
    expected = (told["client_flops"] + flops) / rates.client + told["server_flops"] / rates.server
    return {
        "rounds": rows,
        "shards_drawn": builds[0],
        "sites_times_tasks": N * len(run.context.experiment.tasks),
        "sites_with_state": len(run.federation.client_states),
        "growth": growth(rows),
        "checkpoint_mb": sum(files.values()) / 1e6,
        "uplink_bytes": {"ledger": measured["uplink_bytes"], "calculator": row.up_bytes},
        "downlink_bytes": {"ledger": measured["downlink_bytes"], "calculator": row.down_bytes},
        "flops": {key: {"ledger": measured[key], "calculator": told[key]} for key in ("client_flops", "server_flops")},
        "pool_images": {"run": max(pools), "calculator": row.pool_images},
        "cpu_s": {"run": seconds, "calculator": expected, "ratio": seconds / expected},
    }  # fmt: skip


def growth(rows: list[dict[str, float]]) -> dict[str, float]:
    """Least squares of resident memory on a constant, on what server and sites remember, and on the number of the round."""
    tail = rows[min(WARM_UP, len(rows) // 4) :]
    states = [row["server_state_mb"] + row["client_states_mb"] for row in tail]
    moves = max(states) > 1
    columns = [np.ones(len(tail)), np.arange(len(tail)), *([np.array(states)] if moves else [])]
    found = np.linalg.lstsq(np.stack(columns, axis=1), np.array([row["rss_mb"] for row in tail]), rcond=None)[0]
    return {"mb_per_round": float(found[1]), "mb_per_mb_of_state": float(found[2]) if moves else 0.0}


def main() -> None:
    found: dict[str, Any] = {"command": "python benchmarks/scale_simulation.py", "platform": platform.platform()}
    found |= {
        "torch": torch.__version__,
        "setting": f"{N} sites, {K} per round, 40 images of a task each, ConvNet of width 8",
    }
    for method in OWN:
        env = os.environ | {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16", "LRU_CACHE_CAPACITY": "16"}
        done = subprocess.run(
            [sys.executable, __file__, method], stdout=subprocess.PIPE, check=True, text=True, env=env
        )
        found[method] = json.loads(done.stdout.splitlines()[-1])
        print(method, {key: value for key, value in found[method].items() if key != "rounds"}, flush=True)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    print(json.dumps(simulate(sys.argv[1]))) if len(sys.argv) > 1 else main()
