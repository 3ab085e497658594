"""The first screen of the page: the verdict in plain words, and what left the sites.

The sentences follow the numbers and never the wish: a method that is beaten is said to be beaten, and nothing is called
private unless the run's own record says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rescene.core.errors import DECLINED
from rescene.core.results import Privacy
from rescene.report.formatting import PERCENT, bytes_text, count, percent, plain
from rescene.report.groups import RunGroup, Spread, headline_group, rivals
from rescene.report.load import RunRecord

_SURE = 3.0  # standard errors above guessing, from which on an accuracy is better than that
_FLATTER = ("W217", "W561")
_NOISED = "W374"  # a site put noise on the counts of its test images
_UNSURE_POINTS = 5.0  # the same in points, where the number of test images is not known


@dataclass(frozen=True)
class RunVerdict:
    """One sentence to remember, and what must be known to read it rightly."""

    title: str
    lines: tuple[str, ...]


def verdict(groups: Sequence[RunGroup]) -> RunVerdict:
    """The page's first words."""
    head = headline_group(groups)
    aa = head.spread(lambda run: run.results.aa) if head else None
    if head is None:
        return RunVerdict("No run has finished yet.", ("The figures below show what has been measured so far.",))
    if aa is None:
        return RunVerdict(
            f"{head.label} has finished; its accuracy was not measured.",
            (*absent(head.finished[0]), *unmeasured(head.finished[0])),
        )
    rival = max((group for group in groups if rivals(head, group)), key=_aa, default=None)
    lines = [
        _simulated(head),
        *absent(head.finished[0]),
        *flattered(head.finished[0]),
        chance_line(head),
        _after(head),
        _seeds(head, rival),
    ]
    return RunVerdict(_title(head, aa, rival), tuple(line for line in lines if line))


def unmeasured(run: RunRecord) -> tuple[str, ...]:
    """Why a finished run has no accuracy, as far as it says so; nothing for a run that has one."""
    if run.results.aa is not None:
        return ()
    told = plain(run.results.not_measured.get("accuracy", "not measured: the run does not say why"), 600)
    return (f"Accuracy: {told.rstrip('.')}.",)


def flattered(run: RunRecord) -> tuple[str, ...]:
    """What the run warned of that makes its accuracy look better than it is: test images that were (nearly) trained on."""
    told = dict.fromkeys(plain(row.message, 800) for row in run.events if row.code in _FLATTER)
    noised = _noise(run)
    return (*(f"{words[0].upper()}{words[1:]}." for words in told), *([noised] if noised else []))


def _noise(run: RunRecord) -> str:
    """How far the noise that sites put on their counts moves the accuracy; empty where there is none."""
    found = {row.client: _last_number(row.message) for row in run.events if row.code == _NOISED}
    words = "Sites put noise on the counts behind every accuracy of this run"
    tested, accuracy = _num_tested(run), (run.results.aa or 0.0) / 100
    if not found or not tested:
        return f"{words}." if found else ""
    counts = sum(len(task.classes) for task in run.tasks) * sum(deviation**2 for deviation in found.values())
    points = 100 * math.sqrt(counts * (1 + accuracy**2)) / tested  # right answers and images are both noised
    return f"{words}: the one over all classes is off by about {points:.0f} points (one deviation), those of single classes by more."


def _last_number(words: str) -> float:
    last = words.rsplit(" ", 1)[-1]
    return float(last) if last.replace(".", "", 1).isdigit() else 0.0


def absent(run: RunRecord) -> tuple[str, ...]:
    """Which sites declined to send what they were asked for: the model was made without it."""
    told = dict.fromkeys(plain(row.message, 300) for row in run.events if row.code == DECLINED)
    return tuple(f"The model was made without what a site declined to send: {words}." for words in told)


def _aa(group: RunGroup) -> float:
    found = group.spread(lambda run: run.results.aa)
    return found.mean if found else -1.0


def _title(head: RunGroup, aa: Spread, rival: RunGroup | None) -> str:
    num_tasks = len(head.shown[0].matrix)
    span = f" over all {num_tasks} tasks" if num_tasks > 1 else ""
    start = f"{head.label} reaches {percent(aa.mean)}{PERCENT}{span}"
    run = head.finished[0]
    if run.guessing and not better_than_guessing(aa.mean, run.guessing[-1], _num_tested(run)):
        return f"{start}, no better than guessing."
    if rival is None or _aa(rival) < 0:
        return start + "."
    gap = aa.mean - _aa(rival)
    if abs(gap) < 0.05:
        return f"{start}, level with {rival.label}."
    return f"{start}, {percent(abs(gap))} points {'above' if gap > 0 else 'below'} {rival.label}."


def better_than_guessing(accuracy: float, chance: float, num_images: int | None) -> bool:
    """Whether so many test images tell this accuracy from that of guessing (percent).

    >>> better_than_guessing(60.0, 50.0, 400), better_than_guessing(55.0, 50.0, 400), better_than_guessing(12.0, 10.0, None)
    (True, False, False)
    """
    error = 100 * math.sqrt(chance / 100 * (1 - chance / 100) / num_images) if num_images else 0.0
    return accuracy - chance > (_SURE * error or _UNSURE_POINTS)


def _num_tested(run: RunRecord) -> int | None:
    return sum(task.test_size or 0 for task in run.tasks) or None


def chance_line(head: RunGroup) -> str:
    """What guessing gives, and whether the first task was learned at all: else later ones have nothing to forget."""
    run = head.finished[0]
    if not run.guessing:
        return ""
    line = f"Guessing gives {percent(run.guessing[-1])}{PERCENT}."
    first = head.spread(_first_accuracy)
    if first is None or len(run.matrix) < 2:
        return line
    chance = run.guessing[0]
    shares = f"{percent(first.mean)}{PERCENT} right after it, where guessing gives {percent(chance)}{PERCENT}"
    if better_than_guessing(first.mean, chance, run.tasks[0].test_size):
        return f"{line} It learned its first task: {shares}."
    return f"{line} It did not learn its first task: {shares}, so there was little to forget."


def _first_accuracy(run: RunRecord) -> float | None:
    matrix = run.matrix
    return float(matrix[0, 0]) if len(matrix) and np.isfinite(matrix[0, 0]) else None


def _after(head: RunGroup) -> str:
    """Old against recent tasks: does it forget?"""
    old, recent = head.spread(lambda run: run.results.old), head.spread(lambda run: run.results.recent)
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


def _seeds(head: RunGroup, rival: RunGroup | None) -> str:
    """What chance may explain."""
    aa = head.spread(lambda run: run.results.aa)
    other = rival.spread(lambda run: run.results.aa) if rival else None
    if aa and aa.num == 1:
        return "One seed only: differences of a few points may be chance."
    if aa and other and aa.std is not None and abs(aa.mean - other.mean) <= math.hypot(aa.std, other.std or 0.0):
        return "The gap lies within the spread over seeds: do not read it as a difference."
    return ""


def _traced(group: RunGroup) -> str:
    """Uploads that can be traced to their image, beside what chance gives."""
    found = group.spread(lambda run: run.leakage.traced if run.leakage else None)
    chance = group.spread(lambda run: run.leakage.traced_by_chance if run.leakage else None)
    if not found or not chance or found.mean <= chance.mean:
        return ""
    shares = [f"{percent(100 * one.mean, 0)}{PERCENT}" for one in (found, chance)]
    return f"{shares[0]} can be traced to the image they come from; of images that nobody sent {shares[1]} can."


def simulated(run: RunRecord) -> list[str]:
    """What was made to go wrong on purpose, as the run says."""
    return [plain(words, 200) for words in run.results.simulated]


def _simulated(head: RunGroup) -> str:
    told = list(dict.fromkeys(words for run in head.finished for words in simulated(run)))
    if not told:
        return ""
    success = head.spread(lambda run: run.results.attack_success)
    end = f" The attack succeeds on {percent(success.mean)}{PERCENT} of the test images it aims at." if success else ""
    return f"Simulated: {'; '.join(told)}.{end}"


@dataclass(frozen=True)
class Departure:
    """What left the sites under one method."""

    group: RunGroup
    sends: str
    images: str  # uploaded, or drawn from what was
    upload: str
    upload_bytes: float | None
    share: float | None  # near-copies, 0 to 1
    finding: str
    traced: str  # how many can be traced to their image; empty if no more than by chance
    statement: str  # what the leakage check itself says
    private: bool
    guarantee: str
    mechanism: str  # its figures; empty without one

    @property
    def first_words(self) -> str:
        """The whole guarantee, or that there is none: what follows repeats the figures of the first screen."""
        return self.guarantee if self.private else self.guarantee.partition(". ")[0].rstrip(".") + "."

    @property
    def in_short(self) -> str:
        """The guarantee in a few words."""
        if not self.group.finished:
            return "not recorded yet"
        return self.guarantee if self.private else "none"


def departure(group: RunGroup) -> Departure:
    """What the sites sent, how much of it resembles real images, and what is (not) guaranteed."""
    upload, share = group.spread(lambda run: run.upload_bytes), group.spread(lambda run: run.near_copies)
    privacy = [run.privacy for run in group.finished]
    fallback = "The run recorded no privacy statement; treat what was sent as readable by the server."
    sends = _first_of([entry.leaves_site for entry in privacy], 600) or group.style.sends
    return Departure(
        group=group,
        sends=sends or "not described in the run folder",
        images=privacy[0].images if privacy else "uploaded",
        upload=bytes_text(upload.mean if upload else None),
        upload_bytes=upload.mean if upload else None,
        share=share.mean if share else None,
        finding=_finding(group, share),
        traced=_traced(group),
        statement=_first_of([run.leakage.statement for run in group.finished if run.leakage], 600),
        private=bool(privacy) and all(entry.private for entry in privacy),
        guarantee=_first_of([entry.statement for entry in privacy], 1500) or fallback,
        mechanism=_first_of([_mechanism(entry) for entry in privacy], 1500),
    )


def _first_of(texts: Sequence[str], limit: int) -> str:
    return next((plain(text, limit) for text in texts if text), "")


def _mechanism(entry: Privacy) -> str:
    """The figures of a mechanism, as far as the run has recorded them."""
    if not entry.mechanism:
        return ""
    figures = {
        "σ": entry.noise_multiplier, "C": entry.clip, "δ": entry.delta, "sampling rate": entry.sampling_rate,
        "ε of one upload, one in a round": entry.epsilon_per_round, "ε of the whole run": entry.epsilon,
        "ε if an image is replaced": entry.epsilon_replaced,
    }  # fmt: skip
    told = ", ".join(f"{name} = {value:.4g}" for name, value in figures.items() if value is not None)
    return f"Mechanism {plain(entry.mechanism, 30)}: {told}."


def _finding(group: RunGroup, share: Spread | None) -> str:
    if not group.finished:
        return "measured when the run ends"
    if share is None:
        return "no images checked"
    entry = next(run.leakage for run in group.finished if run.leakage)
    total = "" if entry.num_images is None else f" of {count(entry.num_images, 'image')}"
    exact = "" if entry.exact_copies is None else f", {entry.exact_copies} exact"
    return f"{percent(100 * share.mean, 0)}{PERCENT} near-copies{total}{exact}"
