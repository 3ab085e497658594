"""The cost table of the page: measured and nominal figures of each method."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rescene.report.groups import Group, same_problem
from rescene.report.look import key_of
from rescene.report.runs import Run, number, table
from rescene.report.words import bytes_text, flops_text, seconds_text

_COSTS: tuple[tuple[str, str, str, Callable[[float | None], str]], ...] = (
    ("uplink_bytes_per_message", "Up", "per site and round, task ends apart", bytes_text),
    ("downlink_bytes_per_message", "Down", "per site and round, task ends apart", bytes_text),
    ("uplink_bytes", "Up", "whole run", bytes_text),
    ("downlink_bytes", "Down", "whole run", bytes_text),
    ("client_state_bytes", "Site memory", "largest state kept", bytes_text),
    ("server_state_bytes", "Server memory", "largest state kept", bytes_text),
    ("client_flops", "Site compute", "all sites, whole run", flops_text),
    ("server_flops", "Server compute", "whole run", flops_text),
)


_RATIOS = {"uplink_bytes", "client_flops"}


@dataclass(frozen=True)
class CostCell:
    """One figure: as measured, by the paper's formula, and as a multiple of FedAvg's ("" where there is none)."""

    measured: str
    nominal: str
    ratio: str
    value: float | None  # to sort by
    parts: tuple[str, ...] = ()  # what it is made of


@dataclass(frozen=True)
class CostRow:
    """One method, column by column."""

    group: Group
    cells: tuple[CostCell, ...]


def cost_titles() -> list[tuple[str, str]]:
    return [*((title, unit) for _, title, unit, _ in _COSTS), ("Compute", "sites and server"), ("Time", "per round")]


def cost_rows(groups: Sequence[Group]) -> list[CostRow]:
    """One row per method that measured anything, averaged over seeds."""
    rows = []
    for group in groups:
        alike = [other for other in groups if key_of(other.method) == "fedavg" and same_problem(group, other)]
        cells = tuple(
            _cell(group, alike[0] if alike and key in _RATIOS else None, key, show) for key, _, _, show in _COSTS
        )
        if any(cell.value is not None or cell.nominal for cell in cells):
            rows.append(CostRow(group, (*cells, _compute(group), _time(group))))
    return rows


def _compute(group: Group) -> CostCell:
    """Everybody's work, and the share of it that falls on the sites."""
    measured, nominal = (
        [_mean(group, kind, f"{who}_flops") for who in ("client", "server")] for kind in ("measured", "nominal")
    )
    total, told = (None if None in pair else sum(filter(None, pair)) for pair in (measured, nominal))
    parts = (f"{100 * (measured[0] or 0) / total:.0f} % at sites",) if total else ()
    return CostCell(flops_text(total), "" if told is None else flops_text(told), "", total, parts)


def _time(group: Group) -> CostCell:
    """Seconds of a round on the machine that simulated everybody."""
    found = {who: group.spread(lambda run, who=who: _seconds_per_round(run, who)) for who in ("client", "server")}  # type: ignore[misc]
    known = {who: spread.mean for who, spread in found.items() if spread}
    if len(known) < 2:
        return CostCell(seconds_text(None), "", "", None)
    parts = (f"sites {seconds_text(known['client'])}", f"server {seconds_text(known['server'])}")
    return CostCell(seconds_text(sum(known.values())), "", "", sum(known.values()), parts)


def _seconds_per_round(run: Run, phase: str) -> float | None:
    seconds = number(table(run.timing, "phases").get(phase))
    return seconds / len(run.rounds) if seconds is not None and run.rounds else None


def _cell(group: Group, fedavg: Group | None, key: str, show: Callable[[float | None], str]) -> CostCell:
    mean, nominal = _mean(group, "measured", key), _mean(group, "nominal", key)
    base = _mean(fedavg, "measured", key) if fedavg and fedavg is not group else None
    ratio = f"{times(mean / base)} ×" if mean is not None and base else ""
    return CostCell(show(mean), "" if nominal is None else show(nominal), ratio, mean)


def times(ratio: float) -> str:
    """Two decimals, or two digits of a small ratio.

    >>> times(0.4312), times(2.0), times(1790.4), times(0.00427)
    ('0.43', '2.00', '1,790', '0.0043')
    """
    if ratio == 0:
        return "0"
    decimals = max(2, 1 - math.floor(math.log10(float(f"{ratio:.1e}"))))  # of the ratio as printed: 0.0996 is 0.10
    return f"{ratio:.{decimals}f}" if ratio < 10 else f"{ratio:,.0f}"


def _mean(group: Group, kind: str, key: str) -> float | None:
    found = group.spread(lambda run: number(table(run.cost, kind).get(key)))
    return found.mean if found else None
