"""What a run leaves: results.json and the tables beside it, without any wall-clock value, and the model."""

from __future__ import annotations

import csv
import io
import json
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save

from rescene import functional as fn
from rescene.config import Recipe
from rescene.core.errors import ResceneWarning
from rescene.core.results import rounded
from rescene.core.versions import MODEL, RESULTS
from rescene.data.derived_sets import VALIDATION_WORDS
from rescene.engine.checkpoint import save_atomically, write_json
from rescene.engine.cost_ledger import CostLedger, nominal_cost
from rescene.engine.experiment import Experiment
from rescene.engine.observers.counts import stream_record
from rescene.engine.observers.theory_watch import theory_record, theory_tables
from rescene.engine.run_folder import RunFolder, words_of
from rescene.lens import open_lens
from rescene.methods import Method
from rescene.methods.base import Model
from rescene.privacy.accounting import NEIGHBOURS
from rescene.privacy.promise import HOW_TO_MEASURE, NO_COUNTS

NO_GUARANTEE = "Not private: uploads carry no formal guarantee."


def results_of(experiment: Experiment, facts: dict[str, Any], ledger: CostLedger) -> dict[str, Any]:
    """The record of a finished run. Percent throughout; entries of the accuracy matrix above the diagonal are null."""
    matrix = facts["matrix"]
    tasks = experiment.tasks
    tested = facts["test_sizes"] or [len(task.test) for task in tasks]
    sizes = None if experiment.recipe.tasks.scenario == "domain" else tested
    old, recent = fn.old_and_recent(matrix)
    leakage = _leakage(facts["leakage"])
    record: dict[str, Any] = rounded(
        {
            "schema": RESULTS,
            "method": experiment.method.name,
            **_averages(experiment, facts, sizes),
            "forgetting": fn.forgetting(matrix),
            "bwt": fn.backward_transfer(matrix),
            "old": old,
            "recent": recent,
            "worst_task": min(matrix[-1]),
            "balanced_accuracy": fn.balanced_accuracy(facts["confusion"])
            if facts["confusion"]
            else _mean(facts["recall"]),
            "within_task": facts["within_task"],
            "incremental_accuracy": facts["incremental"],
            "accuracy_matrix": matrix,
            "confusion": facts["confusion"],
            "tasks": [
                {
                    "index": task.index,
                    "classes": [experiment.dataset.classes[c] for c in experiment.new_classes(task)],
                    "domain": None if task.domain is None else experiment.dataset.domains[task.domain],
                    "train_size": len(task.train) if experiment.has_images else None,
                    "test_size": tested[task.index],
                }
                | _held(experiment, task.index)
                for task in tasks
            ],
            "cost": {"measured": ledger.measured(), "nominal": nominal_cost(experiment)},
            "leakage": leakage,
            "theory": theory_record(experiment, facts["theory"]),
            "privacy": privacy_record(experiment.recipe, experiment.method, len(tasks), leakage),
            "events_summary": {
                "client_failures": facts["num_client_failures"],
                "image_fallbacks": facts["num_fallbacks"],
                "images_withheld": facts["num_withheld"],
                "uploads_declined": facts["num_declined"],
                "classes_suppressed": facts["num_suppressed"],
            },
            **_at_sites(experiment, facts["recall"], ledger.sites_tell),
            **stream_record(experiment, facts["closings"]),
            **_own_orders(experiment, facts["by_site"]),
            **{name: facts[name] for name in ("elsewhere", "continued", "forgotten", "filtered_by") if facts[name]},
            **({"made_from_objects": words} if (words := words_of(experiment.recipe)) else {}),
            **_hazards(experiment, facts),
            "style": asdict(experiment.method.style()),
            "seed": experiment.recipe.seed,
            "config": experiment.recipe.model_dump(mode="json", exclude={"device"}),
        }
    )
    return record


def _averages(experiment: Experiment, facts: dict[str, Any], sizes: list[int] | None) -> dict[str, float]:
    """AA and AIA. With an order for each site they are over the classes that anybody has met, which the matrix does not tell."""
    matrix, after = facts["matrix"], facts["incremental"]
    if experiment.orders is not None:
        return {"aa": after[-1], "aia": sum(after) / len(after)}
    return {"aa": fn.average_accuracy(matrix, sizes), "aia": fn.average_incremental_accuracy(matrix, sizes)}


def _own_orders(experiment: Experiment, by_site: list[list[float]]) -> dict[str, Any]:
    """What each site met in each step, and the accuracy on all it had met by then; nothing where all have one order."""
    if experiment.orders is None:
        return {}
    names = experiment.dataset.classes
    rows = [
        {
            "site": site,
            "tasks": [[names[c] for c in classes] for classes in steps],
            "accuracy": [after[site] for after in by_site],
        }
        for site, steps in enumerate(experiment.orders.steps)
    ]
    return {"orders": rows}


def write_tables(folder: Path, results: dict[str, Any], metrics: Path) -> None:
    """The same numbers as CSV: accuracy matrix, rounds, cost, confusion, theory."""
    tasks = [f"task_{j}" for j in range(len(results["tasks"]))]
    _write_csv(
        folder / "accuracy_matrix.csv",
        ["after_task", *tasks],
        ([i, *row] for i, row in enumerate(results["accuracy_matrix"])),
    )
    names = [name for task in results["tasks"] for name in task["classes"]]
    names = names[: len(results["confusion"])]
    _write_csv(
        folder / "confusion.csv",
        ["true_class", *names],
        ([name, *row] for name, row in zip(names, results["confusion"], strict=True)),
    )
    lines = _lines(metrics)
    keys = ("task", "round", "accuracy", "uplink_bytes", "downlink_bytes")
    rounds = [row for row in lines if row["kind"] == "round"]
    _write_csv(folder / "rounds.csv", list(keys), ([row[key] for key in keys] for row in rounds))
    _write_csv(
        folder / "participation.csv",
        ["task", "round", "client"],
        ([row["task"], row["round"], client] for row in rounds for client in row["participants"]),
    )
    cost = results["cost"]
    nominal = cost["nominal"] or {}
    _write_csv(
        folder / "cost.csv",
        ["quantity", "measured", "nominal"],
        ([key, value, nominal.get(key)] for key, value in cost["measured"].items()),
    )
    for name, (header, rows) in theory_tables(results["theory"]).items():
        _write_csv(folder / f"{name}.csv", header, rows)


def _lines(path: Path) -> list[dict[str, Any]]:
    """What the run wrote down. A line the disk has damaged is told and left out: it must not stand between a run and its end."""
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            row = json.loads(line)
            row["kind"]
            found.append(row)
        except (ValueError, KeyError, TypeError) as error:
            warnings.warn(ResceneWarning("W402", f"{path.name}, line {number} is damaged: {error}"), stacklevel=3)
    return found


def _held(experiment: Experiment, task: int) -> dict[str, Any]:
    """Rounds of a task of a plan, and whether it was closed before its last one."""
    plan = experiment.recipe.sites
    return {} if plan is None else {"rounds": plan.tasks[task].rounds, "closed": plan.tasks[task].closed}


def _hazards(experiment: Experiment, facts: dict[str, Any]) -> dict[str, Any]:
    """What was simulated to go wrong, what an attack achieved, what the screen did; nothing for an ordinary run."""
    federation, found = experiment.recipe.federation, dict[str, Any]()
    if federation.simulated:
        found["simulated"] = list(federation.simulated)
    if facts["faults"]:
        found["faults"] = facts["faults"]
    if federation.delay:
        known = {"sent": 0, "on_time": 0, "late": 0, "rounds_late": 0, "dropped": 0} | facts["late_answers"]
        arrived = known["on_time"] + known["late"] + known["dropped"]
        found["late_answers"] = known | {"under_way": known["sent"] - arrived}
    if federation.faults.attack != "none":
        found["attack_success"] = facts["attack_success"]
    if federation.screen != "none":
        found["screen"] = {"judged": facts["judged"], "quarantined": facts["quarantine"]}
    return found


def _at_sites(experiment: Experiment, recall: list[float], sites_tell: bool) -> dict[str, Any]:
    """Where the images are at the sites: where accuracy was measured, and what could not be measured anywhere."""
    if experiment.has_images:
        return {"evaluated": VALIDATION_WORDS} if experiment.recipe.images.validation is not None else {}
    words = "not measured: images are at the sites"
    missing = {"leakage": words, "theory": words, "cost.nominal": words}
    if not sites_tell:
        missing["cost.client"] = "not told: behind a mechanism the work and memory of a site stay at the site"
    if not experiment.tested_at_sites:
        return {"evaluated": "on the server's test images", "not_measured": missing}
    if not any(map(math.isfinite, recall)):
        why = NO_COUNTS if experiment.recipe.formal else "no site answered with counts of held-out images"
        missing["accuracy"] = f"not measured: {why}. For the next run: {HOW_TO_MEASURE}"
    by_class = dict(zip(experiment.dataset.classes, recall, strict=False))
    return {
        "evaluated": "at the sites",
        "accuracy_by_class": by_class,
        "not_measured": missing | {"confusion": "not measured: sites tell counts and right answers only"},
    }


def _mean(values: list[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def _leakage(per_task: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Figures over the whole run from those of the tasks: counts add up, means are weighted by images."""
    total = sum(row["num_images"] for row in per_task)
    if not total:
        return None

    def mean(key: str) -> float:
        return float(sum(row[key] * row["num_images"] for row in per_task) / total)

    starts = {}
    if all("start_rms_mean" in row for row in per_task):
        starts = {key: mean(key) for key in ("start_rms_mean", "start_rms_median", "start_psnr_median_db")}
        starts["start_rms_min"] = min(row["start_rms_min"] for row in per_task)
        starts["unmoved"] = sum(row["unmoved"] for row in per_task)
    traced = {}
    if all("num_traced" in row for row in per_task):
        num = sum(row["num_traced"] for row in per_task)
        keys = ("traced", "traced_by_chance", "nearest_seen", "nearest_seen_by_chance")
        traced = {key: sum(row[key] * row["num_traced"] for row in per_task) / num for key in keys}
        traced["num_traced"] = num
    return {
        "num_images": total,
        "nearest_rms_mean": mean("nearest_rms_mean"),
        "nearest_rms_median": mean("nearest_rms_median"),
        "nearest_rms_min": min(row["nearest_rms_min"] for row in per_task),
        "nearest_psnr_median_db": mean("nearest_psnr_median_db"),
        "near_copies": mean("near_copies"),
        "exact_copies": sum(row["exact_copies"] for row in per_task),
        **starts,
        **traced,
        "per_task": per_task,
    }


def privacy_record(recipe: Recipe, method: Method, num_tasks: int, leakage: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is guaranteed over the whole run, and in plain words what is not. It follows from the recipe and what was measured."""
    promise = recipe.promise(num_tasks)
    if promise is None:
        return {"private": False, "statement": _statement(method, leakage)}
    words = promise.statement()
    if leakage is not None:
        images = "images that the server drew" if promise.mechanism.sends_sums else "uploaded images"
        words += f" {100 * leakage['near_copies']:.0f} % of the {images} are near-copies of a real training image{_traced(leakage)}."
    return {
        "private": promise.formal,
        "statement": words,
        "leaves_site": method.leaving(promise.mechanism),
        "images": "drawn" if promise.mechanism.sends_sums else "uploaded",
        "mechanism": promise.mechanism.kind,
        "noise_multiplier": promise.mechanism.sigma,
        "clip": promise.mechanism.clip,
        "sampling_rate": promise.composition.rate,
        "epsilon": promise.epsilon(),
        "epsilon_replaced": promise.epsilon_replaced(),
        "epsilon_per_round": promise.epsilon_per_round(),
        "delta": promise.delta if promise.formal else None,
        "neighbours": NEIGHBOURS if promise.formal else None,
        "releases_per_record": promise.whole.releases,
        "max_participations": promise.whole.participations,
    }


def _statement(method: Method, leakage: Mapping[str, Any] | None) -> str:
    if leakage is None:
        simulated = "Simulation, exact sums. " if method.additive else ""
        return f"{simulated}{NO_GUARANTEE} What leaves a site: {method.leaves_site}."
    share = f"{100 * leakage['near_copies']:.0f} %"
    words = f"{share} of the uploaded images are near-copies (PSNR > 30 dB) of a real training image{_traced(leakage)}."
    return f"{NO_GUARANTEE} {words} {method.leakage_note()}".rstrip()


def _traced(leakage: Mapping[str, Any]) -> str:
    """What stands beside the near-copies; nothing where no image was left to compare with."""
    if "traced" not in leakage:
        return ""
    found, chance = (f"{100 * leakage[key]:.0f} %" for key in ("traced", "traced_by_chance"))
    return (
        f"; of {leakage['num_traced']} looked at with care {found} can be traced to one (images nobody sent: {chance})"
    )


def _write_csv(path: Path, header: list[str], rows: Iterable[list[Any]]) -> None:
    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(["" if cell is None else cell for cell in row] for row in rows)
    save_atomically(path, file.getvalue().encode())


def save_model(run: RunFolder, e: Experiment, weights: Model) -> None:
    """The final model, before anything is evaluated or exported that might fail."""
    folder = run.directory("model")
    model = {key: value.detach().cpu().contiguous() for key, value in weights.items()}
    save_atomically(folder / "final.safetensors", save(model))
    card = {"schema": MODEL, "arch": vars(e.arch), "classes": list(e.dataset.classes[: e.tasks[-1].num_seen])}
    look: dict[str, Any] = {"mean": e.dataset.transform.mean, "std": e.dataset.transform.std}
    if e.recipe.model.lens is not None:
        lens = open_lens(e.recipe.model.lens)
        look |= {"lens": e.recipe.model.lens, "lens_sha256": lens.sha256, "lens_made_from": lens.made_from}
        look |= {"picture_size": e.dataset.picture_size}
    write_json(folder / "model.json", card | look)
