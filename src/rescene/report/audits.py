"""What attacks on the runs showed, from their audit.json (``rescene audit RUN``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rescene.report.groups import Group
from rescene.report.look import plain
from rescene.report.runs import Row, Run, number
from rescene.report.words import NONE


@dataclass(frozen=True)
class Audit:
    """One audited run: its verdict, the attacks as cells (attack, right, guesses, epsilon at least), sentences."""

    group: Group
    seed: int | None
    verdict: str
    promised: str
    rows: list[list[str]]
    words: list[str]


def audits(groups: Sequence[Group]) -> list[Audit]:
    return [_audit(group, run) for group in groups for run in group.finished if run.audit.get("canaries")]


def _audit(group: Group, run: Run) -> Audit:
    found = run.audit
    return Audit(
        group,
        run.seed,
        plain(found.get("verdict", "?"), 40),
        _epsilon(found, "promised"),
        [_cells(row) for row in found["canaries"] if isinstance(row, dict)],
        [plain(words, 600) for words in found.get("words") or []],
    )


def _cells(row: Row) -> list[str]:
    counts = [
        NONE if (value := number(row.get(key))) is None else f"{value:.0f}" for key in ("num_right", "num_guesses")
    ]
    return [plain(row.get("attack", "?")), *counts, _epsilon(row, "epsilon")]


def _epsilon(row: Row, key: str) -> str:
    value = number(row.get(key))
    return NONE if value is None else f"{value:.2f}"
