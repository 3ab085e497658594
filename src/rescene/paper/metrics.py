"""The columns of the paper's tables, read from a finished run.

Costs have two columns: ``nominal`` follows the paper's conventions, ``measured`` is what the ledger counted. A value that a
run does not hold is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rescene.paper.store import Stored
from rescene.report.groups import Spread, spread

_LEDGER = {
    "client_pflop": ("client_flops", 1e15),
    "state_mb": ("client_state_bytes", 1e6),
    "uplink_mb": ("uplink_bytes_per_message", 1e6),
    "downlink_mb": ("downlink_bytes_per_message", 1e6),
    "server_pflop": ("server_flops", 1e15),
}
BYTES = ("state_mb", "uplink_mb", "downlink_mb")
COSTS = (
    *_LEDGER,
    *("client_compute_ratio", "server_compute_ratio"),
    *("task_client_pflop", "task_server_pflop", "task_total_pflop", "client_share", "server_share"),
)
_RELATIVE = {  # metric -> (what is compared with the reference cell, in which column)
    "aa_change": ("aa", "nominal"),
    "aia_change": ("aia", "nominal"),
    "client_compute_ratio": ("client_pflop", "nominal"),
    "server_compute_ratio": ("server_pflop", "measured"),
}
_LABELS = {
    "aa": "AA", "aia": "AIA", "aa_change": "AA change", "aia_change": "AIA change", "old": "old", "recent": "recent",
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


def read(run: Stored, metric: str, column: str = "nominal") -> float | None:
    """One figure of one run."""
    if metric in _LEDGER:
        return _ledger(run, *_LEDGER[metric], column)
    if metric.startswith("task_") and metric[5:].isdigit():
        final = run.results["accuracy_matrix"][-1]
        task = int(metric[5:])
        return final[task] if task < len(final) else None
    if metric.startswith("task_") or metric.endswith("_share"):
        return _second_task(run, column).get(metric)
    value = run.results.get(metric)
    return float(value) if isinstance(value, (int, float)) else None


def over_seeds(
    runs: Sequence[Stored], metric: str, column: str = "nominal", reference: Sequence[Stored] = ()
) -> Spread | None:
    """Mean and deviation over the runs; ratios and changes are between the means, relative to the reference's runs."""
    if metric not in _RELATIVE:
        return spread(read(run, metric, column) for run in runs)
    inner, own = _RELATIVE[metric]
    column = "measured" if column == "measured" else own
    ours, other = (spread(read(run, inner, column) for run in group) for group in (runs, reference))
    if ours is None or other is None or (metric.endswith("_ratio") and not other.mean):
        return None
    value = ours.mean / other.mean if metric.endswith("_ratio") else ours.mean - other.mean
    return Spread(value, None, ours.num)


def _ledger(run: Stored, key: str, unit: float, column: str) -> float | None:
    value = ((run.results.get("cost") or {}).get(column) or {}).get(key)
    return value / unit if isinstance(value, (int, float)) else None


def _second_task(run: Stored, column: str) -> dict[str, float]:
    """PFLOP of the second task (Table 12): clients a T-th of the run, the server by the images it trained on."""
    clients = _ledger(run, "client_flops", 1e15, column)
    server = _ledger(run, "server_flops", 1e15, column)
    found: dict[str, float] = {}
    if clients is not None:
        found["task_client_pflop"] = clients / len(run.results["tasks"])
    if server is not None:
        share = _trained_on(run.rounds(), task=1) if server else 0.0
        if share is not None:
            found["task_server_pflop"] = server * share
    if len(found) == 2:
        found["task_total_pflop"] = total = sum(found.values())
        found["client_share"] = 100 * found["task_client_pflop"] / total
        found["server_share"] = 100 * found["task_server_pflop"] / total
    return found


def _trained_on(rounds: Sequence[dict[str, Any]], task: int) -> float | None:
    """Share of the server's training images that fell into one task; None if the pool's size was not recorded."""
    sizes = [(row["task"], (row.get("notes") or {}).get("pool_size")) for row in rounds]
    total = sum(size or 0 for _, size in sizes)
    return sum(size or 0 for own, size in sizes if own == task) / total if total else None
