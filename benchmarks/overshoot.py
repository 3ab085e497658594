"""Do steps on pixels bring surrogates closer to their class? Eq. 1 before and after condensation, by the length of its steps.

    python benchmarks/overshoot.py RUN [CLIENTS]

RUN is a finished run of a method that condenses; the classes of its last task are condensed under its last network at the first
CLIENTS sites (10), as its recipe says but for ``method.step``. Eq. 1 is taken over all real images of the class, with the
network as it is. Prints, and writes to RUN/overshoot.json, the mean over classes and sites.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from rescene.config import resolve
from rescene.data import Shard
from rescene.engine.experiment import prepare
from rescene.functional import matching_loss
from rescene.training import Condensation, Surrogates, condense
from rescene.training.condensation import embedding


@torch.no_grad()
def distance(net: nn.Module, images: Tensor, real: Tensor, settings: Condensation) -> float:
    """Eq. 1 of one class."""
    pairs = zip(embedding(net, images, settings), embedding(net, real, settings), strict=True)
    return sum(float(matching_loss(a.mean(0, keepdim=True), b.mean(0, keepdim=True))) for a, b in pairs)


def figures(net: nn.Module, shard: Shard, made: Surrogates, settings: Condensation) -> list[tuple[float, float, float]]:
    """Of each class: Eq. 1 of the start images and of the surrogates, and how far the pixels moved (RMS, normalised)."""
    rows = []
    for label, members in shard.by_class().items():
        own, real = made.labels == label, shard.pictures(members)
        if bool(own.any()):
            start, images = made.start[own], made.images[own]
            before, after = (distance(net, part, real, settings) for part in (start, images))
            rows.append((before, after, float((images - start).square().mean().sqrt())))
    return rows


def main(run: Path, clients: int = 10) -> None:
    recipe = resolve(run / "config.yaml").recipe
    experiment = prepare(recipe)
    task = experiment.tasks[-1]
    weights = load_file(run / "model" / "final.safetensors")
    net = experiment.arch.restore(weights).to(experiment.device).eval()
    shards = [experiment.shard(task, client, experiment.arch.restore) for client in range(clients)]
    rngs = [experiment.rng.at("overshoot", client) for client in range(clients)]
    told = {}
    for step in ("fixed", "polyak"):
        settings = experiment.method.model_copy(update={"step": step})
        condensed = condense(net, shards, rngs, settings, noise_seed=0)
        net.eval()
        rows = [
            row for shard, made in zip(shards, condensed, strict=True) for row in figures(net, shard, made, settings)
        ]
        start, end, moved = (sum(column) / len(rows) for column in zip(*rows, strict=True))
        told[step] = {"start": start, "end": end, "moved": moved, "classes": len(rows)}
        print(f"{step:7} Eq. 1: {start:.2f} -> {end:.2f}   pixels moved {moved:.3f}   ({len(rows)} classes)")
    (run / "overshoot.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
