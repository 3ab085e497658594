"""Figures about what accuracy costs: bytes, work and time, and what uploads show of real images.

The frontier sets accuracy against what uploads show and what they are guaranteed not to tell, one point per method and mode
of privacy. Filled points have a guarantee, hollow ones have none. Beside a page's own runs stand stored ones of the same
problem (``frontier.csv``, made by benchmarks/frontier.py), small and pale.
"""

from __future__ import annotations

import csv
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from itertools import groupby
from pathlib import PurePath
from typing import Any

from rescene.core.errors import few
from rescene.core.json_files import Row
from rescene.core.method_style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    YELLOW,
    MethodStyle,
    style_of,
)
from rescene.report.drawing import (
    ASIDE,
    CARD,
    GUIDE,
    MUTED,
    Plot,
    mean_points,
    name_rows,
    percent_axis,
    percent_bars,
    seed_rows,
    thinned,
)
from rescene.report.formatting import bytes_text, flops_text, plain, seconds_text
from rescene.report.groups import RunGroup, spread
from rescene.report.load import RunRecord

_PHASES = {
    "client": (SKY, "sites"),
    "server": (BLUE, "server"),
    "evaluate": (GREEN, "evaluation"),
    "checkpoint": (ORANGE, "checkpoints"),
    "leakage": (PURPLE, "leakage check"),
    "theory": (YELLOW, "theory"),
    "other": (GREY, "other"),
}
_LETTERS = 32  # of labels side by side below the narrowest panel


def accuracy_for_upload(groups: Sequence[RunGroup]) -> Plot | None:
    """AA against the bytes a site sends per round."""
    caption = (
        "Further left sends less, further up knows more. "
        "How much of what is sent resembles real images is another question (see Privacy)."
    )
    return _accuracy_for(
        groups, "upload", "Accuracy for the bytes sent", caption, "upload_bytes", lambda run: run.upload_bytes,
        "upload per site and round (log scale)", bytes_text,
    )  # fmt: skip


def accuracy_for_compute(groups: Sequence[RunGroup]) -> Plot | None:
    """AA against the floating-point operations of all sites."""
    caption = "Operations of all sites over the whole run, as measured. Further left asks less of the sites."
    return _accuracy_for(
        groups, "compute", "Accuracy for the work of the sites", caption, "client_flops",
        lambda run: run.results.cost.measured.client_flops,
        "operations of all sites (log scale)", flops_text,
    )  # fmt: skip


def _accuracy_for(
    groups: Sequence[RunGroup],
    name: str,
    title: str,
    caption: str,
    key: str,
    pick: Callable[[RunRecord], float | None],
    xlabel: str,
    show: Callable[[float | None], str],
) -> Plot | None:
    """AA against a cost, on a logarithmic axis: whoever pays nothing is not on it."""
    rows = [row for row in seed_rows(groups, **{key: pick, "aa": lambda run: run.results.aa}) if row[key]]
    if not rows:
        return None
    free = [group.label for group in groups if group.finished and all(pick(run) == 0 for run in group.finished)]
    if free:  # said at the axis: a figure in a file has no caption, and its legend may name them for another panel
        xlabel += "\n" + textwrap.fill(f"not drawn, at 0: {few(free, 3)}", 40)

    def draw(sheet: Any) -> None:
        from matplotlib.ticker import LogLocator, NullFormatter

        axes = sheet.subplots()
        axes.set_xscale("log")
        mean_points(axes, groups, rows, key, "aa")
        sizes = [row[key] for row in rows]
        axes.set_xlim(min(sizes) / 2.5, max(sizes) * 2.5)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3) if max(sizes) < 8 * min(sizes) else (1,), numticks=99))
        axes.xaxis.set_major_formatter(_thin(axes.get_xlim(), lambda value: re.sub(r"\.0+ ", " ", show(value))))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(xlabel)
        percent_axis(axes.yaxis, "AA (%)")

    return Plot(name, title, caption, rows, draw)


def _thin(limits: tuple[float, float], show: Callable[[float], str]) -> Callable[[float, int], str]:
    """Labels for an axis of powers of ten, on every second or third of them where more have no room side by side."""
    first, last = math.ceil(math.log10(limits[0])), math.floor(math.log10(limits[1]))
    longest = max((len(show(10.0**power)) for power in range(first, last + 1)), default=1)
    step = thinned(max(last - first + 1, 1), _LETTERS // longest)
    return lambda value, _: "" if (math.floor(math.log10(value) + 1e-9) - first) % step else show(value)


def timing(groups: Sequence[RunGroup]) -> Plot | None:
    """Wall-clock seconds by phase, averaged over seeds."""
    rows = []
    for group in groups:
        phases = [run.timing.phases for run in group.shown]
        names = dict.fromkeys([*_PHASES, *(name for found in phases for name in found)])
        row: dict[str, Any] = {"method": group.label}
        for name in names:
            mean = spread(found.get(name) for found in phases)
            row[f"{name}_s"] = mean.mean if mean else 0.0
        if any(value for key, value in row.items() if key != "method"):
            rows.append(row)
    if not rows:
        return None
    keys = list(dict.fromkeys(key for row in rows for key in row if key != "method"))
    drawn = [group for group in groups if any(row["method"] == group.label for row in rows)]

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        left = [0.0] * len(rows)
        for key in keys:
            colour, label = _PHASES.get(key[:-2], (VERMILLION, key[:-2]))
            widths = [row.get(key, 0.0) for row in rows]
            if any(widths):
                axes.barh(range(len(rows)), widths, left=left, height=0.56, color=colour, label=label)
                left = [a + b for a, b in zip(left, widths, strict=True)]
        for y, total in enumerate(left):
            axes.text(total + 0.015 * max(left), y, seconds_text(total), va="center", color=INK, fontsize=9)
        axes.set_xlim(0, max(left) * 1.2)
        axes.set_xlabel("seconds")
        name_rows(axes, drawn)

    caption = "Seconds on the machine that simulated all sites together, not what one site would need."
    return Plot("timing", "Where the time went", caption, rows, draw, height_in=1.5 + 0.42 * len(rows))


def accuracy_for_copies(groups: Sequence[RunGroup]) -> Plot | None:
    """AA against the share of uploads that are near-copies."""
    rows = seed_rows(groups, near_copies_percent=lambda run: _percent(run.near_copies), aa=lambda run: run.results.aa)
    if not rows:
        return None

    def draw(sheet: Any) -> None:
        axes = _scatter(sheet, groups, rows, "near_copies_percent")
        percent_axis(axes.xaxis, "uploads that are near-copies (%)")

    caption = (
        "Further left, fewer uploads show a real image; methods that upload no images are not on this figure. "
        "A control that sends real images shows what accuracy needs no condensation."
    )
    return Plot("near-copies", "Accuracy against near-copies", caption, rows, draw)


def accuracy_for_distance(groups: Sequence[RunGroup]) -> Plot | None:
    """AA against the median distance of an upload to its nearest real image."""
    rows = seed_rows(groups, nearest_rms_median=lambda run: run.nearest_rms, aa=lambda run: run.results.aa)
    if not rows:
        return None

    def draw(sheet: Any) -> None:
        axes = _scatter(sheet, groups, rows, "nearest_rms_median")
        far = max(max(row["nearest_rms_median"] for row in rows), 0.02)
        axes.set_xlim(-0.08 * far, 1.15 * far)
        axes.axvline(0, **GUIDE)
        place = axes.get_xaxis_transform()  # y in the height of the axes
        axes.text(0.012 * far, 0.04, "the image itself", transform=place, rotation=90, **ASIDE)
        axes.set_xlabel("median distance to a real image (RMS)")

    caption = "RMS over pixels in units of the data's standard deviation. Distance alone is no guarantee of privacy."
    return Plot("distance", "Accuracy against distance to real images", caption, rows, draw)


def accuracy_for_noise(groups: Sequence[RunGroup]) -> Plot | None:
    """AA against sigma, a line for every method and mechanism that was run with several."""
    lines: dict[tuple[str, ...], list[Row]] = {}
    styles: dict[str, MethodStyle] = {}
    for group in groups:
        aa, sigma = group.aa, group.mean(lambda run: run.privacy.noise_multiplier)
        if aa and sigma is not None:
            run = group.finished[0]
            row: Row = {"method": group.method, "title": group.style.title, "mode": _kind_of_noise(run)}
            row |= {"mechanism": run.privacy.mechanism, "sigma": sigma, "aa": aa.mean, "aa_std": aa.std}
            row |= {"num_seeds": aa.num, "epsilon": run.epsilon}
            styles[group.method] = group.style
            lines.setdefault((group.method, _kind_of_noise(run), problem_of(run)), []).append(row)
    drawn = [sorted(rows, key=lambda row: row["sigma"]) for rows in lines.values()]
    drawn = [rows for rows in drawn if rows[0]["sigma"] < rows[-1]["sigma"]]
    if not drawn:
        return None

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        for rows in drawn:
            own, kind = styles[rows[0]["method"]], rows[0]["mode"]
            xs, ys, bars = ([row[key] for row in rows] for key in ("sigma", "aa", "aa_std"))
            inside = own.colour if rows[0]["epsilon"] else CARD
            style = {"color": own.colour, "marker": own.marker, "markerfacecolor": inside}
            axes.errorbar(xs, ys, yerr=percent_bars(ys, bars), elinewidth=1, label=f"{own.label}, {kind}", **style)
        axes.set_xlabel("noise multiplier σ")
        percent_axis(axes.yaxis, "AA (%)")

    names = "; ".join(f"{rows[0]['title']} under {rows[0]['mode']}" for rows in drawn)
    caption = (
        f"{names}. Further right, more noise is added to what leaves a site. "
        "Filled points have a guarantee, hollow ones none."
    )
    return Plot("noise", "Accuracy against noise", caption, [row for rows in drawn for row in rows], draw)


def _kind_of_noise(run: RunRecord) -> str:
    """What a line joins: runs of one mode, which differ in the amount of noise only."""
    kind, _, guarantee = mode_of(run).partition(" ε=")
    return kind if guarantee else plain(run.privacy.mechanism, 20)


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def _scatter(sheet: Any, groups: Sequence[RunGroup], rows: Sequence[Row], key: str) -> Any:
    axes = sheet.subplots()
    mean_points(axes, groups, rows, key, "aa")
    percent_axis(axes.yaxis, "AA (%)")
    return axes


_STARTS = {"real": "real start", "noise": "white noise", "leaves": "dead leaves", "coloured": "class moments"}
_KINDS = {"release": "release", "per-example": "per-example", "dp-sgd": "DP-SGD"}
NO_NOISE = "no noise"  # weights as they are
_LINE = 0.047  # height of a label's line, as a share of the axis
_LETTER = 0.019  # width of a letter, as a share of the axis


@dataclass(frozen=True)
class Point:
    """A method in one mode of privacy, over its seeds."""

    setting: str
    method: str
    mode: str
    num: int
    aa: float
    aa_std: float | None
    near_copies_percent: float | None  # None: no images are sent
    nearest_rms: float | None
    epsilon: float | None  # None: nothing is guaranteed
    stored: bool = False
    hero: bool = False
    style: MethodStyle | None = None  # as the runs recorded it

    @property
    def family(self) -> tuple[str, str]:
        """Points of one method that differ in the amount of noise only."""
        return self.method, self.mode.partition("=")[0]


def mode_of(run: RunRecord) -> str:
    """What stands between a site's images and its upload, in two words."""
    kind, sigma, start = run.privacy.mechanism or "none", run.privacy.noise_multiplier, run.settings.get("method.start")
    lens = run.settings.get("model.lens")
    seen = plain(PurePath(str(lens)).stem, 20) if lens else ""  # what sums are made of: what the lens sees
    sums = (kind, start) == ("release", "coloured") or run.style.uploads == "sums"
    words = seen or "moments" if sums else _KINDS.get(kind, plain(kind, 20))
    if run.settings.get("privacy.honest_sites"):
        words += ", secure sum"
    if run.epsilon is not None:
        return f"{words} ε={run.epsilon:g}"
    if kind == "paper-experiment":
        return "σ=?" if sigma is None else f"σ={sigma:g}"
    return f"{words}, test noise" if kind != "none" else _mode_without_noise(run, seen, start)


def _mode_without_noise(run: RunRecord, seen: str, start: Any) -> str:
    if run.style.reference:
        return seen
    if run.near_copies is None:
        return f"{seen}, exact sums" if run.style.uploads == "sums" else NO_NOISE
    norm = " (GN)" if run.settings.get("model.norm") == "group" else ""
    return seen if seen and start == "coloured" else _STARTS.get(str(start), "surrogates") + norm


def problem_of(run: RunRecord) -> str:
    """What must agree for two points to stand in one figure: data, tasks and federation; a network is part of the mode."""
    keys = ("num_clients", "per_round", "num_rounds", "beta", "partition")
    told = [run.data or run.settings.get("data.name"), f"{len(run.matrix)} tasks"]
    told += [f"{key} {run.settings.get(f'federation.{key}')}" for key in keys]
    return ", ".join(plain(word, 60) for word in told)


def points_of(groups: Sequence[RunGroup]) -> list[Point]:
    """The finished groups as points."""
    found = []
    for group in groups:
        if group.aa is None:
            continue
        run = group.finished[0]
        point = Point(
            setting=problem_of(run),
            method=group.method,
            mode=mode_of(run),
            num=group.aa.num,
            aa=group.aa.mean,
            aa_std=group.aa.std,
            near_copies_percent=_percent(group.mean(lambda run: run.near_copies)),
            nearest_rms=group.mean(lambda run: run.nearest_rms),
            epsilon=run.epsilon,
            hero=group.hero,
            style=group.style,
        )
        found.append(point)
    return found


def stored_points() -> list[Point]:
    """What was measured in advance and ships with the package."""
    text = (files("rescene.report") / "frontier.csv").read_text("utf-8")
    found = []
    for row in csv.DictReader(text.splitlines()):
        words: Any = {key: row.pop(key) for key in ("setting", "method", "mode")}
        numbers: Any = {key: float(value) if value else None for key, value in row.items()}
        found.append(Point(**words | numbers | {"stored": True}))
    return found


def beside_stored(groups: Sequence[RunGroup]) -> list[Point]:
    """A page's points, and the stored ones of the same problem that it does not have itself."""
    own = points_of(groups)
    known, settings = {(p.method, p.mode) for p in own}, {p.setting for p in own}
    return own + [p for p in stored_points() if p.setting in settings and (p.method, p.mode) not in known]


def frontier(points: Sequence[Point]) -> list[Plot]:
    """Three panels, those there is data for; none where nothing but reference lines differs in its mode."""
    if len({p.mode for p in points} - {"", NO_NOISE}) < 2:
        return []
    panels = (
        ("frontier-copies", "Accuracy against near-copies", _COPIES, _copies_axis, lambda p: p.near_copies_percent),
        ("frontier-distance", "Accuracy against distance to real images", _DISTANCE, _distance_axis, lambda p: p.nearest_rms),
        ("frontier-epsilon", "Accuracy against what is guaranteed", _EPSILON, _epsilon_axis, _epsilon_place(points)),
    )  # fmt: skip
    made = []
    for name, title, caption, axis, place in panels:
        drawn = [p for p in points if place(p) is not None]
        if len(drawn) > 1 and (axis is not _epsilon_axis or any(p.epsilon for p in drawn)):
            made.append(Plot(name, title, caption, [point_row(p) for p in drawn], _drawing(drawn, place, axis), 3.9))
    return made


def point_row(point: Point) -> Row:
    """The point as a row of a CSV file, as it is stored."""
    return {key: value for key, value in asdict(point).items() if key not in ("hero", "style")}


_FILLED = "Filled points have a guarantee, hollow ones none; a line joins points that differ in the amount of noise."
_COPIES = f"Left, no upload shows a real image; methods that send no images are not on it. {_FILLED}"
_DISTANCE = f"Median RMS over pixels in the data's standard deviations; being far away is no guarantee. {_FILLED}"
_EPSILON = f"Left, one record matters less to everything a site ever sends; at the right nothing bounds it. {_FILLED}"


def _drawing(points: Sequence[Point], place: Any, axis: Any) -> Callable[[Any], None]:
    tags = _kinds(points) if axis is _epsilon_axis else [p.mode for p in points]

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        xs = [place(p) for p in points]
        for _, family in groupby(sorted(zip(points, xs, strict=True), key=_in_family), lambda pair: pair[0].family):
            members, places = zip(*family, strict=True)
            line = {"color": _style(members[0]).colour, "linewidth": 1, "alpha": 0.5, "zorder": 2}
            axes.plot(places, [p.aa for p in members], **line)
        for p, x in zip(points, xs, strict=True):
            _mark(axes, p, x)
        axis(axes, xs, points)
        percent_axis(axes.yaxis, "AA (%)")
        _labels(axes, points, xs, tags)
        for own in dict.fromkeys(_style(p) for p in points):
            axes.plot([], [], marker=own.marker, color=own.colour, linestyle="none", markersize=7, label=own.label)

    return draw


def _style(point: Point) -> MethodStyle:
    return point.style or style_of(point.method)


def _kinds(points: Sequence[Point]) -> list[str]:
    """Labels where the axis says epsilon: the kind of mechanism, once for points that differ in the amount of noise only."""
    last = {p.family: p for p in sorted(points, key=lambda p: p.epsilon or 0.0)}
    return [
        p.mode.partition(" ε=")[0] if p.mode != NO_NOISE and (p.epsilon is None or last[p.family] is p) else ""
        for p in points
    ]


def _in_family(pair: tuple[Point, float]) -> tuple[Any, ...]:
    return pair[0].family, pair[1]


def _mark(axes: Any, point: Point, x: float) -> None:
    own, size = _style(point), 5.0 if point.stored else 8.0 + point.hero
    style = {
        "marker": own.marker, "color": own.colour, "markersize": size + 2 * (own.marker == "*"), "linestyle": "none",
        "markerfacecolor": own.colour if point.epsilon else CARD, "markeredgecolor": own.colour, "markeredgewidth": 1.4,
        "alpha": 0.6 if point.stored else 1.0, "zorder": 4 if point.stored else 5,
    }  # fmt: skip
    axes.errorbar(x, point.aa, yerr=percent_bars([point.aa], [point.aa_std]), elinewidth=1, **style)


def _labels(axes: Any, points: Sequence[Point], xs: Sequence[float], tags: Sequence[str]) -> None:
    """Each tag beside its point; where labels would lie on each other the lower one moves down, tied by a thin line."""
    (low, high), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    line = _LINE * (top - bottom)
    placed: list[tuple[float, float, float]] = []  # left end, right end, height
    for p, x, tag in sorted(zip(points, xs, tags, strict=True), key=lambda each: -each[0].aa):
        if not tag:
            continue
        at, width = (x - low) / (high - low), _LETTER * len(tag)
        right = at + 0.04 + width < 1 or at < 0.5
        left_end = at + 0.035 if right else at - 0.035 - width
        y = p.aa
        for first, last, taken in sorted(placed, key=lambda spot: -spot[2]):
            if first < left_end + width and left_end < last and abs(taken - y) < line:
                y = taken - line
        placed.append((left_end, left_end + width, y))
        axes.annotate(
            tag, (x, p.aa), (left_end if right else left_end + width, y), xycoords="data",
            textcoords=("axes fraction", "data"), fontsize=8, va="center", ha="left" if right else "right",
            color=MUTED if p.stored else INK, zorder=6,
            arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.5, "shrinkB": 4} if y < p.aa - 0.4 * line else None,
        )  # fmt: skip


def _copies_axis(axes: Any, xs: Sequence[float], points: Sequence[Point]) -> None:
    percent_axis(axes.xaxis, "uploads that are near-copies (%)")


def _distance_axis(axes: Any, xs: Sequence[float], points: Sequence[Point]) -> None:
    far = max(*xs, 0.02)
    axes.set_xlim(-0.06 * far, 1.08 * far)
    axes.set_xlabel("median distance to a real image (RMS)")


def _epsilon_place(points: Sequence[Point]) -> Callable[[Point], float]:
    """Doubling epsilon is a step to the right; no guarantee stands two steps right of the largest."""
    largest = max((math.log2(p.epsilon) for p in points if p.epsilon), default=0.0)
    return lambda p: math.log2(p.epsilon) if p.epsilon else largest + 2


def _epsilon_axis(axes: Any, xs: Sequence[float], points: Sequence[Point]) -> None:
    places = sorted({(x, f"{p.epsilon:g}") for x, p in zip(xs, points, strict=True) if p.epsilon})
    none, step = places[-1][0] + 2, -(-len(places) // 6)
    shown = [*places[::-step][::-1], (none, "none")]
    axes.set_xticks([x for x, _ in shown], [text for _, text in shown])
    axes.set_xlim(places[0][0] - 0.5, none + 2.5)
    axes.axvline(none - 1, **GUIDE)
    axes.set_xlabel("ε for a record, over the whole run")
