"""A table of measured figures and its six forms: text, markdown, latex, csv, html, json.

A cell is a word or a measurement. CSV and JSON carry every digit; the others print ``TableCell.digits`` places, the best of a
column in bold (a star in plain text) and the deviation over seeds small and grey.
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
from dataclasses import asdict, dataclass
from typing import Any

from rescene.core.errors import ConfigError, did_you_mean
from rescene.core.json_files import Row
from rescene.report.formatting import NONE

_FOLD = 80  # characters of a sentence on one line of plain text; commands are shorter and stay whole


@dataclass(frozen=True)
class TableCell:
    """A measured figure: mean and deviation (n-1) over n runs. ``mean`` None: not measured; ``note``: a word beside it."""

    mean: float | None
    std: float | None = None
    n: int = 0
    best: bool = False
    note: str = ""
    digits: int = 2

    def __post_init__(self) -> None:
        for key in ("mean", "std"):  # NaN and infinity are no measurements
            value = getattr(self, key)
            if value is not None and not math.isfinite(value):
                object.__setattr__(self, key, None)

    @property
    def text(self) -> str:
        """The mean as it is printed, or a dash."""
        return self._printed(self.mean) or NONE

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

    def measured(self, column: int) -> bool:
        """Whether a column holds figures; those are set to the right."""
        return any(isinstance(row[column], TableCell) for row in self.rows)


def render(grid: TableGrid, kind: str) -> str:
    """The grid in one of KINDS, ending with a newline.

    >>> print(render(TableGrid("", ("method", "AA"), (("ours", TableCell(77.0, 0.5, 3, best=True)),)), "markdown"), end="")
    | method | AA |
    |---|--:|
    | ours | **77.00** ± 0.50 |
    """
    if kind not in KINDS:
        close = did_you_mean(kind, KINDS)
        raise ConfigError(
            "E140",
            f"unknown table format {kind!r}" + (f"; did you mean {close}?" if close else ""),
            why=f"known are {', '.join(KINDS)}",
        )
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


def _folded(text: str) -> list[str]:
    return textwrap.wrap(text, _FOLD, break_long_words=False, break_on_hyphens=False) or [""]


def _text(grid: TableGrid) -> str:
    """Columns side by side, sentences folded; a star after the best."""
    rows = [[_folded(_plain(entry)) for entry in row] for row in grid.rows]
    folded = [line for row in rows for line in itertools.zip_longest(*row, fillvalue="")]
    table = [grid.columns, *folded]
    widths = [max(len(line[j]) for line in table) for j in range(len(grid.columns))]
    right = [grid.measured(j) for j in range(len(grid.columns))]
    lines = [
        "  ".join(
            text.rjust(w) if r else text.ljust(w) for text, w, r in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in table
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*([grid.title, ""] if grid.title else []), *lines, *([""] if grid.notes else []), *grid.notes])


def _markdown(grid: TableGrid) -> str:
    head = ["| " + " | ".join(map(_md, grid.columns)) + " |"]
    head.append("|" + "|".join("--:" if grid.measured(j) else "---" for j in range(len(grid.columns))) + "|")
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
    align = "".join("r" if grid.measured(j) else "l" for j in range(len(grid.columns)))
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
    """One column per word; a figure gets its mean, and columns for deviation, n and note where any row has them."""
    if not grid.rows:
        return csv_text([dict.fromkeys(grid.columns)]).splitlines()[0]
    rows = []
    for row in grid.rows:
        line: dict[str, Any] = {}
        for j, (name, entry) in enumerate(zip(grid.columns, row, strict=True)):
            line[name] = entry if isinstance(entry, str) else entry.mean
            for key in ("std", "n", "note"):
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
    """Title, columns, rows and notes; a figure as an object with mean, std, n, best, note."""
    rows = [{name: _json_entry(entry) for name, entry in zip(grid.columns, row, strict=True)} for row in grid.rows]
    told = {"title": grid.title, "columns": grid.columns, "rows": rows, "notes": grid.notes}
    return json.dumps(told, indent=1, ensure_ascii=False, allow_nan=False)


def _json_entry(entry: TableEntry) -> Any:
    return entry if isinstance(entry, str) else {key: value for key, value in asdict(entry).items() if key != "digits"}


_HTML_STYLE = """<style>
.rescene { border-collapse: collapse; font: 15px/1.45 system-ui, sans-serif; font-variant-numeric: tabular-nums; }
.rescene caption { text-align: left; font-weight: 600; padding: 4px 10px; }
.rescene th, .rescene td { padding: 4px 10px; text-align: left; vertical-align: top; border-bottom: 1px solid #dfe2e8; }
.rescene th { border-bottom: 2px solid #8a909c; } .rescene tfoot td { border: 0; }
.rescene tbody td { white-space: nowrap; } .rescene .figure { text-align: right; } .rescene .std, .rescene tfoot { color: gray; }
</style>"""


def _html(grid: TableGrid) -> str:
    """A table with a style for itself alone; beyond ASCII as references, so that any page can take it in."""
    lines = [
        _HTML_STYLE,
        '<table class="rescene">',
        *([f"<caption>{html.escape(grid.title)}</caption>"] if grid.title else []),
    ]
    right = [' class="figure"' if grid.measured(j) else "" for j in range(len(grid.columns))]
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
