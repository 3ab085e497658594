"""The paper's two cost tables (App. E), regenerated without data and without a run.

Two columns apart: ``nominal`` is the paper's convention on our split, ``forecast`` what the ledger of a run with our defaults
counts. Both are means over seeds, since the split is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from statistics import fmean
from typing import Any

from rescene.config import Recipe, resolve
from rescene.data import stand_in
from rescene.engine.experiment import Experiment, arch_of, prepare_sizes
from rescene.engine.forecast import forecast
from rescene.engine.nominal import nominal_client_flops, nominal_cost, nominal_server_flops

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
    data: Sequence[str] = DATA,
    methods: Sequence[str] = METHODS,
    seeds: Sequence[int] = (0, 1, 2),
    overrides: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """One row per data set and method: {data, method, nominal: {...}, forecast: {...}} with the four COLUMNS."""
    rows = []
    for name in data:
        for method in methods:
            worlds = [paper_experiment(name, method, seed, overrides) for seed in seeds]
            rows.append(
                {
                    "data": name,
                    "method": method,
                    "nominal": _means([nominal_cost(world) or {} for world in worlds]),
                    "forecast": _means([_forecast(world) for world in worlds]),
                }
            )
    return rows


def total_compute_rows(
    data: str = "cifar10", methods: Sequence[str] = METHODS, seeds: Sequence[int] = (0, 1, 2)
) -> list[dict[str, Any]]:
    """One row per method: {method, nominal: {...}, forecast: {...}} with client_flops, server_flops, client_share.

    As in the paper: the clients' figure is the run's divided by the tasks, the server's is that of the second task. In the
    forecast it is what the server does from the beginning of that task to its end.
    """
    rows = []
    for method in methods:
        worlds = [paper_experiment(data, method, seed) for seed in seeds]
        nominal = [
            (nominal_client_flops(world) / len(world.tasks), nominal_server_flops(world, SECOND_TASK))
            for world in worlds
        ]
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
