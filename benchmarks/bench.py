"""Speed as ratios measured in one run on one machine: `make bench`. Writes results/bench/cpu.json.

herding        herd() against Eq. 2 vectorised over candidates, B=1000 of 2,000 x 512
condensation   all sites in one pass against one site at a time with a copy of the model at every step
demo           wall time, peak memory, and the share of time outside steps and evaluation
"""

from __future__ import annotations

import copy
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
from rescene.engine import prepare, use_all_cores
from rescene.functional import herd, matching_loss, perturbed
from rescene.rng import Rng, seeded_generator
from rescene.steps import condense

OUT = Path(__file__).parents[1] / "results" / "bench" / "cpu.json"


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


def one_at_a_time(net: torch.nn.Module, shards: list[Any], settings: Any, seed: int) -> None:
    """The plain way: for every site and step a deep copy of the model, perturbed, and a loop over classes."""
    for number, shard in enumerate(shards):
        noise = seeded_generator(seed)
        classes, rng = shard.by_class(), Rng(0).at(number).generator()
        pixels = {}
        for label, members in classes.items():
            count = settings.num_surrogates(len(members))
            if count:
                pixels[label] = shard.pictures(members[torch.randperm(len(members), generator=rng)[:count]])
        for _ in range(settings.num_steps):
            moved = copy.deepcopy(net).eval()
            values = perturbed(list(net.parameters()), settings.radius, noise)
            for parameter, value in zip(moved.parameters(), values, strict=True):
                parameter.data.copy_(value)
            for label, own in pixels.items():
                members = classes[label]
                size = settings.real_batch_size(len(members), len(own))
                batch = shard.pictures(members[torch.randperm(len(members), generator=rng)[:size]])
                with torch.no_grad():
                    phi = moved.features(batch)
                    real = (phi.mean(0, keepdim=True), moved.head(phi).mean(0, keepdim=True))
                x = own.detach().requires_grad_(True)
                phi = moved.features(x)
                loss = matching_loss(phi.mean(0, keepdim=True), real[0]) + matching_loss(
                    moved.head(phi).mean(0, keepdim=True), real[1]
                )
                (gradient,) = torch.autograd.grad(loss.sum(), x)
                norm = float(gradient.norm())
                pixels[label] = own - settings.image_lr * gradient / max(1.0, norm / settings.clip)


def bench_condensation(real_batch: str) -> dict[str, Any]:
    recipe = resolve("demo", [f"method.real_batch={real_batch}"]).recipe
    experiment = prepare(recipe)
    net = experiment.initial_net()
    shards = [experiment.shard(experiment.tasks[0], k, experiment.arch.restore) for k in range(10)]
    rngs = [Rng(0).at(k) for k in range(10)]
    ours = best_of(3, lambda: condense(net, shards, rngs, experiment.method, 1))
    plain = best_of(2, lambda: one_at_a_time(net, shards, experiment.method, 1))
    return {
        "ours_s": ours,
        "one_at_a_time_s": plain,
        "ratio": plain / ours,
        "goal": 1.5 if real_batch == "ipc" else 1.0,
    }


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
        "demo": bench_demo,
    }
    machine = {"platform": platform.platform(), "threads": torch.get_num_threads(), "torch": torch.__version__}
    found: dict[str, Any] = {"command": "make bench", "machine": machine}
    for name, work in parts.items():
        found[name] = work()
        print(name, json.dumps(found[name]))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"written: {OUT}")


if __name__ == "__main__":
    main()
