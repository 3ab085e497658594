"""What a run leaves: results.json and the tables beside it, without any wall-clock value, and the model."""

from __future__ import annotations

import csv
import io
import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save

from rescene import functional as fn
from rescene.config import Recipe
from rescene.core.errors import ResceneWarning
from rescene.core.json_files import as_json
from rescene.core.results import (
    DIGITS,
    Cost,
    CostFigures,
    EventCounts,
    LateCounts,
    Leakage,
    Privacy,
    Results,
    ScreenRecord,
    SiteAccuracy,
    SiteOrder,
    TaskFacts,
)
from rescene.core.versions import MODEL
from rescene.data import Task
from rescene.data.derived_sets import VALIDATION_WORDS
from rescene.engine.checkpoint import save_atomically, write_json
from rescene.engine.cost_ledger import CostLedger, nominal_cost
from rescene.engine.evaluate import mean_of_known, site_accuracies
from rescene.engine.experiment import Experiment
from rescene.engine.observers.counts import stream_of
from rescene.engine.observers.theory_watch import theory_of, theory_tables
from rescene.engine.run_context import Facts
from rescene.engine.run_folder import RunFolder, words_of
from rescene.lens import open_lens
from rescene.methods import Method
from rescene.methods.base import Model
from rescene.privacy.accounting import NEIGHBOURS
from rescene.privacy.promise import HOW_TO_MEASURE, NO_COUNTS

NO_GUARANTEE = "Not private: uploads carry no formal guarantee."


def results_of(experiment: Experiment, facts: Facts, ledger: CostLedger, model: Model) -> Results:
    """The record of a finished run with this final model. Percent throughout; NaN stands for what nobody measured."""
    recipe, method, tasks, matrix = experiment.recipe, experiment.method, experiment.tasks, facts.matrix
    federation = recipe.federation
    evaluated, by_class, missing = _at_sites(experiment, facts.recall, ledger.sites_tell)
    tested = facts.test_sizes or [len(task.test) for task in tasks]
    aa, aia = _averages(experiment, facts, None if recipe.tasks.scenario == "domain" else tested)
    old, recent = fn.old_and_recent(matrix)
    sites, leakage = site_accuracies(model, experiment), leakage_of(facts.leakage)
    return Results(
        method=method.name,
        aa=aa,
        aia=aia,
        forgetting=fn.forgetting(matrix),
        bwt=fn.backward_transfer(matrix),
        old=old,
        recent=recent,
        worst_task=min(matrix[-1]),
        worst_site=_worst(sites),
        sites=sites,
        balanced_accuracy=fn.balanced_accuracy(facts.confusion) if facts.confusion else mean_of_known(facts.recall),
        within_task=tuple(facts.within_task),
        incremental_accuracy=tuple(facts.incremental),
        accuracy_matrix=tuple(map(tuple, matrix)),
        confusion=tuple(map(tuple, facts.confusion)),
        tasks=tuple(_task_facts(experiment, task, tested[task.index]) for task in tasks),
        cost=Cost(CostFigures(**ledger.measured()), CostFigures(**nominal_cost(experiment) or {})),
        leakage=leakage,
        theory=theory_of(experiment, facts.theory),
        privacy=privacy_of(recipe, method, len(tasks), leakage),
        events_summary=_event_counts(facts),
        evaluated=evaluated,
        accuracy_by_class=by_class,
        not_measured=missing,
        stream=stream_of(experiment, facts.closings),
        orders=_own_orders(experiment, facts.by_site),
        elsewhere=tuple(facts.elsewhere),
        continued=tuple(facts.continued),
        forgotten=tuple(facts.forgotten),
        filtered_by=tuple(facts.filtered_by),
        made_from_objects=tuple(words_of(recipe)),
        simulated=tuple(federation.simulated),
        faults=facts.faults,
        late_answers=_late_counts(facts.late_answers) if federation.delay else None,
        attack_success=None if federation.faults.attack == "none" else facts.attack_success,
        screen=None if federation.screen == "none" else ScreenRecord(facts.judged, tuple(facts.quarantine)),
        style=asdict(method.style()),
        seed=recipe.seed,
        config=recipe.model_dump(mode="json", exclude={"device"}),
    )


def _averages(experiment: Experiment, facts: Facts, sizes: list[int] | None) -> tuple[float, float]:
    """AA and AIA. With an order for each site they are over the classes that anybody has met, which the matrix does not tell."""
    matrix, after = facts.matrix, facts.incremental
    if experiment.orders is not None:
        return after[-1], sum(after) / len(after)
    return fn.average_accuracy(matrix, sizes), fn.average_incremental_accuracy(matrix, sizes)


def _worst(sites: Sequence[SiteAccuracy]) -> float:
    known = [site.accuracy for site in sites if site.accuracy is not None and not math.isnan(site.accuracy)]
    return min(known, default=math.nan)


def _task_facts(experiment: Experiment, task: Task, tested: int) -> TaskFacts:
    dataset, plan = experiment.dataset, experiment.recipe.sites
    return TaskFacts(
        index=task.index,
        classes=tuple(dataset.classes[c] for c in experiment.new_classes(task)),
        domain="" if task.domain is None else dataset.domains[task.domain],
        train_size=len(task.train) if experiment.has_images else None,
        test_size=tested,
        rounds=None if plan is None else plan.tasks[task.index].rounds,
        closed=None if plan is None else plan.tasks[task.index].closed,
    )


def _own_orders(experiment: Experiment, by_site: list[list[float]]) -> tuple[SiteOrder, ...]:
    """What each site met in each step, and the accuracy on all it had met by then; nothing where all have one order."""
    if experiment.orders is None:
        return ()
    names = experiment.dataset.classes
    return tuple(
        SiteOrder(
            site=site,
            tasks=tuple(tuple(names[c] for c in classes) for classes in steps),
            accuracy=tuple(after[site] for after in by_site),
        )
        for site, steps in enumerate(experiment.orders.steps)
    )


def write_tables(folder: Path, results: Results, metrics: Path) -> None:
    """The same numbers as CSV: accuracy matrix, rounds, cost, confusion, theory."""
    matrix, confusion = as_json(results.accuracy_matrix, DIGITS), results.confusion
    header = ["after_task", *(f"task_{j}" for j in range(len(results.tasks)))]
    _write_csv(folder / "accuracy_matrix.csv", header, ([i, *row] for i, row in enumerate(matrix)))
    names = [name for task in results.tasks for name in task.classes][: len(confusion)]
    rows = ([name, *row] for name, row in zip(names, confusion, strict=True))
    _write_csv(folder / "confusion.csv", ["true_class", *names], rows)
    rounds = [row for row in _lines(metrics) if row["kind"] == "round"]
    keys = ("task", "round", "accuracy", "uplink_bytes", "downlink_bytes")
    _write_csv(folder / "rounds.csv", list(keys), ([row[key] for key in keys] for row in rounds))
    turns = ([row["task"], row["round"], client] for row in rounds for client in row["participants"])
    _write_csv(folder / "participation.csv", ["task", "round", "client"], turns)
    measured, nominal = (as_json(figures, DIGITS) for figures in (results.cost.measured, results.cost.nominal))
    costs = ([key, value, nominal.get(key)] for key, value in measured.items())
    _write_csv(folder / "cost.csv", ["quantity", "measured", "nominal"], costs)
    for name, (header, table) in theory_tables(results.theory).items():
        _write_csv(folder / f"{name}.csv", header, table)


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


def _event_counts(facts: Facts) -> EventCounts:
    return EventCounts(
        client_failures=facts.num_client_failures,
        image_fallbacks=facts.num_fallbacks,
        images_withheld=facts.num_withheld,
        uploads_declined=facts.num_declined,
        classes_suppressed=facts.num_suppressed,
    )


def _late_counts(counted: Mapping[str, int]) -> LateCounts:
    sent, on_time, late, rounds, dropped = (
        counted.get(name, 0) for name in ("sent", "on_time", "late", "rounds_late", "dropped")
    )
    return LateCounts(sent, on_time, late, rounds, dropped, under_way=sent - on_time - late - dropped)


def _at_sites(
    experiment: Experiment, recall: list[float], sites_tell: bool
) -> tuple[str, dict[str, float], dict[str, str]]:
    """Where accuracy was measured, percent of each class as the sites counted it, and what could not be measured; usually empty."""
    if experiment.has_images:
        return VALIDATION_WORDS if experiment.recipe.images.validation is not None else "", {}, {}
    words = "not measured: images are at the sites"
    missing = {"leakage": words, "theory": words, "cost.nominal": words}
    if not sites_tell:
        missing["cost.client"] = "not told: behind a mechanism the work and memory of a site stay at the site"
    if not experiment.tested_at_sites:
        return "on the server's test images", {}, missing
    if not any(map(math.isfinite, recall)):
        why = NO_COUNTS if experiment.recipe.formal else "no site answered with counts of held-out images"
        missing["accuracy"] = f"not measured: {why}. For the next run: {HOW_TO_MEASURE}"
    by_class = dict(zip(experiment.dataset.classes, recall, strict=False))
    return "at the sites", by_class, missing | {"confusion": "not measured: sites tell counts and right answers only"}


def leakage_of(tasks: Sequence[Leakage]) -> Leakage | None:
    """Figures over the whole run from those of its tasks: counts add up, means are weighted by images."""
    if not sum(task.num_images or 0 for task in tasks):
        return None

    def column(key: str) -> list[float]:
        return [math.nan if (value := getattr(task, key)) is None else value for task in tasks]

    def total(key: str) -> int:
        return sum(getattr(task, key) for task in tasks)

    def mean(key: str, weight: str = "num_images") -> float:
        return float(sum(a * b for a, b in zip(column(key), column(weight), strict=True)) / total(weight))

    more: dict[str, Any] = {}
    if all(task.start_rms_mean is not None for task in tasks):
        more = {key: mean(key) for key in ("start_rms_mean", "start_rms_median", "start_psnr_median_db")}
        more |= {"start_rms_min": min(column("start_rms_min")), "unmoved": total("unmoved")}
    if all(task.num_traced is not None for task in tasks):
        keys = ("traced", "traced_by_chance", "nearest_seen", "nearest_seen_by_chance")
        more |= {key: mean(key, "num_traced") for key in keys} | {"num_traced": total("num_traced")}
    return Leakage(
        num_images=total("num_images"),
        nearest_rms_mean=mean("nearest_rms_mean"),
        nearest_rms_median=mean("nearest_rms_median"),
        nearest_rms_min=min(column("nearest_rms_min")),
        nearest_psnr_median_db=mean("nearest_psnr_median_db"),
        near_copies=mean("near_copies"),
        exact_copies=total("exact_copies"),
        **more,
        per_task=tuple(tasks),
    )


def privacy_of(recipe: Recipe, method: Method, num_tasks: int, leakage: Leakage | None) -> Privacy:
    """What is guaranteed over the whole run, and in plain words what is not. It follows from the recipe and what was measured."""
    promise = recipe.promise(num_tasks)
    if promise is None:
        return Privacy(private=False, statement=_statement(method, leakage))
    words = promise.statement()
    if leakage is not None:
        images = "images that the server drew" if promise.mechanism.sends_sums else "uploaded images"
        words += f" {_share(leakage.near_copies)} of the {images} are near-copies of a real training image{_traced(leakage)}."
    return Privacy(
        private=promise.formal,
        statement=words,
        leaves_site=method.leaving(promise.mechanism),
        images="drawn" if promise.mechanism.sends_sums else "uploaded",
        mechanism=promise.mechanism.kind,
        noise_multiplier=promise.mechanism.sigma,
        clip=promise.mechanism.clip,
        sampling_rate=promise.composition.rate,
        epsilon=promise.epsilon(),
        epsilon_replaced=promise.epsilon_replaced(),
        epsilon_per_round=promise.epsilon_per_round(),
        delta=promise.delta if promise.formal else None,
        neighbours=NEIGHBOURS if promise.formal else None,
        releases_per_record=promise.whole.releases,
        max_participations=promise.whole.participations,
    )


def _statement(method: Method, leakage: Leakage | None) -> str:
    if leakage is None:
        simulated = "Simulation, exact sums. " if method.additive else ""
        return f"{simulated}{NO_GUARANTEE} What leaves a site: {method.leaves_site}."
    share = _share(leakage.near_copies)
    words = f"{share} of the uploaded images are near-copies (PSNR > 30 dB) of a real training image{_traced(leakage)}."
    return f"{NO_GUARANTEE} {words} {method.leakage_note()}".rstrip()


def _traced(leakage: Leakage) -> str:
    """What stands beside the near-copies; nothing where no image was left to compare with."""
    if leakage.traced is None:
        return ""
    found, chance = _share(leakage.traced), _share(leakage.traced_by_chance)
    return f"; of {leakage.num_traced} looked at with care {found} can be traced to one (images nobody sent: {chance})"


def _share(value: float | None) -> str:
    """
    >>> _share(0.25)
    '25 %'
    """
    if value is None:
        raise ValueError("the share of near-copies is not known")
    return f"{100 * value:.0f} %"


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
