"""Sites that withdrew from a run (``rescene forget``): what was removed, and accuracy before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rescene.report.groups import Group
from rescene.report.look import plain
from rescene.report.runs import Row, Run, number, table
from rescene.report.words import NONE, bytes_text, percent


@dataclass(frozen=True)
class Withdrawal:
    """One site of one run. ``accuracies``: on what, before, after, and where checked of the run that never saw it."""

    group: Group
    seed: int | None
    site: str
    words: str
    checked: bool
    accuracies: list[list[str]]
    kinds: list[str]  # of what was removed: the columns after task and class
    removed: list[list[str]]
    remains: list[str]


def withdrawals(groups: Sequence[Group]) -> list[Withdrawal]:
    return [
        _withdrawal(group, run, row)
        for group in groups
        for run in group.finished
        for row in run.results.get("forgotten") or ()
        if isinstance(row, dict)
    ]


def _withdrawal(group: Group, run: Run, row: Row) -> Withdrawal:
    check = run.withdrawal if run.withdrawal.get("client") == row.get("client") else {}
    lost = [plain(name, 60) for name in row.get("classes_lost") or ()]
    exact = row.get("exact") is True
    kinds = {"sums": "In the sums"} if exact else {"buffer": "From the buffer", "pool": "From the pool"}
    words = (
        f"{'Sums over ' if exact else ''}{_count(row, 'num_images')} images ({bytes_text(number(row.get('bytes')))}) were removed, "
        f"{_count(row, 'num_images_left')} of other sites remained; "
        + ("solved anew without them." if exact else f"{_count(row, 'epochs')} epochs from the run's first weights.")
    ) + (f" Nobody else had sent images of {', '.join(lost)}." if lost else "")
    return Withdrawal(
        group=group,
        seed=run.seed,
        site=plain(row.get("name") or row.get("client"), 40),
        words=words,
        checked=bool(check),
        accuracies=_accuracies(row, check),
        kinds=list(kinds.values()),
        removed=[
            [plain(cell.get(key, "?"), 60) for key in ("task", "class", *kinds)]
            for cell in row.get("removed") or ()
            if isinstance(cell, dict)
        ],
        remains=[plain(words, 200) for words in row.get("remains") or ()],
    )


def _accuracies(row: Row, check: Row) -> list[list[str]]:
    stages = ("before", "after")
    rows: list[tuple[str, list[Any], Any]] = [
        ("all classes so far", [row.get(f"accuracy_{s}") for s in stages], table(check, "aa").get("never")),
        (
            "the site's own images",
            [row.get(f"own_images_{s}") for s in stages],
            table(check, "own_images").get("never"),
        ),
    ]
    before, after = (row.get(f"per_task_{stage}") or [] for stage in stages)
    never = table(check, "per_task").get("never") or [None] * len(before)
    rows += [(f"task {t}", [b, a], n) for t, (b, a, n) in enumerate(zip(before, after, never, strict=False))]
    return [[name, *map(_percent, values), *([_percent(last)] if check else [])] for name, values, last in rows]


def _count(row: Row, key: str) -> str:
    value = number(row.get(key))
    return NONE if value is None else f"{value:,.0f}"


def _percent(value: Any) -> str:
    found = number(value)
    return NONE if found is None else percent(found)
