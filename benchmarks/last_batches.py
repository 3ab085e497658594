"""Are rounds less accurate when a site takes part whose last batch has few images? A look at stored runs.

    python benchmarks/last_batches.py RUN ... [--json FILE]

RUN is a finished run of a method whose sites train, with BatchNorm and ``metrics.jsonl``. Of FedAvg, FedEWC and FedLwF all tasks
are looked at; of other methods the first alone, because a site then has no kept images yet. The first five rounds of a task are
left out: the network has learned little then. A site of n images has n mod ``batch_size`` in its last batch; few are fewer than
ten. Prints, and writes to FILE, the accuracy (on the tasks so far) and the loss (the mean over sites) of the rounds in which
such a site takes part and of those without one, for tasks that have three rounds of each at least.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rescene.config import Recipe, resolve
from rescene.core.results import RoundRecord, read_metrics
from rescene.data.catalog import CATALOG
from rescene.engine.experiment import prepare
from rescene.methods.averaging import AveragingMethod

FEW, LEARNED, ROUNDS = 10, 5, 3
KEEP_NO_IMAGES = ("fedavg", "fedewc", "fedlwf")
Sizes = list[list[int]]


def sizes(recipe: Recipe, known: dict[str, Sizes]) -> Sizes:
    """[task][site]: how many images; ``known`` keeps it for the next run with this split."""
    split = recipe.federation
    parts = (recipe.data, recipe.tasks, recipe.seed, split.partition, split.beta, split.num_clients, split.min_size)
    if (key := repr(parts)) not in known:
        known[key] = [[len(own) for own in task] for task in prepare(recipe).shards]
    return known[key]


def figures(run: Path, known: dict[str, Sizes]) -> Iterator[dict[str, Any]]:
    """A row for each task that can tell."""
    recipe = resolve(run / "config.yaml", ["device=cpu"]).recipe
    trained = isinstance(recipe.build_method(), AveragingMethod) and recipe.model.norm == "batch"
    if not trained or recipe.data.name not in CATALOG:
        return
    name, least, batch = recipe.method["name"], recipe.train.smallest_batch, recipe.train.batch_size
    rounds = [row for row in read_metrics(run, [])[0] if row.round >= LEARNED and row.accuracy is not None]
    for task, images in enumerate(sizes(recipe, known)):
        few = {k: [n, n % batch] for k, n in enumerate(images) if n > batch and least <= n % batch < FEW}
        here = [row for row in rounds if row.task == task and (task == 0 or name in KEEP_NO_IMAGES)]
        groups = (
            [row for row in here if few.keys() & set(row.participants)],
            [row for row in here if not few.keys() & set(row.participants)],
        )
        if all(len(group) >= ROUNDS for group in groups):
            sites = {str(k): told for k, told in few.items()}
            told = dict(zip(("with", "without"), map(_told, groups), strict=True))
            yield {"run": str(run), "method": name, "task": task + 1, "images_and_last_batch": sites} | told


def _told(rounds: Sequence[RoundRecord]) -> dict[str, float | list[float]]:
    accuracies = [row.accuracy for row in rounds if row.accuracy is not None]
    losses = [row.notes["local_loss"] for row in rounds if "local_loss" in row.notes]
    told: dict[str, float | list[float]] = {"rounds": len(rounds), "accuracy": _short([fmean(accuracies)])[0]}
    told["accuracies"] = _short([min(accuracies), max(accuracies)])
    return told | ({"losses": _short([min(losses), max(losses)], 4)} if losses else {})


def _short(values: Sequence[float], digits: int = 2) -> list[float]:
    return [round(value, digits) for value in values]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    known: dict[str, Sizes] = {}
    rows = [row for run in asked.runs if (run / "metrics.jsonl").is_file() for row in figures(run, known)]
    for row in rows:
        print(row["run"], "task", row["task"], row["images_and_last_batch"])
        print("    with", row["with"], "without", row["without"])
    if asked.json:
        asked.json.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
