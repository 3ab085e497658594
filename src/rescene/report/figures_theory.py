"""What the theory of temporal herding says about finished runs: findings in sentences, a table, figures.

The sentences follow the numbers: an assumption that fails is said to fail, a bound that promises nothing is said to
promise nothing. Symbols and definitions: docs/theory.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rescene.core.json_files import Row
from rescene.core.method_style import BLUE, ORANGE, SKY
from rescene.core.results import ClassTheory
from rescene.report.drawing import CARD, GUIDE, MUTED, Plot, name_ticks, thinned
from rescene.report.formatting import percent_sign, plain
from rescene.report.groups import RunGroup
from rescene.report.load import RunRecord

Classes = Sequence[ClassTheory]


TRIVIAL = 2.0  # two means of unit vectors are never further apart
_NEARLY = 1e-9  # distances that differ by less are the same up to rounding


VERDICTS = {"holds": "holds", "fails": "fails", "mixed": "in part", "silent": "says nothing"}


@dataclass(frozen=True)
class TheoryFinding:
    """One statement of the paper and how it fared: holds, fails, mixed, or silent (its condition is not met)."""

    statement: str
    verdict: str
    text: str


def theory_rows(head: RunGroup | None) -> list[ClassTheory]:
    """The rows of the headline method, all seeds."""
    return class_rows(head.finished) if head else []


def class_rows(runs: Sequence[RunRecord]) -> list[ClassTheory]:
    """The rows of all classes, tasks and seeds."""
    return [row for run in runs for row in run.class_theory]


def nearer_level_further(rows: Classes, other: str = "pool_to_real") -> tuple[int, int, int]:
    """In how many classes the herded mean is nearer to the real mean than the ``other`` one, as near, and further away."""
    nearer = _count(rows, lambda row: row.herded_to_real < getattr(row, other) - _NEARLY)
    level = _count(rows, lambda row: abs(row.herded_to_real - getattr(row, other)) <= _NEARLY)
    return nearer, level, len(rows) - nearer - level


def findings(rows: Classes) -> list[TheoryFinding]:
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


def _count(rows: Classes, test: Callable[[ClassTheory], bool]) -> int:
    return sum(1 for row in rows if test(row))


def _mean(rows: Classes, key: str) -> float:
    return statistics.fmean(getattr(row, key) for row in rows)


def _verdict(num: int, total: int) -> str:
    return "holds" if num == total else "fails" if num == 0 else "mixed"


def _setting(rows: Classes) -> list[TheoryFinding]:
    """Why there may be nothing to compare."""
    total, found = len(rows), []
    everything = _count(rows, lambda row: row.num_kept == row.num_pool)
    if everything:
        text = f"In {everything} of {total} classes the whole pool fitted into the budget: the buffer is the pool."
        found.append(TheoryFinding("Budget", "silent", text))
    whole = _count(rows, lambda row: row.num_window == row.num_pool)
    if whole:
        text = f"In {whole} of {total} classes the window holds every upload: temporal and full-pool herding are one."
        found.append(TheoryFinding("Window", "silent", text))
    return found


def _covered(row: ClassTheory) -> bool:
    return row.coverage_fails_at is None


def _within(row: ClassTheory) -> bool:
    return bool(row.target_distance <= row.target_bound + _NEARLY)


def _coverage(rows: Classes) -> TheoryFinding:
    total, good = len(rows), _count(rows, _covered)
    text = f"At every step a candidate was left that leads towards the target in {good} of {total} classes."
    failing = [(row.coverage_fails_at, row.num_kept) for row in rows if row.coverage_fails_at is not None]
    if failing:
        steps = sorted(step for step, _ in failing)
        share = statistics.median(step / num_kept for step, num_kept in failing)
        text += (
            f" Elsewhere it first failed between step {steps[0]} and {steps[-1]}, at the median after "
            f"{percent_sign(100 * share, 0)} of the picks; from there on the proof of the lemma does not apply."
        )
    return TheoryFinding("Assumption 1, directional coverage", _verdict(good, total), text)


def _lemma(rows: Classes) -> TheoryFinding:
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
    chance = _count(rows, lambda row: row.num_kept < row.num_pool and row.target_random <= row.target_bound)
    if chance:
        text += (
            f" The bound is weak: a buffer drawn at random would typically keep it too in {chance} of {total} "
            f"(distance {_mean(rows, 'target_random'):.4f} on average)."
        )
    return TheoryFinding("Lemma 1, the buffer approaches its target", _verdict(good, total), text)


def _bias(rows: Classes) -> TheoryFinding:
    share, gone = 100 * _mean(rows, "coherence"), _count(rows, lambda row: row.removed_bias > _NEARLY)
    text = (
        f"A shared direction that fades over the rounds explains {percent_sign(share, 0)} of the rounds' squared error on "
        f"average; the rest is a deviation of up to σ = {_mean(rows, 'sigma'):.4f}. The window removes some bias in "
        f"{gone} of {len(rows)} classes, {_mean(rows, 'removed_bias'):.4f} on average. Any errors can be "
        "written this way; the theorem asks whether the bias outweighs σ."
    )
    return TheoryFinding("Assumption 2, coherent stale bias", "holds" if share >= 50 and gone else "mixed", text)


def _theorem(rows: Classes) -> TheoryFinding:
    total, direct = len(rows), [row for row in rows if row.largest_margin > row.target_bound]
    extra = ""
    if len(direct) < total:
        extra = (
            f" In {total - len(direct)} of {total} no choice of direction and bias could meet it: "
            "‖m_P − μ‖ − ‖m_W − μ‖ does not exceed Δ/√B."
        )
    if any(row.removed_bias <= row.theorem_needs for row in direct):
        sure = _count(direct, _covered)
        extra += f" In {sure} that difference alone does exceed it, which is enough for the proof."
    keys = ("theorem_needs", "pool_to_real", "the whole pool")
    return _improvement(rows, "Theorem 1, closer to the real class than the whole pool", *keys, extra=extra)


def _corollary(rows: Classes) -> TheoryFinding:
    keys = ("corollary_needs", "full_pool_to_real", "full-pool herding")
    return _improvement(rows, "Corollary 1, closer than full-pool herding", *keys, extra="")


def _improvement(rows: Classes, statement: str, needs: str, other: str, name: str, extra: str) -> TheoryFinding:
    """Was the condition met, and what happened anyway?"""
    total, met = len(rows), [row for row in rows if row.removed_bias > getattr(row, needs)]
    proved = [
        row for row in met if _covered(row) and (needs == "theorem_needs" or row.full_pool_coverage_fails_at is None)
    ]
    closer, level, further = nearer_level_further(rows, other)
    text = (
        f"The condition is met in {len(met)} of {total} classes (removed bias {_mean(rows, 'removed_bias'):.4f}, "
        f"needed more than {_mean(rows, needs):.4f}, on average)"
    )
    text += f", and with it every assumption in {len(proved)}." if met else ": nothing is promised."
    text += extra
    wrong = _count(proved, lambda row: row.herded_to_real >= getattr(row, other))
    if wrong:
        text += f" In {wrong} the promise was broken: that contradicts the proof, so suspect the program."
    text += (
        f" Measured: temporal herding is closer to the real mean in {closer} of {total}, level in {level}, further in "
        f"{further} ({_mean(rows, 'herded_to_real'):.4f} against {_mean(rows, other):.4f} for {name})."
    )
    return TheoryFinding(
        statement, "silent" if not proved else "fails" if wrong else _verdict(len(proved), total), text
    )


def _stale(rows: Classes) -> list[TheoryFinding]:
    """Proposition 1. With the smoothness taken from the same rounds its bound cannot fail; the question is what it says."""
    steps = [step for row in rows for step in round_rows(row) if step["staleness_bound"] is not None]
    if not steps:
        return []
    empty = sum(step["staleness_bound"] >= TRIVIAL for step in steps)
    pairs = [(own[0], own[-1]) for row in rows if len(own := round_rows(row)) > 1]
    text = (
        f"The bound is {_step_mean(steps, 'staleness_bound'):.2f} on average where the error is {_step_mean(steps, 'task_end_error'):.4f}; "
        f"in {empty} of {len(steps)} rounds it is 2 or more and says nothing."
    )
    text += (
        f" Since they were made, uploads moved by {_step_mean(steps, 'surrogate_drift'):.2f} and real images by "
        f"{_step_mean(steps, 'real_drift'):.2f} in feature space; the bound adds the two, even where they go together."
    )
    if pairs:
        first, last = ([pair[i] for pair in pairs] for i in (0, 1))
        worse = sum(a["task_end_error"] > b["task_end_error"] for a, b in pairs)
        text += (
            f" Under the final model the first round's uploads are {_step_mean(first, 'task_end_error'):.4f} from the real mean and the "
            f"last round's {_step_mean(last, 'task_end_error'):.4f}; the first are the staler ones in {worse} of {len(pairs)} classes."
        )
    verdict = "silent" if empty == len(steps) else "mixed" if empty else "holds"
    return [TheoryFinding("Proposition 1, staleness", verdict, text)]


def _step_mean(steps: Sequence[Row], key: str) -> float:
    return statistics.fmean(step[key] for step in steps)


def round_rows(row: ClassTheory) -> list[Row]:
    """The columns of a class's rounds as rows."""
    return [dict(zip(row.rounds, cells, strict=True)) for cells in zip(*row.rounds.values(), strict=False)]


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


def cells(row: ClassTheory) -> list[str]:
    """A class's numbers as text, in the order of COLUMNS."""
    return [_cell(key, getattr(row, key)) for key, _, _ in COLUMNS]


def _cell(key: str, value: Any) -> str:
    if key == "coverage_fails_at":
        return "holds" if value is None else str(value)
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def theory_view(rows: Classes) -> Row | None:
    """What the section of the page shows; None where nothing was recorded."""
    if not rows:
        return None
    kept = sorted({row.num_kept for row in rows})
    return {
        "findings": findings(rows),
        "words": VERDICTS,
        "columns": COLUMNS,
        "rows": [(row, plain(row.class_name), cells(row)) for row in rows],
        "num_kept": kept[0] if len(kept) == 1 else f"{kept[0]} to {kept[-1]}",
        "num_seeds": len({row.seed for row in rows}),
    }


def theory_plots(rows: Classes) -> list[Plot | None]:
    """The figures about herding theory; none without records."""
    return [distance_plot(rows), picks_plot(rows), staleness_plot(rows)] if rows else []


def distance_plot(rows: Classes) -> Plot:
    """Does the buffer represent the class better than what it is compared with? One mark per class and rival."""
    rivals = ("pool_to_real", "full_pool_to_real")

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        y = [row.herded_to_real for row in rows]
        ends = [0.0, 1.08 * max([*y, *(getattr(row, key) for row in rows for key in rivals)])]
        axes.plot(ends, ends, **GUIDE)
        axes.scatter([row.pool_to_real for row in rows], y, s=34, color=BLUE, label="against the whole pool", zorder=4)
        hollow = {"facecolor": CARD, "edgecolor": ORANGE, "linewidths": 1.4, "label": "against full-pool herding"}
        axes.scatter([row.full_pool_to_real for row in rows], y, s=34, zorder=3, **hollow)
        axes.set(xlim=ends, ylim=ends, xlabel="‖m − μ‖ of the rival", ylabel="‖m_H − μ‖ of temporal herding")
        axes.set_aspect("equal")
        axes.locator_params(nbins=6)

    caption = (
        "Distance of mean features to those of the real images, one mark per class. Below the dashed line the herded "
        "buffer stands for the class better than its rival."
    )
    kept = [_named(row) | {key: getattr(row, key) for key in ("herded_to_real", *rivals)} for row in rows]
    return Plot("theory-distance", "Buffer against the real class mean", caption, kept, draw, height_in=4.9)


def _named(row: ClassTheory) -> Row:
    return {"seed": row.seed, "task": row.task, "class": row.class_name}


def picks_plot(rows: Classes) -> Plot | None:
    """Which rounds the buffers come from, and which of them formed the target; None for runs that did not record it."""
    steps = [step for row in rows for step in round_rows(row) if step.get("num_kept") is not None]
    numbers = sorted({step["round"] for step in steps})
    if len(numbers) < 2:
        return None
    sums = [
        {"round": r, **{key: sum(step[key] for step in steps if step["round"] == r) for key in ("num", "num_kept")}}
        for r in numbers
    ]
    recent = [step["round"] for step in steps if step["recent"]]

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        axes.axvspan(min(recent) - 0.5, numbers[-1] + 0.5, color=MUTED, alpha=0.12, linewidth=0, label="target window")
        axes.bar(numbers, [s["num"] for s in sums], 0.8, color=SKY, label="uploaded")
        axes.bar(numbers, [s["num_kept"] for s in sums], 0.8, color=BLUE, label="kept")
        axes.set_xlim(numbers[0] - 0.5, numbers[-1] + 0.5)
        _by_round(axes, numbers, "surrogates")

    caption = (
        "All classes and tasks together. Herding aims at the mean of the shaded rounds, the last ⌈λR⌉, and may pick from all "
        "of them; where a class has no more uploads than the budget, everything is kept."
    )
    return Plot("theory-picks", "Which rounds the buffer comes from", caption, sums, draw)


def staleness_plot(rows: Classes) -> Plot | None:
    """Error by round, under the final model and under the one of its own time."""
    kept = [_named(row) | step for row in rows for step in round_rows(row)]
    steps = sorted({step["round"] for step in kept})
    if len(steps) < 2:
        return None
    lines = (
        ("task_end_error", "under the final model", BLUE, "o", "-"),
        ("matching_error", "under the model of that round", ORANGE, "s", "-"),
        ("bias", "fitted stale bias a_r", SKY, "^", "--"),
    )

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        for key, label, colour, marker, dash in lines:
            means = [(r, [s[key] for s in kept if s["round"] == r and s[key] is not None]) for r in steps]
            points = [(r, statistics.fmean(values)) for r, values in means if values]
            if points:
                style = {"color": colour, "marker": marker, "markersize": 5, "linestyle": dash}
                axes.plot(*zip(*points, strict=True), label=label, **style)
        axes.set_ylim(bottom=0)
        _by_round(axes, steps, "distance to the real mean")

    caption = (
        "Mean over classes of ‖m_r − μ‖. If uploads grow stale, those of early rounds are further from the real images "
        "under the final model than those of late rounds."
    )
    return Plot("theory-staleness", "Do uploads grow stale?", caption, kept, draw)


def _by_round(axes: Any, rounds: Sequence[int], ylabel: str) -> None:
    """What figures over the rounds of a task share."""
    axes.set_xticks(rounds[:: thinned(len(rounds))])
    axes.set(xlabel="round of the uploads", ylabel=ylabel)
    axes.grid(False, axis="x")


def pool_balance(run: RunRecord) -> Plot | None:
    """Shares of the classes while the last task ends: pi_c in buffers and pool, q_c ~ n_c^alpha among what is drawn."""
    alpha, held = run.settings.get("method.alpha"), _held(run)
    if not isinstance(alpha, (int, float)) or len(held) < 2:
        return None
    whole, drawn = sum(held.values()), sum(n**alpha for n in held.values())
    rows: list[Row] = [
        {"class": name, "n_c": n, "pi_c": 100 * n / whole, "q_c": 100 * n**alpha / drawn} for name, n in held.items()
    ]

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        axes.bar([i - 0.2 for i in range(len(rows))], [row["pi_c"] for row in rows], 0.4, color=SKY, label="held, π_c")
        axes.bar([i + 0.2 for i in range(len(rows))], [row["q_c"] for row in rows], 0.4, color=BLUE, label="drawn, q_c")
        axes.axhline(100 / len(rows), **GUIDE)
        name_ticks(axes.xaxis, list(held), most=12, rotation=40, ha="right", fontsize=8.5)
        axes.set_ylabel("share of the images (%)")
        axes.grid(False, axis="x")

    caption = (
        "At the end of the last task: each class's share of the images on the server, where earlier classes have their "
        f"buffer and the newest every upload, and of those drawn for training (α = {alpha:g}). Dashed: equal shares. "
        f"n_c, the images held of a class, runs from {min(held.values()):g} to {max(held.values()):g}."
    )
    return Plot("pool", "What the server trains on", caption, rows, draw)


def _held(run: RunRecord) -> dict[str, float]:
    """Images of each class on the server when the last task ends; classes of several tasks (domains) add up."""
    rows, held = class_rows([run]), dict[str, float]()
    everything = run.settings.get("method.buffer") == "keep-all"
    for row in rows:
        newest = row.task == max(other.task for other in rows)
        held[row.class_name] = held.get(row.class_name, 0) + (row.num_pool if newest or everything else row.num_kept)
    return held
