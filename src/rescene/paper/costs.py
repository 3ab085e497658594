"""Costs in the paper's own conventions (App. E), from recipes and their splits: no data and no run is needed.

A cell's nominal columns, and the paper's two cost tables with two columns apart: ``nominal`` is the paper's convention on our
split, ``forecast`` what the ledger of a run with our defaults counts. All are means over seeds, since the split is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from statistics import fmean
from typing import Any

from rescene.config import Recipe, resolve
from rescene.data import stand_in
from rescene.engine.cost_ledger import nominal_cost, setting_of
from rescene.engine.experiment import Experiment, arch_of, prepare_sizes
from rescene.engine.forecast import forecast
from rescene.paper.recipes import PaperCell
from rescene.report.groups import Spread

DATA = ("cifar10", "cifar100", "tinyimagenet")
METHODS = ("fedavg", "fedewc", "fedlwf", "target", "glfc", "fedcbdr", "refed", "rescene")
SECOND_TASK = 1  # "at task 2 with one completed task's buffer"
SPLIT_BY: Any = {"data": True, "tasks": True, "federation": True, "model": {"lens"}, "seed": True, "device": True}
COLUMNS = ("client_flops", "client_state_bytes", "uplink_bytes_per_message", "downlink_bytes_per_message")


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


def client_resource_rows(
    data: Sequence[str] = DATA, methods: Sequence[str] = METHODS, seeds: Sequence[int] = (0, 1, 2)
) -> list[dict[str, Any]]:
    """One row per data set and method: {data, method, nominal: {...}, forecast: {...}} with the four COLUMNS."""
    rows = []
    for name in data:
        for method in methods:
            worlds = [paper_experiment(name, method, seed) for seed in seeds]
            rows.append(
                {
                    "data": name,
                    "method": method,
                    "nominal": _means([nominal_cost(world) or {} for world in worlds]),
                    "forecast": _means([_forecast(world) for world in worlds]),
                }
            )
    return rows


def total_compute_rows(methods: Sequence[str] = METHODS, seeds: Sequence[int] = (0, 1, 2)) -> list[dict[str, Any]]:
    """One row per method on CIFAR-10: {method, nominal: {...}, forecast: {...}} with client_flops, server_flops, client_share.

    As in the paper: the clients' figure is the run's divided by the tasks, the server's is that of the second task. In the
    forecast it is what the server does from the beginning of that task to its end.
    """
    rows = []
    for method in methods:
        worlds = [paper_experiment("cifar10", method, seed) for seed in seeds]
        nominal = [(client_flops(world) / len(world.tasks), server_flops(world, SECOND_TASK)) for world in worlds]
        rows.append({"method": method, "nominal": _shares(nominal), "forecast": _shares([_of_task(w) for w in worlds])})
    return rows


def _forecast(world: Experiment) -> dict[str, float]:
    found = forecast(world)
    return found.measured() if found else {}


def _of_task(world: Experiment) -> tuple[float, float]:
    found = forecast(world)
    if found is None:
        return 0.0, 0.0
    server = sum(moment.server_flops for moment in found.moments if moment.task == SECOND_TASK)
    return found.measured()["client_flops"] / len(world.tasks), float(server)


def _means(rows: list[dict[str, float]]) -> dict[str, float]:
    return {key: fmean(row[key] for row in rows) for key in COLUMNS if key in rows[0]}


def _shares(pairs: list[tuple[float, float]]) -> dict[str, float]:
    client, server = (fmean(column) for column in zip(*pairs, strict=True))
    return {"client_flops": client, "server_flops": server, "client_share": client / ((client + server) or 1)}


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
