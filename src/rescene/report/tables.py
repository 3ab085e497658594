"""Tables of runs: the page's comparison, ``rescene table`` with rows by what differs; and the six forms of a table.

Runs are averaged only over seeds. Asking for fewer columns than differ never melts two recipes into one row: they stay two
rows, and a note says what else differs. A cell is a word or a measurement. CSV and JSON carry every digit; text, markdown,
latex and html print ``TableCell.digits`` places, the best of a column in bold (a star in plain text) and the deviation over
seeds small and grey.
"""

from __future__ import annotations

import csv
import html
import io
import itertools
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any

from rescene.core.errors import ConfigError, with_guess
from rescene.core.json_files import Row
from rescene.report.formatting import (
    NONE,
    bytes_text,
    percent,
    task_name,
)
from rescene.report.groups import (
    SERVER_EPOCHS,
    RunGroup,
    differing,
    group_runs,
    heads,
    resolve_keys,
    same_problem,
    telling_keys,
    traits,
)
from rescene.report.load import RunRecord

_FOLD = 80  # characters of a sentence on one line of plain text; commands are shorter and stay whole


@dataclass(frozen=True)
class TableCell:
    """A measured figure: mean and deviation (n-1) over n runs. ``mean`` None: not measured; ``note``: a word beside it.

    ``bound``: ``<`` or ``>`` where the figure is known to be less or more than ``mean``.

    >>> TableCell(0.01, bound="<").text
    '<0.01'
    """

    mean: float | None
    std: float | None = None
    n: int = 0
    best: bool = False
    note: str = ""
    digits: int = 2
    bound: str = ""

    def __post_init__(self) -> None:
        for key in ("mean", "std"):  # NaN and infinity are no measurements
            value = getattr(self, key)
            if value is not None and not math.isfinite(value):
                object.__setattr__(self, key, None)

    @property
    def text(self) -> str:
        """The mean as it is printed, or a dash."""
        return self.bound + self._printed(self.mean) if self.mean is not None else NONE

    @property
    def std_text(self) -> str:
        """The deviation as printed; empty for a single run."""
        return self._printed(self.std) if self.mean is not None else ""

    def _printed(self, value: float | None) -> str:
        return "" if value is None else f"{value:.{self.digits}f}"


TableEntry = str | TableCell


@dataclass(frozen=True)
class TableGrid:
    """A table: one entry per column in every row, and remarks that belong under it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[TableEntry, ...], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{len(row)} entries for {len(self.columns)} columns: {row}")

    @property
    def measured(self) -> list[bool]:
        """Which columns hold figures; those are set to the right."""
        return [any(isinstance(row[j], TableCell) for row in self.rows) for j in range(len(self.columns))]


def render(grid: TableGrid, kind: str) -> str:
    """The grid in one of KINDS, ending with a newline.

    >>> print(render(TableGrid("", ("method", "AA"), (("ours", TableCell(77.0, 0.5, 3, best=True)),)), "markdown"), end="")
    | method | AA |
    |---|--:|
    | ours | **77.00** ± 0.50 |
    """
    if kind not in KINDS:
        what = with_guess(f"unknown table format {kind!r}", kind, KINDS)
        raise ConfigError("E140", what, why=f"known are {', '.join(KINDS)}")
    return KINDS[kind](grid).rstrip("\n") + "\n"


def _entry(escape: Callable[[str], str], best: str, std: str, note: str) -> Callable[[TableEntry], str]:
    """How a format writes an entry: its escape, and its marks around the best mean, a deviation and a note."""

    def written(entry: TableEntry) -> str:
        if isinstance(entry, str):
            return escape(entry)
        parts = [(best if entry.best else "{}", entry.text), (std, entry.std_text), (note, entry.note)]
        return " ".join(marks.format(escape(part)) for marks, part in parts if part)

    return written


_plain = _entry(str, "{}*", "± {}", "({})")


def _text(grid: TableGrid) -> str:
    """Columns side by side, sentences folded; a star after the best."""
    fold = textwrap.TextWrapper(_FOLD, break_long_words=False, break_on_hyphens=False).wrap
    table = [grid.columns]
    for row in grid.rows:
        table += itertools.zip_longest(*(fold(_plain(entry)) or [""] for entry in row), fillvalue="")
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    places = [f"{'>' if right else '<'}{width}" for right, width in zip(grid.measured, widths, strict=True)]
    lines = ["  ".join(map(format, line, places)).rstrip() for line in table]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*([grid.title, ""] if grid.title else []), *lines, *([""] if grid.notes else []), *grid.notes])


def _markdown(grid: TableGrid) -> str:
    head = ["| " + " | ".join(map(_md, grid.columns)) + " |"]
    head.append("|" + "|".join("--:" if right else "---" for right in grid.measured) + "|")
    body = ["| " + " | ".join(map(_md_entry, row)) + " |" for row in grid.rows]
    title = [f"**{_md(grid.title)}**", ""] if grid.title else []
    return "\n".join([*title, *head, *body, *([""] if grid.notes else []), *(f"{_md(note)}  " for note in grid.notes)])


def _md(text: str) -> str:
    return re.sub(r"([\\|*_`<])", r"\\\1", text)


_md_entry = _entry(_md, "**{}**", "± {}", "({})")

_TEX = {
    **{char: "\\" + char for char in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": "$<$", ">": "$>$"},
    **{"–": "--", "±": r"$\pm$", "·": r"$\cdot$", "×": r"$\times$", "−": "$-$", "≤": r"$\leq$", "≥": r"$\geq$"},
    **{"…": r"\ldots{}", "\u00a0": "~", "α": r"$\alpha$", "β": r"$\beta$", "λ": r"$\lambda$", "σ": r"$\sigma$"},
    **{"τ": r"$\tau$", "ε": r"$\varepsilon$", "Δ": r"$\Delta$"},
}


def _latex(grid: TableGrid) -> str:
    align = "".join("r" if right else "l" for right in grid.measured)
    lines = [r"% \usepackage{booktabs,xcolor}", *([f"% {_tex(grid.title)}"] if grid.title else [])]
    lines += [rf"\begin{{tabular}}{{{align}}}", r"\toprule", _tex_line(map(_tex, grid.columns)), r"\midrule"]
    lines += [_tex_line(map(_tex_entry, row)) for row in grid.rows]
    lines += [r"\bottomrule", r"\end{tabular}"]
    return "\n".join(lines + [rf"\par{{\footnotesize {_tex(note)}}}" for note in grid.notes])


def _tex_line(texts: Iterable[str]) -> str:
    return " & ".join(texts) + r" \\"


def _tex(text: str) -> str:
    """Escape what LaTeX would act on, and spell what its default fonts lack.

    >>> _tex("a_b & 5 %, β")
    'a\\\\_b \\\\& 5 \\\\%, $\\\\beta$'
    """
    return "".join(_TEX.get(char, char) for char in text)


_tex_entry = _entry(_tex, r"\textbf{{{}}}", r"{{\scriptsize\textcolor{{gray}}{{$\pm$ {}}}}}", r"{{\scriptsize {}}}")


def _csv(grid: TableGrid) -> str:
    """One column per word; a figure gets its mean, and columns for deviation, n, note and bound where any row has them."""
    if not grid.rows:
        return csv_text([dict.fromkeys(grid.columns)]).splitlines()[0]
    rows = []
    for row in grid.rows:
        line: dict[str, Any] = {}
        for j, (name, entry) in enumerate(zip(grid.columns, row, strict=True)):
            line[name] = entry if isinstance(entry, str) else entry.mean
            for key in ("std", "n", "note", "bound"):
                if any(getattr(other[j], key, None) for other in grid.rows):
                    line[f"{name} {key}"] = getattr(entry, key, None)
        rows.append(line)
    return csv_text(rows)


def csv_text(rows: Sequence[Row]) -> str:
    """Rows as CSV with a header; None is an empty cell. No rows give an empty text."""
    if not rows:
        return ""
    out = io.StringIO()
    keys = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([_cell(key) for key in keys])
    writer.writerows([_cell(row.get(key)) for key in keys] for row in rows)
    return out.getvalue()


def _cell(value: Any) -> Any:
    """Text that a spreadsheet would run as a formula is quoted: class names come from other people's folders."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return "'" + value
    return value


def _json(grid: TableGrid) -> str:
    """Title, columns, rows and notes; a figure as an object with mean, std, n, best, note, and bound if it has one."""

    def told(entry: TableEntry) -> Any:
        if isinstance(entry, str):
            return entry
        left_out = {"digits"} if entry.bound else {"digits", "bound"}
        return {key: value for key, value in asdict(entry).items() if key not in left_out}

    rows = [{name: told(entry) for name, entry in zip(grid.columns, row, strict=True)} for row in grid.rows]
    whole = {"title": grid.title, "columns": grid.columns, "rows": rows, "notes": grid.notes}
    return json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False)


_HTML_STYLE = """<style>
.rescene { border-collapse: collapse; font: 15px/1.45 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
.rescene caption { text-align: left; font-weight: 600; padding: 4px 10px; }
.rescene th, .rescene td { padding: 4px 10px; text-align: left; vertical-align: top; border-bottom: 1px solid #dfe2e8; }
.rescene th { border-bottom: 2px solid #8a909c; } .rescene tfoot td { border: 0; }
.rescene tbody td { white-space: nowrap; } .rescene .figure { text-align: right; } .rescene .std, .rescene tfoot { color: gray; }
</style>"""


def _html(grid: TableGrid) -> str:
    """A table with a style for itself alone; beyond ASCII as references, so that any page can take it in."""
    caption = [f"<caption>{html.escape(grid.title)}</caption>"] if grid.title else []
    lines = [_HTML_STYLE, '<table class="rescene">', *caption]
    right = [' class="figure"' if measured else "" for measured in grid.measured]
    heads = "".join(f"<th{align}>{html.escape(name)}</th>" for name, align in zip(grid.columns, right, strict=True))
    lines += [f"<thead><tr>{heads}</tr></thead>", "<tbody>"]
    for row in grid.rows:
        cells = "".join(f"<td{align}>{_html_entry(entry)}</td>" for entry, align in zip(row, right, strict=True))
        lines.append(f"<tr>{cells}</tr>")
    lines.append("</tbody>")
    if grid.notes:
        notes = "<br>".join(map(html.escape, grid.notes))
        lines.append(f'<tfoot><tr><td colspan="{len(grid.columns)}"><small>{notes}</small></td></tr></tfoot>')
    return "\n".join([*lines, "</table>"]).encode("ascii", "xmlcharrefreplace").decode("ascii")


_html_entry = _entry(html.escape, "<b>{}</b>", '<small class="std">± {}</small>', "<small>{}</small>")


KINDS: dict[str, Callable[[TableGrid], str]] = {
    "text": _text,
    "markdown": _markdown,
    "latex": _latex,
    "csv": _csv,
    "html": _html,
    "json": _json,
}


@dataclass(frozen=True)
class Column:
    """A metric. ``better``: +1 more is better, -1 less is better, 0 no winner is named; ``show``: as the page says it."""

    key: str
    title: str
    unit: str
    better: int
    pick: Callable[[RunRecord], float | None]
    show: Callable[[float | None], str] = percent
    digits: int = 2

    @property
    def head(self) -> str:
        """Title and unit."""
        return f"{self.title} ({self.unit})"


def _measured(key: str, scale: float) -> Callable[[RunRecord], float | None]:
    return lambda run: _scaled(getattr(run.results.cost.measured, key), 1 / scale)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


# No winner among near-copies: where nothing was measured nothing can win, and a low share is no guarantee.
NEAR_COPIES = Column(
    "near_copies", "Near-copies", "% of uploads", 0, lambda run: _scaled(run.near_copies, 100),
    lambda value: percent(value, 0), 0,
)  # fmt: skip
_ALL = (
    Column("aa", "AA", "%", 1, attrgetter("results.aa")),
    Column("aia", "AIA", "%", 1, attrgetter("results.aia")),
    Column("old", "Old tasks", "%", 1, attrgetter("results.old")),
    Column("recent", "Recent tasks", "%", 1, attrgetter("results.recent")),
    Column("forgetting", "Forgetting", "points", -1, attrgetter("results.forgetting")),
    Column("bwt", "BWT", "points", 1, attrgetter("results.bwt")),
    Column("worst_task", "Worst task", "%", 1, attrgetter("results.worst_task")),
    Column("worst_site", "Worst site", "%", 1, attrgetter("results.worst_site")),
    Column("within_task", "Within task", "%", 1, attrgetter("within_task")),
    Column("balanced_accuracy", "Balanced", "%", 1, attrgetter("results.balanced_accuracy")),
    Column("upload", "Upload", "MB per site and round", -1, lambda run: _scaled(run.upload_bytes, 1e-6),
           lambda value: bytes_text(_scaled(value, 1e6)), 3),
    Column("uplink", "Uplink", "MB, whole run", -1, _measured("uplink_bytes", 1e6)),
    Column("downlink", "Downlink", "MB, whole run", -1, _measured("downlink_bytes", 1e6)),
    Column("client_flops", "Site compute", "TFLOP, all sites, without lens", -1, _measured("client_flops", 1e12)),
    Column("server_flops", "Server compute", "TFLOP, without solver", -1, _measured("server_flops", 1e12)),
    Column("client_state", "Site memory", "MB", -1, _measured("client_state_bytes", 1e6)),
    Column("server_state", "Server memory", "MB", -1, _measured("server_state_bytes", 1e6)),
    Column("epsilon", "ε", "whole run, most-used record", 0, attrgetter("privacy.epsilon")),
    NEAR_COPIES,
    Column("nearest_rms", "Nearest real image", "median RMS", 0, attrgetter("nearest_rms"), digits=3),
    Column("nearest_psnr", "Nearest real image", "median PSNR, dB", 0, 
           lambda run: run.leakage.nearest_psnr_median_db if run.leakage else None, digits=1),
)  # fmt: skip
METRICS = {column.key: column for column in _ALL}
PAGE = (  # leakage right beside accuracy: a narrow screen shows the first columns only
    *(replace(METRICS[key], digits=1) for key in ("aa", "aia")),
    NEAR_COPIES,
    *(replace(METRICS[key], digits=1) for key in ("old", "recent", "forgetting")),
    METRICS["upload"],
)


def task_column(task: int) -> Column:
    """Final accuracy on one task."""

    def pick(run: RunRecord) -> float | None:
        final = run.results.accuracy_matrix[-1] if run.results.accuracy_matrix else ()
        return final[task] if task < len(final) else None

    return Column(f"task{task + 1}", task_name(task), "%", 1, pick)


def site_column(name: str) -> Column:
    """Final accuracy on the test images of one site."""

    def pick(run: RunRecord) -> float | None:
        return next((site.accuracy for site in run.results.sites if site.name == name), None)

    return Column(f"site:{name.lower()}", name, "%", 1, pick)


def cells_of(groups: Sequence[RunGroup], column: Column) -> list[TableCell]:
    """One cell per group, the best marked: among competitors that face the same problem, if there are at least two.

    Reference lines frame the comparison and never win. Cells that print the same share the
    honour.
    """
    spreads = [group.spread(column.pick) for group in groups]
    cells = [
        TableCell(found.mean, found.std, found.num, digits=column.digits)
        if found
        else TableCell(None, digits=column.digits)
        for found in spreads
    ]
    if not column.better:
        return cells
    rivals = [i for i, cell in enumerate(cells) if cell.mean is not None and groups[i].competes]
    marked = list(cells)
    for i in rivals:
        pool = [cells[j] for j in rivals if same_problem(groups[i], groups[j])]
        top = max(pool, key=lambda cell: column.better * (cell.mean or 0.0))
        marked[i] = replace(cells[i], best=len(pool) > 1 and cells[i].text == top.text)
    return marked


def leak_entry(group: RunGroup, cell: TableCell) -> TableEntry:
    """A near-copy figure, or in words why there is none."""
    if cell.mean is not None or not group.finished:
        return cell
    return "not measured" if group.style.uploads == "images" else group.style.without_images()


def comparison_grid(groups: Sequence[RunGroup]) -> TableGrid:
    """The page's comparison as a grid."""
    rows = [
        (group.label, str(len(group.finished)), *own)
        for group, own in zip(groups, entries_of(groups, PAGE), strict=True)
    ]
    return TableGrid("", ("Method", "n", *(column.head for column in PAGE)), tuple(rows))


def entries_of(groups: Sequence[RunGroup], columns: Sequence[Column]) -> list[list[TableEntry]]:
    """Figures, or words where there is none, [group][column]."""
    found: list[list[TableEntry]] = [[] for _ in groups]
    for column in columns:
        for own, group, cell in zip(found, groups, cells_of(groups, column), strict=True):
            own.append(leak_entry(group, cell) if column is NEAR_COPIES else cell)
    return found


def compare(runs: Sequence[RunRecord], by: str = "", metrics: str = "aa,aia", across: str = "") -> TableGrid:
    """The table of these runs: ``by`` and ``metrics`` are comma-separated names, ``across`` one setting.

    Near-copies stand beside accuracy wherever a method uploaded pictures, asked for or not.
    """
    groups = group_runs(runs)
    over = resolve_keys(across, groups)
    if len(over) > 1:
        raise ConfigError("E144", "only one setting can go across", where="--across", fix=f"--across {over[0]}")
    keys = resolve_keys(by, groups) if by else [key for key in telling_keys(groups) if key not in over]
    keys = [key for key in ("method", *(key for key in keys if key != "method")) if key not in over]
    if "seed" in [*keys, *over]:
        groups = [replace(group, runs=(run,)) for group in groups for run in group.runs]
    columns = _columns(metrics, groups)
    if "seed" in [*keys, *over]:  # raw values: one lucky seed wins nothing
        columns = [replace(column, better=0) if column.better else column for column in columns]
    notes = [*_notes(groups, columns), *_hidden([*keys, *over], groups)]
    grid = _across(groups, keys, over[0], columns) if over else _down(groups, keys, columns)
    return replace(grid, notes=(*grid.notes, *notes))


def _columns(metrics: str, groups: Sequence[RunGroup]) -> list[Column]:
    """The columns asked for; ``tasks`` stands for all tasks, ``task1`` for one of them, ``sites`` for all sites."""
    num_tasks = max((len(run.matrix) for group in groups for run in group.finished), default=0)
    by_task = {f"task{t + 1}": task_column(t) for t in range(num_tasks)}
    sites = dict.fromkeys(site.name for group in groups for run in group.finished for site in run.results.sites)
    by_site = [site_column(name) for name in sites]
    known = METRICS | by_task | {column.key: column for column in by_site}
    found: list[Column] = []
    for name in filter(None, (part.strip().lower().replace("-", "_") for part in metrics.split(","))):
        if name == "sites" and not by_site:
            raise ConfigError(
                "E143", "these runs have no sites of their own", where="--metric", fix="federation.partition=sites"
            )
        if name not in known and name not in ("tasks", "sites"):
            what = with_guess(f"unknown metric {name!r}", name, known)
            choice = [*METRICS, "tasks", *([f"task1 to task{num_tasks}"] if by_task else []), "sites"]
            raise ConfigError("E143", what, where="--metric", why=f"known are {', '.join(choice)}")
        found += {"tasks": [*by_task.values()], "sites": by_site}.get(name) or [known[name]]
    if NEAR_COPIES not in found and any(run.leakage for group in groups for run in group.finished):
        found.append(NEAR_COPIES)
    return list(dict.fromkeys(found))


def _down(groups: Sequence[RunGroup], keys: Sequence[str], columns: Sequence[Column]) -> TableGrid:
    """One row per group: settings together, in each of them the best AA first."""
    outer = [key for key in keys if not key.startswith("method") and key != SERVER_EPOCHS]  # not every row has those
    groups = sorted(groups, key=lambda group: [_natural(traits(group).get(key, NONE)) for key in outer])
    rows = []
    for group, entries in zip(groups, entries_of(groups, columns), strict=True):
        own = traits(group)
        rows.append((*(own.get(key, NONE) for key in keys), str(len(group.finished)), *entries))
    return TableGrid("", (*heads(keys), "n", *(column.head for column in columns)), tuple(rows))


def _across(groups: Sequence[RunGroup], keys: Sequence[str], over: str, columns: Sequence[Column]) -> TableGrid:
    """One row per method (and what else is asked for), the values of one setting side by side."""
    values = sorted({traits(group).get(over, NONE) for group in groups}, key=_natural)
    cells: dict[tuple[str, ...], dict[str, list[TableEntry]]] = {}
    owners: dict[tuple[str, ...], RunGroup] = {}
    for group, entries in zip(groups, entries_of(groups, columns), strict=True):
        own = traits(group)
        labels, value = tuple(own.get(key, NONE) for key in keys), own.get(over, NONE)
        first = owners.setdefault((*labels, value), group)
        if first is not group:
            apart = ",".join(differing([first, group]))
            what = f"several recipes share one cell: {own['method']} at {over}={value}"
            raise ConfigError("E144", what, where="--across", why=f"they differ in {apart}", fix=f"--by {apart}")
        cells.setdefault(labels, {})[value] = entries
    missing: list[TableEntry] = [TableCell(None, digits=column.digits) for column in columns]
    name = heads([over])[0]
    titles = [f"{column.title} {name}={value}" for value in values for column in columns]
    rows = tuple(
        (*labels, *(entry for value in values for entry in row.get(value, missing))) for labels, row in cells.items()
    )
    seeds = sorted({len(group.finished) for group in groups})
    said = f"n = {seeds[0]}" if len(seeds) == 1 else f"n from {seeds[0]} to {seeds[-1]}"
    return TableGrid("", (*heads(keys), *titles), rows, (f"{said} seeds per cell.",))


def _natural(text: str) -> tuple[bool, float, str]:
    """Numbers by size, words after them."""
    try:
        return (False, float(text), text)
    except ValueError:
        return (True, 0.0, text)


def _notes(groups: Sequence[RunGroup], columns: Sequence[Column]) -> list[str]:
    several = any(len(group.finished) > 1 for group in groups)
    notes = ["Mean ± standard deviation (n-1) over n seeds."] if several else []
    if any(cell.best for column in columns for cell in cells_of(groups, column)):
        notes += ["Marked: the best of a column among methods that face the same problem; reference lines never win."]
    if NEAR_COPIES in columns:
        notes += ["Near-copies: uploaded images with PSNR above 30 dB to a real training image."]
    if going := sum(not run.finished for group in groups for run in group.runs):
        notes += [f"{going} unfinished run(s) are not counted."]
    if repeats := sum(len(group.repeats) for group in groups):
        notes += [f"{repeats} repeated run(s) of the same recipe and seed are not counted."]
    return notes


def _hidden(shown: Sequence[str], groups: Sequence[RunGroup]) -> list[str]:
    """A note if two rows look alike and yet are not."""
    alike: dict[tuple[str, ...], list[RunGroup]] = {}
    for group in groups:
        alike.setdefault(tuple(traits(group).get(key, NONE) for key in shown), []).append(group)
    left = dict.fromkeys(key for members in alike.values() for key in differing(members))
    return [f"Rows that look alike differ in {', '.join(left)}."] if left else []
