"""One HTML file from run folders: read files, draw figures, fill the template.

The first screen is a summary: the verdict, the comparison, one curve, what left the sites. Everything else is folded. Nothing
is fetched, and the page's own policy forbids it. The one script sorts tables and opens sections; without it all can be read.

There are pages of pictures too: what a model says about them (``rescene predict``), and what a site would send
(``rescene deploy check``).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from rescene import __version__
from rescene.core.errors import DataError, ResceneError
from rescene.core.files import ANYBODY, US_ALONE, unique_draft, write_atomically
from rescene.core.json_files import Row, record_of
from rescene.core.results import PairRecord
from rescene.report import figures_accuracy, figures_theory, figures_tradeoffs
from rescene.report import page_sections as sections
from rescene.report.drawing import Figure, Plot, css_colour, render
from rescene.report.formatting import count, data_uri, percent, plain
from rescene.report.groups import (
    SERVER_EPOCHS,
    RunGroup,
    comparison_rows,
    differing_settings,
    group_runs,
    headline_group,
)
from rescene.report.load import RunRecord, load_runs, text_of
from rescene.report.summary import Departure, departure, verdict
from rescene.report.tables import METRICS, PAGE, cost_rows, cost_titles, downloads, page_cells
from rescene.report.uploads import gallery, pair_of, png_uri, through_lens


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
    return put_page(render_page("page.html.j2", **view), out)


def put_page(html: str, out: Path, mode: int = ANYBODY) -> Path:
    """Whoever opens the page meanwhile sees the old one or the new one, whole."""
    write_atomically(out, html.encode(), sync="none", mode=mode, draft=unique_draft(out))
    return out


def render_page(template: str, /, **values: Any) -> str:
    """A page of ours with its style sheet: everything put into it is escaped, and what is missing is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    env = Environment(
        loader=PackageLoader("rescene.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    css = (files("rescene.report") / "page.css").read_text("utf-8")
    return env.get_template(template).render(version=__version__, css=css, **values)


def _view(runs: Sequence[RunRecord], plots: Path, printed: Mapping[Path, Mapping[str, str]]) -> dict[str, Any]:
    """Everything the template needs, by name."""
    groups = group_runs(runs)
    head = headline_group(groups)
    told = (head.finished if head else groups[0].shown)[0]  # the run whose setting and data are described
    script = (files("rescene.report") / "page.js").read_text("utf-8")
    figures = {figure.name: figure for figure in _figures(groups, head, told, plots)}
    return {
        "script": script,
        "script_hash": base64.b64encode(hashlib.sha256(f"\n{script}".encode()).digest()).decode(),
        "title": _title(groups),
        "running": any(run.state == "running" for run in runs),
        "groups": groups,
        "head": head,
        "told": told,
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


def _comparison(
    groups: Sequence[RunGroup], runs: Sequence[RunRecord], printed: Mapping[Path, Mapping[str, str]]
) -> dict[str, Any]:
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


def _privacy(groups: Sequence[RunGroup], head: RunGroup | None) -> dict[str, Any]:
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


def _small_print(
    groups: Sequence[RunGroup], head: RunGroup | None, told: RunRecord, runs: Sequence[RunRecord]
) -> dict[str, Any]:
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


def _title(groups: Sequence[RunGroup]) -> str:
    names = list(dict.fromkeys(group.style.label for group in groups))
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _printed(group: RunGroup, printed: Mapping[Path, Mapping[str, str]]) -> dict[str, tuple[str, str]]:
    """What is printed for the group's runs, which are one experiment, and how far ours lies from it."""
    told = next((told for run in group.runs if (told := printed.get(run.folder.resolve()))), {})
    ours = {key: group.spread(METRICS[key].pick) for key in told}
    paper = {key: float(text.split()[0]) for key, text in told.items()}
    return {key: (text, f"{own.mean - paper[key]:+.2f}" if (own := ours[key]) else "") for key, text in told.items()}


def _figures(groups: Sequence[RunGroup], head: RunGroup | None, told: RunRecord, plots: Path) -> Iterable[Figure]:
    """All figures there is data for."""
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
        *(_between_methods(groups) if len(groups) > 1 else ()),
        *(fronts or (_leaks(groups) if len(groups) > 1 else ())),
        *figures_theory.theory_plots(figures_theory.theory_rows(head)),
    ]
    return [render(plot, plots) for plot in wanted if plot]


def _between_methods(groups: Sequence[RunGroup]) -> list[Plot | None]:
    """Figures of one point per method: a single point says no more than the table."""
    return [
        figures_accuracy.old_recent(groups),
        figures_tradeoffs.accuracy_for_upload(groups),
        figures_tradeoffs.accuracy_for_compute(groups),
    ]


def _leaks(groups: Sequence[RunGroup]) -> list[Plot | None]:
    return [figures_tradeoffs.accuracy_for_copies(groups), figures_tradeoffs.accuracy_for_distance(groups)]


MOST = 500  # pictures on a page; more would be slow to open
UNSURE = 0.5  # confidence below which an answer is marked


@dataclass(frozen=True)
class GalleryAnswer:
    """A picture uint8 [3,H,W] and its likeliest classes with confidence (0 to 1)."""

    name: str
    top: Sequence[tuple[str, float]]
    pixels: np.ndarray


def write_gallery(answers: Sequence[GalleryAnswer], model: str, classes: Sequence[str], out: Path) -> Path:
    """The page; it holds the pictures themselves, so treat it like them."""
    pictures = [
        {
            "uri": png_uri(answer.pixels),
            "name": plain(answer.name, 60),
            "top": [(plain(name, 40), 100 * value) for name, value in answer.top],
            "unsure": answer.top[0][1] < UNSURE,
        }
        for answer in answers[:MOST]
    ]
    counts: dict[str, int] = {}
    for answer in answers:
        counts[answer.top[0][0]] = counts.get(answer.top[0][0], 0) + 1
    html = render_page(
        "gallery.html.j2",
        model=model,
        classes=[plain(name, 40) for name in classes],
        title=count(len(answers), "picture"),
        counts=sorted(counts.items(), key=lambda item: (-item[1], item[0])),
        num_unsure=sum(answer.top[0][1] < UNSURE for answer in answers),
        pictures=pictures,
        num=len(answers),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(html, encoding="utf-8")
    return out


def write_inspection(found: Row, sheet: bytes, out: Path) -> Path:
    """The page of ``rescene data inspect``: counts, what is odd, the command, and the contact sheet (a PNG)."""
    tables = {key: found[key] for key in ("classes", "sites", "domains") if found[key]}
    html = render_page("inspection.html.j2", found=found, tables=tables, uri=data_uri("image/png", sheet))
    return put_page(html, out)


@dataclass(frozen=True)
class Preview:
    """A trial round in words and pictures (uint8 [n,3,H,W], one entry per pair)."""

    facts: dict[str, str]
    leaves_site: str
    drawn: bool
    num_images: int
    near_copies: float
    entries: Sequence[Row]
    surrogates: np.ndarray
    nearest: np.ndarray


def write_check(rows: Sequence[Row], preview: Preview | None, name: str, out: Path) -> Path:
    """One page that fetches nothing and that nobody else can read: it shows the site's images."""
    pairs = []
    if preview:
        shown = zip(preview.entries, preview.surrogates, preview.nearest, strict=True)
        pairs = [pair_of(record_of(PairRecord, entry, []), surrogate, nearest) for entry, surrogate, nearest in shown]
    html = render_page(
        "check.html.j2",
        name=name,
        rows=rows,
        problems=[row for row in rows if row["problem"]],
        preview=preview,
        pairs=pairs,
        lens=through_lens(preview.surrogates) if preview else "",
    )
    return put_page(html, out, mode=US_ALONE)
