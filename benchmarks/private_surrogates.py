"""Tries at surrogates that start from no data: each is a name and overrides on one protocol; every result is one line of JSON.

python benchmarks/private_surrogates.py OUT.jsonl SEED TASKS [NAME ...]      resumable: a line that is there is not run again
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import rescene

LEAVES = {"method.start": "leaves", "method.num_steps": 100, "method.image_lr": 0.1}
RANDOM = LEAVES | {
    "method.match": ["stages", "features", "pixels", "covariance"],
    "method.random_nets": 8,
    "method.own_net": False,
}
COLOURED = {"method.start": "coloured", "method.num_steps": 0, "method.min_images": 10}
PLAIN = {"train.augment": False}
TRIES: dict[str, dict[str, Any]] = {
    "raw": {"method": "raw-upload"},
    "raw, no crops": {"method": "raw-upload", **PLAIN},
    "white noise, Eq. 1": {"method.start": "noise"},
    "layers": LEAVES | {"method.match": ["features", "logits", "stages", "pixels"]},
    "layers+cov": LEAVES | {"method.match": ["features", "logits", "stages", "pixels", "covariance"]},
    "pixels+cov": LEAVES | {"method.match": ["pixels", "covariance"], "method.own_net": False},
    "random": RANDOM,
    "random, soften": RANDOM | {"train.soften": 0.3},
    "random, group norm": RANDOM | {"model.norm": "group"},
    "random, no crops": RANDOM | PLAIN,
    "coloured": COLOURED,
    "coloured, no crops": COLOURED | PLAIN,
    "coloured, no crops, soften": COLOURED | PLAIN | {"train.soften": 0.3},
    "coloured, no crops, group norm": COLOURED | PLAIN | {"model.norm": "group"},
    "coloured, soften, batch 32": COLOURED | {"train.soften": 0.3, "train.batch_size": 32},
    "coloured, no crops, soften, batch 32": COLOURED | PLAIN | {"train.soften": 0.3, "train.batch_size": 32},
    "raw, soften, batch 32": {"method": "raw-upload", "train.soften": 0.3, "train.batch_size": 32},
    "raw, no crops, soften, batch 32": {"method": "raw-upload", "train.soften": 0.3, "train.batch_size": 32} | PLAIN,
    "local 10, no crops": COLOURED | PLAIN | {"method.neighbours": 10},
    "local 20, no crops": COLOURED | PLAIN | {"method.neighbours": 20, "method.min_images": 20},
    "local 10, soften, batch 32": COLOURED | {"method.neighbours": 10, "train.soften": 0.3, "train.batch_size": 32},
    "local 10, no crops, batch 32": COLOURED | PLAIN | {"method.neighbours": 10, "train.batch_size": 32},
    "coloured+random, no crops": COLOURED
    | PLAIN
    | {"method.num_steps": 40, "method.image_lr": 0.05, "method.match": ["stages", "features", "pixels"]}
    | {"method.random_nets": 8, "method.own_net": False},
    "coloured+random, no crops, soften": COLOURED
    | PLAIN
    | {"method.num_steps": 40, "method.image_lr": 0.05, "method.match": ["stages", "features", "pixels"]}
    | {"method.random_nets": 8, "method.own_net": False, "train.soften": 0.3},
    "coloured+own, no crops": COLOURED
    | PLAIN
    | {"method.num_steps": 40, "method.image_lr": 0.05, "method.match": ["stages", "features", "pixels", "logits"]},
}


def measure(name: str, seed: int, num_tasks: int) -> dict[str, Any]:
    began = time.perf_counter()
    settings = {"federation.evaluate_every": 0, "tasks.limit": num_tasks, "seed": seed, "device": "cpu", **TRIES[name]}
    with tempfile.TemporaryDirectory() as folder:
        found = rescene.run("demo", out=Path(folder) / "run", **settings).values
    return {
        "try": name,
        "seed": seed,
        "tasks": num_tasks,
        "aa": found["aa"],
        "aia": found["aia"],
        "per_task": found["accuracy_matrix"][-1],
        "within": found["within_task"],
        "near_copies": found["leakage"]["near_copies"],
        "exact_copies": found["leakage"]["exact_copies"],
        "nearest_rms": found["leakage"]["nearest_rms_median"],
        "nearest_rms_min": found["leakage"]["nearest_rms_min"],
        "seconds": round(time.perf_counter() - began),
    }


def main(out: str, seed: str, num_tasks: str, *names: str) -> None:
    path = Path(out)
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {(line["try"], line["seed"], line["tasks"]) for line in lines}
    for name in names or TRIES:
        if (name, int(seed), int(num_tasks)) not in done:
            line = json.dumps(measure(name, int(seed), int(num_tasks)))
            print(line, flush=True)
            with path.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
