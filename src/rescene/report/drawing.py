"""How figures are drawn: colours, markers, axes, legends; and from a plot to its files and its place on the page.

A plot is its data (the rows of the CSV) and a function that draws them. Figures are drawn once, with the neutral
colours below; in the page these become the theme's variables, so that one figure serves light and dark.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from rescene.core.errors import ConfigError
from rescene.core.json_files import Row
from rescene.core.method_style import BROWN, INK, SLATE, YELLOW, MethodStyle
from rescene.report.formatting import data_uri, plain, visible, wrapped
from rescene.report.groups import RunGroup
from rescene.report.load import RunRecord
from rescene.report.tables import csv_text

# Neutral colours of the figures, beside INK. On the page they become the theme's variables.
MUTED, GRID, CARD = "#6a7180", "#dfe2e8", "#ffffff"
WHITE, BLACK = "#fefefe", "#191b20"  # these stay as they are in both themes: text on a filled shape

GUIDE: Any = {"color": MUTED, "linewidth": 0.9, "linestyle": (0, (4, 4))}  # a line to compare with
BORDER: Any = {"color": MUTED, "linewidth": 0.8}  # between tasks
ASIDE: Any = {"color": MUTED, "fontsize": 8.5, "style": "italic"}  # words inside the axes
SLANTED: Any = {"rotation": 38, "ha": "right", "rotation_mode": "anchor", "fontsize": 8.5}  # long names below an axis

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
    """Raise a ConfigError (E145) if no figure format has this ending."""
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
        _legend_above(sheet)
        if any(axes.get_aspect() != "auto" for axes in sheet.axes):  # square ones find their place in two steps
            engine: Any = sheet.get_layout_engine()
            engine.execute(sheet)
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


def percent_axis(axis: Any, label: str, zero: bool = False) -> None:
    """A percent axis around the data that was drawn before; ``zero``: bars start at 0, so their axis must.

    It spans at least 20 points, in whole tens, with a little air so that markers at the ends are not cut.
    """
    axis.set_label_text(label)
    low, high = getattr(axis.axes.dataLim, f"interval{axis.axis_name}")
    set_percent_limits([axis], *percent_span(low, high, zero))


def percent_span(low: float, high: float, zero: bool = False) -> tuple[int, int]:
    """The whole tens around values between 0 and 100.

    >>> percent_span(3.0, 41.5), percent_span(86.2, 91.9), percent_span(86.2, 91.9, zero=True), percent_span(9.8, 10.1)
    ((0, 50), (80, 100), (0, 100), (0, 20))
    """
    low, high = (low, high) if low <= high else (0.0, 100.0)  # nothing was drawn
    first = 0 if zero or low < 50 else int(low // 10) * 10
    last = min(100, -int(-(high + 0.5) // 10) * 10)
    last = max(last, min(100, first + 20))
    return min(first, last - 20), last


def set_percent_limits(axes: Sequence[Any], first: int, last: int) -> None:
    """Limits and ticks of percent axes; ticks are multiples of 5, 10 or 20."""
    span = last - first
    step, air = 5 if span <= 30 else 10 if span <= 60 else 20, 0.03 * span
    for axis in axes:
        axis.axes.set(**{f"{axis.axis_name}lim": (first - air, last + air)})
        axis.set_ticks(range(-(-first // step) * step, last + 1, step))


def thinned(num: int, most: int = 12) -> int:
    """Every how many-th label to write so that at most ``most`` stand side by side.

    >>> thinned(5), thinned(20)
    (1, 2)
    """
    return -(-num // most)


def name_ticks(axis: Any, names: Sequence[str], most: int = 24, **style: Any) -> None:
    """Names along an axis; with too many to read, every n-th."""
    shown = range(0, len(names), thinned(len(names), most))
    axis.set_ticks(shown, [plain(names[i], 14) for i in shown], **style)


_MOST_ACROSS = 6  # columns of a legend
_LETTERS_PER_IN = 10  # of a label, so that one is never wider than its sheet
_ONE_ROW = 2.5  # height of a legend of one row, in letters; a plot's own height has room for it


def _legend_above(sheet: Any) -> None:
    """One legend of all that has a label, above the axes; a single entry needs none, nor a plot that has made its own.

    Names stand on one line or are folded so that more of them stand side by side, whichever is lower. A sheet grows by what
    the legend needs beyond one row: however many series there are, the axes keep their height.
    """
    entries: dict[str, Any] = {}
    for axes in sheet.axes:
        entries |= dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    names, handles = list(entries), list(entries.values())
    if len(names) < 2 or sheet.legends:
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


_FILLS = ("full", "none", "left", "top", "right", "bottom")
_DASHES: tuple[Any, ...] = ("-", (0, (3, 1)), (0, (1, 1)), (0, (4, 1, 1, 1)), (0, (6, 2)), (0, (3, 1, 1, 1, 1, 1)))
_SHADES = ((0.0, 0), (0.5, 255), (0.45, 0))  # how much of which grey is mixed in: none, paler, darker


def colour_of(group: RunGroup) -> str:
    """The method's colour; the variants beyond those that fills and dashes tell apart get it paler, then darker.

    The neutral colours stay: on the page they are the theme's.
    """
    share, grey = _SHADES[group.variant // len(_FILLS) % len(_SHADES)]
    colour = group.style.colour
    if not share or colour == INK:
        return colour
    return "#" + "".join(f"{round((1 - share) * int(colour[i : i + 2], 16) + share * grey):02x}" for i in (1, 3, 5))


def mark(group: RunGroup, size: float) -> dict[str, Any]:
    """Marker of a group: variants of one method (a sweep) share colour and shape and differ in how it is filled."""
    style, colour = group.style, colour_of(group)
    haloed = style.marker in "osD" and group.variant == 0  # a halo would eat up thin shapes
    return {
        "marker": style.marker,
        "markersize": size + 2 * group.hero + 3 * (style.marker == "*") - 2 * (not group.competes),
        "color": colour,
        "fillstyle": _FILLS[group.variant % len(_FILLS)],
        "markerfacecoloralt": CARD,
        "markeredgecolor": CARD if haloed else INK if style.colour == YELLOW else colour,
        "markeredgewidth": 0.8 if group.variant == 0 else 1.2,
        "zorder": 5 if group.hero else 4 if group.competes else 6,  # references are small and may lie on top
    }


def stroke(group: RunGroup, size: float) -> dict[str, Any]:
    """Line with markers; the hero's is the strong one, reference lines are thin, dashed and on top."""
    if not group.competes:
        return {**mark(group, size + 1), "linewidth": 1.2, "linestyle": (0, (2, 1.5))}
    dash = _DASHES[group.variant % len(_DASHES)]  # as many as there are fills: lines without markers differ as well
    return {**mark(group, size), "linewidth": 2.6 if group.hero else 1.5, "linestyle": dash}


def css_colour(style: MethodStyle) -> str:
    """The colour as the page writes it: dark ones follow the theme."""
    return _THEME.get(style.colour, style.colour)


def text_on(colour: str) -> str:
    """Colour of text on a shape of this colour, readable in both themes."""
    if colour == INK:
        return CARD
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return BLACK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.58 else WHITE


def seed_rows(groups: Sequence[RunGroup], **picks: Callable[[RunRecord], float | None]) -> list[Row]:
    """One row for each finished run that has all of these figures."""
    rows: list[Row] = [
        {"method": group.label, "seed": run.seed} | {key: pick(run) for key, pick in picks.items()}
        for group in groups
        for run in group.finished
    ]
    return [row for row in rows if all(row[key] is not None for key in picks)]


def mean_points(axes: Any, groups: Sequence[RunGroup], rows: Sequence[Row], x: str, y: str) -> None:
    """Seeds as small dots, their mean as the method's marker."""
    for group in groups:
        own = [row for row in rows if row["method"] == group.label]
        if not own:
            continue
        xs, ys = [row[x] for row in own], [row[y] for row in own]
        if len(own) > 1:
            axes.scatter(xs, ys, s=9, color=colour_of(group), alpha=0.45, linewidths=0)
        axes.plot(np.mean(xs), np.mean(ys), label=group.label, **{**mark(group, 9), "linestyle": "none"})


def mean_line(axes: Any, group: RunGroup, stack: np.ndarray) -> None:
    """Mean over seeds of accuracies [seed, task] in percent as a line, with a band of one deviation (n-1) if there are several."""
    mean, x = np.mean(stack, axis=0), np.arange(stack.shape[1])
    axes.plot(x, mean, label=group.label, **stroke(group, 6))
    if len(stack) > 1:
        std = np.std(stack, axis=0, ddof=1)
        band(axes, group, x, mean - std, mean + std, top=100.0)


def band(axes: Any, group: RunGroup, x: Any, low: np.ndarray, high: np.ndarray, top: float = np.inf) -> None:
    """What a deviation around a mean covers; not below 0 around a mean that is not, because accuracies and sizes never are.

    ``top``: the largest value that there can be, 100 for percent.
    """
    low, high = np.where(low + high >= 0, np.maximum(low, 0), low), np.minimum(high, top)
    axes.fill_between(x, low, high, color=colour_of(group), alpha=0.16, linewidth=0)


def percent_bars(means: Sequence[float], deviations: Sequence[float | None]) -> list[list[float]]:
    """How far error bars reach below and above these percentages: within 0 to 100.

    >>> percent_bars([50.0, 98.0, 1.0], [3.0, 5.0, None])
    [[3.0, 5.0, 0.0], [3.0, 2.0, 0.0]]
    """
    pairs = [(mean, std or 0.0) for mean, std in zip(means, deviations, strict=True)]
    return [[min(std, mean) for mean, std in pairs], [min(std, 100.0 - mean) for mean, std in pairs]]


def name_rows(axes: Any, groups: Sequence[RunGroup]) -> None:
    """Method names down the left side, first one on top."""
    axes.set_yticks(range(len(groups)), visible([group.label for group in groups], 26))
    axes.tick_params(axis="y", labelcolor=INK)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)


_PANEL_IN = 3.6  # two of them are as wide as a printed page


def together(plots: Sequence[Plot], across: int) -> Plot:
    """Several plots as panels of one, each under its title; a legend they share stands once, above them."""
    across = min(across, len(plots))
    down = -(-len(plots) // across)
    wide = max(plot.width_in for plot in plots) if across == 1 else min(_PANEL_IN, plots[0].width_in)
    heights = [max(plot.height_in for plot in plots[i : i + across]) for i in range(0, len(plots), across)]

    def draw(sheet: Any) -> None:
        parts = sheet.subfigures(down, across, squeeze=False, height_ratios=heights).ravel()
        for part, plot in zip(parts, plots, strict=False):
            plot.draw(part)
            part.suptitle(wrapped(plot.title, 44), fontsize=10, color=INK)

    return replace(plots[0], draw=draw, width_in=wide * across, height_in=sum(heights) + 0.3 * down)
