"""The small print: setting, progress, events, environment, glossary. Files in, plain rows out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rescene.report.groups import Group, flatten, same, spread
from rescene.report.look import plain
from rescene.report.runs import Row, Run, number, table
from rescene.report.words import NONE, count, percent, seconds_text, simulated

Pairs = list[tuple[str, str]]
_LEVELS = ("error", "warning", "info")
_RESUMED = "I401"  # the one piece of information that belongs beside what went wrong
_MOST_EVENTS = 60


def setting(run: Run, runs: Sequence[Run]) -> Pairs:
    """The experiment in a few facts, every value where runs differ; what a folder does not tell is left out."""
    others = [_set_up(other) for other in runs]
    seeds = sorted({other.seed for other in runs if other.seed is not None})
    seconds = spread(number(other.timing.get("total_s")) for other in runs)
    facts: list[tuple[str, Any]] = [
        *((name, _together([value, *(other[name] for other in others)])) for name, value in _set_up(run).items()),
        ("Evaluated", run.results.get("evaluated")),
        ("Seeds", ", ".join(map(str, seeds)) or None),
        ("Device", run.env.get("device") or run.config.get("device")),
        ("Went on elsewhere", _elsewhere(runs)),
        ("Simulated", "; ".join(dict.fromkeys(words for other in runs for words in simulated(other))) or None),
        ("Quarantined", _quarantined(runs)),
        ("Time per run", seconds_text(seconds.mean) if seconds else None),
    ]
    return [(name, _short(value)) for name, value in facts if value not in (None, "", 0)]


def _set_up(run: Run) -> dict[str, Any]:
    """What one run was set up with."""
    flat, at_sites = flatten(run.config), bool(run.config.get("sites"))  # nobody drew a split then
    tasks = run.tasks or run.partition.get("tasks") or []
    names = [name for task in run.tasks for name in task.get("classes") or []] or run.partition.get("classes") or []
    turns = [len(row.get("participants") or ()) for row in run.rounds]
    per_task = Counter(row.get("task") for row in run.rounds)
    return {
        "Data": run.env.get("data") or _first(flat, "data.name", "data.path", "data", "data.source", "data.kind"),
        "Tasks": len(tasks) or run.status.get("num_tasks"),
        "Classes": len(set(map(str, names))) or None,
        "Sites": number(run.partition.get("num_clients")) or flat.get("federation.num_clients"),
        "Sites per round": max(turns, default=flat.get("federation.per_round")),
        "Rounds per task": run.status.get("num_rounds")
        or max(per_task.values(), default=flat.get("federation.num_rounds")),
        "Skew β": None if at_sites else next((v for key, v in flat.items() if key.split(".")[-1] == "beta"), None),
        "Model": _first(flat, "model.name", "model", "model.arch", "model.kind"),
    }


def _together(values: Sequence[Any]) -> str | None:
    """Every value once, numbers by size.

    >>> _together([0.5, 0.1, None, 0.5]), _together([100, 20]), _together([None])
    ('0.1, 0.5', '20, 100', None)
    """
    told = {_short(value): value for value in values if value not in (None, "", 0)}
    sizes = {text: number(value) for text, value in told.items()}
    ordered = sorted(told, key=lambda text: (math.inf if sizes[text] is None else sizes[text], text))
    return ", ".join(ordered) or None


def _elsewhere(runs: Sequence[Run]) -> str | None:
    """Runs whose bits cannot be repeated, because they went on with other code or on another machine."""
    parts = [part for run in runs for part in run.results.get("elsewhere") or () if isinstance(part, dict)]
    names = sorted({str(key).replace("_", " ") for part in parts for key in part.get("changed") or ()})
    return f"{', '.join(names)} changed" if parts else None


def _quarantined(runs: Sequence[Run]) -> str | None:
    """Uploads that the screen put apart, by site; the events say why."""
    screens = [table(run.results, "screen") for run in runs if run.results.get("screen")]
    if not screens:
        return None
    rows = [row for screen in screens for row in screen.get("quarantined") or () if isinstance(row, dict)]
    judged = sum(int(number(num) or 0) for screen in screens for num in table(screen, "judged").values())
    by_site = Counter(plain(row.get("client"), 8) for row in rows).most_common(8)
    sites = ", ".join(f"site {site}: {num}" for site, num in by_site)
    return f"{len(rows)} of {judged} uploads of a class" + (f" ({sites})" if sites else "")


def task_rows(run: Run) -> list[list[str]]:
    """Task (and domain), classes, training images, test images, as text."""
    rows = []
    for i, task in enumerate(run.tasks):
        domain = f" · {plain(task['domain'], 40)}" if task.get("domain") else ""
        names = ", ".join(plain(name, 60) for name in task.get("classes") or [])
        sizes = [_short(task[key]) if key in task else NONE for key in ("train_size", "test_size")]
        rows.append([f"T{plain(task.get('index', i), 6)}{domain}", names, *sizes])
    return rows


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


def leakage_rows(head: Group | None) -> list[list[str]]:
    """The leakage check task by task: task, images, near-copies (%), exact copies, RMS median and least, PSNR (dB);
    then against each surrogate's own start image: RMS median, and how many never moved."""
    found = next((run.leakage for run in head.finished if run.leakage), {}) if head else {}
    rows = []
    for entry in found.get("per_task") or []:
        if isinstance(entry, dict):
            values = [(number(entry.get(key)), factor, digits) for key, factor, digits in _LEAKS]
            cells = [NONE if value is None else percent(factor * value, digits) for value, factor, digits in values]
            rows.append([f"T{plain(entry.get('task', '?'), 6)}", *cells])
    return rows


def _first(flat: dict[str, Any], *keys: str) -> Any:
    return next((flat[key] for key in keys if flat.get(key) not in (None, "")), None)


def _short(value: Any) -> str:
    return plain(f"{value:g}" if isinstance(value, float) else value, 120)


def config_rows(runs: Sequence[Run]) -> list[tuple[str, str, bool]]:
    """Every key of the recipes: (key, value or values, whether it differs between runs)."""
    flats = [flatten(run.config) for run in runs if run.config]
    keys = sorted({key for flat in flats for key in flat})
    rows = []
    for key in keys:
        values = list(dict.fromkeys(same(flat[key]) for flat in flats if key in flat))
        rows.append((plain(key), plain("  |  ".join(values), 200), len(values) > 1))
    return rows


@dataclass(frozen=True)
class Progress:
    """A run that is not done: who, how far, in which state."""

    label: str
    state: str
    text: str
    share: float  # 0 to 1


def progress(groups: Sequence[Group]) -> list[Progress]:
    """The runs without results, in the groups' order."""
    return [_progress(group, run) for group in groups for run in group.runs if not run.finished]


def _progress(group: Group, run: Run) -> Progress:
    told = {key: number(run.status.get(key)) for key in ("task", "round", "num_tasks", "num_rounds")}
    task, turn = told["task"] or 0.0, max(told["round"] or 0.0, 0.0)  # -1: between rounds
    tasks, turns = told["num_tasks"] or 0.0, told["num_rounds"] or 1.0
    words = (
        [f"task {task + 1:.0f} of {tasks:.0f}", f"round {turn + 1:.0f} of {turns:.0f}"] if tasks else ["no status yet"]
    )
    words += [plain(run.status["phase"], 30)] if run.status.get("phase") else []
    seed = "" if run.seed is None else f", seed {run.seed}"
    share = min((task + turn / turns) / tasks, 1.0) if tasks else 0.0
    return Progress(group.label + seed, plain(run.state, 20), " · ".join(words), share)


@dataclass(frozen=True)
class Event:
    """A warning or error, as often as it occurred, with the first place."""

    level: str
    code: str
    message: str
    method: str
    place: str
    num: int


def events(groups: Sequence[Group]) -> list[Event]:
    """Warnings, errors and resumes of all runs, equal ones counted; errors first, then the frequent."""
    first: dict[tuple[str, str, str, str], str] = {}
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for group in groups:
        for run in group.runs:
            for row in run.events:
                if row.get("level") in _LEVELS[:2] or row.get("code") == _RESUMED:
                    key = (
                        str(row["level"]) if row.get("level") in _LEVELS else "info",
                        plain(row.get("code", ""), 12),
                        plain(row.get("message", ""), 400),
                        group.label,
                    )
                    first.setdefault(key, _place(row))
                    counts[key] += 1
    found = [Event(*key, place=first[key], num=num) for key, num in counts.items()]
    return sorted(found, key=lambda event: (_LEVELS.index(event.level), -event.num))[:_MOST_EVENTS]


def _place(row: Row) -> str:
    names = (("task", "T"), ("round", "round "), ("client", "site "))
    return ", ".join(f"{word}{plain(row[key], 8)}" for key, word in names if row.get(key) is not None)


def event_summary(runs: Sequence[Run]) -> str:
    """
    >>> event_summary([])
    'no warnings, no errors'
    """
    levels = Counter(row.get("level") for run in runs for row in run.events)
    return ", ".join(count(levels[level], level) if levels[level] else f"no {level}s" for level in ("warning", "error"))


def environment(runs: Sequence[Run]) -> Pairs:
    """Versions, machine, commit, data fingerprint; where runs differ all values are listed."""
    keys = dict.fromkeys(key for run in runs for key in run.env)
    return [
        (
            plain(key).replace("_", " "),
            " | ".join(dict.fromkeys(_words(run.env[key]) for run in runs if key in run.env)),
        )
        for key in keys
    ]


def _words(value: Any) -> str:
    """
    >>> _words({"mean": [0.2, 0.3]}), _words(True)
    ('mean 0.2, 0.3', 'True')
    """
    if isinstance(value, dict):
        return "; ".join(f"{plain(key)} {_words(own)}" for key, own in value.items())
    return ", ".join(map(_words, value)) if isinstance(value, list) else plain(value, 120)


def commands(runs: Sequence[Run]) -> list[str]:
    """The command lines that made these runs, each once."""
    return list(dict.fromkeys(plain(run.command, 400) for run in runs if run.command))
