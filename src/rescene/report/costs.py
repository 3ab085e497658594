"""The cost table of the page: measured and nominal figures of each method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rescene.report.groups import Group
from rescene.report.runs import number, table
from rescene.report.words import NONE, bytes_text, flops_text

_COSTS: tuple[tuple[str, str, str, Callable[[float | None], str]], ...] = (
    ("uplink_bytes_per_message", "Up", "per message", bytes_text),
    ("downlink_bytes_per_message", "Down", "per message", bytes_text),
    ("uplink_bytes", "Up", "whole run", bytes_text),
    ("downlink_bytes", "Down", "whole run", bytes_text),
    ("client_state_bytes", "Site memory", "largest state kept", bytes_text),
    ("server_state_bytes", "Server memory", "largest state kept", bytes_text),
    ("client_flops", "Site compute", "all sites, whole run", flops_text),
    ("server_flops", "Server compute", "whole run", flops_text),
)


@dataclass(frozen=True)
class CostRow:
    """One method, column by column: measured and nominal text ("" where there is none), and what to sort by."""

    group: Group
    cells: tuple[tuple[str, str, float | None], ...]


def cost_titles() -> list[tuple[str, str]]:
    return [(title, unit) for _, title, unit, _ in _COSTS]


def cost_rows(groups: Sequence[Group]) -> list[CostRow]:
    """One row per method that measured anything, averaged over seeds."""
    rows = []
    for group in groups:
        cells = tuple(_cost_cell(group, key, show) for key, _, _, show in _COSTS)
        if any(measured != NONE or nominal for measured, nominal, _ in cells):
            rows.append(CostRow(group, cells))
    return rows


def _cost_cell(group: Group, key: str, show: Callable[[float | None], str]) -> tuple[str, str, float | None]:
    measured = group.spread(lambda run: number(table(run.cost, "measured").get(key)))
    nominal = group.spread(lambda run: number(table(run.cost, "nominal").get(key)))
    mean = measured.mean if measured else None
    return show(mean), show(nominal.mean) if nominal else "", mean
