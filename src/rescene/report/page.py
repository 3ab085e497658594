"""One HTML file from run folders: read files, draw figures, fill the template.

Nothing is fetched, and the page's own policy forbids it. The one script sorts tables; without it all can be read.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from rescene import __version__
from rescene.errors import DataError, ResceneError
from rescene.report import (
    facts,
    plots_cost,
    plots_curves,
    plots_grids,
    plots_pool,
    plots_privacy,
    plots_retention,
    plots_stream,
    plots_theory,
)
from rescene.report.audits import audits
from rescene.report.canvas import Figure, Plot, data_uri, render
from rescene.report.costs import cost_rows, cost_titles
from rescene.report.glossary import GLOSSARY
from rescene.report.groups import Group, comparison_rows, differing_settings, group_runs, headline_group
from rescene.report.labels import SERVER_EPOCHS
from rescene.report.plots_frontier import beside_stored, frontier
from rescene.report.reading import text_of
from rescene.report.runs import Run, load_runs
from rescene.report.sites import sites_view
from rescene.report.surrogates import gallery
from rescene.report.tables import METRICS, PAGE, downloads, figures, page_cells, shown
from rescene.report.theory import theory_rows, theory_view
from rescene.report.withdrawn import withdrawals
from rescene.report.words import departure, percent, verdict


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
    runs: Sequence[Run],
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
    return put_page(template("page.html.j2").render(view), out)


def put_page(html: str, out: Path, mode: int = 0o666) -> Path:
    """Whoever opens the page meanwhile sees the old one or the new one, whole."""
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8") as file:
            file.write(html)
        os.replace(draft, out)
    finally:
        draft.unlink(missing_ok=True)  # still there if it could not take its place
    return out


def template(name: str) -> Any:
    """A page of ours: everything put into it is escaped, and what is missing is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    env = Environment(
        loader=PackageLoader("rescene.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return env.get_template(name)


def _view(runs: Sequence[Run], plots: Path, printed: Mapping[Path, Mapping[str, str]]) -> dict[str, Any]:
    """Everything the template needs, by name."""
    groups = group_runs(runs)
    head = headline_group(groups)
    told = (head.finished if head else groups[0].shown)[0]  # the run whose setting and data are described
    rows = comparison_rows(runs)
    departures = [departure(group) for group in sorted(groups, key=lambda group: group is not head)]
    script = (files("rescene.report") / "page.js").read_text("utf-8")
    return {
        "version": __version__,
        "css": (files("rescene.report") / "page.css").read_text("utf-8"),
        "script": script,
        "script_hash": base64.b64encode(hashlib.sha256(f"\n{script}".encode()).digest()).decode(),
        "title": _title(groups),
        "running": any(run.state == "running" for run in runs),
        "groups": groups,
        "head": head,
        "told": told,
        "verdict": verdict(groups),
        "tiles": _tiles(head),
        "departures": departures,
        "guarded": any(group.finished for group in groups) and all(d.private for d in departures if d.group.finished),
        "leaked": facts.leakage_rows(head),
        "audits": audits(groups),
        "rows": [
            (group, row, list(zip(PAGE, cells, strict=True)))
            for group, row, cells in zip(groups, rows, page_cells(groups), strict=True)
        ],
        "columns": PAGE,
        "printed": [_printed(group, printed) for group in groups] if printed else [],
        "units": {column.key: column.unit for column in PAGE} | {"upload": "per site and round"},  # each with its own
        "downloads": downloads(groups, rows),
        "differing": [f"E_srv ({key})" if key == SERVER_EPOCHS else key for key in differing_settings(groups)],
        "figures": {figure.name: figure for figure in _figures(groups, head, told, plots)},
        "matrices": [render(plot, plots) for group in groups if (plot := plots_grids.accuracy_matrix(group))],
        "galleries": [found for group in groups if (found := gallery(group, plots))],
        "federation": sites_view(runs),
        "theory": theory_view(theory_rows(head)),
        "withdrawals": withdrawals(groups),
        "costs": cost_rows(groups),
        "cost_titles": cost_titles(),
        "setting": facts.setting(told, runs),
        "tasks": facts.task_rows(told),
        "config_rows": facts.config_rows(runs),
        "config_uri": data_uri("application/yaml", text.encode())
        if (text := text_of(told.folder / "config.yaml"))
        else "",
        "progress": facts.progress(groups),
        "events": facts.events(groups),
        "event_summary": facts.event_summary(runs),
        "environment": facts.environment(runs),
        "commands": facts.commands(runs),
        "glossary": GLOSSARY,
        "problems": [(run.folder.name, problem) for run in runs for problem in run.problems],
        "repeats": [run.folder.name for group in groups for run in group.repeats],
        "percent": percent,
    }


def _title(groups: Sequence[Group]) -> str:
    names = list(dict.fromkeys(group.look.label for group in groups))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _printed(group: Group, printed: Mapping[Path, Mapping[str, str]]) -> dict[str, tuple[str, str]]:
    """What is printed for the group's runs, which are one experiment, and how far ours lies from it."""
    told = next((told for run in group.runs if (told := printed.get(run.folder.resolve()))), {})
    ours = {key: group.spread(METRICS[key].pick) for key in told}
    paper = {key: float(text.split()[0]) for key, text in told.items()}
    return {key: (text, f"{own.mean - paper[key]:+.2f}" if (own := ours[key]) else "") for key, text in told.items()}


def _tiles(head: Group | None) -> list[dict[str, str]]:
    """The four numbers of the headline method."""
    if head is None:
        return []
    tiles = (
        ("aa", "AA", "accuracy on everything, after the last task", "%"),
        ("aia", "AIA", "the same, averaged over all tasks on the way", "%"),
        ("old", "Old tasks", "accuracy at the end on the first half of the tasks", "%"),
        ("upload", "Upload", "sent by one site in one round", ""),
    )
    cells = [shown(figures([head], METRICS[key])[0], METRICS[key]) for key, *_ in tiles]
    return [
        {"name": name, "text": cell.text, "unit": unit, "note": note, "std": cell.std}
        for cell, (_, name, note, unit) in zip(cells, tiles, strict=True)
    ]


def _figures(groups: Sequence[Group], head: Group | None, told: Run, plots: Path) -> Iterable[Figure]:
    """All figures there is data for."""
    fronts = frontier(beside_stored(groups))
    wanted: list[Plot | None] = [
        plots_retention.old_recent(groups),
        plots_retention.inside_between(groups),
        plots_curves.task_curve(groups),
        plots_curves.incremental_curve(groups),
        plots_retention.forgetting_bars(groups),
        plots_curves.rounds_curve(groups),
        plots_curves.matching_curve(groups),
        plots_stream.stream(head),
        plots_grids.confusion(head) if head else None,
        plots_grids.sites_by_class(told),
        plots_grids.participation(told),
        plots_pool.pool_balance(told),
        plots_cost.accuracy_for_upload(groups),
        plots_cost.accuracy_for_compute(groups),
        plots_privacy.accuracy_for_noise(groups),
        *(fronts or (plots_privacy.accuracy_for_copies(groups), plots_privacy.accuracy_for_distance(groups))),
        plots_cost.timing(groups),
        *plots_theory.plots(theory_rows(head)),
    ]
    return [render(plot, plots) for plot in wanted if plot]
