"""What the theory of temporal herding says about finished runs, in sentences and a table. Read from results.json.

The sentences follow the numbers: an assumption that fails is said to fail, a bound that promises nothing is said to
promise nothing. Symbols and definitions: docs/theory.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rescene.report.groups import Group
from rescene.report.look import plain
from rescene.report.runs import Row, Run, number, table
from rescene.report.words import PERCENT

TRIVIAL = 2.0  # two means of unit vectors are never further apart
_NEARLY = 1e-9  # distances that differ by less are the same up to rounding


VERDICTS = {"holds": "holds", "fails": "fails", "mixed": "in part", "silent": "says nothing"}


@dataclass(frozen=True)
class Finding:
    """One statement of the paper and how it fared: holds, fails, mixed, or silent (its condition is not met)."""

    statement: str
    verdict: str
    text: str


def theory_rows(head: Group | None) -> list[Row]:
    """The rows of the headline method, all seeds."""
    return class_rows(head.finished) if head else []


def class_rows(runs: Sequence[Run]) -> list[Row]:
    """The rows of all classes, tasks and seeds; rows that lack a number are left out."""
    found = [{"seed": run.seed, **row} for run in runs for row in table(run.results, "theory").get("classes") or []]
    return [row for row in found if all(number(row.get(key)) is not None for key in _NUMBERS)]


_NUMBERS = (
    *("num_pool", "num_window", "num_kept", "target_distance", "target_bound", "target_random", "full_pool_distance"),
    *("full_pool_bound", "removed_bias", "sigma", "coherence", "theorem_needs", "corollary_needs", "largest_margin"),
    *("kept_to_real", "herded_to_real", "pool_to_real", "full_pool_to_real"),
)


def findings(rows: Sequence[Row]) -> list[Finding]:
    """What holds and what does not, over all given classes (at least one)."""
    return [
        *_setting(rows),
        _coverage(rows),
        _lemma(rows),
        _bias(rows),
        _theorem(rows),
        _corollary(rows),
        *_stale(rows),
    ]


def _count(rows: Sequence[Row], test: Callable[[Row], bool]) -> int:
    return sum(1 for row in rows if test(row))


def _mean(rows: Sequence[Row], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def _verdict(num: int, total: int) -> str:
    return "holds" if num == total else "fails" if num == 0 else "mixed"


def _setting(rows: Sequence[Row]) -> list[Finding]:
    """Why there may be nothing to compare."""
    total, found = len(rows), []
    everything = _count(rows, lambda row: row["num_kept"] == row["num_pool"])
    if everything:
        text = f"In {everything} of {total} classes the whole pool fitted into the budget: the buffer is the pool."
        found.append(Finding("Budget", "silent", text))
    whole = _count(rows, lambda row: row["num_window"] == row["num_pool"])
    if whole:
        text = f"In {whole} of {total} classes the window holds every upload: temporal and full-pool herding are one."
        found.append(Finding("Window", "silent", text))
    return found


def _covered(row: Row, key: str = "coverage_fails_at") -> bool:
    return row[key] is None


def _within(row: Row) -> bool:
    return bool(row["target_distance"] <= row["target_bound"] + _NEARLY)


def _coverage(rows: Sequence[Row]) -> Finding:
    total, good = len(rows), _count(rows, _covered)
    text = f"At every step a candidate was left that leads towards the target in {good} of {total} classes."
    failing = [row for row in rows if not _covered(row)]
    if failing:
        steps = sorted(row["coverage_fails_at"] for row in failing)
        share = statistics.median(row["coverage_fails_at"] / row["num_kept"] for row in failing)
        text += (
            f" Elsewhere it first failed between step {steps[0]} and {steps[-1]}, at the median after "
            f"{100 * share:.0f}{PERCENT} of the picks; from there on the proof of the lemma does not apply."
        )
    return Finding("Assumption 1, directional coverage", _verdict(good, total), text)


def _lemma(rows: Sequence[Row]) -> Finding:
    total, good = len(rows), _count(rows, _within)
    text = (
        f"The buffer's mean lies within Δ/√B of its target in {good} of {total} classes: "
        f"{_mean(rows, 'target_distance'):.4f} on average, against a bound of {_mean(rows, 'target_bound'):.4f}."
    )
    lucky = _count(rows, lambda row: _within(row) and not _covered(row))
    if lucky:
        text += f" In {lucky} of them the bound held although the assumption failed."
    broken = _count(rows, lambda row: _covered(row) and not _within(row))
    if broken:
        text += f" In {broken} the assumption held and the bound did not: that contradicts the proof, so suspect the program."
    chance = _count(rows, lambda row: row["num_kept"] < row["num_pool"] and row["target_random"] <= row["target_bound"])
    if chance:
        text += (
            f" The bound is weak: a buffer drawn at random would typically keep it too in {chance} of {total} "
            f"(distance {_mean(rows, 'target_random'):.4f} on average)."
        )
    return Finding("Lemma 1, the buffer approaches its target", _verdict(good, total), text)


def _bias(rows: Sequence[Row]) -> Finding:
    share, gone = 100 * _mean(rows, "coherence"), _count(rows, lambda row: row["removed_bias"] > _NEARLY)
    text = (
        f"A shared direction that fades over the rounds explains {share:.0f}{PERCENT} of the rounds' squared error on average; the rest is "
        f"a deviation of up to σ = {_mean(rows, 'sigma'):.4f}. The window removes some bias in {gone} of {len(rows)} classes, "
        f"{_mean(rows, 'removed_bias'):.4f} on average. Any errors can be written this way; the theorem asks whether the bias outweighs σ."
    )
    return Finding("Assumption 2, coherent stale bias", "holds" if share >= 50 and gone else "mixed", text)


def _theorem(rows: Sequence[Row]) -> Finding:
    total, direct = len(rows), [row for row in rows if row["largest_margin"] > row["target_bound"]]
    extra = ""
    if len(direct) < total:
        extra = (
            f" In {total - len(direct)} of {total} no choice of direction and bias could meet it: "
            "‖m_P − μ‖ − ‖m_W − μ‖ does not exceed Δ/√B."
        )
    if len(direct) > len([row for row in direct if row["removed_bias"] > row["theorem_needs"]]):
        sure = _count(direct, _covered)
        extra += f" In {sure} that difference alone does exceed it, which is enough for the proof."
    keys = ("theorem_needs", "pool_to_real", "the whole pool")
    return _improvement(rows, "Theorem 1, closer to the real class than the whole pool", *keys, extra=extra)


def _corollary(rows: Sequence[Row]) -> Finding:
    keys = ("corollary_needs", "full_pool_to_real", "full-pool herding")
    return _improvement(rows, "Corollary 1, closer than full-pool herding", *keys, extra="")


def _improvement(rows: Sequence[Row], statement: str, needs: str, other: str, name: str, extra: str) -> Finding:
    """Was the condition met, and what happened anyway?"""
    total, met = len(rows), [row for row in rows if row["removed_bias"] > row[needs]]
    proved = [
        row
        for row in met
        if _covered(row) and (needs == "theorem_needs" or _covered(row, "full_pool_coverage_fails_at"))
    ]
    closer = _count(rows, lambda row: row["herded_to_real"] < row[other] - _NEARLY)
    level = _count(rows, lambda row: abs(row["herded_to_real"] - row[other]) <= _NEARLY)
    text = (
        f"The condition is met in {len(met)} of {total} classes (removed bias {_mean(rows, 'removed_bias'):.4f}, "
        f"needed more than {_mean(rows, needs):.4f}, on average)"
    )
    text += f", and with it every assumption in {len(proved)}." if met else ": nothing is promised."
    text += extra
    wrong = _count(proved, lambda row: row["herded_to_real"] >= row[other])
    if wrong:
        text += f" In {wrong} the promise was broken: that contradicts the proof, so suspect the program."
    text += (
        f" Measured: temporal herding is closer to the real mean in {closer} of {total}, level in {level}, further in "
        f"{total - closer - level} ({_mean(rows, 'herded_to_real'):.4f} against {_mean(rows, other):.4f} for {name})."
    )
    return Finding(statement, "silent" if not proved else "fails" if wrong else _verdict(len(proved), total), text)


def _stale(rows: Sequence[Row]) -> list[Finding]:
    """Proposition 1. With the smoothness taken from the same rounds its bound cannot fail; the question is what it says."""
    steps = [step for row in rows for step in round_rows(row) if step["staleness_bound"] is not None]
    if not steps:
        return []
    empty = _count(steps, lambda step: step["staleness_bound"] >= TRIVIAL)
    pairs = [(own[0], own[-1]) for row in rows if len(own := round_rows(row)) > 1]
    text = (
        f"The bound is {_mean(steps, 'staleness_bound'):.2f} on average where the error is {_mean(steps, 'task_end_error'):.4f}; "
        f"in {empty} of {len(steps)} rounds it is 2 or more and says nothing."
    )
    text += (
        f" Since they were made, uploads moved by {_mean(steps, 'surrogate_drift'):.2f} and real images by "
        f"{_mean(steps, 'real_drift'):.2f} in feature space; the bound adds the two, even where they go together."
    )
    if pairs:
        first, last = ([pair[i] for pair in pairs] for i in (0, 1))
        worse = sum(a["task_end_error"] > b["task_end_error"] for a, b in pairs)
        text += (
            f" Under the final model the first round's uploads are {_mean(first, 'task_end_error'):.4f} from the real mean and the last "
            f"round's {_mean(last, 'task_end_error'):.4f}; the first are the staler ones in {worse} of {len(pairs)} classes."
        )
    verdict = "silent" if empty == len(steps) else "mixed" if empty else "holds"
    return [Finding("Proposition 1, staleness", verdict, text)]


def round_rows(row: Row) -> list[Row]:
    """The columns of a class's rounds as rows."""
    columns = table(row, "rounds")
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=False)]


COLUMNS: tuple[tuple[str, str, str], ...] = (  # key, title, what it is
    ("num_pool", "|P|", "uploads of the class"),
    ("num_window", "|W|", "of the recent rounds"),
    ("num_kept", "B", "kept"),
    ("target_distance", "‖m_H − m_W‖", "to its target"),
    ("target_bound", "Δ/√B", "the lemma's bound"),
    ("target_random", "random", "to the target"),
    ("coverage_fails_at", "coverage", "first failing step"),
    ("removed_bias", "A_P − A_W", "removed bias"),
    ("theorem_needs", "2σ + Δ/√B", "needed"),
    ("herded_to_real", "‖m_H − μ‖", "buffer to real"),
    ("pool_to_real", "‖m_P − μ‖", "pool to real"),
    ("full_pool_to_real", "‖m_Hᴾ − μ‖", "full-pool herding to real"),
)


def cells(row: Row) -> list[str]:
    """A class's numbers as text, in the order of COLUMNS."""
    return [_cell(key, row[key]) for key, _, _ in COLUMNS]


def _cell(key: str, value: Any) -> str:
    if key == "coverage_fails_at":
        return "holds" if value is None else str(value)
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def theory_view(rows: Sequence[Row]) -> Row | None:
    """What the section of the page shows; None where nothing was recorded."""
    if not rows:
        return None
    kept = sorted({row["num_kept"] for row in rows})
    return {
        "findings": findings(rows),
        "words": VERDICTS,
        "columns": COLUMNS,
        "rows": [({**row, "class": plain(row["class"])}, cells(row)) for row in rows],
        "num_kept": kept[0] if len(kept) == 1 else f"{kept[0]} to {kept[-1]}",
        "num_seeds": len({row["seed"] for row in rows}),
    }
