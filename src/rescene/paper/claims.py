"""What the paper's text claims, held against numbers: the paper's own (they must agree with it) or ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rescene.functional import old_and_recent
from rescene.paper.compare import Kind, Line, band, compare, explanation, lies_in
from rescene.paper.numbers import packaged, printed
from rescene.paper.recipes import paper_recipe
from rescene.paper.store import NOMINAL, Store

BASELINES = ("fedavg", "fedewc", "fedlwf", "target", "glfc", "fedcbdr", "refed")
FigureLookup = Callable[[str, str], float | None]  # (TABLE:CELL, metric) -> figure, None if not measured
Spec = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """``known`` of ``needed`` figures are measured; ``figure`` is None until enough of them are.

    ``num``: seeds of the measured figure with the fewest; None where formulas alone were needed, or nothing is measured.
    """

    claim: str
    says: str
    place: str
    figure: float | None
    known: int
    needed: int
    verdict: str  # supported, not supported, explained or not yet measured
    why: str = ""
    num: int | None = None
    kind: Kind = "accuracy"


def judge(book: FigureLookup) -> list[Verdict]:
    """Every claim against one book of figures."""
    return [_judge(name, spec, book) for name, spec in _claims().items()]


def paper_book(where: str, metric: str) -> float | None:
    """The paper's own figures: its tables must support what its text claims, else we have read one of them wrongly."""
    table, _, cell = where.partition(":")
    return _of_cell({n.metric: n.mean for n in printed(table) if n.cell == cell}, metric)


class OurBook:
    """Our figures, of the readings taken. No run with E_srv=10 stands for E_srv=100.

    Costs follow the paper's conventions and need no run, unless the metric says ``measured``, as in measured client_pflop.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.seeds: dict[tuple[str, str], int] = {}  # of the measured figures that were asked for
        self._lines: dict[tuple[str, bool], Line | None] = {}

    def __call__(self, where: str, metric: str) -> float | None:
        line = self._line(where, costs=metric.removeprefix("measured ") in NOMINAL)
        if line is None:
            return None
        if metric not in NOMINAL and line.runs:
            self.seeds[where, metric] = len(line.runs)
        figures = line.measured if metric.startswith("measured ") else line.ours
        return _of_cell({key: value.mean for key, value in figures.items()}, metric)

    def _line(self, where: str, costs: bool) -> Line | None:
        if (where, costs) not in self._lines:
            table, _, cell = where.partition(":")
            lines = compare(paper_recipe(table), self.store, [cell], costs)
            own = (line for line in lines if line.cell.name == cell and not line.variant)
            self._lines[where, costs] = next(own, None)
        return self._lines[where, costs]


def _claims() -> dict[str, Spec]:
    found: dict[str, Spec] = packaged("claims.yaml")
    return found


def _of_cell(own: dict[str, float], metric: str) -> float | None:
    return _old(own) if metric == "old" else own.get(metric.removeprefix("measured "))


def _old(tasks: dict[str, float]) -> float | None:
    final = [tasks[f"task_{j}"] for j in range(len(tasks)) if f"task_{j}" in tasks]
    return old_and_recent([final] * len(final))[0] if len(final) > 1 else None


def _judge(name: str, claim: Spec, book: FigureLookup) -> Verdict:
    store = getattr(book, "store", None) or Store([])
    kind = next(kind for kind in KINDS if kind in claim)
    spec = claim[kind]
    seen: dict[tuple[str, str], float | None] = {}

    def look(where: str, metric: str) -> float | None:
        return seen.setdefault((where, metric), book(where, metric))

    figure, settled = KINDS[kind](spec, look)
    figure = figure if settled else None
    known, needed = sum(value is not None for value in seen.values()), len(seen)
    seeds = getattr(book, "seeds", {})
    num = min((seeds[asked] for asked in seen if asked in seeds), default=None)
    counted: Kind = "formula" if spec["metric"] in NOMINAL else "accuracy"
    if spec["metric"].startswith("measured "):
        counted = "measured cost"
    verdict, why = "not yet measured", ""
    if figure is not None:
        verdict = "supported"
        if _breaks(figure, spec):
            number = printed(spec["of"].partition(":")[0])[0] if kind == "share" else None
            limit = replace(number, mean=float(spec.get("at_most", spec.get("at_least")))) if number else None
            verdict, why = explanation(f"claims:{name}", kind, figure, store, limit, counted)
            verdict = "not supported" if verdict == "open" else verdict
    return Verdict(name, claim["says"], claim["place"], figure, known, needed, verdict, why, num, counted)


def _breaks(figure: float | None, spec: Spec) -> bool:
    """The figure is rounded to the digits of the claim first, as its authors did. A printed figure has a band on both sides."""
    if figure is None:
        return False
    if "at_least" not in spec and "at_most" not in spec:
        table, _, cell = spec["of"].partition(":")
        number = next(n for n in printed(table) if (n.cell, n.metric) == (cell, spec["metric"]))
        return not lies_in(figure, band(number) or (number.mean, number.mean))
    limit = spec["at_least"] if "at_least" in spec else spec["at_most"]
    shown = round(figure, len(str(limit).partition(".")[2]))
    return bool(shown < limit if "at_least" in spec else shown > limit)


def _margins(spec: Spec, places: list[str], look: FigureLookup) -> Iterator[tuple[float | None, bool]]:
    """At each place: ours minus the best known of the others, None if there is none; whether all of them are known."""
    for place in places:
        own = look(place.replace("*", spec.get("who", "rescene")), spec["metric"])
        others = [look(place.replace("*", name), spec["metric"]) for name in spec.get("over", BASELINES)]
        known = [other for other in others if other is not None]
        margin = own - max(known) if own is not None and known else None
        yield margin, own is not None and len(known) == len(others)


def _lead(spec: Spec, look: FigureLookup) -> tuple[float | None, bool]:
    """Another competitor or place can only make it smaller: settled early once it is too small."""
    margins = list(_margins(spec, spec["at"], look))
    smallest = min((margin for margin, _ in margins if margin is not None), default=None)
    return smallest, all(complete for _, complete in margins) or _breaks(smallest, spec)


def _first(spec: Spec, look: FigureLookup) -> tuple[float | None, bool]:
    """Settled early if the places still open cannot change the answer."""
    margins = list(_margins(spec, spec["at"], look))
    wins = sum(complete and (margin or 0) > 0 for margin, complete in margins)
    lost = sum(margin is not None and margin <= 0 for margin, _ in margins)
    return float(wins), wins >= spec["at_least"] or len(margins) - lost < spec["at_least"]


def _widest(spec: Spec, look: FigureLookup) -> tuple[float | None, bool]:
    groups = [list(_margins(spec, places, look)) for places in spec["at"]]
    if not all(complete for group in groups for _, complete in group):
        return None, False
    return float(sum(group[0] == max(group) for group in groups)), True


def _share(spec: Spec, look: FigureLookup) -> tuple[float | None, bool]:
    part, whole = look(spec["of"], spec["metric"]), look(spec["to"], spec["metric"])
    if part is None or not whole:
        return None, False
    return part / whole * (100 if spec.get("percent") else 1), True


def _figure(spec: Spec, look: FigureLookup) -> tuple[float | None, bool]:
    figure = look(spec["of"], spec["metric"])
    return figure, figure is not None


def _extreme(best: Callable[..., Any]) -> Callable[[Spec, FigureLookup], tuple[float | None, bool]]:
    """The lowest or highest of some figures: settled early once a known one breaks the bound."""

    def find(spec: Spec, look: FigureLookup) -> tuple[float | None, bool]:
        values = [look(where, spec["metric"]) for where in spec["of"]]
        known = [value for value in values if value is not None]
        figure = best(known, default=None)
        return figure, len(known) == len(values) or _breaks(figure, spec)

    return find


KINDS = {
    "figure": _figure,
    "lead": _lead,
    "first": _first,
    "widest": _widest,
    "share": _share,
    "lowest": _extreme(min),
    "highest": _extreme(max),
}
