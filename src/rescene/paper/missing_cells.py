"""What the paper's tables still lack, most informative first, and how many minutes each run is likely to take here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from rescene.config import Resolved, resolve
from rescene.core.documents import parse_yaml
from rescene.core.errors import ResceneError
from rescene.core.json_files import json_object
from rescene.engine.cost_ledger import nominal_cost
from rescene.paper.costs import without_pictures
from rescene.paper.recipes import FAST_LABEL, PaperCell, paper_recipe
from rescene.paper.store import FAMILY, Store, Stored


@dataclass(frozen=True)
class Missing:
    """A run that no stored folder holds yet."""

    group: str
    name: str
    cell: PaperCell
    seed: int

    @property
    def resolved(self) -> Resolved:
        return self.cell.resolve(f"seed={self.seed}")

    @property
    def folder(self) -> Path:
        """Below the folder of the runs."""
        recipe = self.resolved.recipe
        return Path(recipe.data.name) / f"{recipe.method['name']}-s{self.seed}-{self.resolved.digest()}"

    @property
    def command(self) -> list[str]:
        """The words after `rescene`, without a folder."""
        return ["run", self.cell.base, *self.cell.overrides, f"seed={self.seed}"]


def missing_cells(store: Store) -> list[Missing]:
    """Every run of queue.yaml that is not stored, once, in its order; cells that this version cannot set up are left out."""
    found: dict[tuple[str, int], Missing] = {}
    for group in _queue():
        for line in group["cells"]:
            for name, cell in _cells(line):
                for seed in line["seeds"]:
                    if not cell.unavailable and not store.find(cell.experiment, [seed]):
                        found.setdefault((cell.experiment, seed), Missing(group["group"], name, cell, seed))
    return list(found.values())


def _cells(line: dict[str, Any]) -> Iterator[tuple[str, PaperCell]]:
    for pattern in line["cells"]:
        table, _, wanted = pattern.partition(":")
        for cell in paper_recipe(table).cells:
            where = f"{table}:{cell.name}"
            if not fnmatch(cell.name, wanted) or any(fnmatch(where, other) for other in line.get("except", ())):
                continue
            form = (cell.fast if line.get("fast") else None) or cell
            for reading in line.get("readings", [""]):
                words = (where, FAST_LABEL if form is not cell else "", reading)
                yield ", ".join(filter(None, words)), form.read_as(reading) if reading else form


@lru_cache
def _queue() -> tuple[dict[str, Any], ...]:
    return tuple(parse_yaml((files("rescene.paper") / "queue.yaml").read_text(encoding="utf-8"), "queue.yaml"))


# on another data set the formulas count memories that are never full, up to five times the work (results/cost/README.md)
OVERCOUNTED = ("glfc", "fedcbdr")
Predict = Callable[[Missing], float | None]  # minutes of a run that has the device for itself; None: not known


def predictor(store: Store, device: str) -> Predict:
    """Minutes from stored runs of the same method on the same kind of device, in proportion to the work.

    The quickest stored run counts, since the others ran beside something else; of runs with the same network and server
    epochs if there are any. Without such a run, or where the images' sizes are not known here, nothing is said.
    """
    known = [one for run in store.all() if (one := _timed(run, device))]

    def minutes(missing: Missing) -> float | None:
        recipe = missing.resolved.recipe
        method = FAMILY.get(recipe.method["name"], recipe.method["name"])
        same = [one for one in known if one.method == method and one.model == recipe.model.name]
        if method in OVERCOUNTED:
            same = [one for one in same if one.data == recipe.data.name]
        near = [one for one in same if one.server_epochs == recipe.train.server_epochs] or same
        work = _work(missing.cell.base, missing.cell.overrides) if near else None
        return min(one.seconds / one.work for one in near) * work / 60 if work else None

    return minutes


@dataclass(frozen=True)
class _Timed:
    method: str
    data: str
    model: str
    server_epochs: int
    seconds: float
    work: float


def _timed(run: Stored, device: str) -> _Timed | None:
    problems: list[str] = []
    env, timing = (json_object(run.folder / name, problems) for name in ("env.json", "timing.json"))
    config, seconds = run.results.config, timing.get("total_s")
    if problems or env.get("device") != device or not isinstance(seconds, (int, float)):
        return None
    name = str(config["method"]["name"])
    nominal = run.results.cost.nominal
    work = (nominal.client_flops or 0.0) + (nominal.server_flops or 0.0)
    epochs = int(config["train"]["server_epochs"])
    words = (FAMILY.get(name, name), str(config["data"]["name"]), str(config["model"]["name"]))
    return _Timed(*words, epochs, float(seconds), work) if work else None


@cache
def _work(base: str, overrides: tuple[str, ...]) -> float | None:
    """FLOPs of a run by the paper's formulas."""
    try:
        found = nominal_cost(without_pictures(resolve(base, overrides).recipe, 0))
    except ResceneError:  # such as a data set of unknown sizes
        return None
    return None if found is None else found["client_flops"] + found["server_flops"]
