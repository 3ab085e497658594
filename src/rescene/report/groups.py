"""Runs that belong together: one method in one setting, over its seeds. What sets groups apart, and what they are called.

Runs are averaged only if they differ in nothing but the seed (and where they ran). The same method with another recipe
is another group whose label names the difference, so a sweep never melts into one row.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import numpy as np

from rescene.core.errors import ConfigError, with_guess
from rescene.core.json_files import Row
from rescene.core.method_style import MethodStyle, method_key, style_of
from rescene.core.recipe_keys import Flat, experiment_keys, with_one_augmentation
from rescene.core.versions import NEWER
from rescene.report.formatting import NONE, distinct, plain, shortened, slug
from rescene.report.load import RunRecord

SERVER_EPOCHS = "train.server_epochs"
_ACROSS = ("federation.beta", SERVER_EPOCHS)  # named on every row they act on, if rows differ in them
# keys that recipes got later, and what every run had before; a method's own keys say nothing of other methods
_FORMER = {f"{section}.{key}": value for (section, key), value in NEWER.items() if not isinstance(value, dict)}
BEFORE = {key: value for key, value in _FORMER.items() if not key.startswith("method.")}
OF_METHODS = {key: value for key, value in _FORMER.items() if key.startswith("method.")}
METRICS = ("aa", "aia", "old", "recent", "forgetting")


@dataclass(frozen=True)
class Spread:
    """Mean over seeds; ``std`` uses n-1 and is None for a single value."""

    mean: float
    std: float | None
    num: int


@dataclass(frozen=True)
class RunGroup:
    """One method in one setting. ``runs``: one per seed, finished first; ``repeats``: a seed again, not counted."""

    method: str
    label: str
    slug: str
    variant: int
    runs: tuple[RunRecord, ...]
    repeats: tuple[RunRecord, ...]
    hero: bool = False  # the page opens with it

    @property
    def style(self) -> MethodStyle:
        """Colour and marker of the group's method."""
        return self.runs[0].style if self.runs else style_of(self.method)

    @property
    def competes(self) -> bool:
        """False for reference lines such as an upper bound: they frame a comparison and do not take part in it."""
        return not self.style.reference

    @property
    def finished(self) -> tuple[RunRecord, ...]:
        """The group's finished runs."""
        return tuple(run for run in self.runs if run.finished)

    @property
    def shown(self) -> tuple[RunRecord, ...]:
        """Runs whose curves are drawn: the finished ones, or else the one that got furthest."""
        return self.finished or (max(self.runs, key=lambda run: len(run.rounds)),)

    @property
    def aa(self) -> Spread | None:
        """Average accuracy after the last task, in percent."""
        return self.spread(lambda run: run.results.aa)

    def spread(self, pick: Callable[[RunRecord], float | None]) -> Spread | None:
        """Mean and deviation over the finished seeds that have the value."""
        return spread(pick(run) for run in self.finished)

    def mean(self, pick: Callable[[RunRecord], float | None]) -> float | None:
        """Mean over the finished seeds that have the value."""
        found = self.spread(pick)
        return found.mean if found else None

    def alike(self, pick: Callable[[RunRecord], np.ndarray]) -> tuple[RunRecord, ...]:
        """The shown runs whose array has the shape of the first one's."""
        shape = pick(self.shown[0]).shape
        return tuple(run for run in self.shown if pick(run).shape == shape)

    def stack(self, pick: Callable[[RunRecord], np.ndarray]) -> np.ndarray:
        """The arrays of the runs that are alike, [seed, ...]."""
        return np.stack([pick(run) for run in self.alike(pick)])


def spread(values: Iterable[float | None]) -> Spread | None:
    """Mean and sample deviation (n-1) of the values that are there.

    >>> spread([1.0, 3.0, None])
    Spread(mean=2.0, std=1.4142135623730951, num=2)
    """
    found = [value for value in values if value is not None]
    if not found:
        return None
    return Spread(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, len(found))


def same(value: Any) -> str:
    """A value as text that is equal exactly when the values are."""
    return json.dumps(value, sort_keys=True, default=str)


def setting_apart(flats: Sequence[Row]) -> list[str]:
    """Keys that have two values. A key that a run does not know says nothing: it is younger than the run.

    >>> setting_apart([{"beta": 0.1}, {"beta": 0.5, "exclude": []}])
    ['beta']
    >>> setting_apart([{"privacy": None}, {"privacy.sigma": 1.0}])
    ['privacy.sigma']
    """
    keys = dict.fromkeys(key for flat in flats for key in flat)
    return [key for key in keys if len({same(flat.get(key)) for flat in flats if _knows(flat, key)}) > 1]


def _knows(flat: Row, key: str) -> bool:
    """Whether the key is there, or a section around it is there and empty."""
    parts = key.split(".")
    return any(".".join(parts[:n]) in flat for n in range(1, len(parts) + 1))


def group_runs(runs: Sequence[RunRecord]) -> list[RunGroup]:
    """Group runs by method and recipe; best AA first, unfinished last."""
    groups: list[RunGroup] = []
    apart = setting_apart([_setting(run) for run in runs])
    always = [key for key in _ACROSS if key in apart]
    for method in dict.fromkeys(run.method for run in runs):
        groups += _variants(method, [run for run in runs if run.method == method], always)
    return _with_hero(_numbered(sorted(_with_unique_names(groups), key=_rank)))


def _setting(run: RunRecord) -> Flat:
    """The recipe as far as it acts, and the sites that were forgotten later: such a run is another one.

    Keys that came after the run was recorded have the value that all runs had before.
    """
    told = {**BEFORE, **with_one_augmentation(acting(run))}
    return told | {"forgot": [row.client for row in run.results.forgotten] or None}


def acting(run: RunRecord) -> Flat:
    """The recipe's dotted keys as far as they act.

    E_srv counts only where a server trains on uploads. How often a run was evaluated changes no model.
    """
    flat = _without_idle_privacy(experiment_keys(run.config))
    flat.pop("federation.evaluate_every", None)
    if not run.style.server_trains:
        flat.pop(SERVER_EPOCHS, None)
    return flat


def _without_idle_privacy(flat: Flat) -> Flat:
    """Without a mechanism nothing else in the privacy section acts, and its epsilon is nobody's guarantee.

    >>> _without_idle_privacy({"privacy.mechanism": "none", "privacy.epsilon": 8.0, "train.lr": 0.1})
    {'privacy.mechanism': 'none', 'train.lr': 0.1}
    """
    if flat.get("privacy.mechanism") != "none":
        return flat
    return {key: value for key, value in flat.items() if key == "privacy.mechanism" or not key.startswith("privacy.")}


def _variants(method: str, runs: Sequence[RunRecord], always: Sequence[str]) -> list[RunGroup]:
    """The groups of one method; each label names what sets it apart, within the method and, of ``always``, beyond it."""
    flats = [_setting(run) for run in runs]
    known = {key for flat in flats for key in flat}
    former = {key: value for key, value in OF_METHODS.items() if key in known}
    flats = [flat | former | flat for flat in flats]  # the keys of a record stay first
    apart = setting_apart(flats)
    cells: dict[str, tuple[Row, list[RunRecord]]] = {}
    for run, flat in zip(runs, flats, strict=True):
        cells.setdefault(same([flat.get(key) for key in apart]), (flat, []))[1].append(run)
    settings, members = zip(*cells.values(), strict=True)
    groups = []
    for i, words in enumerate(telling(settings, [own[0].recipe for own in members], apart, always)):
        name = " ".join([members[i][0].style.label, *words])
        kept, repeats = _one_per_seed(members[i])
        groups.append(RunGroup(method, name, slug(name), 0, kept, repeats))
    return groups


def _one_per_seed(members: list[RunRecord]) -> tuple[tuple[RunRecord, ...], tuple[RunRecord, ...]]:
    """One run per seed: counting the same seed twice would make the deviation too small."""
    ordered = sorted(members, key=lambda run: not run.finished)
    kept: list[RunRecord] = []
    repeats: list[RunRecord] = []
    for run in ordered:
        known = run.seed is not None and any(run.seed == other.seed for other in kept)
        (repeats if known else kept).append(run)
    return tuple(kept), tuple(repeats)


def _with_unique_names(groups: list[RunGroup]) -> list[RunGroup]:
    """Labels name series and slugs files and ids, so two groups may share neither."""
    labels = distinct([group.label for group in groups])
    slugs = distinct([group.slug for group in groups], "{}-{}")
    return [replace(group, label=label, slug=name) for group, label, name in zip(groups, labels, slugs, strict=True)]


def _numbered(groups: list[RunGroup]) -> list[RunGroup]:
    """Each method's groups counted in their order: its best one is drawn as the method, the others as variants of it."""
    counts: Counter[str] = Counter()
    made = []
    for group in groups:
        made.append(replace(group, variant=counts[group.method]))
        counts[group.method] += 1
    return made


def _rank(group: RunGroup) -> tuple[bool, float, str]:
    return (group.aa is None, -(group.aa.mean if group.aa else 0.0), group.label)


def _with_hero(groups: list[RunGroup]) -> list[RunGroup]:
    """The best finished group that competes is the hero; where none competes, the best finished one."""
    finished = [group for group in groups if group.finished]
    hero = next((group for group in finished if group.competes), finished[0] if finished else None)
    return [replace(group, hero=group is hero) for group in groups]


def headline_group(groups: Sequence[RunGroup]) -> RunGroup | None:
    """The group the page opens with; None while no run has finished."""
    return next((group for group in groups if group.hero), None)


def rivals(one: RunGroup, other: RunGroup) -> bool:
    """Only another method that faces the same problem is a rival; other forms of the same one and references are not."""
    another = method_key(other.method) != method_key(one.method)
    return another and other.competes and bool(other.finished) and same_problem(one, other)


def comparison_rows(runs: Sequence[RunRecord]) -> list[Row]:
    """The comparison table's data, one row per method (and recipe), best AA first.

    Each quantity comes as ``name`` (mean over seeds, None if never measured) and ``name_std`` (n-1, None for one seed).
    Accuracies and forgetting are in percent; ``upload_bytes`` is per client and round; ``near_copies`` is a share.
    """
    return [_comparison_row(group) for group in group_runs(runs)]


def _comparison_row(group: RunGroup) -> Row:
    row: Row = {
        "method": group.method,
        "label": group.label,
        "num_seeds": len(group.finished),
        "num_unfinished": len(group.runs) - len(group.finished),
    }
    for place in (*(f"results.{key}" for key in METRICS), "upload_bytes", "near_copies"):
        key, value = place.rpartition(".")[2], group.spread(attrgetter(place))
        row[key], row[f"{key}_std"] = (value.mean, value.std) if value else (None, None)
    row["private"] = bool(group.finished) and all(run.privacy.private for run in group.finished)
    return row


_CHOICES = {"federation.engine", "federation.evaluate_every", "federation.wire"}  # how it runs, not what is asked
UNNAMED = (None, "auto", "folder", "csv", "npz")  # layouts: the path says which images they are
_PROBLEM = ("data", "tasks", "federation", "model", "privacy")
_WEIGHTY = (SERVER_EPOCHS, "train.augment")  # no part of the problem, but worth tens of points


def same_problem(one: RunGroup, other: RunGroup) -> bool:
    """Whether two groups face the same data, tasks, sites, model and privacy: only then one can beat the other."""
    return not _problem_apart([one, other])


def differing_settings(groups: Sequence[RunGroup]) -> list[str]:
    """Keys in which groups differ so that their rows are not comparable: of the training what weighs most, the problem."""
    training = [{key: value for key, value in acting(group.runs[0]).items() if key in _WEIGHTY} for group in groups]
    return [*setting_apart(training), *_problem_apart(groups)]


def _problem(run: RunRecord) -> Flat:
    return _without_idle_privacy(experiment_keys({name: run.config[name] for name in _PROBLEM if name in run.config}))


def _problem_apart(groups: Sequence[RunGroup]) -> list[str]:
    flats = [_problem(group.runs[0]) for group in groups]
    for group, flat in zip(groups, flats, strict=True):
        epsilon = group.runs[0].epsilon
        if epsilon is not None:  # how a method reaches its guarantee is its own affair
            for key in [key for key in flat if key.startswith("privacy.") and key != "privacy.delta"]:
                del flat[key]
        flat["privacy.epsilon"] = epsilon
        if flat.get("data.name") not in UNNAMED:  # a set with a name is the same wherever it lies
            flat.pop("data.path", None)
    return [key for key in setting_apart(flats) if key not in _CHOICES]


_FEW = 3  # settings that a label names, if no more are needed to tell it from others
_FIRST = (  # what one asks for first
    "data.name", "federation.beta", SERVER_EPOCHS, "method.step", "privacy.mechanism", "privacy.epsilon",
    "privacy.noise_multiplier", "method.start", "model.name", "federation.wire",
)  # fmt: skip
_WORDS: dict[str, str | dict[str, str]] = {  # as the paper's tables and the frontier call them
    SERVER_EPOCHS: "E_srv={}", "method.step": "{} steps", "privacy.mechanism": "{}", "privacy.epsilon": "ε={}",
    "privacy.noise_multiplier": "σ={}", "model.name": "{}", "data.name": "{}", "federation.wire": "{} wire",
    "train.augment": {"False": "no augmentation", "new": "new images augmented"},
}  # fmt: skip
_UNSAID = {"method.step": "polyak", "privacy.mechanism": "none", "train.augment": True}  # the forms that need no word


def quiet(key: str) -> bool:
    """Whether a setting says how or where something ran: it is named only where nothing else tells two runs apart."""
    return key == "data.path" or key.endswith(".precision")


def word(key: str, value: Any) -> str:
    """A setting in one short word; empty for what goes without saying.

    >>> word("train.server_epochs", 100), word("method.step", "fixed"), word("method.step", "polyak"), word("train.lr", 0.1)
    ('E_srv=100', 'fixed steps', '', 'lr=0.1')
    >>> word("train.augment", True), word("train.augment", False), word("method.guard", False)
    ('', 'no augmentation', 'guard=false')
    """
    if value is None or value == _UNSAID.get(key):
        return ""
    text = str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else plain(value)
    text = shortened(text, 24)
    form = _WORDS.get(key)
    if isinstance(form, str):
        return form.format(text)
    return (form or {}).get(str(value), f"{plain(key.split('.')[-1], 24)}={text}")


def telling(
    settings: Sequence[Row], recipes: Sequence[str], apart: Sequence[str], always: Sequence[str] = ()
) -> list[list[str]]:
    """Words for each cell that no other one has: a few settings, or where many differ the recipe's name if that differs too.

    ``always`` is named in any case. More settings come to that as long as they tell cells apart that still look alike; what
    most cells have of them is not said. "…" marks a cell that differs from most in yet another setting.
    """
    keys = sorted(dict.fromkeys([*always, *apart]), key=_key_rank)
    columns = {key: [word(key, own.get(key)) for own in settings] for key in keys}
    named = sum(not quiet(key) for key in apart) > _FEW and all(recipes) and len(set(recipes)) > 1
    shown = [[shortened(plain(name), 24) for name in recipes]] if named else []
    left = []
    for key, column in columns.items():
        if key in always or (not named and len(shown) < _FEW and not quiet(key)):
            shown.append(column)
        elif _kinds([*shown, column]) > _kinds(shown):
            rare = [each if each != _common(column) else "" for each in column]
            shown.append(rare if _kinds([*shown, rare]) == _kinds([*shown, column]) else column)
        elif not named and not quiet(key):
            left.append(column)
    more = ["…" if any(column[i] != _common(column) for column in left) else "" for i in range(len(settings))]
    return [[each for each in [*(column[i] for column in shown), more[i]] if each] for i in range(len(settings))]


def _key_rank(key: str) -> tuple[bool, int]:
    return quiet(key), _FIRST.index(key) if key in _FIRST else len(_FIRST)


def _kinds(columns: Sequence[Sequence[str]]) -> int:
    """How many cells look different."""
    return len(set(zip(*columns, strict=True))) if columns else 1


def _common(column: Sequence[str]) -> str | None:
    """The word that more than half of the cells have.

    >>> _common(["a", "a", "b"]), _common(["a", "b"])
    ('a', None)
    """
    found, num = Counter(column).most_common(1)[0]
    return found if 2 * num > len(column) else None


ALWAYS = ("method", "data", "seed", "epsilon")  # names that are not keys of a recipe


def traits(group: RunGroup) -> dict[str, str]:
    """Every dotted key of the group's recipe as text, and ``method``, ``data``, ``seed``, ``epsilon`` (as guaranteed)."""
    run = group.runs[0]
    flat = {key: value for key, value in acting(run).items() if key not in ("method", "method.name")}
    # what is a method's own comes last
    flat = dict(sorted(flat.items(), key=lambda item: item[0].startswith("method.")))
    name, path = flat.get("data.name"), flat.get("data.path")
    data = run.data or (path or name if name in UNNAMED else name) or NONE
    seeds = sorted({other.seed for other in group.runs if other.seed is not None})
    words = {key: plain(NONE if value is None else value, 40) for key, value in flat.items()}
    return words | {
        "method": group.style.label,
        "data": plain(data, 40),
        "seed": ", ".join(map(str, seeds)) or NONE,
        "epsilon": NONE if run.epsilon is None else f"{run.epsilon:g}",
    }


def differing(groups: Sequence[RunGroup]) -> list[str]:
    """Keys in which groups differ. A method's own settings count only against other groups of that method."""
    told = [traits(group) for group in groups]
    keys = dict.fromkeys(key for own in told for key in own if key not in ALWAYS)
    found = [key for key in keys if _varies(key, groups, told)]
    if len({own["data"] for own in told}) > 1:  # the name says it; where it lies is of no interest
        found = ["data", *(key for key in found if key not in ("data.name", "data.path"))]
    return found


def telling_keys(groups: Sequence[RunGroup]) -> list[str]:
    """Keys that differ and tell rows apart: where data lie or how exactly they are computed with only if nothing else does."""
    apart = differing(groups)
    keys = [key for key in apart if not quiet(key)]
    for key in apart:
        if key not in keys and _num_looks(groups, [*keys, key]) > _num_looks(groups, keys):
            keys.append(key)
    return keys


def _num_looks(groups: Sequence[RunGroup], keys: Sequence[str]) -> int:
    """How many different rows these keys and the method give."""
    told = [traits(group) for group in groups]
    return len({tuple(own.get(key, NONE) for key in ("method", *keys)) for own in told})


def _varies(key: str, groups: Sequence[RunGroup], told: Sequence[dict[str, str]]) -> bool:
    values: dict[str, set[str]] = {}
    for group, own in zip(groups, told, strict=True):
        if key in own:
            values.setdefault(group.method if key.startswith("method.") else "", set()).add(own[key])
    return any(len(found) > 1 for found in values.values())


def resolve_keys(text: str, groups: Sequence[RunGroup]) -> list[str]:
    """Comma-separated names as full keys: ``beta`` is federation.beta if no other key ends so."""
    known = list(dict.fromkeys(key for group in groups for key in traits(group)))
    return list(dict.fromkeys(_resolve(name.strip(), known) for name in text.split(",") if name.strip()))


def _resolve(name: str, known: Sequence[str]) -> str:
    if name in known:
        return name
    ends = [key for key in known if name in (key.rpartition(".")[2], key.removesuffix(".name"))]
    if len(ends) == 1:
        return ends[0]
    if ends:
        raise ConfigError("E142", f"{name!r} may be {' or '.join(ends)}", where="--by", fix=f"--by {ends[0]}")
    words = [*known, *(key.rpartition(".")[2] for key in known)]
    raise ConfigError(
        "E141",
        with_guess(f"no run has a setting {name!r}", name, words),
        where="--by or --across",
        fix="rescene show RUN   lists the settings of a run",
    )


def heads(keys: Sequence[str]) -> list[str]:
    """Column titles: the part of each key that says most, where it is unambiguous.

    >>> heads(["method", "federation.beta", "model.name", "train.lr", "method.lr"])
    ['method', 'beta', 'model', 'train.lr', 'method.lr']
    """
    ends = [key.removesuffix(".name").rpartition(".")[2] for key in keys]
    return [end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)]
