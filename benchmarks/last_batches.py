"""Are rounds less accurate when a site takes part whose last batch has few images? A look at stored runs.

    python benchmarks/last_batches.py RUN ... [--json FILE]

RUN is a finished run of a method whose sites train, with BatchNorm and ``metrics.jsonl``. The first task alone is looked at,
because a site then trains on its own images and on no kept ones. Its first five rounds are left out: the network has learned
little then. A site of n images has n mod ``batch_size`` in its last batch; few are fewer than ten. Prints, and writes to FILE,
the accuracy of the rounds in which such a site takes part and of those without one.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from statistics import fmean

from rescene.config import Recipe, resolve
from rescene.core.results import read_metrics
from rescene.data.catalog import CATALOG
from rescene.engine.experiment import prepare
from rescene.methods.averaging import AveragingMethod

FEW = 10
LEARNED = 5


def sizes(recipe: Recipe, known: dict[str, list[int]]) -> list[int]:
    """How many images each site has in the first task; ``known`` keeps it for the next run with this split."""
    parts = (recipe.data, recipe.tasks, recipe.federation.beta, recipe.federation.num_clients, recipe.seed)
    if (key := repr(parts)) not in known:
        known[key] = [len(own) for own in prepare(recipe).shards[0]]
    return known[key]


def figures(run: Path, known: dict[str, list[int]]) -> dict[str, object] | None:
    """The accuracies of a run; None if it cannot tell."""
    recipe = resolve(run / "config.yaml", ["device=cpu"]).recipe
    method = recipe.build_method()
    if not isinstance(method, AveragingMethod) or recipe.model.norm != "batch" or recipe.data.name not in CATALOG:
        return None
    images, batch = sizes(recipe, known), recipe.train.batch_size
    last = {k: n % batch for k, n in enumerate(images) if n > batch and recipe.train.smallest_batch <= n % batch < FEW}
    rounds = [
        row for row in read_metrics(run, [])[0] if row.task == 0 and row.round >= LEARNED and row.accuracy is not None
    ]
    few = [row.accuracy for row in rounds if last.keys() & set(row.participants)]
    others = [row.accuracy for row in rounds if not last.keys() & set(row.participants)]
    if not few or not others:
        return None
    return {
        "run": str(run),
        "method": recipe.method["name"],
        "last_batches": {str(k): [images[k], n] for k, n in last.items()},
        "with": _told(few),
        "without": _told(others),
    }


def _told(accuracies: list[float]) -> dict[str, float]:
    mean, least, most = (round(value, 2) for value in (fmean(accuracies), min(accuracies), max(accuracies)))
    return {"rounds": len(accuracies), "mean": mean, "least": least, "most": most}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    known: dict[str, list[int]] = {}
    rows = [row for run in asked.runs if (run / "metrics.jsonl").is_file() and (row := figures(run, known))]
    for row in rows:
        print(
            f"{row['run']:60} [images, in the last batch] {row['last_batches']}  with {row['with']}  without {row['without']}"
        )
    if asked.json:
        asked.json.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
