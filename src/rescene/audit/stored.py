"""What a run folder already holds that an attacker could use: a few uploads of each task, and the sites' ledgers."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rescene.engine.experiment import Experiment
from rescene.privacy import nearest_real
from rescene.privacy.accounting import Composition, total_epsilon
from rescene.privacy.ledger import Charge, Ledger


def stored_uploads(folder: Path, experiment: Experiment) -> dict[str, Any] | None:
    """How many stored uploads have a training image as their nearest, and how many would if the sites had held none of them.

    Training and test images of a class are drawn alike, so an upload that knew neither would have a training image as its
    nearest with the training images' share of the two. None where nothing is stored.
    """
    if not (folder / "surrogates.safetensors").is_file():
        return None
    told = json.loads((folder / "surrogates.json").read_text(encoding="utf-8"))
    rows = told["pairs"] if isinstance(told, dict) else told  # a plain list in older folders
    pictures = load_file(folder / "surrogates.safetensors")["surrogates"]
    data = experiment.dataset
    labels = torch.tensor([data.classes.index(row["class"]) for row in rows])
    nearer, by_chance = [], []
    for label in labels.unique().tolist():
        had, never = (split.pixels[split.labels == label] for split in (data.train, data.test))
        images = data.transform.normalise(pictures[labels == label].to(had.device))
        distances = [nearest_real(images, pool, data.transform)[0] for pool in (had, never)]
        nearer.append((distances[0] < distances[1]).double())
        by_chance.append(torch.full((len(images),), len(had) / (len(had) + len(never)), dtype=torch.float64))
    shares = {"nearest_was_there": nearer, "by_chance": by_chance}
    return {"num_uploads": len(rows)} | {name: float(torch.cat(parts).mean()) for name, parts in shares.items()}


def ledger_epsilon(folder: Path, delta: float) -> tuple[float, int] | None:
    """What the books of the most-used site and task add up to, and in how many participations; None without books."""
    most: tuple[float, int] | None = None
    for path in sorted(folder.glob("client-*.jsonl")):
        tasks: dict[tuple[str, int], list[Charge]] = defaultdict(list)
        for charge in Ledger(path).charges():
            tasks[charge.run, charge.task].append(charge)
        for own in tasks.values():
            spent = total_epsilon([(c.sigma, Composition(c.steps, 1, c.rate)) for c in own], delta)
            most = max(most or (0.0, 0), (spent, len(own)))
    return most
