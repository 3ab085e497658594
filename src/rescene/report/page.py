"""One HTML file from run folders: read files, draw figures, fill the template. Nothing to fetch, no script needed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from rescene import __version__
from rescene.errors import DataError
from rescene.report import facts, plots_cost, plots_curves, plots_grids, plots_retention, plots_theory
from rescene.report.canvas import Figure, Plot, render
from rescene.report.groups import Group, comparison_rows, differing_settings, group_runs, headline_group
from rescene.report.runs import Run, load_run
from rescene.report.surrogates import gallery
from rescene.report.tables import COLUMNS, cells_of, cost_rows, cost_titles, downloads, std_text
from rescene.report.theory import theory_rows, theory_view
from rescene.report.words import bytes_text, departure, percent, verdict


def write_report(folders: list[Path], out: Path) -> Path:
    """Compare these run folders on one self-contained page and return its path.

    Beside ``out`` it writes plots/<figure>.svg, .png and .csv. Runs still going are shown as far as they are, and the
    page then reloads itself every ten seconds. The page appears in one piece: a reader never sees half of it.
    """
    if not folders:
        raise DataError("E208", "no run folder was named", fix="rescene report runs/<name>/<run>")
    runs = [load_run(Path(folder)) for folder in folders]
    out = Path(out)
    plots = out.parent / "plots"
    plots.mkdir(parents=True, exist_ok=True)
    html = _template().render(_view(runs, plots))
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    draft.write_text(html, "utf-8")
    os.replace(draft, out)
    return out


def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    env = Environment(
        loader=PackageLoader("rescene.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return env.get_template("page.html.j2")


def _view(runs: Sequence[Run], plots: Path) -> dict[str, Any]:
    """Everything the template needs, by name."""
    groups = group_runs(runs)
    head = headline_group(groups)
    told = (head.finished if head else groups[0].shown)[0]  # the run whose setting and data are described
    rows = comparison_rows(runs)
    return {
        "version": __version__,
        "css": (files("rescene.report") / "page.css").read_text("utf-8"),
        "title": _title(groups),
        "running": any(run.state == "running" for run in runs),
        "groups": groups,
        "head": head,
        "told": told,
        "verdict": verdict(groups),
        "tiles": _tiles(rows, head),
        "departures": [departure(group) for group in sorted(groups, key=lambda group: group is not head)],
        "leaked": facts.leakage_rows(head),
        "rows": list(zip(groups, rows, cells_of(rows), strict=True)),
        "columns": COLUMNS,
        "downloads": downloads(rows),
        "differing": differing_settings(groups),
        "figures": {figure.name: figure for figure in _figures(groups, head, told, plots)},
        "matrices": [render(plot, plots) for group in groups if (plot := plots_grids.accuracy_matrix(group))],
        "galleries": [found for group in groups if (found := gallery(group, plots))],
        "theory": theory_view(theory_rows(head)),
        "costs": cost_rows(groups),
        "cost_titles": cost_titles(),
        "setting": facts.setting(told, runs),
        "tasks": facts.task_rows(told),
        "config_rows": facts.config_rows(runs),
        "progress": facts.progress(groups),
        "events": facts.events(groups),
        "event_summary": facts.event_summary(runs),
        "environment": facts.environment(runs),
        "commands": facts.commands(runs),
        "glossary": facts.GLOSSARY,
        "problems": [(run.folder.name, problem) for run in runs for problem in run.problems],
        "repeats": [run.folder.name for group in groups for run in group.repeats],
        "percent": percent,
    }


def _title(groups: Sequence[Group]) -> str:
    names = list(dict.fromkeys(group.look.label for group in groups))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _tiles(rows: Sequence[dict[str, Any]], head: Group | None) -> list[dict[str, str]]:
    """The four numbers of the headline method."""
    row = next((row for row in rows if head and row["label"] == head.label), None)
    if row is None:
        return []
    tiles = (
        ("aa", "AA", "accuracy on everything, after the last task", percent, "%"),
        ("aia", "AIA", "the same, averaged over all tasks on the way", percent, "%"),
        ("old", "Old tasks", "accuracy at the end on the first half of the tasks", percent, "%"),
        ("upload_bytes", "Upload", "sent by one site in one round", bytes_text, ""),
    )
    return [
        {"name": name, "text": show(row[key]), "unit": unit, "note": note, "std": std_text(row, key, show)}
        for key, name, note, show, unit in tiles
    ]


def _figures(groups: Sequence[Group], head: Group | None, told: Run, plots: Path) -> Iterable[Figure]:
    """All figures there is data for."""
    wanted: list[Plot | None] = [
        plots_retention.old_recent(groups),
        plots_retention.inside_between(groups),
        plots_curves.task_curve(groups),
        plots_curves.incremental_curve(groups),
        plots_retention.forgetting_bars(groups),
        plots_curves.rounds_curve(groups),
        plots_grids.confusion(head) if head else None,
        plots_grids.sites_by_class(told),
        plots_grids.participation(told),
        plots_cost.accuracy_for_upload(groups),
        plots_cost.timing(groups),
        *plots_theory.plots(theory_rows(head)),
    ]
    return [render(plot, plots) for plot in wanted if plot]
