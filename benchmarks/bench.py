"""Speed as ratios measured in one run on one machine: `make bench`, or some of them by name. Writes results/bench/cpu.json.

herding        herd() against Eq. 2 vectorised over candidates, B=1000 of 2,000 x 512
condensation   all sites in one pass against one site at a time with a copy of the model at every step
demo_steps     condensation, server training and local training of one round of the demo against tests/reference.py
demo           wall time, peak memory, and the share of time outside steps and evaluation
"""

from __future__ import annotations

import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from rescene.config import resolve
from rescene.core.rng import Rng, seeded_generator
from rescene.engine import prepare, use_all_cores
from rescene.functional import herd
from rescene.training import condense, fit_pool, fit_shard

ROOT = Path(__file__).parents[1]
OUT = ROOT / "results" / "bench" / "cpu.json"
sys.path.insert(0, str(ROOT / "tests"))
import reference  # noqa: E402 the plain path that the tests keep


def best_of(count: int, work: Callable[[], Any]) -> float:
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)


def literal_herding(z: torch.Tensor, target: torch.Tensor, budget: int) -> torch.Tensor:
    """Eq. 2 as printed, all candidates at once."""
    total, free, picks = torch.zeros_like(target), torch.ones(len(z), dtype=torch.bool), []
    for j in range(1, budget + 1):
        errors = (target - (z + total) / j).square().sum(dim=1)
        errors[~free] = torch.inf
        pick = int(errors.argmin())
        picks.append(pick)
        total, free[pick] = total + z[pick], False
    return torch.tensor(picks)


def bench_herding() -> dict[str, Any]:
    z = F.normalize(torch.randn(2000, 512, generator=torch.Generator().manual_seed(0)), dim=1)
    target = z[500:].mean(dim=0)
    same = torch.equal(herd(z, target, 1000), literal_herding(z.double(), target.double(), 1000))
    ours, literal = best_of(5, lambda: herd(z, target, 1000)), best_of(2, lambda: literal_herding(z, target, 1000))
    return {"ours_s": ours, "literal_s": literal, "ratio": literal / ours, "goal": 10.0, "same_picks": same}


def condense_plainly(net: torch.nn.Module, shards: list[Any], made: list[Any], settings: Any) -> None:
    """The same sites, classes and start images, one at a time."""
    for number, (shard, own) in enumerate(zip(shards, made, strict=True)):
        starts = {label: own.start[own.labels == label] for label in own.labels.unique().tolist()}
        reference.condensation(net, shard, starts, settings, 1, seeded_generator(number))


def bench_condensation(real_batch: str) -> dict[str, Any]:
    recipe = resolve("demo", [f"method.real_batch={real_batch}"]).recipe
    experiment = prepare(recipe)
    net = experiment.initial_net()
    shards = [experiment.shard(experiment.tasks[0], k, experiment.arch.restore) for k in range(10)]
    rngs = [Rng(0).at(k) for k in range(10)]
    made = condense(net, shards, rngs, experiment.method, 1)
    ours = best_of(3, lambda: condense(net, shards, rngs, experiment.method, 1))
    net.to(memory_format=torch.contiguous_format)
    plain = best_of(2, lambda: condense_plainly(net, shards, made, experiment.method))
    return {
        "ours_s": ours,
        "one_at_a_time_s": plain,
        "ratio": plain / ours,
        "goal": 1.5 if real_batch == "ipc" else 1.0,
    }


def bench_demo_steps() -> dict[str, Any]:
    """A round in the third task of the demo: five sites, the pool of its last round; both paths do the same steps."""
    experiment = prepare(resolve("demo", []).recipe)
    task, settings, look = experiment.tasks[2], experiment.method.train, experiment.dataset.transform
    sites = experiment.participants(task, 0)
    shards = [experiment.shard(task, k, experiment.arch.restore) for k in sites]
    rngs = [Rng(0).at(k) for k in sites]
    model = experiment.arch.build(task.num_seen).state_dict()
    made = condense(experiment.arch.restore(model), shards, rngs, experiment.method, 1)
    old = torch.cat([t.train[torch.arange(2 * experiment.method.budget) * len(t.train) // (2 * experiment.method.budget)]
                     for t in experiment.tasks[:2]])  # fmt: skip
    images = torch.cat([shards[0].pictures(old), *(own.images for own in made for _ in range(3))])
    labels = torch.cat([experiment.dataset.train.labels[old], *(own.labels for own in made for _ in range(3))])
    balance = {"num_classes": task.num_seen, "alpha": experiment.method.alpha, "tau": experiment.method.tau}
    net, seed = lambda: experiment.arch.restore(model), lambda: torch.Generator().manual_seed(0)
    plain_net = lambda: net().to(memory_format=torch.contiguous_format)  # noqa: E731
    work: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "condensation": (
            lambda: condense(net(), shards, rngs, experiment.method, 1),
            lambda: condense_plainly(plain_net(), shards, made, experiment.method),
        ),
        "server": (
            lambda: fit_pool(net(), images, labels, look, settings, seed(), **balance),
            lambda: reference.server_training(plain_net(), images, labels, look, settings, seed(), **balance),
        ),
        "local": (
            lambda: [fit_shard(net(), shard, settings, seed()) for shard in shards],
            lambda: [reference.local_training(plain_net(), shard, settings, seed()) for shard in shards],
        ),
    }
    times = {name: [[best_of(1, path) for path in paths] for _ in range(2)] for name, paths in work.items()}
    best = {name: [min(column) for column in zip(*rows, strict=True)] for name, rows in times.items()}
    ours, plain = (sum(column) for column in zip(*best.values(), strict=True))
    parts = {name: {"ours_s": a, "reference_s": b, "ratio": b / a} for name, (a, b) in best.items()}
    return {"ours_s": ours, "reference_s": plain, "ratio": plain / ours, "goal": 2.0, "parts": parts}


def bench_demo() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "rescene", "demo", "--out", folder, "-q"], check=True, stdout=subprocess.DEVNULL
        )
        wall = time.perf_counter() - begin
        timings = {m: json.loads((Path(folder) / m / "timing.json").read_text()) for m in ("fedavg", "rescene")}
        accuracy = {m: json.loads((Path(folder) / m / "results.json").read_text())["aa"] for m in ("fedavg", "rescene")}
    outside = {
        m: 1 - sum(t["phases"].get(p, 0.0) for p in ("client", "server", "evaluate")) / t["total_s"]
        for m, t in timings.items()
    }
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    return {
        "wall_s": wall,
        "goal_s": 180.0,
        "peak_memory_gb": memory,
        "goal_gb": 1.5,
        "share_outside_steps_and_evaluation": outside,
        "goal_share": 0.05,
        "aa": accuracy,
    }


def main() -> None:
    use_all_cores()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "herding": bench_herding,
        "condensation_real_batch_ipc": lambda: bench_condensation("ipc"),
        "condensation_real_batch_256": lambda: bench_condensation("256"),
        "demo_steps": bench_demo_steps,
        "demo": bench_demo,
    }
    machine = {"platform": platform.platform(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    found: dict[str, Any] = {"command": "make bench", "machine": machine}
    chosen = sys.argv[1:] or list(parts)
    if unknown := set(chosen) - set(parts):
        sys.exit(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    if OUT.is_file() and sys.argv[1:]:  # some of them: the others stay as they are
        found = json.loads(OUT.read_text(encoding="utf-8")) | found
    for name in chosen:
        found[name] = parts[name]()
        print(name, json.dumps(found[name]))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"written: {OUT}")


if __name__ == "__main__":
    main()
