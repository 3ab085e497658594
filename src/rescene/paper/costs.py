"""Costs of a cell in the paper's own conventions (App. E): they follow from the recipe and its split, no run is needed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from statistics import fmean

from rescene.engine.cost_tables import SECOND_TASK, paper_experiment
from rescene.engine.nominal import nominal_cost, nominal_server_flops
from rescene.paper.recipes import PaperCell
from rescene.report.groups import Spread


def nominal(cell: PaperCell, seeds: Sequence[int], reference: PaperCell | None = None) -> dict[str, Spread]:
    """Every nominal column of the paper's cost tables, mean over the splits of these seeds."""
    rows = [_of_seed(cell, seed) for seed in seeds]
    means = {key: fmean(row[key] for row in rows) for key in rows[0]}
    if reference:
        other = fmean(_of_seed(reference, seed)["client_pflop"] for seed in seeds)
        means["client_compute_ratio"] = means["client_pflop"] / other
    return {key: Spread(value, None, 0) for key, value in means.items()}


@lru_cache(maxsize=1024)
def _of_seed(cell: PaperCell, seed: int) -> dict[str, float]:
    shared = [text for text in cell.overrides if not text.startswith("method")]  # the split is the same for all methods
    world = paper_experiment(cell.base, cell.method, seed, shared)
    cost = nominal_cost(world) or {}
    clients = cost["client_flops"] / 1e15 / len(world.tasks)
    server = nominal_server_flops(world, SECOND_TASK) / 1e15
    return {
        "client_pflop": cost["client_flops"] / 1e15,
        "state_mb": cost["client_state_bytes"] / 1e6,
        "uplink_mb": cost["uplink_bytes_per_message"] / 1e6,
        "downlink_mb": cost["downlink_bytes_per_message"] / 1e6,
        "task_client_pflop": clients,
        "task_server_pflop": server,
        "task_total_pflop": clients + server,
        "client_share": 100 * clients / (clients + server),
        "server_share": 100 * server / (clients + server),
    }
