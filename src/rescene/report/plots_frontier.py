"""The frontier: accuracy against what uploads show and what they are guaranteed not to tell. One point per method and mode.

Filled points have a guarantee, hollow ones have none. Beside a page's own runs stand stored ones of the same problem
(``frontier.csv``, made by benchmarks/frontier.py), small and pale.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from itertools import groupby
from pathlib import PurePath
from typing import Any

from rescene.report.canvas import Plot, legend_above, percent_axis
from rescene.report.groups import Group, guaranteed, near_copies
from rescene.report.look import CARD, INK, MUTED, REFERENCES, SUMS, is_ours, key_of, look_of, plain
from rescene.report.runs import Run, number, table

_STARTS = {"real": "real start", "noise": "white noise", "leaves": "dead leaves", "coloured": "class moments"}
_KINDS = {"release": "release", "per-example": "per-example", "dp-sgd": "DP-SGD"}
NO_NOISE = "no noise"  # weights as they are
_LINE = 5.0  # height of a label's line on the accuracy axis, percent
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

    @property
    def family(self) -> tuple[str, str]:
        """Points of one method that differ in the amount of noise only."""
        return self.method, self.mode.partition("=")[0]


def mode_of(run: Run) -> str:
    """What stands between a site's images and its upload, in two words."""
    kind = str(run.privacy.get("mechanism") or "none")
    start = table(run.config, "method").get("start")
    epsilon, sigma = guaranteed(run), number(run.privacy.get("noise_multiplier"))
    lens = table(run.config, "model").get("lens")
    seen = plain(PurePath(str(lens)).stem, 20) if lens else ""  # what sums are made of: what the lens sees
    sums = (kind, start) == ("release", "coloured") or look_of(run.method).sends == SUMS
    words = seen or "moments" if sums else _KINDS.get(kind, plain(kind, 20))
    if table(run.config, "privacy").get("honest_sites"):
        words += ", secure sum"
    if epsilon is not None:
        return f"{words} ε={epsilon:g}"
    if kind == "paper-experiment":
        return "σ=?" if sigma is None else f"σ={sigma:g}"
    if kind != "none":
        return f"{words}, test noise"
    if key_of(run.method) in REFERENCES:
        return seen
    if near_copies(run) is None:
        return f"{seen}, exact sums" if look_of(run.method).sends == SUMS else NO_NOISE
    norm = " (GN)" if table(run.config, "model").get("norm") == "group" else ""
    return seen if seen and start == "coloured" else _STARTS.get(str(start), "surrogates") + norm


def problem_of(run: Run) -> str:
    """What must agree for two points to stand in one figure: data, tasks and federation; a network is part of the mode."""
    federation = table(run.config, "federation")
    told = [run.env.get("data") or table(run.config, "data").get("name"), f"{len(run.matrix)} tasks"]
    told += [f"{key} {federation.get(key)}" for key in ("num_clients", "per_round", "num_rounds", "beta", "partition")]
    return ", ".join(plain(word, 60) for word in told)


def points_of(groups: Sequence[Group]) -> list[Point]:
    """The finished groups as points."""
    found = []
    for group in groups:
        aa = group.spread(lambda run: run.number("aa"))
        if aa is None:
            continue
        run, copies = group.finished[0], group.spread(near_copies)
        distance = group.spread(lambda run: number(run.leakage.get("nearest_rms_median")))
        found.append(
            Point(
                problem_of(run),
                group.method,
                mode_of(run),
                aa.num,
                aa.mean,
                aa.std,
                100 * copies.mean if copies else None,
                distance.mean if distance else None,
                guaranteed(run),
            )  # fmt: skip
        )
    return found


def stored_points() -> list[Point]:
    """What was measured in advance and ships with the package."""
    text = (files("rescene.report") / "frontier.csv").read_text("utf-8")
    numbers = [field.name for field in fields(Point) if field.name not in ("setting", "method", "mode", "stored")]
    return [
        Point(**{**row, **{key: float(row[key]) if row[key] else None for key in numbers}, "stored": True})  # type: ignore[arg-type]
        for row in csv.DictReader(text.splitlines())
    ]


def beside_stored(groups: Sequence[Group]) -> list[Point]:
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
            made.append(Plot(name, title, caption, [asdict(p) for p in drawn], _drawing(drawn, place, axis), 3.9))
    return made


_FILLED = "Filled points have a guarantee, hollow ones none; a line joins points that differ in the amount of noise."
_COPIES = f"Left, no upload shows a real image; methods that send no images are not on it. {_FILLED}"
_DISTANCE = f"Median RMS over pixels in the data's standard deviations; being far away is no guarantee. {_FILLED}"
_EPSILON = f"Left, one record matters less to everything a site ever sends; at the right nothing bounds it. {_FILLED}"


def _drawing(points: Sequence[Point], place: Any, axis: Any) -> Callable[[Any], None]:
    tags = _kinds(points) if axis is _epsilon_axis else [p.mode for p in points]

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        xs = [place(p) for p in points]
        axis(axes, xs, points)
        for _, family in groupby(sorted(zip(points, xs, strict=True), key=_in_family), lambda pair: pair[0].family):
            line = [(look_of(p.method).colour, x, p.aa) for p, x in family]
            axes.plot(
                [x for _, x, _ in line], [y for *_, y in line], color=line[0][0], linewidth=1, alpha=0.5, zorder=2
            )
        for p, x in zip(points, xs, strict=True):
            _mark(axes, p, x)
        percent_axis(axes.yaxis, "AA (%)")
        _labels(axes, points, xs, tags)
        for look in dict.fromkeys(look_of(p.method) for p in points):
            axes.plot([], [], marker=look.marker, color=look.colour, linestyle="none", markersize=7, label=look.label)
        legend_above(sheet, *axes.get_legend_handles_labels())

    return draw


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
    look, size = look_of(point.method), 5.0 if point.stored else 8.0 + is_ours(point.method)
    style = {
        "marker": look.marker, "color": look.colour, "markersize": size + 2 * (look.marker == "*"), "linestyle": "none",
        "markerfacecolor": look.colour if point.epsilon else CARD, "markeredgecolor": look.colour, "markeredgewidth": 1.4,
        "alpha": 0.6 if point.stored else 1.0, "zorder": 4 if point.stored else 5,
    }  # fmt: skip
    axes.errorbar(x, point.aa, yerr=point.aa_std, elinewidth=1, **style)


def _labels(axes: Any, points: Sequence[Point], xs: Sequence[float], tags: Sequence[str]) -> None:
    """Each tag beside its point; where labels would lie on each other the lower one moves down, tied by a thin line."""
    low, high = axes.get_xlim()
    placed: list[tuple[float, float, float]] = []  # left end, right end, height
    for p, x, tag in sorted(zip(points, xs, tags, strict=True), key=lambda each: -each[0].aa):
        if not tag:
            continue
        at, width = (x - low) / (high - low), _LETTER * len(tag)
        right = at + 0.04 + width < 1 or at < 0.5
        left_end = at + 0.035 if right else at - 0.035 - width
        y = p.aa
        for first, last, taken in sorted(placed, key=lambda spot: -spot[2]):
            if first < left_end + width and left_end < last and abs(taken - y) < _LINE:
                y = taken - _LINE
        placed.append((left_end, left_end + width, y))
        axes.annotate(
            tag, (x, p.aa), (left_end if right else left_end + width, y), xycoords="data",
            textcoords=("axes fraction", "data"), fontsize=8, va="center", ha="left" if right else "right",
            color=MUTED if p.stored else INK, zorder=6,
            arrowprops={"arrowstyle": "-", "color": MUTED, "linewidth": 0.5, "shrinkB": 4} if y < p.aa - 2 else None,
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
    axes.axvline(none - 1, color=MUTED, linewidth=0.9, linestyle=(0, (4, 4)))
    axes.set_xlabel("ε for a record, over the whole run")
