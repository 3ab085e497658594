"""Finished runs on disk, found by what they are and not by what their folder is called, and the columns of the paper's tables.

Costs are what the run's ledger counted; costs.py has them in the paper's conventions. A value that a run does not hold is
None.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

from pydantic import ValidationError

from rescene.config import Recipe
from rescene.core.errors import ResceneError
from rescene.core.recipe_keys import flatten, with_one_augmentation
from rescene.core.results import Results, RoundRecord, TaskRecord, read_metrics, results_of_row, results_row
from rescene.core.run_state import runs_root
from rescene.data.catalog import CATALOG
from rescene.methods import method_class
from rescene.methods.averaging import AveragingMethod
from rescene.methods.surrogates import SurrogateMethod
from rescene.report.groups import Spread, spread
from rescene.report.leaderboard import contradictions, unusable_numbers
from rescene.report.load import RunRecord

# May differ between two runs of the same experiment: where and how it ran, not what.
VOLATILE = {
    *("seed", "device", "data.path", "data.skip_unreadable"),
    *("train.precision", "method.precision", "federation.engine", "federation.evaluate_every"),
}


@dataclass(frozen=True)
class Stored:
    """A finished run: its folder and what its results.json holds."""

    folder: Path
    seed: int
    results: Results

    @cached_property
    def recorded(self) -> tuple[tuple[RoundRecord, ...], tuple[TaskRecord, ...]]:
        """The rounds and the ends of tasks in metrics.jsonl; none if that file was not kept or is damaged."""
        problems: list[str] = []
        found = read_metrics(self.folder, problems)
        return ((), ()) if problems else found


FAMILY = {"rescene-plus": "rescene"}  # a name for other defaults: the settings say what it is


def identity(recipe: Recipe) -> str:
    """The experiment as text, without what may vary between its runs and the epochs that its method never uses."""
    method = method_class(recipe.method["name"])
    condenses, averages = issubclass(method, SurrogateMethod), issubclass(method, AveragingMethod)
    unused = {"train.local_epochs": condenses, "train.server_epochs": averages}
    flat = with_one_augmentation(flatten(recipe.model_dump(mode="json")))
    flat["method.name"] = FAMILY.get(method.name, method.name)
    return json.dumps({key: flat[key] for key in sorted(flat) if key not in VOLATILE and not unused.get(key)})


# what happened to a run that its recipe does not tell: it is another experiment then
CHANGED_BY = ("filtered_by", "made_from_objects", "forgotten", "continued", "evaluated", "not_measured")


class Store:
    """The finished runs below some folders, as long as they are the experiment of their recipe.

    The others are named and do not count. ``unreadable`` has those whose results are damaged or of a newer version, ``foreign``
    those of a method or network of the user's own, ``contradicting`` those whose figures do not follow from their own accuracy
    matrix or whose images are not those of the recipe, and ``changed`` those in which something happened that the recipe does
    not tell, such as uploads that a user's observer filtered.

    ``loaded``: runs of these folders that need not be read again.
    """

    def __init__(self, roots: Iterable[Path], loaded: Iterable[RunRecord] = ()) -> None:
        self.runs: dict[str, dict[int, Stored]] = {}  # identity -> seed -> run; the first one found counts
        self.unreadable: list[Path] = []
        self.foreign: list[Path] = []
        self.contradicting: dict[Path, list[str]] = {}
        self.changed: dict[Path, str] = {}
        known = {run.folder: run for run in loaded if run.finished}
        for file in _result_files(roots):
            self._enter(file, known.get(file.parent))

    def _enter(self, file: Path, run: RunRecord | None) -> None:
        try:
            row = run.raw if run else results_row(file)
            results = run.results if run else results_of_row(row, [])
            if unusable_numbers(results):
                raise ValueError("no accuracy")
            wrong = contradictions(results, row, flatten(results.config))
        except (OSError, ValueError, TypeError, ZeroDivisionError, ResceneError):
            self.unreadable.append(file.parent)
            return
        try:
            recipe = Recipe.model_validate(row["config"])
        except (KeyError, ValidationError, ResceneError):
            self.foreign.append(file.parent)
            return
        wrong += _other_experiment(results, recipe)
        if wrong:
            self.contradicting[file.parent] = wrong
            return
        if happened := [name for name in CHANGED_BY if getattr(results, name)]:
            self.changed[file.parent] = ", ".join(happened)
            return
        stored = Stored(file.parent, recipe.seed, results)
        self.runs.setdefault(identity(recipe), {}).setdefault(recipe.seed, stored)

    def find(self, experiment: str, seeds: Sequence[int] | None = None) -> tuple[Stored, ...]:
        """Runs of this experiment (its identity), by seed."""
        found = self.runs.get(experiment, {})
        return tuple(found[seed] for seed in sorted(found) if seeds is None or seed in seeds)

    def of_seeds(self, seeds: Sequence[int]) -> Store:
        """The same without the runs of other seeds."""
        found = Store([])
        found.unreadable, found.foreign = self.unreadable, self.foreign
        found.contradicting, found.changed = self.contradicting, self.changed
        found.runs = {key: {seed: run for seed, run in own.items() if seed in seeds} for key, own in self.runs.items()}
        return found

    def all(self) -> list[Stored]:
        return [run for seeds in self.runs.values() for run in seeds.values()]

    def at(self, folder: str) -> Stored | None:
        """The run in the folder that ends so, such as ``controls/glfc-s0``."""
        return next((run for run in self.all() if run.folder.resolve().as_posix().endswith(f"/{folder}")), None)


def _other_experiment(results: Results, recipe: Recipe) -> list[str]:
    """What results.json says of method and images against the recipe."""
    method, data, found = recipe.method["name"], recipe.data.name, list[str]()
    if results.method != method:
        found.append(f"method: results.json says {results.method!r}, the recipe says {method!r}")
    whole = recipe.tasks.limit is None and recipe.data.validation is None
    if whole and recipe.tasks.scenario == "class" and not has_images_of(data, results):
        found.append(f"images: the tasks do not have those of {data}")
    return found


def has_images_of(data: str, results: Results) -> bool:
    """Whether the tasks together have the classes and images of a data set. True where its size is not known here."""
    entry = CATALOG.get(data)
    if entry is None or entry.per_class is None:
        return True
    classes = sum(len(task.classes) for task in results.tasks)
    images = tuple(sum(getattr(task, name) or 0 for task in results.tasks) for name in ("train_size", "test_size"))
    return (classes, images) == (entry.num_classes, tuple(entry.num_classes * count for count in entry.per_class))


def default_roots() -> list[Path]:
    """results/ here and in the checkout this package runs from, then the run folder."""
    checkout = Path(__file__).parents[3]
    kept = [Path("results")] + ([checkout / "results"] if (checkout / "pyproject.toml").is_file() else [])
    return [*kept, runs_root()]


def _result_files(roots: Iterable[Path]) -> list[Path]:
    """Each file once, in the order of the roots."""
    found: dict[Path, Path] = {}
    for root in roots:
        for file in sorted(root.rglob("results.json")) if root.is_dir() else ():
            found.setdefault(file.resolve(), file)
    return list(found.values())


_LEDGER = {
    "client_pflop": ("client_flops", 1e15),
    "state_mb": ("client_state_bytes", 1e6),
    "uplink_mb": ("uplink_bytes_per_message", 1e6),
    "downlink_mb": ("downlink_bytes_per_message", 1e6),
    "server_pflop": ("server_flops", 1e15),
}
BYTES = ("state_mb", "uplink_mb", "downlink_mb")
FLOPS = ("client_pflop", "task_client_pflop", "task_server_pflop", "task_total_pflop")
COSTS = (
    *_LEDGER,
    *("client_compute_ratio", "server_compute_ratio"),
    *("task_client_pflop", "task_server_pflop", "task_total_pflop", "client_share", "server_share"),
)
NOMINAL = tuple(metric for metric in COSTS if metric not in ("server_pflop", "server_compute_ratio"))  # see costs.py
REPLAY = ("budget", "images_per_client", "images_in_all")  # of the recipe, see costs.py
_RELATIVE = {  # to the reference cell
    "aa_change": "aa",
    "aia_change": "aia",
    "aa_kept": "aa",
    "client_compute_ratio": "client_pflop",
    "server_compute_ratio": "server_pflop",
}
_LABELS = {
    "aa": "AA", "aia": "AIA", "aa_change": "AA change", "aia_change": "AIA change", "old": "old", "recent": "recent",
    "aa_kept": "AA kept %", "nearest_rms": "RMS to real",
    "client_pflop": "client PFLOP", "state_mb": "state MB", "uplink_mb": "up MB", "downlink_mb": "down MB",
    "client_compute_ratio": "client ratio", "server_compute_ratio": "server ratio", "samples_ratio": "sample ratio",
    "task_client_pflop": "clients PFLOP", "task_server_pflop": "server PFLOP", "task_total_pflop": "total PFLOP",
    "client_share": "clients %", "server_share": "server %", "images_per_client": "images/client", "images_in_all": "images in all",
}  # fmt: skip


def label(metric: str) -> str:
    """
    >>> label("aa"), label("task_3"), label("budget")
    ('AA', 'T3', 'budget')
    """
    return _LABELS.get(metric) or ("T" + metric.removeprefix("task_") if metric.startswith("task_") else metric)


def read(run: Stored, metric: str) -> float | None:
    """One figure of one run."""
    if metric in _LEDGER:
        return _measured(run, *_LEDGER[metric])
    if metric.startswith("task_") and metric[5:].isdigit():
        final = run.results.accuracy_matrix[-1]
        task = int(metric[5:])
        return final[task] if task < len(final) else None
    if metric.startswith("task_") or metric.endswith("_share"):
        return _second_task(run).get(metric)
    if metric in ("samples", "samples_ratio"):
        kept, sent = _surrogates(run)
        return kept if metric == "samples" else kept / sent if kept is not None and sent else None
    if metric == "nearest_rms":  # median distance of an upload to the nearest real image; none if no images are sent
        return run.results.leakage.nearest_rms_median if run.results.leakage else None
    value = getattr(run.results, metric, None)
    return value if isinstance(value, float) else None


def over_seeds(runs: Sequence[Stored], metric: str, reference: Sequence[Stored] = ()) -> Spread | None:
    """Mean and deviation over the runs; ratios and changes are between the means, relative to the reference's runs."""
    if metric not in _RELATIVE:
        return spread(read(run, metric) for run in runs)
    ours, other = (spread(read(run, _RELATIVE[metric]) for run in group) for group in (runs, reference))
    value = relative(metric, ours.mean, other.mean) if ours and other else None
    return None if value is None or ours is None else Spread(value, None, ours.num)


LAST_ROUNDS = 10  # rounds of which the mean says how much AA depends on the sites of one


def last_rounds(run: Stored, task: int = -1) -> list[float]:
    """Accuracy on the tasks so far after each of the last ten rounds of a task; of the last task this is AA.

    It is the accuracy on their test images, or where tasks are domains the mean over them. Nothing where rounds were not
    evaluated, or by another measure than AA.
    """
    after = run.results.incremental_accuracy
    reached = after[task] if len(after) == len(run.results.tasks) > 0 else None
    pooled = [row.accuracy for row in _last_of(run, task) if row.accuracy is not None]
    for found in (pooled, [fmean(row) for row in last_tasks(run, task)]):
        if len(found) == LAST_ROUNDS and reached is not None and abs(found[-1] - reached) < 0.01:
            return found
    return []


def last_tasks(run: Stored, task: int = -1) -> list[list[float]]:
    """Accuracy on each task so far after each of the last ten rounds of a task; nothing in records of earlier versions."""
    rows = _last_of(run, task)
    rounds = [[value for value in row.by_task if value is not None] for row in rows]
    return rounds if all(len(found) == row.task + 1 for row, found in zip(rows, rounds, strict=True)) else []


def aia_of_last_rounds(run: Stored) -> float | None:
    """AIA with each task's last ten rounds in place of its last; None where one of them is not known."""
    tasks = [last_rounds(run, task) for task in range(len(run.results.tasks))]
    return fmean(fmean(rounds) for rounds in tasks) if tasks and all(tasks) else None


def _last_of(run: Stored, task: int) -> list[RoundRecord]:
    """The last ten rounds of a task, which may be counted from the end."""
    return [row for row in run.recorded[0] if row.task == task % len(run.results.tasks)][-LAST_ROUNDS:]


def relative(metric: str, value: float, reference: float) -> float | None:
    """A value against that of the reference: the ratio, the percentage kept, or the difference.

    >>> relative("aa_kept", 55.0, 50.0), relative("aa_change", 55.0, 50.0), relative("aa_kept", 1.0, 0.0)
    (110.0, 5.0, None)
    """
    if metric.endswith("_change"):
        return value - reference
    return (100 if metric.endswith("_kept") else 1) * value / reference if reference else None


def _surrogates(run: Stored) -> tuple[float | None, float | None]:
    """Surrogates kept at the end and sent in all (Table 4b); None where the run did not record its buffers."""
    rows = run.results.theory.classes
    if not rows:
        return None, None
    sent = sum(row.num_pool for row in rows)
    everything = run.results.config["method"].get("buffer") == "keep-all"
    return (sent if everything else sum(row.num_kept for row in rows)), sent


def _measured(run: Stored, key: str, unit: float) -> float | None:
    value: float | None = getattr(run.results.cost.measured, key)
    return None if value is None else value / unit


def _second_task(run: Stored) -> dict[str, float]:
    """PFLOP of the second task (Table 12): clients a T-th of the run, the server's own."""
    clients, server = _measured(run, "client_flops", 1e15), _server_in_second_task(run)
    if clients is None:
        return {}
    clients /= len(run.results.tasks)
    if server is None:
        return {"task_client_pflop": clients}
    return {
        "task_client_pflop": clients,
        "task_server_pflop": server,
        "task_total_pflop": clients + server,
        "client_share": 100 * clients / ((clients + server) or 1),
        "server_share": 100 * server / ((clients + server) or 1),
    }


def _server_in_second_task(run: Stored) -> float | None:
    """As counted at the end of each task; in records of earlier versions by the images it trained on or painted, if noted."""
    rounds, tasks = run.recorded
    ends = [row.server_flops for row in tasks if row.server_flops is not None][:2]
    if len(ends) == 2:
        return (ends[1] - ends[0]) / 1e15
    server = _measured(run, "server_flops", 1e15)
    images = [(row.task, row.notes.get("pool_size", row.notes.get("synthetic_images")) or 0) for row in rounds]
    total = sum(number for _, number in images)
    if not server:
        return server
    return server * sum(number for task, number in images if task == 1) / total if total else None
