"""The folded sections of the page: setting, sites, events, audits, withdrawals, environment, glossary. Records in, rows out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rescene.core.recipe_keys import experiment_keys
from rescene.core.results import EventRecord, Forgotten, Leakage, RoundRecord, SiteRecord, WithdrawalCheck
from rescene.report.formatting import NONE, bytes_text, count, known, percent, plain, seconds_text, short, task_name
from rescene.report.groups import RunGroup, same
from rescene.report.load import RunRecord
from rescene.report.summary import simulated

Pairs = list[tuple[str, str]]
_LEVELS = ("error", "warning", "info")
_RESUMED = "I401"  # the one piece of information that belongs beside what went wrong
_MOST_EVENTS = 60


def setting(run: RunRecord, runs: Sequence[RunRecord]) -> Pairs:
    """The experiment in a few facts, every value where runs differ; what a folder does not tell is left out."""
    others = [_set_up(other) for other in runs]
    seeds = sorted({other.seed for other in runs if other.seed is not None})
    facts: list[tuple[str, Any]] = [
        *((name, _together([value, *(other[name] for other in others)])) for name, value in _set_up(run).items()),
        ("Order of classes", _own_orders(runs)),
        ("Evaluated", run.results.evaluated),
        ("Seeds", ", ".join(map(str, seeds)) or None),
        ("Device", run.env.get("device") or run.config.get("device")),
        ("Made from Python objects", _objects(runs)),
        ("Continued", _continued(runs)),
        ("Went on elsewhere", _elsewhere(runs)),
        ("Simulated", "; ".join(dict.fromkeys(words for other in runs for words in simulated(other))) or None),
        ("Late answers", _late_answers(runs)),
        ("Quarantined", _quarantined(runs)),
        ("Time per run", _times(runs)),
    ]
    return [(name, short(value)) for name, value in facts if value not in (None, "", 0)]


def _set_up(run: RunRecord) -> dict[str, Any]:
    """What one run was set up with."""
    flat = run.settings
    at_sites = bool(run.config.get("sites")) or flat.get("federation.partition") == "sites"  # nobody drew a split then
    names = [name for task in run.tasks for name in task.classes] or run.partition.classes
    turns = [len(row.participants) for row in run.rounds]
    per_task = Counter(row.task for row in run.rounds)
    return {
        "Data": run.data or flat.get("data.name") or flat.get("data.path"),
        "Tasks": len(run.tasks or run.partition.tasks) or run.status.num_tasks,
        "Classes": len(set(names)) or None,
        "Sites": run.partition.num_clients or flat.get("federation.num_clients"),
        "Sites per round": max(turns, default=flat.get("federation.per_round")),
        "Rounds per task": run.status.num_rounds or max(per_task.values(), default=flat.get("federation.num_rounds")),
        "Skew β": None if at_sites else flat.get("federation.beta"),
        "Model": flat.get("model.name"),
    }


def _together(values: Sequence[Any]) -> str | None:
    """Every value once, numbers by size.

    >>> _together([0.5, 0.1, None, 0.5]), _together([100, 20]), _together([None])
    ('0.1, 0.5', '20, 100', None)
    """
    told = {short(value): value for value in values if value not in (None, "", 0)}
    sizes = {text: value if isinstance(value, (int, float)) else math.inf for text, value in told.items()}
    ordered = sorted(told, key=lambda text: (sizes[text], text))
    return ", ".join(ordered) or None


def _times(runs: Sequence[RunRecord]) -> str | None:
    """How long the runs took: the shortest and the longest, because methods differ too much for a mean."""
    seconds = sorted(run.timing.total_s for run in runs if run.timing.total_s is not None)
    ends = dict.fromkeys(seconds_text(value) for value in (*seconds[:1], *seconds[-1:]))
    return " to ".join(ends) or None


def _objects(runs: Sequence[RunRecord]) -> str | None:
    """Networks and data that somebody handed over in Python: no command can make them again."""
    values = (run.settings.get(key) for run in runs for key in ("model.name", "model.lens", "data.name"))
    names = {str(value).removeprefix("object:") for value in values if str(value).startswith("object:")}
    return ", ".join(sorted(names)) or None


def _elsewhere(runs: Sequence[RunRecord]) -> str | None:
    """Runs whose bits cannot be repeated, because they went on with other code or on another machine."""
    parts = [part for run in runs for part in run.results.elsewhere]
    names = sorted({key.replace("_", " ") for part in parts for key in part.changed})
    return f"{', '.join(names)} changed" if parts else None


def _continued(runs: Sequence[RunRecord]) -> str | None:
    """When tasks were added to runs that were finished."""
    told = (
        f"{part.num_tasks - part.after_task - 1} new after {task_name(part.after_task)}"
        for run in runs
        for part in run.results.continued
    )
    return "; ".join(dict.fromkeys(told)) or None


def _own_orders(runs: Sequence[RunRecord]) -> str | None:
    """That sites have orders of their own, and the accuracy on the classes that a site has met."""
    finals = [order.accuracy[-1] for run in runs for order in run.results.orders if order.accuracy]
    known = [value for value in finals if value is not None]
    if not known:
        return None
    mean, least = percent(sum(known) / len(known)), percent(min(known))
    return f"each site its own; on the classes a site has met: {mean} % on average, {least} % at the worst site"


def _late_answers(runs: Sequence[RunRecord]) -> str | None:
    """How many answers came late or too late, where sites answer when they can."""
    found = [run.results.late_answers for run in runs if run.results.late_answers]
    if not found:
        return None
    sent, late, dropped, left = (
        sum(getattr(one, name) or 0 for one in found) for name in ("sent", "late", "dropped", "under_way")
    )
    return f"{late} of {sent} late, {dropped} dropped, {left} under way at the end"


def _quarantined(runs: Sequence[RunRecord]) -> str | None:
    """Uploads that the screen put apart, by site; the events say why."""
    screens = [run.results.screen for run in runs if run.results.screen]
    if not screens:
        return None
    rows = [row for screen in screens for row in screen.quarantined]
    judged = sum(num for screen in screens for num in screen.judged.values())
    by_site = Counter(row.client for row in rows).most_common(8)
    sites = ", ".join(f"site {site}: {num}" for site, num in by_site)
    return f"{len(rows)} of {judged} uploads of a class" + (f" ({sites})" if sites else "")


def task_rows(run: RunRecord) -> list[list[str]]:
    """Task (and domain), classes, training images, test images, as text."""
    rows = []
    for i, task in enumerate(run.tasks):
        domain = f" · {plain(task.domain, 40)}" if task.domain else ""
        names = ", ".join(plain(name, 60) for name in task.classes) or NONE
        sizes = map(known, (task.train_size, task.test_size))
        rows.append([f"{task_name(i if task.index is None else task.index)}{domain}", names, *sizes])
    return rows


@dataclass(frozen=True)
class SiteScores:
    """A natural site on the page: its images, and for each method its accuracy and that of a head tuned at the site."""

    name: str
    images: str
    cells: tuple[tuple[str, str], ...]
    worst: tuple[bool, ...]


def site_accuracy(groups: Sequence[RunGroup]) -> tuple[list[RunGroup], list[SiteScores]]:
    """The methods whose runs have sites of their own, and one row per site; means over seeds."""
    told = [group for group in groups if any(run.results.sites for run in group.finished)]
    sites = {site.name: site for group in told for run in group.finished for site in run.results.sites}
    known = [[score for name in sites if (score := _at_site(group, name)) is not None] for group in told]
    lowest = [min(scores, default=None) for scores in known]
    rows = []
    for name, site in sites.items():
        found = [_at_site(group, name) for group in told]
        cells = tuple((percent(value), _tuned(group, name)) for value, group in zip(found, told, strict=True))
        worst = tuple(value is not None and value == low for value, low in zip(found, lowest, strict=True))
        rows.append(SiteScores(plain(name, 60), f"{site.train_size} + {site.test_size}", cells, worst))
    return told, rows


def _at_site(group: RunGroup, name: str) -> float | None:
    return group.mean(lambda run: next((s.accuracy for s in run.results.sites if s.name == name), None))


def _tuned(group: RunGroup, name: str) -> str:
    found = group.mean(lambda run: next((s.tuned for s in run.site_heads.sites if s.name == name), None))
    return "" if found is None else percent(found)


_LEAKS = (  # key, factor, digits
    ("num_images", 1, 0),
    ("near_copies", 100, 0),
    ("exact_copies", 1, 0),
    ("nearest_rms_median", 1, 3),
    ("nearest_rms_min", 1, 3),
    ("nearest_psnr_median_db", 1, 1),
    ("start_rms_median", 1, 3),
    ("unmoved", 1, 0),
)


def leakage_rows(head: RunGroup | None) -> list[list[str]]:
    """The leakage check task by task: task, images, near-copies (%), exact copies, RMS median and least, PSNR (dB);
    then against each surrogate's own start image: RMS median, and how many never moved."""
    found = next((run.leakage for run in head.finished if run.leakage), Leakage()) if head else Leakage()
    rows = []
    for entry in found.per_task:
        values = [(getattr(entry, key), factor, digits) for key, factor, digits in _LEAKS]
        cells = [percent(value and factor * value, digits) for value, factor, digits in values]
        rows.append([task_name(entry.task), *cells])
    return rows


def config_rows(runs: Sequence[RunRecord]) -> list[tuple[str, str, bool]]:
    """Every key of the recipes: (key, value or values, whether it differs between runs)."""
    flats = [experiment_keys(run.config) for run in runs if run.config]
    keys = sorted({key for flat in flats for key in flat})
    rows = []
    for key in keys:
        values = list(dict.fromkeys(same(flat[key]) for flat in flats if key in flat))
        rows.append((plain(key), plain("  |  ".join(values), 200), len(values) > 1))
    return rows


@dataclass(frozen=True)
class ProgressLine:
    """A run that is not done: who, how far, in which state."""

    label: str
    state: str
    text: str
    share: float  # 0 to 1


def progress(groups: Sequence[RunGroup]) -> list[ProgressLine]:
    """The runs without results, in the groups' order."""
    return [_progress(group, run) for group in groups for run in group.runs if not run.finished]


def _progress(group: RunGroup, run: RunRecord) -> ProgressLine:
    status = run.status
    turn, tasks, turns = max(status.round, 0), status.num_tasks or 0, status.num_rounds or 1
    words = [f"task {status.task + 1} of {tasks}", f"round {turn + 1} of {turns}"] if tasks else ["no status yet"]
    words += [plain(status.phase, 30)] if status.phase else []
    seed = "" if run.seed is None else f", seed {run.seed}"
    share = min((status.task + turn / turns) / tasks, 1.0) if tasks else 0.0
    return ProgressLine(group.label + seed, plain(run.state, 20), " · ".join(words), share)


@dataclass(frozen=True)
class EventLine:
    """A warning or error, as often as it occurred, with the first place and the methods it occurred under."""

    level: str
    code: str
    message: str
    methods: str
    place: str
    num: int


def events(groups: Sequence[RunGroup]) -> list[EventLine]:
    """Warnings, errors and resumes of all runs, identical ones once; errors first, then the frequent."""
    found: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for group in groups:
        for row in (row for run in group.runs for row in run.events):
            if row.level in _LEVELS[:2] or row.code == _RESUMED:
                level = row.level if row.level in _LEVELS else "info"
                key = (level, plain(row.code, 12), plain(row.message, 800))
                found.setdefault(key, []).append((group.label, _event_place(row)))
    told = [
        EventLine(*key, ", ".join(dict.fromkeys(label for label, _ in places)), places[0][1], len(places))
        for key, places in found.items()
    ]
    return sorted(told, key=lambda event: (_LEVELS.index(event.level), -event.num))[:_MOST_EVENTS]


def _event_place(row: EventRecord) -> str:
    places = (("T", row.task), ("round ", row.round), ("site ", row.client))
    return ", ".join(f"{word}{value}" for word, value in places if value is not None)


def event_summary(runs: Sequence[RunRecord]) -> str:
    """
    >>> event_summary([])
    'no warnings, no errors'
    """
    levels = Counter(row.level for run in runs for row in run.events)
    return ", ".join(count(levels[level], level) if levels[level] else f"no {level}s" for level in ("warning", "error"))


def environment(runs: Sequence[RunRecord]) -> Pairs:
    """Versions, machine, commit, data fingerprint; where runs differ all values are listed."""
    found: dict[str, dict[str, None]] = {}
    for key, value in (item for run in runs for item in run.env.items()):
        found.setdefault(key, {})[_words(value)] = None
    return [(plain(key).replace("_", " "), " | ".join(values)) for key, values in found.items()]


def _words(value: Any) -> str:
    """
    >>> _words({"mean": [0.2, 0.3]}), _words(True)
    ('mean 0.2, 0.3', 'True')
    """
    if isinstance(value, dict):
        return "; ".join(f"{plain(key)} {_words(own)}" for key, own in value.items())
    return ", ".join(map(_words, value)) if isinstance(value, list) else plain(value, 120)


def problems(runs: Sequence[RunRecord]) -> list[tuple[str, str]]:
    """What could not be read: (folders, problem), identical problems once."""
    found: dict[str, list[str]] = {}
    for run in runs:
        for problem in run.problems:
            found.setdefault(plain(problem, 400), []).append(run.folder.name)
    return [(", ".join(folders), problem) for problem, folders in found.items()]


def commands(runs: Sequence[RunRecord]) -> list[str]:
    """The command lines that made these runs, each once."""
    return list(dict.fromkeys(plain(run.command, 400) for run in runs if run.command))


@dataclass(frozen=True)
class AuditView:
    """One audited run: its verdict, the attacks as cells (attack, right, guesses, epsilon at least), sentences."""

    group: RunGroup
    seed: int | None
    verdict: str
    promised: str
    rows: list[list[str]]
    words: list[str]


def audits(groups: Sequence[RunGroup]) -> list[AuditView]:
    """The privacy audits to show, one for each audited run."""
    return [_audit(group, run) for group in groups for run in group.finished if run.audit.canaries]


def _audit(group: RunGroup, run: RunRecord) -> AuditView:
    found = run.audit
    rows = [
        [plain(row.attack), known(row.num_right), known(row.num_guesses), percent(row.epsilon, 2)]
        for row in found.canaries
    ]
    words = [plain(words, 600) for words in found.words]
    return AuditView(group, run.seed, plain(found.verdict, 40), percent(found.promised, 2), rows, words)


@dataclass(frozen=True)
class WithdrawnSite:
    """One site of one run. ``accuracies``: on what, before, after, and where checked of the run that never saw it."""

    group: RunGroup
    seed: int | None
    site: str
    words: str
    checked: bool
    accuracies: list[list[str]]
    kinds: list[str]  # of what was removed: the columns after task and class
    removed: list[list[str]]
    remains: list[str]


def withdrawals(groups: Sequence[RunGroup]) -> list[WithdrawnSite]:
    """The sites that withdrew, run by run."""
    return [_withdrawal(group, run, row) for group in groups for run in group.finished for row in run.results.forgotten]


def _withdrawal(group: RunGroup, run: RunRecord, row: Forgotten) -> WithdrawnSite:
    check = run.withdrawal if row.client is not None and run.withdrawal.client == row.client else None
    lost = [plain(name, 60) for name in row.classes_lost]
    kinds = {"sums": "In the sums"} if row.exact else {"buffer": "From the buffer", "pool": "From the pool"}
    done = "solved anew without them." if row.exact else f"{_count(row.epochs)} epochs from the run's first weights."
    words = (
        "Sums over the other sites were taken anew, with fresh noise, and their images charged again."
        if row.summed_again
        else f"{'Sums over ' if row.exact else ''}{_count(row.num_images)} images ({bytes_text(row.bytes)}) were removed, "
        f"{_count(row.num_images_left)} of other sites remained; {done}"
    ) + (f" Nobody else had sent images of {', '.join(lost)}." if lost else "")
    return WithdrawnSite(
        group=group,
        seed=run.seed,
        site=plain(row.name or row.client, 40),
        words=words,
        checked=check is not None,
        accuracies=_accuracies(row, check),
        kinds=list(kinds.values()),
        removed=[[plain(cell.get(key, "?"), 60) for key in ("task", "class", *kinds)] for cell in row.removed],
        remains=[plain(words, 200) for words in row.remains],
    )


def _accuracies(row: Forgotten, check: WithdrawalCheck | None) -> list[list[str]]:
    """On what, before, after, and (where it was checked) of the run that never saw the site."""
    told = check or WithdrawalCheck()
    never = told.per_task.never or (None,) * len(row.per_task_before)
    rows = [
        ("all classes so far", row.accuracy_before, row.accuracy_after, told.aa.never),
        ("the site's own images", row.own_images_before, row.own_images_after, told.own_images.never),
        *(
            (f"task {t}", *each)
            for t, each in enumerate(zip(row.per_task_before, row.per_task_after, never, strict=False), start=1)
        ),
    ]
    return [[name, *map(percent, values[: 3 if check else 2])] for name, *values in rows]


def _count(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"


_MOST_ROUNDS = 30  # rounds, and uploads left out, newest first


@dataclass(frozen=True)
class SiteRow:
    """One site, in words."""

    name: str
    client: int
    state: str
    last_answer: str
    late: str
    answered: str
    up: str
    down: str
    left_out: str

    @property
    def here(self) -> bool:
        """Whether the site is connected."""
        return self.state.startswith("online")


@dataclass(frozen=True)
class SitesView:
    """The section of the page; ``told`` is the run it speaks of."""

    federation: str
    updated: str
    told: RunRecord
    sites: list[SiteRow]
    rounds: list[list[str]]
    left_out: list[list[str]]


def sites_view(runs: Sequence[RunRecord]) -> SitesView | None:
    """Of the first run that went across sites (it has a sites.json); None if all were simulated."""
    run = next((run for run in runs if run.federation.sites), None)
    if run is None:
        return None
    found = run.federation
    names = {site.client: plain(site.name, 40) for site in found.sites}
    return SitesView(
        plain(found.federation, 40),
        _clock(found.updated),
        run,
        [_site(run, site, found.updated) for site in found.sites],
        [_round(row, names) for row in run.rounds[::-1][:_MOST_ROUNDS]],
        [_left_out(row, names) for row in _failures(run)[::-1][:_MOST_ROUNDS]],
    )


def _site(run: RunRecord, site: SiteRecord, updated: str) -> SiteRow:
    shares = [row.sites.get(str(site.client), ()) for row in run.rounds]
    asked = [share for share in shares if len(share) == 2]
    up, down = (sum(share[side] for share in asked) for side in (0, 1))
    codes = Counter(plain(row.code, 12) for row in _failures(run) if row.client == site.client)
    since = site.waiting_since if run.state == "running" else ""
    return SiteRow(
        name=plain(site.name, 40),
        client=site.client,
        state=plain(site.state, 20),
        last_answer=_ago(site.last_answer, updated),
        late=_ago(since, updated) if since else "",
        answered=f"{sum(share[0] > 0 for share in asked)} of {len(asked)}" if asked else NONE,
        up=bytes_text(up) if asked else NONE,
        down=bytes_text(down) if asked else NONE,
        left_out=", ".join(f"{num} × {code}" for code, num in sorted(codes.items())),
    )


def _round(row: RoundRecord, names: dict[int, str]) -> list[str]:
    """Place, accuracy, how many answered, bytes from each."""
    shares = {int(client): share[0] for client, share in row.sites.items() if client.isdigit() and share}
    each = ", ".join(
        f"{names.get(client, f'site {client}')} {bytes_text(up) if up else 'nothing'}" for client, up in shares.items()
    )
    answered = f"{sum(up > 0 for up in shares.values())} of {len(shares)}"
    return [_place(row), percent(row.accuracy), answered, bytes_text(sum(shares.values())), each]


def _failures(run: RunRecord) -> list[EventRecord]:
    """What a site did not send, or what of it was not accepted."""
    return [row for row in run.events if row.left_out]


def _left_out(row: EventRecord, names: dict[int, str]) -> list[str]:
    name = NONE if row.client is None else names.get(row.client, f"site {row.client}")
    return [_place(row), name, plain(row.code, 12), plain(row.message, 400)]


def _place(row: RoundRecord | EventRecord) -> str:
    turn = row.round
    return task_name(row.task or 0) + ("" if turn is None or turn < 0 else f", round {turn + 1}")


def _when(text: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text))
    except ValueError:
        return None


def _clock(text: str) -> str:
    when = _when(text)
    return f"{when:%Y-%m-%d %H:%M:%S} UTC" if when else NONE


def _ago(text: str, now: str) -> str:
    """
    >>> _ago("2026-11-15T09:00:00+00:00", "2026-11-15T09:01:01+00:00"), _ago("", "")
    ('1 min 01 s ago', '–')
    """
    then, at = _when(text), _when(now)
    return f"{seconds_text(max((at - then).total_seconds(), 0.0))} ago" if then and at else NONE


# a[i][j]: accuracy on task j after learning task i; T tasks, numbered 0 to T-1.
GLOSSARY: tuple[tuple[str, str, str], ...] = (
    (
        "a(i, j)",
        "",
        "Accuracy on the test images of task j after task i was learned, in percent. "
        "The answer is one of all classes seen so far; the model is not told the task.",
    ),
    (
        "AA",
        "Σⱼ nⱼ a(T−1, j) / Σⱼ nⱼ",
        "Average accuracy over all tasks after the last one. nⱼ: test images of task j; domains count equally.",
    ),
    (
        "AIA",
        "(1/T) Σᵢ Aᵢ",
        "Average incremental accuracy. Aᵢ is the accuracy over everything seen after task i.",
    ),
    (
        "Old, recent",
        "mean of a(T−1, j) over j < ⌊T/2⌋, over j ≥ ⌊T/2⌋",
        "Final accuracy on the first ⌊T/2⌋ tasks and on the rest, the split of the paper.",
    ),
    (
        "Forgetting",
        "mean over j < T−1 of maxᵢ a(i, j) − a(T−1, j)",
        "Points each task but the last has lost since its best moment; 0 is best.",
    ),
    (
        "BWT",
        "mean over j < T−1 of a(T−1, j) − a(j, j)",
        "Backward transfer: what later tasks did to earlier ones. Negative means forgetting.",
    ),
    (
        "Within-task accuracy",
        "",
        "Accuracy when the choice is only among the classes of the image's own task. "
        "What separates it from AA is lost between tasks, what separates it from 100 inside them.",
    ),
    (
        "Upload per site and round",
        "all bytes sent up / sites asked, summed over the rounds",
        "Counted on what was really sent, tensors as they are. A method may ask more sites than were drawn. What is sent at the "
        "ends of tasks counts here; the table of costs leaves it out, as the paper's formulas do. 1 MB is 10⁶ bytes.",
    ),
    (
        "Nominal cost",
        "",
        "What the paper's formulas give for this setting: all classes present, labels not counted.",
    ),
    (
        "Nearest real image",
        "",
        "For an uploaded image, the real training image with the smallest root-mean-square pixel difference (RMS).",
    ),
    (
        "PSNR",
        "10 log₁₀(peak² / mean squared difference)",
        "Likeness of two images in decibel. An upload above 30 dB counts as a near-copy: "
        "to most people such a pair looks the same.",
    ),
    (
        "Traced",
        "",
        "An upload whose nearest training image is much nearer than the nearest image that no site had, after mirror, small moves, "
        "negative, contrast and blur are undone. Beside it stands the same share for images that nobody sent: chance.",
    ),
    ("±", "√(Σ(x − x̄)² / (n−1))", "Standard deviation over n seeds; none is shown for one seed."),
)
