"""Running experiments from the command line, with something to watch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rescene.api import Result, default_folder, execute
from rescene.cli.live import watch
from rescene.cli.livepage import live_page
from rescene.config import Resolved, resolve
from rescene.data import LazySplit
from rescene.engine import prepare
from rescene.engine.nominal import nominal_cost
from rescene.report import write_report

DEMO_METHODS = ("fedavg", "rescene")


def run_one(resolved: Resolved, out: Path | None, quiet: bool, as_json: bool, elsewhere: bool = False) -> None:
    """One run; the report lies in its folder."""
    folder = out or default_folder(resolved)
    page = folder / "report.html"
    with watch(quiet or as_json) as show, live_page(show, [folder], page) as progress:
        result = execute(resolved, folder, progress, elsewhere)
    write_report([folder], page)
    if as_json:
        print(json.dumps({"folder": str(result.folder), **result.values}))
        return
    print_summary([result], page)


def run_demo(overrides: list[str], out: Path | None, quiet: bool) -> None:
    """The two methods side by side on the same sites, images and seed."""
    plans = [resolve("demo", [*overrides, f"method={name}"]) for name in DEMO_METHODS]
    root = out or default_folder(plans[0]).parent
    if overrides and out is None:
        root = root.with_name(f"demo-{plans[-1].digest()}")
    folders, page, results = [root / name for name in DEMO_METHODS], root / "report.html", []
    with watch(quiet) as show, live_page(show, folders, page) as progress:
        for resolved, folder in zip(plans, folders, strict=True):
            results.append(execute(resolved, folder, progress))
    print_summary(results, write_report(folders, page))
    print("Again with your images: rescene run demo data.path=./images")


def plan_run(resolved: Resolved, out: Path | None, as_json: bool) -> None:
    """What a run would do: tasks, sites, sizes, bytes. Loads the data, trains nothing."""
    from rescene.cli.listing import print_rows

    experiment = prepare(resolved.recipe)
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


def print_summary(results: list[Result], page: Path) -> None:
    """The table at the end of a run, a demo or a sweep, and what left the sites."""
    from rescene.cli.listing import print_rows

    rows = []
    for result in results:
        values = result.values
        per_task = {f"T{j}": _known(v) for j, v in enumerate(values["accuracy_matrix"][-1])}
        if len(per_task) > 10:
            per_task = {}
        upload = values["cost"]["measured"]["uplink_bytes_per_message"] / 1e6
        leakage = values["leakage"]
        missing = "not measured" if "leakage" in values.get("not_measured", {}) else "no images sent"
        copies = f"{100 * leakage['near_copies']:.0f} %" if leakage else missing
        rows.append(
            {"method": values["method"], "AA": _known(values["aa"]), "AIA": _known(values["aia"]), **per_task}
            | {"forgetting": _known(values["forgetting"]), "upload/round": f"{upload:.2f} MB", "near-copies": copies}
        )
    print_rows(rows)
    for statement in dict.fromkeys(f"{r.values['method']}: {r.values['privacy']['statement']}" for r in results):
        print(statement)
    print(f"Report: {page}")


def _known(value: float | None) -> str:
    """An accuracy; sites may have no image to measure it on."""
    return "-" if value is None else f"{value:.1f}"
