"""Are rounds less accurate when a site takes part whose last batch has few images? A look at stored runs.

    python benchmarks/last_batches.py RUN ... [--sites K,...] [--json FILE]

RUN is a finished run of a method whose sites train, with BatchNorm and ``metrics.jsonl``. Of FedAvg, FedEWC and FedLwF all tasks
are looked at; of other methods the first alone. The first five rounds of a task are left out: the network has learned little
then. A site of n images has n mod ``batch_size`` in its last batch; few are fewer than ten. ``--sites`` names the sites instead,
also for runs in which no site has such a batch.

Prints, for tasks that have three rounds of each at least, the accuracy (on the tasks so far) and the loss (the mean over sites)
of the rounds in which such a site takes part and of those without one. FILE also gets ``each_site``: the accuracy of the rounds
in which a site takes part minus that of the others, for every site, so that one sees whether the sites with such a batch stand
out. It also gets the split of every run: how many images each site has of a task, and of its largest class there.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rescene.config import Recipe, resolve
from rescene.core.results import RoundRecord, read_metrics
from rescene.data.catalog import CATALOG
from rescene.engine.experiment import prepare
from rescene.methods.averaging import AveragingMethod

FEW, LEARNED, ROUNDS = 10, 5, 3
# Later tasks of other methods: the sites of GLFC, FedCBDR and Re-Fed then have kept images too, so their last batch has another
# size; TARGET's take a large synthetic batch beside each real one, from which BatchNorm learns too.
LAST_BATCH_IS_KNOWN = ("fedavg", "fedewc", "fedlwf")
Split = dict[str, Any]
Rounds = Sequence[RoundRecord]


def split_of(recipe: Recipe, known: dict[str, Split]) -> Split:
    """How many images each site has, [task][site]; ``known`` keeps it for the next run with this split."""
    data, how = recipe.data, recipe.federation
    parts = (
        data.model_copy(update={"image_size": None}),
        recipe.tasks,
        recipe.seed,
        how.partition,
        how.beta,
        how.num_clients,
        how.min_size,
    )
    if (key := repr(parts)) not in known:
        tasks = [row["counts"] for row in prepare(recipe).counts()["tasks"]]
        known[key] = {
            **{
                "split": len(known),
                "data": data.name,
                "held_out": data.held_out,
                "beta": how.beta,
                "seed": recipe.seed,
            },
            "images": [[sum(site) for site in task] for task in tasks],
            "largest_class": [[max(site) for site in task] for task in tasks],
        }
    return known[key]


def figures(run: Path, known: dict[str, Split], named: Collection[int] = ()) -> Iterator[dict[str, Any]]:
    """A row for each task that can tell."""
    recipe = resolve(run / "config.yaml", ["device=cpu"]).recipe
    trained = isinstance(recipe.build_method(), AveragingMethod) and recipe.model.norm == "batch"
    if not trained or recipe.data.name not in CATALOG:
        return
    name, least, batch = recipe.method["name"], recipe.train.smallest_batch, recipe.train.batch_size
    rounds = [row for row in read_metrics(run, [])[0] if row.round >= LEARNED and row.accuracy is not None]
    split = split_of(recipe, known)
    for task, images in enumerate(split["images"]):
        sites = named or {k for k, n in enumerate(images) if n > batch and least <= n % batch < FEW}
        here = [row for row in rounds if row.task == task and (task == 0 or name in LAST_BATCH_IS_KNOWN)]
        if (groups := _with_and_without(here, sites)) is not None:
            yield {
                **{"run": str(run), "method": name, "task": task + 1, "split": split["split"]},
                "images_and_last_batch": {str(k): [images[k], images[k] % batch] for k in sorted(sites)},
                **dict(zip(("with", "without"), map(_told, groups), strict=True)),
                "each_site": [_difference(here, site) for site in range(len(images))],
            }


def _with_and_without(rounds: Rounds, sites: Collection[int]) -> tuple[Rounds, Rounds] | None:
    """The rounds in which one of the sites takes part, and the others; None if one group is too small to tell."""
    groups = (
        [row for row in rounds if not set(sites).isdisjoint(row.participants)],
        [row for row in rounds if set(sites).isdisjoint(row.participants)],
    )
    return groups if all(len(group) >= ROUNDS for group in groups) else None


def _difference(rounds: Rounds, site: int) -> float | None:
    """Accuracy of the rounds in which the site takes part minus that of the others."""
    if (groups := _with_and_without(rounds, {site})) is None:
        return None
    present, absent = (fmean(_accuracies(group)) for group in groups)
    return round(present - absent, 2)


def _told(rounds: Rounds) -> dict[str, float | list[float]]:
    accuracies = _accuracies(rounds)
    losses = [row.notes["local_loss"] for row in rounds if "local_loss" in row.notes]
    told: dict[str, float | list[float]] = {"rounds": len(rounds), "accuracy": round(fmean(accuracies), 2)}
    told["accuracies"] = _range(accuracies, 2)
    return told | ({"losses": _range(losses, 4)} if losses else {})


def _accuracies(rounds: Rounds) -> list[float]:
    return [row.accuracy for row in rounds if row.accuracy is not None]


def _range(values: Sequence[float], digits: int) -> list[float]:
    return [round(min(values), digits), round(max(values), digits)]


def _lines(rows: Sequence[dict[str, Any]]) -> str:
    """A JSON list with a line for each row."""
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--sites", type=lambda text: {int(word) for word in text.split(",")}, default=())
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    known: dict[str, Split] = {}
    runs = (run for run in asked.runs if (run / "metrics.jsonl").is_file())
    rows = [row for run in runs for row in figures(run, known, asked.sites)]
    for row in rows:
        print(row["run"], "task", row["task"], row["images_and_last_batch"])
        print("    with", row["with"], "without", row["without"])
    if asked.json:
        asked.json.write_text(f'{{"splits": {_lines([*known.values()])},\n"tasks": {_lines(rows)}}}\n')


if __name__ == "__main__":
    main()
