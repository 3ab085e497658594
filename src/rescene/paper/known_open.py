"""Figures and claims that are known to be open, so that a check can fail on new ones alone.

Known is not explained: a cause that is shown stands in explained.csv. An entry holds for one figure. Another one at the same
place, such as the mean of more seeds, is new until somebody accepts it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from rescene.core.files import write_atomically
from rescene.paper.claims import Verdict
from rescene.paper.compare import Finding

FILE = Path(__file__).with_name("known_open.csv")
FAILED = ("open", "not supported")
Judged = Finding | Verdict
AnyJudged = TypeVar("AnyJudged", Finding, Verdict)
OpenFigure = tuple[str, str, str, str]  # where, kind, metric and our figure
COLUMNS = ("where", "kind", "metric", "ours", "since")


def failing(judged: Iterable[Judged]) -> list[Judged]:
    """Those that are open or not supported; with the words of ``told_as_known`` they are neither."""
    return [one for one in judged if one.verdict in FAILED]


def read_known(file: Path) -> dict[OpenFigure, str]:
    """Each with the day since which it is known to be open."""
    with file.open(encoding="utf-8", newline="") as lines:
        return {(row["where"], row["kind"], row["metric"], row["ours"]): row["since"] for row in csv.DictReader(lines)}


def write_known(judged: Iterable[Judged], file: Path) -> None:
    """Make the list anew from what is open now. What was known before keeps its day."""
    before = read_known(file) if file.is_file() else {}
    today = datetime.now(UTC).date().isoformat()
    rows = [(*figure, before.get(figure, today)) for figure in map(_figure, failing(judged))]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *rows])
    write_atomically(file, text.getvalue().encode())


def told_as_known(judged: Iterable[AnyJudged], known: Mapping[OpenFigure, str]) -> list[AnyJudged]:
    """The same; the verdict on what is in the list says since when it is known."""
    return [
        replace(one, verdict=f"known to be {one.verdict} since {known[_figure(one)]}")
        if one.verdict in FAILED and _figure(one) in known
        else one
        for one in judged
    ]


def no_longer_open(judged: Iterable[Judged], known: Iterable[OpenFigure]) -> list[str]:
    """Entries that nothing open has any more: the list can shrink."""
    now = set(map(_figure, failing(judged)))
    return [" ".join(filter(None, (figure[0], *figure[2:]))) for figure in known if figure not in now]


def _figure(one: Judged) -> OpenFigure:
    if isinstance(one, Verdict):
        return f"claims:{one.claim}", "claim", "", "" if one.figure is None else f"{one.figure:.2f}"
    return f"{one.table}:{one.line.name}", one.kind, one.metric, f"{one.ours.mean:.2f}"
