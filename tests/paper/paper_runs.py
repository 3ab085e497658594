"""Run folders that look finished, for tests of the comparison."""

import json
from statistics import fmean

from rescene.data.catalog import CATALOG
from rescene.functional.metrics import average_accuracy, average_incremental_accuracy


def write_run(
    root,
    cell,
    seed=0,
    aa=50.0,
    aia=60.0,
    matrix=None,
    *,
    overrides=(),
    cost=None,
    near_copies=None,
    config=None,
    rms=None,
):
    """A folder with the results.json of this cell of the paper; its name says nothing. With a ``matrix`` AA and AIA follow from it."""
    if matrix is None:
        matrix = [[2 * aia - aa, None], [aa - 10.0, aa + 10.0]]
    else:
        aa, aia = average_accuracy(matrix), average_incremental_accuracy(matrix)
    folder = root / f"run-{len(list(root.glob('*')))}"
    folder.mkdir(parents=True)
    if config is None:
        config = cell.resolve(f"seed={seed}", *overrides).recipe.model_dump(mode="json", exclude={"device"})
    results = {
        "method": config.get("method", {}).get("name", ""),
        "seed": config.get("seed"),
        "aa": aa,
        "aia": aia,
        "accuracy_matrix": matrix,
        "incremental_accuracy": [fmean(value for value in row if value is not None) for row in matrix if row],
        "tasks": tasks_of(cell, len(matrix)),
        "cost": cost or {"nominal": None, "measured": {}},
        "leakage": None if near_copies is None else {"near_copies": near_copies, "nearest_rms_median": rms},
        "config": config,
    }
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def tasks_of(cell, num):
    """So many tasks that share the classes and images of the cell's data set."""
    entry = CATALOG[cell.data]
    classes, per_class = entry.num_classes, entry.per_class or (10, 10)
    cuts = [classes * t // num for t in range(num + 1)]
    facts = [{"index": t, "classes": [f"class {c}" for c in range(cuts[t], cuts[t + 1])]} for t in range(num)]
    sizes = [[classes * count * (t + 1) // num - classes * count * t // num for count in per_class] for t in range(num)]
    return [one | {"train_size": train, "test_size": test} for one, (train, test) in zip(facts, sizes, strict=True)]


def cell_of(recipe, name):
    return next(cell for cell in recipe.cells if cell.name == name)
