"""From a plot to its files: plots/<name>.svg, .png and .csv, and the SVG that goes into the page.

A plot is its data (the rows of the CSV) and a function that draws them. Figures are drawn once, with the neutral
colours of ``look``; in the page these become the theme's variables, so that one figure serves light and dark.
"""

from __future__ import annotations

import base64
import csv
import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from rescene.errors import ConfigError
from rescene.report.labels import visible
from rescene.report.look import BROWN, CARD, GRID, INK, MUTED, SLATE
from rescene.report.runs import Row

WIDTH_IN = 5.0  # one width for all figures: text then has one size everywhere, also scaled down on a phone
_MOST_CSV = 200_000  # characters of a table that still travels inside the page
_STYLE: Any = {  # typed loosely: matplotlib lists its hundreds of keys one by one
    "pdf.fonttype": 42,  # journals refuse Type 3 fonts
    "svg.fonttype": "none",  # text stays text: it takes the page's font and can be searched
    "text.parse_math": False,  # a "$" in a class name is a dollar
    "font.size": 10,
    "axes.titlesize": 10,
    "text.color": INK,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.handlelength": 2.2,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
_THEME = {
    **{INK: "var(--ink)", MUTED: "var(--muted)", GRID: "var(--grid)", CARD: "var(--card)"},
    **{BROWN: "var(--brown)", SLATE: "var(--slate)"},  # too dark for a dark page
}


@dataclass(frozen=True)
class Plot:
    """A figure to be drawn: file name, words, the numbers behind it, and how to draw them."""

    name: str
    title: str
    caption: str
    rows: Sequence[Row]
    draw: Callable[[Any], None]  # takes a matplotlib Figure
    height_in: float = 3.5
    width_in: float = WIDTH_IN


@dataclass(frozen=True)
class Figure:
    """A drawn figure as the page needs it."""

    name: str
    title: str
    caption: str
    svg: str
    csv_uri: str  # empty if the table is too large to carry along; it is then only in the folder


def render(plot: Plot, folder: Path) -> Figure:
    """Draw a plot, write its three files into ``folder`` (which exists) and return what the page shows."""
    svg, png = _draw(plot)
    (folder / f"{plot.name}.svg").write_text(_on_white(svg), "utf-8")
    (folder / f"{plot.name}.png").write_bytes(png)
    text = csv_text(plot.rows)
    uri = data_uri("text/csv", text.encode("utf-8")) if len(text) <= _MOST_CSV else ""
    (folder / f"{plot.name}.csv").write_text(text, "utf-8", newline="")
    return Figure(plot.name, plot.title, plot.caption, _for_page(svg, plot), uri)


def checked_ending(path: Path) -> None:
    if path.suffix not in ENDINGS:
        why = f"known endings are {', '.join(ENDINGS)}"
        raise ConfigError("E145", f"no figure format ends in '{path.suffix}'", where="--out", why=why)


def save(plot: Plot, path: Path) -> list[Path]:
    """Draw a plot for print, with the numbers behind it as CSV; the ending (one of ENDINGS) is the format. Returns both paths."""
    with _drawn(plot) as sheet:
        if path.suffix == ".svg":
            svg = io.StringIO()
            sheet.savefig(svg, format="svg", metadata=_UNDATED[".svg"])
            path.write_text(_on_white(svg.getvalue()), "utf-8")
        else:
            sheet.savefig(path, dpi=300, facecolor="white", metadata=_UNDATED[path.suffix])
    table = path.with_suffix(".csv")
    table.write_text(csv_text(plot.rows), "utf-8", newline="")
    return [path, table]


# The same runs give the same bytes.
_UNDATED: dict[str, dict[str, Any]] = {
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    ".svg": {"Date": None, "Creator": None},
}
ENDINGS = tuple(_UNDATED)


@contextmanager
def _drawn(plot: Plot) -> Iterator[Any]:
    """The plot on a matplotlib figure, to be saved while its style is in force."""
    import matplotlib
    from matplotlib.figure import Figure as Sheet

    style = _STYLE | {"svg.hashsalt": plot.name}  # ids from the content: the same run gives the same file
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # class names may be in any script
        sheet = Sheet(figsize=(plot.width_in, plot.height_in), layout="constrained")
        plot.draw(sheet)
        if any(axes.get_aspect() != "auto" for axes in sheet.axes):  # square ones find their place in two steps
            sheet.get_layout_engine().execute(sheet)
        yield sheet


def _draw(plot: Plot) -> tuple[str, bytes]:
    svg, png = io.StringIO(), io.BytesIO()
    with _drawn(plot) as sheet:
        sheet.savefig(svg, format="svg", metadata=_UNDATED[".svg"])
        sheet.savefig(png, format="png", dpi=160, facecolor="white")
    return svg.getvalue(), png.getvalue()


def _on_white(svg: str) -> str:
    """The file version gets a white sheet: transparent figures vanish in a dark viewer."""
    head = svg.index(">", svg.index("<svg")) + 1
    return f'{svg[:head]}\n <rect width="100%" height="100%" fill="#ffffff"/>{svg[head:]}'


def _for_page(svg: str, plot: Plot) -> str:
    """The SVG element alone, with theme colours and ids that no other figure of the page has.

    Inside HTML neither namespaces nor the header are needed; its style element would act on the whole page.
    """
    root = ElementTree.fromstring(svg.encode("utf-8"))
    for parent in list(root.iter()):
        for child in list(parent):
            if _local(child.tag) in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = _local(element.tag)
        values = {_local(key): _adapted(_local(key), value, plot.name) for key, value in element.attrib.items()}
        element.attrib.clear()
        element.attrib.update(values)
    style = f"max-width:{plot.width_in * 1.15:.2f}in"
    kept = {"class": "plot", "viewBox": root.get("viewBox", ""), "role": "img", "style": style}
    root.attrib.clear()
    root.attrib.update({**kept, "aria-labelledby": f"title-{plot.name}"})
    return ElementTree.tostring(root, encoding="unicode")


def _local(name: str) -> str:
    """A name without its XML namespace."""
    return name.rpartition("}")[2]


def _adapted(key: str, value: str, name: str) -> str:
    """An attribute as the page needs it: ids and references to them prefixed, neutral colours from the theme."""
    if key == "id":
        return f"{name}--{value}"
    if key == "href" and value.startswith("#"):
        return f"#{name}--{value[1:]}"
    value = value.replace("url(#", f"url(#{name}--")
    return re.sub(r"#[0-9a-f]{6}\b", lambda match: _THEME.get(match[0], match[0]), value) if key == "style" else value


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


def data_uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def percent_axis(axis: Any, label: str) -> None:
    """0 to 100 percent with a little air, so that markers at the ends are not cut."""
    axis.set_label_text(label)
    axis.axes.set(**{f"{axis.axis_name}lim": (-3, 103)})
    axis.set_ticks([0, 20, 40, 60, 80, 100])


def thinned(num: int, most: int = 12) -> int:
    """Every how many-th label to write so that at most ``most`` stand side by side.

    >>> thinned(5), thinned(20)
    (1, 2)
    """
    return -(-num // most)


_MOST_ACROSS = 6  # columns of a legend
_LETTERS_PER_IN = 10  # of a label, so that one is never wider than its sheet
_ONE_ROW = 2.5  # height of a legend of one row, in letters; a plot's own height has room for it


def legend_above(sheet: Any, handles: Sequence[Any], names: Sequence[str]) -> None:
    """A legend above the axes; a single entry needs none, and parts of a sheet share the one of the whole.

    Names stand on one line or are folded so that more of them stand side by side, whichever is lower. A sheet grows by what
    the legend needs beyond one row: however many series there are, the axes keep their height.
    """
    if len(names) < 2 or not hasattr(sheet, "set_figheight"):
        return
    size = 8.5 if len(names) > 6 else 10.0
    letters = int(_LETTERS_PER_IN * sheet.get_figwidth())
    folds = dict.fromkeys(tuple(visible(names, letters // parts)) for parts in (1, 2))
    tried = [_legend(sheet, handles, fold, size) for fold in folds]
    height, legend = min(tried, key=lambda each: each[0])
    for _, other in tried:
        if other is not legend:
            other.remove()
    sheet.set_figheight(sheet.get_figheight() + max(0.0, height - _ONE_ROW * size / 72))


def _legend(sheet: Any, handles: Sequence[Any], names: Sequence[str], size: float) -> tuple[float, Any]:
    """A legend of as many columns as the widest name leaves room for, and its height in inches."""

    def legend(across: int) -> tuple[Any, Any]:
        style = {"columnspacing": 1.2, "labelcolor": INK, "fontsize": size}
        made = sheet.legend(handles, names, loc="outside upper left", ncols=across, **style)
        return made, made.get_window_extent()

    made, box = legend(1)
    across = min(_MOST_ACROSS, len(names), int(sheet.bbox.width // box.width))
    if across > 1:
        made.remove()
        made, box = legend(across)
    return box.height / sheet.dpi, made
