"""Costs of a cell in the paper's own conventions (App. E): they follow from the recipe and its split, no run is needed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean

from rescene.engine.cost_tables import SECOND_TASK, without_pictures
from rescene.engine.experiment import Experiment
from rescene.engine.nominal import nominal_bytes, nominal_client_flops, nominal_replay, nominal_server_flops
from rescene.paper.recipes import PaperCell
from rescene.report.groups import Spread


def nominal(cell: PaperCell, seeds: Sequence[int], reference: PaperCell | None = None) -> dict[str, Spread]:
    """Every nominal column of the paper's cost tables, mean over the splits of these seeds."""
    figures = dict(_figures(cell, tuple(seeds)))
    if reference:
        figures["client_compute_ratio"] = figures["client_pflop"] / _clients(reference, tuple(seeds))
    return {key: Spread(value, None, 0) for key, value in figures.items()}


def replay(cell: PaperCell, seeds: Sequence[int]) -> dict[str, Spread]:
    """The memory columns of Table 8, mean over the splits of these seeds; nothing for a method that it does not list."""
    told = [nominal_replay(_world(cell, seed)) or {} for seed in seeds]
    return {key: Spread(fmean(each[key] for each in told), None, 0) for key in told[0]}


@lru_cache(maxsize=256)
def _figures(cell: PaperCell, seeds: tuple[int, ...]) -> dict[str, float]:
    world = _world(cell, seeds[0])  # bytes and the server's share do not depend on the split
    largest = max(len(task.classes) for task in world.tasks)
    cost = nominal_bytes(world.method, world.arch, largest, world.tasks[-1].num_seen) or {}
    of_run = _clients(cell, seeds)
    clients, server = of_run / len(world.tasks), nominal_server_flops(world, SECOND_TASK) / 1e15
    return {
        "client_pflop": of_run,
        "state_mb": cost["client_state_bytes"] / 1e6,
        "uplink_mb": cost["uplink_bytes_per_message"] / 1e6,
        "downlink_mb": cost["downlink_bytes_per_message"] / 1e6,
        "task_client_pflop": clients,
        "task_server_pflop": server,
        "task_total_pflop": clients + server,
        "client_share": 100 * clients / (clients + server),
        "server_share": 100 * server / (clients + server),
    }


@lru_cache(maxsize=256)
def _clients(cell: PaperCell, seeds: tuple[int, ...]) -> float:
    """PFLOP of all clients in a run."""
    return fmean(nominal_client_flops(_world(cell, seed)) for seed in seeds) / 1e15


def _world(cell: PaperCell, seed: int) -> Experiment:
    return without_pictures(cell.resolve().recipe, seed)
