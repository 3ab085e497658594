"""Running experiments from the command line, with something to watch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rescene.api import Result, default_folder, execute
from rescene.cli.live import watch
from rescene.cli.livepage import live_page
from rescene.config import Resolved, resolve
from rescene.data import LazySplit
from rescene.engine import prepare_sizes
from rescene.engine.nominal import nominal_cost
from rescene.report import write_report
from rescene.report.model_card import write_card

DEMO = {  # folder: recipe, overrides; the small lens, because `leaves` alone takes minutes for the demo's images
    "fedavg": ("demo", ["method=fedavg"]),
    "rescene": ("demo", ["method=rescene"]),
    "moments": ("lens", ["method=moments", "model.name=linear", "model.lens=waves", "model.width=null"]),
}
PRIVACY_DEMO = {name: (name, ["method=rescene"]) for name in ("demo", "waves", "waves-dp")}


def run_one(
    resolved: Resolved,
    out: Path | None,
    quiet: bool,
    as_json: bool,
    told: bool = True,
    log: str = "",
    elsewhere: bool = False,
) -> None:
    """One run; the report lies in its folder. ``told``: whether the result is printed."""
    folder = out or default_folder(resolved)
    page = folder / "report.html"
    with watch(quiet or as_json or not told) as show, live_page(show, [folder], page) as progress:
        result = execute(resolved, folder, progress, log, elsewhere)
    write_report([folder], page)
    write_card(folder)
    if as_json:
        print(json.dumps({"folder": str(result.folder), **result.values}))
        return
    if told:
        print_summary([result], page)


def run_demo(overrides: list[str], out: Path | None, quiet: bool, privacy: bool = False) -> None:
    """Three methods, or with ``privacy`` three recipes, side by side on the same sites, images and seed."""
    cells = PRIVACY_DEMO if privacy else DEMO
    plans = [resolve(recipe, [*overrides, *own]) for recipe, own in cells.values()]
    root = out or default_folder(plans[0]).parent
    if out is None and (overrides or privacy):
        root = root.with_name(f"demo-{plans[1].digest()}" if overrides else "demo-privacy")
    folders, page, results = [root / name for name in cells], root / "report.html", []
    with watch(quiet) as show, live_page(show, folders, page) as progress:
        for resolved, folder in zip(plans, folders, strict=True):
            results.append(execute(resolved, folder, progress))
            write_card(folder)
    print_summary(results, write_report(folders, page), list(cells) if privacy else [])
    if not privacy:
        print("Moments looked through the lens waves; through leaves, which takes minutes on a CPU: rescene run lens")
    again = "demo --privacy" if privacy else "run own"
    print(f"Again with your images: rescene {again} data.path=./images")


def plan_run(resolved: Resolved, out: Path | None, as_json: bool) -> None:
    """What a run would do: tasks, sites, sizes, bytes. Loads the data, trains nothing."""
    from rescene.cli.listing import print_rows

    experiment = prepare_sizes(resolved.recipe)
    federation = resolved.recipe.federation
    cost = nominal_cost(experiment)
    facts: dict[str, Any] = {
        "folder": str(out or default_folder(resolved)),
        "method": experiment.method.title,
        "data": f"{experiment.dataset.name}, {len(experiment.dataset.train)} train and {len(experiment.dataset.test)} test images",
        "device": str(experiment.device),
        "sites": f"{federation.num_clients}, {federation.per_round} per round, {federation.num_rounds} rounds per task",
        "cost": cost,
        "tasks": [
            {
                "task": task.index,
                "classes": ", ".join(experiment.dataset.classes[c] for c in task.classes),
                "train": len(task.train),
                "test": len(task.test),
                "images per site": f"at most {shards.size}, drawn on demand"
                if isinstance(shards, LazySplit)
                else f"{min(map(len, shards))} to {max(map(len, shards))}",
            }
            for task, shards in zip(experiment.tasks, experiment.shards, strict=True)
        ],
    }
    if as_json:
        print(json.dumps(facts))
        return
    for key in ("method", "data", "device", "sites", "folder"):
        print(f"{key:<8} {facts[key]}")
    if cost:
        up, down = cost["uplink_bytes_per_message"] / 1e6, cost["downlink_bytes_per_message"] / 1e6
        print(f"{'bytes':<8} {up:.2f} MB up and {down:.2f} MB down per site and round (nominal)")
    print_rows(facts["tasks"])
    print("dry run: nothing was trained")


def print_summary(
    results: list[Result], page: Path, names: Sequence[str] = (), settings: Sequence[dict[str, str]] = ()
) -> None:
    """The table at the end of a run, a demo or a sweep, and what left the sites.

    ``names``: of the rows, if not methods. ``settings``: what tells rows of one method apart.
    """
    from rescene.cli.listing import print_rows

    rows, statements = [], {}
    methods = [result.values["method"] for result in results]
    for result, name, setting in zip(results, names or methods, settings or [{} for _ in results], strict=True):
        values = result.values
        statements[f"{name}: {values['privacy']['statement']}"] = None
        per_task = {f"T{j}": _known(v) for j, v in enumerate(values["accuracy_matrix"][-1])}
        if len(per_task) > 10:
            per_task = {}
        upload = values["cost"]["measured"]["uplink_bytes_per_message"] / 1e6
        leakage = values["leakage"]
        missing = "not measured" if "leakage" in values.get("not_measured", {}) else "no images sent"
        copies = f"{100 * leakage['near_copies']:.0f} %" if leakage else missing
        rows.append(
            {
                "recipe" if names else "method": name,
                **setting,
                "AA": _known(values["aa"]),
                "AIA": _known(values["aia"]),
                **per_task,
            }
            | {"forgetting": _known(values["forgetting"]), "upload/round": f"{upload:.2f} MB", "near-copies": copies}
        )
    print_rows(rows)
    for statement in statements:
        print(statement)
    print(f"Report: {page}")


def _known(value: float | None) -> str:
    """An accuracy; sites may have no image to measure it on."""
    return "-" if value is None else f"{value:.1f}"
