"""Costs in the paper's own conventions (App. E), from recipes and their splits: no data and no run is needed.

All are means over seeds, since the split is drawn. What the ledger of a run with our defaults counts is ``engine.forecast``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from statistics import fmean
from typing import Any

from rescene.config import Recipe, resolve
from rescene.data import stand_in
from rescene.engine.cost_ledger import setting_of
from rescene.engine.experiment import Experiment, arch_of, prepare_sizes
from rescene.paper.recipes import PaperCell
from rescene.report.groups import Spread

SECOND_TASK = 1  # "at task 2 with one completed task's buffer"
SPLIT_BY: Any = {"data": True, "tasks": True, "federation": True, "model": {"lens"}, "seed": True, "device": True}


def paper_experiment(data: str, method: str, seed: int = 0, overrides: Sequence[str] = ()) -> Experiment:
    """``without_pictures`` for a shipped recipe."""
    return without_pictures(resolve(data, [f"method={method}", *overrides]).recipe, seed)


def without_pictures(recipe: Recipe, seed: int) -> Experiment:
    """The set-up of a recipe on a data set of the right size without pictures. All methods and networks see the same split."""
    recipe = recipe.model_copy(update={"seed": seed, "device": "cpu"})
    split = _split(recipe.model_dump_json(include=SPLIT_BY))
    return replace(split, recipe=recipe, method=recipe.build_method(), arch=arch_of(recipe, split.dataset))


@lru_cache(maxsize=16)
def _split(recipe: str) -> Experiment:
    """Drawn once for all recipes that agree in what it depends on."""
    made = Recipe.model_validate_json(recipe)
    return prepare_sizes(made, stand_in(made.data.name))


def client_flops(world: Experiment) -> float:
    """Nominal, of the run on all clients."""
    return world.method.nominal_client_flops(setting_of(world))


def server_flops(world: Experiment, task: int) -> float:
    """Nominal, of one task."""
    return world.method.nominal_server_flops(setting_of(world), task)


def nominal(cell: PaperCell, seeds: Sequence[int], reference: PaperCell | None = None) -> dict[str, Spread]:
    """Every nominal column of the paper's cost tables, mean over the splits of these seeds."""
    figures = dict(_figures(cell, tuple(seeds)))
    if reference:
        figures["client_compute_ratio"] = figures["client_pflop"] / _clients(reference, tuple(seeds))
    return {key: Spread(value, None, 0) for key, value in figures.items()}


def replay(cell: PaperCell, seeds: Sequence[int]) -> dict[str, Spread]:
    """The memory columns of Table 8, mean over the splits of these seeds; nothing for a method that it does not list."""
    worlds = [_world(cell, seed) for seed in seeds]
    found = [world.method.nominal_replay(setting_of(world)) for world in worlds]
    told = [asdict(each) for each in found if each is not None]
    return {key: Spread(fmean(each[key] for each in told), None, 0) for key in (told[0] if told else ())}


@lru_cache(maxsize=256)
def _figures(cell: PaperCell, seeds: tuple[int, ...]) -> dict[str, float]:
    world = _world(cell, seeds[0])  # bytes and the server's share do not depend on the split
    largest = max(len(task.classes) for task in world.tasks)
    cost = world.method.nominal_bytes(world.arch, largest, world.tasks[-1].num_seen)
    assert cost is not None  # the paper prices every method of its tables
    of_run = _clients(cell, seeds)
    clients, server = of_run / len(world.tasks), server_flops(world, SECOND_TASK) / 1e15
    return {
        "client_pflop": of_run,
        "state_mb": cost.state / 1e6,
        "uplink_mb": cost.up / 1e6,
        "downlink_mb": cost.down / 1e6,
        "task_client_pflop": clients,
        "task_server_pflop": server,
        "task_total_pflop": clients + server,
        "client_share": 100 * clients / (clients + server),
        "server_share": 100 * server / (clients + server),
    }


@lru_cache(maxsize=256)
def _clients(cell: PaperCell, seeds: tuple[int, ...]) -> float:
    """PFLOP of all clients in a run."""
    return fmean(client_flops(_world(cell, seed)) for seed in seeds) / 1e15


def _world(cell: PaperCell, seed: int) -> Experiment:
    return without_pictures(cell.resolve().recipe, seed)
