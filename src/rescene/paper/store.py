"""Finished runs on disk, found by what they are and not by what their folder is called."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rescene.config import Recipe
from rescene.core.errors import ResceneError
from rescene.core.json_files import json_lines
from rescene.core.recipe_keys import flatten
from rescene.core.results import Results, results_of_row
from rescene.core.run_state import read_object
from rescene.methods import method_class
from rescene.methods.averaging import AveragingMethod
from rescene.methods.surrogates import SurrogateMethod

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

    def rows(self, kind: str) -> list[dict[str, Any]]:
        """The rounds or tasks as recorded in metrics.jsonl; none if that file was not kept."""
        return [row for row in self._recorded if row.get("kind") == kind]

    @cached_property
    def _recorded(self) -> list[dict[str, Any]]:
        problems: list[str] = []
        found = json_lines(self.folder / "metrics.jsonl", problems)
        return [] if problems else found


FAMILY = {"rescene-plus": "rescene"}  # a name for other defaults: the settings say what it is


def identity(recipe: Recipe) -> str:
    """The experiment as text, without what may vary between its runs and the epochs that its method never uses.

    Where the sites condense, only the server could augment: two settings that come to the same are one experiment.
    """
    method = method_class(recipe.method["name"])
    condenses, averages = issubclass(method, SurrogateMethod), issubclass(method, AveragingMethod)
    unused = {"train.local_epochs": condenses, "train.server_epochs": averages}
    flat = flatten(recipe.model_dump(mode="json"))
    flat["method.name"] = FAMILY.get(method.name, method.name)
    if condenses:
        flat["train.augment"] = flat.pop("method.server_augment") and bool(flat["train.augment"])
    return json.dumps({key: flat[key] for key in sorted(flat) if key not in VOLATILE and not unused.get(key)})


class Store:
    """All finished runs below some folders. ``unreadable``: results that are damaged or of another version."""

    def __init__(self, roots: Iterable[Path]) -> None:
        self.runs: dict[str, dict[int, Stored]] = {}  # identity -> seed -> run; the first one found counts
        self.unreadable: list[Path] = []
        for file in _result_files(roots):
            self._enter(file)

    def _enter(self, file: Path) -> None:
        try:
            row = read_object(file)
            recipe, results = Recipe.model_validate(row["config"]), results_of_row(row, [])
            if results.aa is None or not results.accuracy_matrix:
                raise ValueError("no accuracy")
        except (OSError, ValueError, KeyError, TypeError, ValidationError, ResceneError):
            self.unreadable.append(file.parent)
            return
        stored = Stored(file.parent, recipe.seed, results)
        self.runs.setdefault(identity(recipe), {}).setdefault(recipe.seed, stored)

    def find(self, experiment: str, seeds: Sequence[int] | None = None) -> tuple[Stored, ...]:
        """Runs of this experiment (its identity), by seed."""
        found = self.runs.get(experiment, {})
        return tuple(found[seed] for seed in sorted(found) if seeds is None or seed in seeds)

    def all(self) -> list[Stored]:
        return [run for seeds in self.runs.values() for run in seeds.values()]

    def at(self, folder: str) -> Stored | None:
        """The run in the folder that ends so, such as ``controls/glfc-s0``."""
        return next((run for run in self.all() if run.folder.resolve().as_posix().endswith(f"/{folder}")), None)


def default_roots() -> list[Path]:
    """results/ here and in the checkout this package runs from, then the run folder."""
    checkout = Path(__file__).parents[3]
    kept = [Path("results")] + ([checkout / "results"] if (checkout / "pyproject.toml").is_file() else [])
    return [*kept, Path(os.environ.get("RESCENE_RUNS", "runs"))]


def _result_files(roots: Iterable[Path]) -> list[Path]:
    files = [file for root in roots if root.is_dir() for file in sorted(root.rglob("results.json"))]
    return list({file.resolve(): file for file in reversed(files)}.values())[::-1]
