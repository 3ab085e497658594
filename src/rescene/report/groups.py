"""Runs that belong together: one method in one setting, over its seeds.

Runs are averaged only if they differ in nothing but the seed (and where they ran). The same method with another recipe
is another group whose label names the difference, so a sweep never melts into one row.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rescene.report.labels import SERVER_EPOCHS, distinct, telling
from rescene.report.look import REFERENCES, Look, is_ours, key_of, look_of, slug
from rescene.report.runs import Row, Run, number

_NOT_THE_EXPERIMENT = {"seed", "device", "threads", "out", "tag"}
_ACROSS = ("federation.beta", SERVER_EPOCHS)  # named on every row they act on, if rows differ in them
METRICS = ("aa", "aia", "old", "recent", "forgetting")


@dataclass(frozen=True)
class Spread:
    """Mean over seeds; ``std`` uses n-1 and is None for a single value."""

    mean: float
    std: float | None
    num: int


@dataclass(frozen=True)
class Group:
    """One method in one setting. ``runs``: one per seed, finished first; ``repeats``: a seed again, not counted."""

    method: str
    label: str
    slug: str
    variant: int
    runs: tuple[Run, ...]
    repeats: tuple[Run, ...]

    @property
    def look(self) -> Look:
        return look_of(self.method)

    @property
    def ours(self) -> bool:
        return is_ours(self.method)

    @property
    def competes(self) -> bool:
        """False for reference lines such as joint training: they frame a comparison and do not take part in it."""
        return key_of(self.method) not in REFERENCES

    @property
    def finished(self) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.finished)

    @property
    def shown(self) -> tuple[Run, ...]:
        """Runs whose curves are drawn: the finished ones, or else the one that got furthest."""
        return self.finished or (max(self.runs, key=lambda run: len(run.rounds)),)

    def spread(self, pick: Callable[[Run], float | None]) -> Spread | None:
        """Mean and deviation over the finished seeds that have the value."""
        return spread(pick(run) for run in self.finished)

    def alike(self, pick: Callable[[Run], np.ndarray]) -> tuple[Run, ...]:
        """The shown runs whose array has the shape of the first one's."""
        shape = pick(self.shown[0]).shape
        return tuple(run for run in self.shown if pick(run).shape == shape)

    def stack(self, pick: Callable[[Run], np.ndarray]) -> np.ndarray:
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


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested config as dotted keys; seeds and places are left out.

    >>> flatten({"seed": 3, "federation": {"beta": 0.1}})
    {'federation.beta': 0.1}
    """
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if str(key) not in _NOT_THE_EXPERIMENT and not str(key).endswith("_seed"):
            flat.update(flatten(value, f"{prefix}.{key}" if prefix else str(key)))
    return flat


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


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Group runs by method and recipe; best AA first, unfinished last."""
    groups: list[Group] = []
    apart = setting_apart([_setting(run) for run in runs])
    always = [key for key in _ACROSS if key in apart]
    for method in dict.fromkeys(run.method for run in runs):
        groups += _variants(method, [run for run in runs if run.method == method], always)
    return _numbered(sorted(_with_unique_names(groups), key=_rank))


def _setting(run: Run) -> Row:
    """The recipe as far as it acts, and the sites that were forgotten later: such a run is another one."""
    gone = [row.get("client") for row in run.results.get("forgotten") or () if isinstance(row, dict)]
    return acting(run) | {"forgot": gone or None}


def acting(run: Run) -> Row:
    """The recipe's dotted keys without E_srv where no server trains on uploads: it then changes nothing."""
    flat = flatten(run.config)
    if not look_of(run.method).server_trains:
        flat.pop(SERVER_EPOCHS, None)
    return flat


def _variants(method: str, runs: Sequence[Run], always: Sequence[str]) -> list[Group]:
    """The groups of one method; each label names what sets it apart, within the method and, of ``always``, beyond it."""
    flats = [_setting(run) for run in runs]
    apart = setting_apart(flats)
    cells: dict[str, tuple[Row, list[Run]]] = {}
    for run, flat in zip(runs, flats, strict=True):
        cells.setdefault(same([flat.get(key) for key in apart]), (flat, []))[1].append(run)
    settings, members = zip(*cells.values(), strict=True)
    groups = []
    for i, words in enumerate(telling(settings, [own[0].recipe for own in members], apart, always)):
        name = " ".join([look_of(method).label, *words])
        kept, repeats = _one_per_seed(members[i])
        groups.append(Group(method, name, slug(name), 0, kept, repeats))
    return groups


def _one_per_seed(members: list[Run]) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """One run per seed: counting the same seed twice would make the deviation too small."""
    ordered = sorted(members, key=lambda run: not run.finished)
    kept: list[Run] = []
    repeats: list[Run] = []
    for run in ordered:
        known = run.seed is not None and any(run.seed == other.seed for other in kept)
        (repeats if known else kept).append(run)
    return tuple(kept), tuple(repeats)


def _with_unique_names(groups: list[Group]) -> list[Group]:
    """Labels name series and slugs files and ids, so two groups may share neither."""
    labels = distinct([group.label for group in groups])
    slugs = distinct([group.slug for group in groups], "{}-{}")
    return [replace(group, label=label, slug=name) for group, label, name in zip(groups, labels, slugs, strict=True)]


def _numbered(groups: list[Group]) -> list[Group]:
    """Each method's groups counted in their order: its best one is drawn as the method, the others as variants of it."""
    counts: Counter[str] = Counter()
    made = []
    for group in groups:
        made.append(replace(group, variant=counts[group.method]))
        counts[group.method] += 1
    return made


def _rank(group: Group) -> tuple[bool, float, str]:
    aa = group.spread(lambda run: run.number("aa"))
    return (aa is None, -(aa.mean if aa else 0.0), group.label)


def headline_group(groups: Sequence[Group]) -> Group | None:
    """The group the page opens with: ReSCENE where it finished, else the best finished method."""
    finished = sorted((group for group in groups if group.finished), key=lambda group: not group.competes)
    return next((group for group in finished if group.ours), finished[0] if finished else None)


def near_copies(run: Run) -> float | None:
    """Share (0 to 1) of uploaded images that are near-copies of a real one; None where it was not measured."""
    return number(run.leakage.get("near_copies"))


def guaranteed(run: Run) -> float | None:
    """Epsilon over the whole run, to two decimals; None where nothing is guaranteed."""
    epsilon = number(run.privacy.get("epsilon"))
    return None if epsilon is None else round(epsilon, 2)


def comparison_rows(runs: Sequence[Run]) -> list[Row]:
    """The comparison table's data, one row per method (and recipe), best AA first.

    Each quantity comes as ``name`` (mean over seeds, None if never measured) and ``name_std`` (n-1, None for one seed).
    Accuracies and forgetting are in percent; ``upload_bytes`` is per client and round; ``near_copies`` is a share.
    """
    return [_comparison_row(group) for group in group_runs(runs)]


def _comparison_row(group: Group) -> Row:
    row: Row = {
        "method": group.method,
        "label": group.label,
        "num_seeds": len(group.finished),
        "num_unfinished": len(group.runs) - len(group.finished),
    }
    spreads = {key: group.spread(lambda run, key=key: run.number(key)) for key in METRICS}  # type: ignore[misc]
    spreads["upload_bytes"] = group.spread(lambda run: run.upload_bytes)
    spreads["near_copies"] = group.spread(near_copies)
    for key, value in spreads.items():
        row[key], row[f"{key}_std"] = (value.mean, value.std) if value else (None, None)
    row["private"] = bool(group.finished) and all(run.privacy.get("private") is True for run in group.finished)
    return row


_CHOICES = {"federation.engine", "federation.evaluate_every", "federation.wire"}  # how it runs, not what is asked
UNNAMED = (None, "auto", "folder", "csv", "npz")  # layouts: the path says which images they are
_PROBLEM = ("data", "tasks", "federation", "model", "privacy")
_WEIGHTY = (SERVER_EPOCHS, "train.augment")  # no part of the problem, but worth tens of points


def same_problem(one: Group, other: Group) -> bool:
    """Whether two groups face the same data, tasks, sites, model and privacy: only then one can beat the other."""
    return not _problem_apart([one, other])


def differing_settings(groups: Sequence[Group]) -> list[str]:
    """Keys in which groups differ so that their rows are not comparable: of the training what weighs most, the problem."""
    training = [{key: value for key, value in acting(group.runs[0]).items() if key in _WEIGHTY} for group in groups]
    return [*setting_apart(training), *_problem_apart(groups)]


def _problem_apart(groups: Sequence[Group]) -> list[str]:
    flats = [flatten({name: group.runs[0].config.get(name, {}) for name in _PROBLEM}) for group in groups]
    for group, flat in zip(groups, flats, strict=True):
        epsilon = guaranteed(group.runs[0])
        if epsilon is not None:  # how a method reaches its guarantee is its own affair
            for key in [key for key in flat if key.startswith("privacy.") and key != "privacy.delta"]:
                del flat[key]
        flat["privacy.epsilon"] = epsilon
        if flat.get("data.name") not in UNNAMED:  # a set with a name is the same wherever it lies
            flat.pop("data.path", None)
    return [key for key in setting_apart(flats) if key not in _CHOICES]
