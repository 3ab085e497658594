"""Sites that are lost, slow or hostile: runs complete, a late site is left out, an attack is put apart.

    python benchmarks/trust_faults.py [--full] [--seed 0]

On pictures that take seconds; benchmarks/dropouts.py and benchmarks/poisoning.py measure the price on real ones.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import smallworld
import torch
from trust import options, tell

import rescene
from rescene.core.errors import RunError

torch.set_num_threads(1)
SITES = 10
SLOW = 3
ATTACKER = 3  # holds many images of both classes


def images(path: Path) -> Path:
    """Four classes of 8 x 8 pixels, each a pattern of its own under noise."""
    random, parts = np.random.default_rng(0), {}
    patterns = random.integers(40, 200, (4, 4, 4, 3)).repeat(2, axis=1).repeat(2, axis=2)
    for split, count in (("train", 800), ("test", 80)):
        labels = np.arange(count) % 4
        noise = random.normal(0, 25, (count, 8, 8, 3))
        pixels = (patterns[labels] + noise).clip(0, 255).astype(np.uint8)
        parts |= {f"x_{split}": pixels, f"y_{split}": labels}
    np.savez(path, **parts)
    return path


def run(data: Path, folder: Path, **more: Any) -> dict[str, Any]:
    """Two tasks of three rounds in which all ten sites are asked."""
    method = more.pop("method", "rescene")
    settings = smallworld.overrides(data, method) | {
        "model.width": 8,
        "federation.num_clients": SITES,
        "federation.per_round": SITES,
        "federation.num_rounds": 3,
        "train.server_epochs": 3,
        "device": "cpu",
    }
    settings = {k: v for k, v in settings.items() if k != "method.budget"}
    settings |= {"method.budget": 60, "method.ipc": 8, "method.num_steps": 2} if method == "rescene" else {}
    return rescene.run("smoke", out=folder, **settings | {f"federation.{k}": v for k, v in more.items()}).values


def attack(root: Path, kind: str) -> tuple[str, bool]:
    """On real images, for noise has no features to speak of: most of the attacker's groups are put apart, hardly any honest one."""
    settings = {
        "device": "cpu",
        "tasks.limit": 1,
        "federation.num_clients": SITES,
        "federation.per_round": SITES,
        "federation.num_rounds": 3,
        "federation.evaluate_every": 0,
        "train.server_epochs": 10,
        "method.ipc": 8,
        "method.budget": 80,
        "federation.faults.attack": kind,
        "federation.faults.attackers": [ATTACKER],
    }
    open_, found = (
        rescene.run("smoke", out=root / f"{kind}-{screen}", **settings, **{"federation.screen": screen}).values
        for screen in ("none", "features")
    )
    judged, rows = found["screen"]["judged"], found["screen"]["quarantined"]
    own, all_own = sum(row["client"] == ATTACKER for row in rows), judged[str(ATTACKER)]
    honest, hit = sum(judged.values()) - all_own, len(rows) - own
    figure = (
        f"{own} of the attacker's {all_own} groups apart, {hit} of {honest} honest ones; "
        f"success {open_['attack_success']:.1f} % -> {found['attack_success']:.1f} %"
    )
    return figure, own >= 0.5 * all_own and hit <= 0.1 * honest


def losses(data: Path, root: Path, methods: list[str], seeds: list[int]) -> tuple[str, bool]:
    """Half of the sites lost in every round: all runs come to their end."""
    done, repeated, total = 0, 0, 0
    for method in methods:
        for seed in seeds:
            total += 1
            chance = {"faults.dropout": 0.5, "quorum": 0.5, "retries": 20}
            try:
                found = run(data, root / f"lost-{method}-{seed}", method=method, **chance | {"num_rounds": 2})
            except RunError:
                continue
            done, repeated = done + 1, repeated + int(found["faults"].get("held_again", 0))
    return f"{done} of {total} runs complete, {repeated} rounds held again", done == total


def straggler(data: Path, root: Path) -> tuple[str, bool]:
    """A site ten times as slow: no round takes longer than the deadline, and none has anything of that site."""
    folder = root / "slow"
    found = run(data, folder, **{"faults.slow": [SLOW], "faults.deadline": 2.0})
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rounds = [row for row in rows if row["kind"] == "round"]
    sent = sum(row["sites"][str(SLOW)][0] for row in rounds)
    late, time = found["faults"]["late"], found["faults"]["time"]
    figure = f"{late} late answers in {len(rounds)} rounds, {sent} bytes of them used, {time / len(rounds):g} answers' time a round"
    return figure, late == len(rounds) and sent == 0 and time <= 2 * len(rounds)


def main() -> None:
    asked = options(__doc__ or "")
    seeds = [asked.seed + i for i in range(5 if asked.full else 2)]
    methods = ["rescene", "fedavg", "refed", "glfc", "feddm"] if asked.full else ["rescene", "fedavg"]
    with tempfile.TemporaryDirectory(prefix="rescene-trust-") as spare:
        root = Path(spare)
        data = images(root / "images.npz")
        tell("one site of ten flips labels: put apart, and told", *attack(root, "flip"))
        tell("half of the sites lost in every round: the run completes", *losses(data, root, methods, seeds))
        tell("a site ten times as slow: left out at the deadline", *straggler(data, root))


if __name__ == "__main__":
    main()
