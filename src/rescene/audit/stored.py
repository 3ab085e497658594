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
    """Are the stored uploads nearer to images the sites had than to as many of the same class that they never had?

    Half of them would be no signal. None where nothing is stored.
    """
    if not (folder / "surrogates.safetensors").is_file():
        return None
    rows = json.loads((folder / "surrogates.json").read_text(encoding="utf-8"))
    pictures = load_file(folder / "surrogates.safetensors")["surrogates"]
    data, names = experiment.dataset, [row["class"] for row in rows]
    nearer = []
    for label in sorted({data.classes.index(name) for name in names}):
        own = torch.tensor([data.classes.index(name) == label for name in names])
        had, never = (split.pixels[split.labels == label] for split in (data.train, data.test))
        num = min(len(had), len(never))
        images = data.transform.normalise(pictures[own].to(had.device))
        distances = [nearest_real(images, pool[:num], data.transform)[0] for pool in (had, never)]
        nearer.append(distances[0] < distances[1])
    return {"num_uploads": len(rows), "nearer_to_own": float(torch.cat(nearer).double().mean())}


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
