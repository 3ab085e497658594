"""What the paper's tables still lack, most informative first, and the minutes that each missing run is likely to take here."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

from rescene.config import Resolved, resolve
from rescene.core.errors import ConfigError, ResceneError
from rescene.core.json_files import json_object
from rescene.engine.cost_ledger import nominal_cost
from rescene.paper.costs import without_pictures
from rescene.paper.numbers import packaged
from rescene.paper.recipes import FAST_LABEL, PaperCell, matches, paper_recipe
from rescene.paper.store import FAMILY, Store, Stored

# several runs on one GPU: how much longer each takes than alone (results/bench/README.md)
SLOWER = {1: 1.0, 2: 1.6, 3: 2.25, 4: 2.95}
AT_A_TIME = "at-a-time.json"


def slower(at_a_time: int) -> float:
    """How many times as long a run takes with so many at a time. More than four gain nothing: they share the card in proportion.

    >>> slower(1), slower(4), slower(8)
    (1.0, 2.95, 5.9)
    """
    known = min(at_a_time, max(SLOWER))
    return SLOWER[known] * at_a_time / known


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


def picked(missing: Sequence[Missing], patterns: Sequence[str]) -> list[Missing]:
    """Runs whose name fits one of the patterns or has it as a part, or whose group has this letter; no pattern: all (E151)."""
    if idle := [pattern for pattern in patterns if not any(_is_meant(one, pattern) for one in missing)]:
        raise ConfigError(
            "E151",
            f"no run that is missing matches {', '.join(idle)}",
            why=f"a run is called like {missing[0].name!r}, in group {missing[0].group!r}"
            if missing
            else "none is missing",
            fix="rescene paper run --queue --plan lists them",
        )
    return [one for one in missing if not patterns or any(_is_meant(one, pattern) for pattern in patterns)]


def _is_meant(one: Missing, pattern: str) -> bool:
    if len(pattern) == 1:
        return one.group.startswith(f"{pattern}.")
    return matches(one.name, pattern)


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


def _queue() -> tuple[dict[str, Any], ...]:
    return tuple(packaged("queue.yaml"))


# on another data set the formulas count memories that are never full, up to five times the work (results/cost/README.md)
OVERCOUNTED = ("glfc", "fedcbdr")
Predict = Callable[[Missing], float | None]  # minutes of a run that has the device for itself; None: not known


def predictor(store: Store, device: str) -> Predict:
    """Minutes from stored runs of the same method on the same kind of device, in proportion to the work.

    Of runs with the same network, those with the same data and server epochs count if there are any. Where it is known how
    many ran at a time, the median of what they would take alone; else the quickest, since others only slow a run down.
    Where the number of images is not known here, the work is that of stored runs with the same data and server epochs.
    Without such a run nothing is said.
    """
    known = [one for run in store.all() if (one := _timed(run, device))]

    def minutes(missing: Missing) -> float | None:
        recipe = missing.resolved.recipe
        method = FAMILY.get(recipe.method["name"], recipe.method["name"])
        form = (method, recipe.model.name, _norm_statistics(recipe.method))
        same = [one for one in known if (one.method, one.model, one.norm_statistics) == form]
        if method in OVERCOUNTED:
            same = [one for one in same if one.data == recipe.data.name]
        near = [one for one in same if one.server_epochs == recipe.train.server_epochs] or same
        near = [one for one in near if one.data == recipe.data.name] or near
        alike = [
            one.work for one in near if (one.data, one.server_epochs) == (recipe.data.name, recipe.train.server_epochs)
        ]
        work = _work(missing.cell.base, missing.cell.overrides) or (statistics.median(alike) if alike else None)
        return _pace(near) * work / 60 if near and work else None

    return minutes


@dataclass(frozen=True)
class _Timed:
    method: str
    data: str
    model: str
    norm_statistics: str
    server_epochs: int
    seconds: float
    work: float
    at_a_time: int | None  # runs on the device while it ran; None: not known


def _pace(runs: Sequence[_Timed]) -> float:
    """Seconds of a FLOP for a run that has the device for itself.

    >>> def made(seconds, at_a_time): return _Timed("m", "d", "net", "server", 10, seconds, 1.0, at_a_time)
    >>> _pace([made(30.0, None), made(20.0, None)]), _pace([made(30.0, None), made(16.0, 2), made(45.0, 3), made(59.0, 4)])
    (20.0, 20.0)
    """
    alone = [one.seconds / slower(one.at_a_time) / one.work for one in runs if one.at_a_time]
    return statistics.median(alone) if alone else min(one.seconds / one.work for one in runs)


def _at_a_time(run: Path, timing: Mapping[str, Any]) -> int | None:
    """As the queue wrote it into timing.json; of older runs as a list beside the results has it (results/README.md)."""
    told = timing.get("at_a_time")
    for place in run.parents if told is None else ():
        if (listed := place / AT_A_TIME).is_file():
            told = json_object(listed, []).get(run.relative_to(place).as_posix())
    return told if isinstance(told, int) and told > 0 else None


def _norm_statistics(method: Mapping[str, Any]) -> str:
    """Condensation with statistics of the batch takes several times as long on a GPU, because it is not recorded as a graph."""
    return str(method.get("norm_statistics", "server"))


def _timed(run: Stored, device: str) -> _Timed | None:
    problems: list[str] = []
    env, timing = (json_object(run.folder / name, problems) for name in ("env.json", "timing.json"))
    config, seconds = run.results.config, timing.get("total_s")
    if problems or env.get("device") != device or not isinstance(seconds, float) or not 0 < seconds < math.inf:
        return None
    try:
        name, data, model = (str(config[section]["name"]) for section in ("method", "data", "model"))
        epochs = int(config["train"]["server_epochs"])
    except KeyError:  # a record of an early version
        return None
    nominal = run.results.cost.nominal
    work = (nominal.client_flops or 0.0) + (nominal.server_flops or 0.0)
    told = (_norm_statistics(config["method"]), epochs, seconds, work, _at_a_time(run.folder, timing))
    return _Timed(FAMILY.get(name, name), data, model, *told) if work else None


@cache
def _work(base: str, overrides: tuple[str, ...]) -> float | None:
    """FLOPs of a run by the paper's formulas."""
    try:
        found = nominal_cost(without_pictures(resolve(base, overrides).recipe, 0))
    except ResceneError:  # such as a data set of unknown sizes
        return None
    return None if found is None else found["client_flops"] + found["server_flops"]
