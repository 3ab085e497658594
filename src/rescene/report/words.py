"""Numbers and findings in plain words: units, the verdict, what left the sites.

The sentences follow the numbers and never the wish: a method that is beaten is said to be beaten, and nothing is called
private unless the run's own record says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rescene.report.groups import Group, Spread, headline_group, near_copies, same_problem
from rescene.report.look import key_of, plain
from rescene.report.runs import Row, Run, number

NONE = "–"
PERCENT = "\u00a0%"  # the sign never stands alone on a line


def percent(value: float | None, digits: int = 1) -> str:
    """
    >>> percent(78.26), percent(None)
    ('78.3', '–')
    """
    return NONE if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def _scaled(value: float | None, step: float, units: Sequence[str]) -> str:
    """Three significant digits with the largest unit that keeps the number at 1 or more."""
    if value is None:
        return NONE
    size, i = float(value), 0
    while abs(size) >= 0.9995 * step and i < len(units) - 1:
        size, i = size / step, i + 1
    digits = 0 if i == 0 or abs(size) >= 100 else 1 if abs(size) >= 10 else 2
    return f"{size:.{digits}f} {units[i]}"


def bytes_text(value: float | None) -> str:
    """Decimal units, as in the paper's tables.

    >>> bytes_text(245760), bytes_text(1228800), bytes_text(12)
    ('246 kB', '1.23 MB', '12 B')
    """
    return _scaled(value, 1000, ("B", "kB", "MB", "GB", "TB", "PB"))


def flops_text(value: float | None) -> str:
    """
    >>> flops_text(3.34e9)
    '3.34 GFLOP'
    """
    return _scaled(value, 1000, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP"))


def seconds_text(value: float | None) -> str:
    """
    >>> seconds_text(4.26), seconds_text(61.2), seconds_text(7322)
    ('4.3 s', '1 min 01 s', '2 h 02 min')
    """
    if value is None:
        return NONE
    whole = round(value)
    if value < 59.95:
        return f"{value:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def count(num: int, noun: str) -> str:
    """
    >>> count(1, "task"), count(3, "class")
    ('1 task', '3 classes')
    """
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{num:,} {noun if num == 1 else plural}"


@dataclass(frozen=True)
class Verdict:
    """One sentence to remember, and what must be known to read it rightly."""

    title: str
    lines: tuple[str, ...]


def verdict(groups: Sequence[Group]) -> Verdict:
    """The page's first words."""
    head = headline_group(groups)
    aa = head.spread(lambda run: run.number("aa")) if head else None
    if head is None or aa is None:
        return Verdict("No run has finished yet.", ("The figures below show what has been measured so far.",))
    rival = max((group for group in groups if _rivals(head, group)), key=_aa, default=None)
    lines = [_simulated(head), _after(head), _seeds(head, rival), _copies(head)]
    return Verdict(_title(head, aa, rival), tuple(line for line in lines if line))


def _rivals(head: Group, other: Group) -> bool:
    """Only another method that faces the same problem is a rival; other forms of the same one and references are not."""
    another = key_of(other.method) != key_of(head.method)
    return another and other.competes and bool(other.finished) and same_problem(head, other)


def _aa(group: Group) -> float:
    found = group.spread(lambda run: run.number("aa"))
    return found.mean if found else -1.0


def _title(head: Group, aa: Spread, rival: Group | None) -> str:
    num_tasks = len(head.shown[0].matrix)
    span = f" over all {num_tasks} tasks" if num_tasks > 1 else ""
    start = f"{head.label} reaches {percent(aa.mean)}{PERCENT}{span}"
    if rival is None or _aa(rival) < 0:
        return start + "."
    gap = aa.mean - _aa(rival)
    if abs(gap) < 0.05:
        return f"{start}, level with {rival.label}."
    return f"{start}, {percent(abs(gap))} points {'above' if gap > 0 else 'below'} {rival.label}."


def _after(head: Group) -> str:
    """Old against recent tasks: does it forget?"""
    old, recent = (head.spread(lambda run, key=key: run.number(key)) for key in ("old", "recent"))  # type: ignore[misc]
    if old is None or recent is None or len(head.shown[0].matrix) < 2:
        return ""
    lost = recent.mean - old.mean
    shares = (
        f"{percent(old.mean)}{PERCENT} of the images of old tasks and {percent(recent.mean)}{PERCENT} of recent ones"
    )
    start = f"It names {shares} correctly: "
    if max(old.mean, recent.mean) < 10:
        return start + "it has learned little."
    if old.mean < 5:
        return start + "old tasks are forgotten."
    if abs(lost) <= 5:
        return start + "old tasks are held about as well as new ones."
    return start + f"old tasks {'trail' if lost > 0 else 'lead'} by {percent(abs(lost))} points."


def _seeds(head: Group, rival: Group | None) -> str:
    """What chance may explain."""
    aa = head.spread(lambda run: run.number("aa"))
    other = rival.spread(lambda run: run.number("aa")) if rival else None
    if aa and aa.num == 1:
        return "One seed only: differences of a few points may be chance."
    if aa and other and aa.std is not None and abs(aa.mean - other.mean) <= math.hypot(aa.std, other.std or 0.0):
        return "The gap lies within the spread over seeds: do not read it as a difference."
    return ""


def _copies(head: Group) -> str:
    share = head.spread(near_copies)
    if share is None:
        return ""
    text = ""
    if share.mean > 0:
        text = (
            f"{percent(100 * share.mean, 0)}{PERCENT} of the images the sites uploaded are near-copies of a real image"
        )
        text += ": sending them is close to sending the data." if share.mean >= 0.5 else "."
    found, chance = (
        head.spread(lambda run, key=key: number(run.leakage.get(key))) for key in ("traced", "traced_by_chance")
    )
    if found and chance and found.mean > chance.mean:
        shares = [f"{percent(100 * one.mean, 0)}{PERCENT}" for one in (found, chance)]
        text += f" {shares[0]} can be traced to the image they come from; of images that nobody sent {shares[1]} can."
    return text.strip()


def simulated(run: Run) -> list[str]:
    """What was made to go wrong on purpose, as the run says."""
    return [plain(words, 200) for words in run.results.get("simulated") or ()]


def _simulated(head: Group) -> str:
    told = list(dict.fromkeys(words for run in head.finished for words in simulated(run)))
    if not told:
        return ""
    success = head.spread(lambda run: run.number("attack_success"))
    end = f" The attack succeeds on {percent(success.mean)}{PERCENT} of the test images it aims at." if success else ""
    return f"Simulated: {'; '.join(told)}.{end}"


@dataclass(frozen=True)
class Departure:
    """What left the sites under one method."""

    group: Group
    sends: str
    images: str  # uploaded, or drawn from what was
    upload: str
    upload_bytes: float | None
    share: float | None  # near-copies, 0 to 1
    finding: str
    statement: str  # what the leakage check itself says
    private: bool
    guarantee: str
    mechanism: str  # its figures; empty without one

    @property
    def in_short(self) -> str:
        if not self.group.finished:
            return "not recorded yet"
        return self.guarantee if self.private else "none"


def departure(group: Group) -> Departure:
    """What the sites sent, how much of it resembles real images, and what is (not) guaranteed."""
    upload = group.spread(lambda run: run.upload_bytes)
    share = group.spread(near_copies)
    privacy = [run.privacy for run in group.finished]
    private = bool(privacy) and all(entry.get("private") is True for entry in privacy)
    told = next((plain(entry["statement"], 1500) for entry in privacy if entry.get("statement")), "")
    fallback = "The run recorded no privacy statement; treat what was sent as readable by the server."
    return Departure(
        group=group,
        sends=next(
            (plain(entry["leaves_site"], 600) for entry in privacy if entry.get("leaves_site")),
            group.look.sends or "not described in the run folder",
        ),
        images=next((run.images for run in group.finished), "uploaded"),
        upload=bytes_text(upload.mean if upload else None),
        upload_bytes=upload.mean if upload else None,
        share=share.mean if share else None,
        finding=_finding(group, share),
        statement=next(
            (plain(run.leakage["statement"], 600) for run in group.finished if run.leakage.get("statement")), ""
        ),
        private=private,
        guarantee=told or fallback,
        mechanism=next((words for entry in privacy if (words := _mechanism(entry))), ""),
    )


def _mechanism(entry: Row) -> str:
    """The figures of a mechanism, as far as the run has recorded them."""
    if not entry.get("mechanism"):
        return ""
    names = {
        "noise_multiplier": "σ", "clip": "C", "delta": "δ", "sampling_rate": "sampling rate",
        "epsilon_per_round": "ε of one upload, one in a round", "epsilon": "ε of the whole run",
        "epsilon_replaced": "ε if an image is replaced",
    }  # fmt: skip
    figures = [(name, number(entry.get(key))) for key, name in names.items()]
    told = ", ".join(f"{name} = {value:.4g}" for name, value in figures if value is not None)
    return f"Mechanism {plain(entry['mechanism'], 30)}: {told}."


def _finding(group: Group, share: Spread | None) -> str:
    if not group.finished:
        return "measured when the run ends"
    if share is None:
        return "no images checked"
    entry = next(run.leakage for run in group.finished if run.leakage)
    exact, total = entry.get("exact_copies"), entry.get("num_images")
    text = f"{percent(100 * share.mean, 0)}{PERCENT} near-copies"
    if isinstance(total, int):
        text += f" of {count(total, 'image')}"
    return f"{text}, {exact} exact" if isinstance(exact, int) else text
