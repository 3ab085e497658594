"""From run folders to one HTML file (``rescene report``) or one figure (``rescene plot``): read files, draw, fill the template.

The first screen is a summary: the verdict, the comparison, one curve, what left the sites. Everything else is folded. Nothing
is fetched, and the page's own policy forbids it. The one script sorts tables and opens sections; without it all can be read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rescene.core.errors import ConfigError, DataError, ResceneError, few, with_guess
from rescene.core.json_files import Row
from rescene.report import figures_accuracy, figures_theory, figures_tradeoffs
from rescene.report import page_sections as sections
from rescene.report.drawing import Figure, Plot, checked_ending, css_colour, render, save, together
from rescene.report.formatting import (
    NONE,
    bytes_text,
    count,
    data_uri,
    flops_text,
    percent,
    put_page,
    render_page,
    seconds_text,
    server_work,
    site_work,
    times,
)
from rescene.report.galleries import contact_sheet, gallery
from rescene.report.groups import (
    SERVER_EPOCHS,
    RunGroup,
    comparison_rows,
    differing_settings,
    group_runs,
    headline_group,
    same_problem,
)
from rescene.report.load import RunRecord, load_runs, text_of
from rescene.report.summary import Departure, departure, verdict
from rescene.report.tables import METRICS, PAGE, Column, TableEntry, comparison_grid, csv_text, entries_of
from rescene.report.tables import render as render_table

Groups = Sequence[RunGroup]


def write_report(folders: list[Path], out: Path, printed: Mapping[Path, Mapping[str, str]] | None = None) -> Path:
    """Compare these run folders on one self-contained page and return its path.

    ``printed``: AA and AIA that a paper prints for a run, by its folder; they stand beside ours.
    Beside ``out`` it writes plots/<figure>.svg, .png and .csv. Runs still going are shown as far as they are, and the
    page then reloads itself every ten seconds. The page appears in one piece: a reader never sees half of it. A run that
    cannot be read is named on it with the reason, and the others are shown; if none can be read, that is an error.
    """
    if not folders:
        raise DataError("E213", "no run folder was named", fix="rescene report runs/<name>/<run>")
    return write_page(*load_runs(map(Path, folders)), out, printed)


def write_page(
    runs: Sequence[RunRecord],
    unreadable: Mapping[Path, ResceneError],
    out: Path,
    printed: Mapping[Path, Mapping[str, str]] | None = None,
) -> Path:
    """The page of runs that were loaded before."""
    out = Path(out)
    plots = out.parent / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    view = _view(runs, plots, printed or {})
    view["problems"] += [(folder.name, f"left out, {error.why or error.what}") for folder, error in unreadable.items()]
    return put_page(render_page("page.html.j2", script="page.js", **view), out)


def _view(runs: Sequence[RunRecord], plots: Path, printed: Mapping[Path, Mapping[str, str]]) -> dict[str, Any]:
    """Everything the template needs, by name."""
    groups = group_runs(runs)
    head = headline_group(groups)
    told = (head.finished if head else groups[0].shown)[0]  # the run whose setting and data are described
    figures = {figure.name: figure for figure in _figures(groups, head, told, plots)}
    return {
        "title": _title(groups),
        "running": any(run.state == "running" for run in runs),
        "groups": groups,
        "head": head,
        "told": told,
        "told_group": head or groups[0],
        "num_shown": sum(len(group.runs) for group in groups),
        "verdict": verdict(groups),
        "curve": next((name for name in ("incremental", "rounds", "tasks") if name in figures), ""),
        "figures": figures,
        "matrices": [render(plot, plots) for group in groups if (plot := figures_accuracy.accuracy_matrix(group))],
        "galleries": [found for group in groups if (found := gallery(group, plots))],
        "percent": percent,
        "css_colour": css_colour,
        **_comparison(groups, runs, printed),
        **_privacy(groups, head),
        **_small_print(groups, head, told, runs),
    }


def _comparison(groups: Groups, runs: Sequence[RunRecord], printed: Mapping[Path, Mapping[str, str]]) -> dict[str, Any]:
    rows = comparison_rows(runs)
    return {
        "rows": [
            (group, row, list(zip(PAGE, cells, strict=True)))
            for group, row, cells in zip(groups, rows, page_cells(groups), strict=True)
        ],
        "columns": PAGE,
        "printed": [_printed(group, printed) for group in groups] if printed else [],
        "units": {column.key: column.unit for column in PAGE} | {"upload": "per site and round"},  # each with its own
        "downloads": downloads(groups, rows),
        "differing": [f"E_srv ({key})" if key == SERVER_EPOCHS else key for key in differing_settings(groups)],
        "repeats": [run.folder.name for group in groups for run in group.repeats],
        "costs": cost_rows(groups),
        "cost_titles": cost_titles(),
    }


def _privacy(groups: Groups, head: RunGroup | None) -> dict[str, Any]:
    departures = [departure(group) for group in sorted(groups, key=lambda group: group is not head)]
    finished = [one for one in departures if one.group.finished]
    return {
        "departures": departures,
        "guarantees": _guarantees(departures),
        "guarded": bool(finished) and all(one.private for one in finished),
        "leaked": sections.leakage_rows(head),
        "audits": sections.audits(groups),
    }


def _guarantees(departures: Sequence[Departure]) -> list[tuple[list[RunGroup], str, str]]:
    """Statements and the groups that make them, identical ones once."""
    found: dict[tuple[str, str], list[RunGroup]] = {}
    for one in departures:
        told = (one.guarantee, one.mechanism) if one.group.finished else ("not recorded yet", "")
        found.setdefault(told, []).append(one.group)
    return [(groups, words, mechanism) for (words, mechanism), groups in found.items()]


def _small_print(groups: Groups, head: RunGroup | None, told: RunRecord, runs: Sequence[RunRecord]) -> dict[str, Any]:
    text = text_of(told.folder / "config.yaml")
    return {
        "federation": sections.sites_view(runs),
        "theory": figures_theory.theory_view(figures_theory.theory_rows(head)),
        "withdrawals": sections.withdrawals(groups),
        "by_site": sections.site_accuracy(groups),
        "setting": sections.setting(told, runs),
        "tasks": sections.task_rows(told),
        "config_rows": sections.config_rows(runs),
        "config_uri": data_uri("application/yaml", text.encode()) if text else "",
        "progress": sections.progress(groups),
        "events": sections.events(groups),
        "event_summary": sections.event_summary(runs),
        "environment": sections.environment(runs),
        "commands": sections.commands(runs),
        "glossary": sections.GLOSSARY,
        "problems": sections.problems(runs),
        "num_runs": count(sum(len(group.runs) for group in groups), "run folder"),
    }


def _title(groups: Groups) -> str:
    names = list(dict.fromkeys(group.style.label for group in groups))
    return few(names, 4)


def _printed(group: RunGroup, printed: Mapping[Path, Mapping[str, str]]) -> dict[str, tuple[str, str]]:
    """What is printed for the group's runs, which are one experiment, and how far ours lies from it."""
    told = next((told for run in group.runs if (told := printed.get(run.folder.resolve()))), {})
    ours = {key: group.spread(METRICS[key].pick) for key in told}
    paper = {key: float(text.split()[0]) for key, text in told.items()}
    return {key: (text, f"{own.mean - paper[key]:+.2f}" if (own := ours[key]) else "") for key, text in told.items()}


def downloads(groups: Groups, rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The table for other programs: (file name, data URI), nothing to fetch."""
    texts = {
        "comparison.csv": ("text/csv", csv_text(rows)),
        "comparison.json": ("application/json", json.dumps(rows, indent=1)),
        "comparison.tex": ("application/x-tex", render_table(comparison_grid(groups), "latex")),
    }
    return [(name, data_uri(kind, text.encode("utf-8"))) for name, (kind, text) in texts.items()]


@dataclass(frozen=True)
class Shown:
    """A figure as the page prints it; ``value`` is what its column is sorted by."""

    text: str
    std: str
    best: bool
    value: float | None


def page_cells(groups: Groups) -> list[list[Shown]]:
    """Cells [group][column of PAGE]."""
    return [[shown(entry, column) for entry, column in zip(row, PAGE, strict=True)] for row in entries_of(groups, PAGE)]


def shown(entry: TableEntry, column: Column) -> Shown:
    """No deviation is shown for one seed, nor one of counts and bytes that is too small to change the mean as it is printed."""
    if isinstance(entry, str):
        return Shown(entry, "", False, None)
    mean, std = column.show(entry.mean), "" if entry.std is None else column.show(entry.std)
    if entry.mean is not None and column.unit != "%" and column.show(entry.mean + (entry.std or 0)) == mean:
        std = ""
    return Shown(mean, "" if std == "0" else std, entry.best, entry.mean)


_COSTS: tuple[tuple[str, str, str, Callable[[float | None], str]], ...] = (
    ("uplink_bytes_per_message", "Up", "per site and round, without task ends", bytes_text),
    ("downlink_bytes_per_message", "Down", "per site and round, without task ends", bytes_text),
    ("uplink_bytes", "Up", "whole run", bytes_text),
    ("downlink_bytes", "Down", "whole run", bytes_text),
    ("client_state_bytes", "Site memory", "largest state kept", bytes_text),
    ("server_state_bytes", "Server memory", "largest state kept", bytes_text),
    ("client_flops", "Site compute", "all sites, whole run", flops_text),
    ("server_flops", "Server compute", "whole run", server_work),
)


_RATIOS = {"uplink_bytes", "client_flops"}


@dataclass(frozen=True)
class CostCell:
    """One figure: as measured, by the paper's formula, and as a multiple of the cost unit's ("" where there is none)."""

    measured: str
    nominal: str
    ratio: str
    value: float | None  # to sort by
    parts: tuple[str, ...] = ()  # what it is made of


@dataclass(frozen=True)
class CostRow:
    """One method, column by column."""

    group: RunGroup
    cells: tuple[CostCell, ...]


def cost_titles() -> list[tuple[str, str]]:
    """Titles and units of the cost table's columns."""
    return [*((title, unit) for _, title, unit, _ in _COSTS), ("Compute", "sites and server"), ("Time", "per round")]


def cost_rows(groups: Groups) -> list[CostRow]:
    """One row per method that measured anything, averaged over seeds."""
    rows = []
    for group in groups:
        alike = [other for other in groups if other.style.cost_unit and same_problem(group, other)]
        cells = tuple(
            _cost_cell(group, alike[0] if alike and key in _RATIOS else None, key, show) for key, _, _, show in _COSTS
        )
        if any(cell.value is not None or cell.nominal for cell in cells):
            rows.append(CostRow(group, (*cells, _compute(group), _time(group))))
    return rows


def _compute(group: RunGroup) -> CostCell:
    """Everybody's work, and the share of it that falls on the sites."""
    measured, nominal = (
        [_mean_cost(group, kind, f"{who}_flops") for who in ("client", "server")] for kind in ("measured", "nominal")
    )
    total, told = (None if None in pair else sum(filter(None, pair)) for pair in (measured, nominal))
    parts = (f"{100 * (measured[0] or 0) / total:.0f} % at sites",) if total else ()
    shown = server_work(total) if total == 0 else site_work(total, group.shown[0].lens)
    return CostCell(shown, "" if told is None else flops_text(told), "", total, parts)


def _time(group: RunGroup) -> CostCell:
    """Seconds of a round on the machine that simulated everybody."""
    sites, server = (group.mean(lambda run, who=who: _seconds_per_round(run, who)) for who in ("client", "server"))  # type: ignore[misc]
    if sites is None or server is None:
        return CostCell(NONE, "", "", None)
    parts = (f"sites {seconds_text(sites)}", f"server {seconds_text(server)}")
    return CostCell(seconds_text(sites + server), "", "", sites + server, parts)


def _seconds_per_round(run: RunRecord, phase: str) -> float | None:
    seconds = run.timing.phases.get(phase)
    return seconds / len(run.rounds) if seconds is not None and run.rounds else None


def _cost_cell(group: RunGroup, unit: RunGroup | None, key: str, show: Callable[[float | None], str]) -> CostCell:
    mean, nominal = _mean_cost(group, "measured", key), _mean_cost(group, "nominal", key)
    base = _mean_cost(unit, "measured", key) if unit and unit is not group else None
    ratio = f"{times(mean / base)} × {unit.style.title}" if mean is not None and base and unit else ""
    shown = site_work(mean, group.shown[0].lens) if key == "client_flops" else show(mean)
    return CostCell(shown, "" if nominal is None else show(nominal), ratio, mean)


def _mean_cost(group: RunGroup, kind: str, key: str) -> float | None:
    return group.mean(lambda run: getattr(getattr(run.results.cost, kind), key))


def _figures(groups: Groups, head: RunGroup | None, told: RunRecord, plots: Path) -> Iterable[Figure]:
    """All figures there is data for. Of one group, those with a point per method say no more than the table."""
    several = len(groups) > 1
    fronts = figures_tradeoffs.frontier(figures_tradeoffs.beside_stored(groups))
    wanted: list[Plot | None] = [
        figures_accuracy.inside_between(groups),
        figures_accuracy.task_curve(groups),
        figures_accuracy.incremental_curve(groups),
        figures_accuracy.forgetting_bars(groups),
        figures_accuracy.rounds_curve(groups),
        figures_accuracy.matching_curve(groups),
        figures_accuracy.stream(head),
        figures_accuracy.confusion(head) if head else None,
        figures_accuracy.sites_by_class(told),
        figures_accuracy.participation(told),
        figures_theory.pool_balance(told),
        figures_tradeoffs.accuracy_for_noise(groups),
        figures_tradeoffs.timing(groups),
        *((figures_accuracy.old_recent(groups), *_for_cost(groups)) if several else ()),
        *(fronts or (_for_leaks(groups) if several else ())),
        *figures_theory.theory_plots(figures_theory.theory_rows(head)),
    ]
    return [render(plot, plots) for plot in wanted if plot]


def _for_cost(groups: Groups) -> list[Plot | None]:
    return [figures_tradeoffs.accuracy_for_upload(groups), figures_tradeoffs.accuracy_for_compute(groups)]


def _for_leaks(groups: Groups) -> list[Plot | None]:
    return [figures_tradeoffs.accuracy_for_copies(groups), figures_tradeoffs.accuracy_for_distance(groups)]


# kind: (what draws its panels, how many stand side by side, what the runs must hold)
KINDS: dict[str, tuple[Callable[[Groups], Iterable[Plot | None]], int, str]] = {
    "old-recent": (lambda groups: [figures_accuracy.old_recent(groups)], 1, "a finished run of two or more tasks"),
    "curves": (
        lambda groups: [figures_accuracy.task_curve(groups), figures_accuracy.incremental_curve(groups)],
        2,
        "a finished task",
    ),
    "matrix": (lambda groups: map(figures_accuracy.accuracy_matrix, groups), 3, "a finished task"),
    "rounds": (lambda groups: [figures_accuracy.rounds_curve(groups)], 1, "metrics.jsonl with an evaluated round"),
    "cost": (_for_cost, 2, "results.json with measured cost"),
    "privacy": (
        lambda groups: [*_for_leaks(groups), figures_tradeoffs.accuracy_for_noise(groups)],
        2,
        "a finished run of a method that uploads images",
    ),
    "frontier": (
        lambda groups: figures_tradeoffs.frontier(figures_tradeoffs.points_of(groups)),
        3,
        "finished runs in two modes of privacy",
    ),
    "surrogates": (lambda groups: map(contact_sheet, groups), 1, "surrogates.safetensors and surrogates.json"),
}


def figure(groups: Groups, kind: str, out: Path) -> list[Path]:
    """Draw one kind into ``out`` (.png, .pdf or .svg), with the numbers behind it as CSV; returns both paths."""
    if kind not in KINDS:
        what = with_guess(f"unknown kind of figure {kind!r}", kind, KINDS)
        raise ConfigError("E145", what, where="the first word, or --kind", why=f"known are {', '.join(KINDS)}")
    checked_ending(out)
    panels, across, needs = KINDS[kind]
    plots = [plot for plot in panels(groups) if plot]
    if not plots:
        raise ConfigError("E146", f"nothing to draw for {kind}", where="these runs", why=f"it needs {needs}")
    drawn = plots[0] if len(plots) == 1 else together(plots, across)
    rows = [{"panel": plot.name, **row} for plot in plots for row in plot.rows]
    return save(replace(drawn, rows=rows), out)
