"""A search for settings with Optuna (``pip install 'rescene[search]'``), on a validation part of the training images only.

The study lies in a file, so a search that was stopped continues: finished trials are kept, unfinished ones are run to their end.
Trials depend on the seed and on the trials before them, not on how often the search was stopped. The test images take no part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from rescene.api import Result
from rescene.core.errors import ConfigError, command
from rescene.sweeps.grid import RANGE, SweepCell, axis, cell, read_seeds

VALIDATION = 0.2  # share of each class's training images, unless the recipe or the command line says another
METRICS = ("aa", "aia", "balanced_accuracy", "worst_task")
JOURNAL, SUMMARY = "search.journal", "search.json"


@dataclass(frozen=True)
class SettingsSearch:
    """What is searched: overrides that stay, and for each key the values or the range it may take."""

    recipe: str
    fixed: tuple[str, ...]
    space: Mapping[str, tuple[str, ...] | tuple[float, float, bool]]
    seeds: tuple[int, ...]
    metric: str
    out: Path

    def cells(self, chosen: Mapping[str, Any]) -> list[SweepCell]:
        """The runs of one trial: one for each seed."""
        own = [f"{key}={value}" for key, value in chosen.items()]
        return [cell(self.recipe, [*self.fixed, *own, f"seed={seed}"], self.out) for seed in self.seeds]

    def test_command(self, chosen: Mapping[str, Any]) -> str:
        """The command that measures the chosen settings on the test images, once."""
        own = [f"{key}={value}" for key, value in chosen.items()]
        kept = [text for text in self.fixed if not text.startswith("data.validation=")]
        return command("sweep", self.recipe, *kept, *own, "--seeds", ",".join(map(str, self.seeds)))


def read_search(recipe: str, overrides: Sequence[str], seeds: str, metric: str, out: Path) -> SettingsSearch:
    """From the command line: ``key=a,b`` are choices, ``key=1..8`` and ``key=log:1e-4..1e-1`` ranges, one value stays."""
    fixed: list[str] = []
    space: dict[str, Any] = {}
    for text in overrides:
        key, _, value = text.partition("=")
        if found := RANGE.fullmatch(value):
            space[key] = _bounds(text, *found.groups())
        elif len(values := axis(text)) > 1:
            space[key] = tuple(one.partition("=")[2] for one in values)
        else:
            fixed += values
    if metric not in METRICS:
        raise ConfigError("E106", f"cannot search by {metric!r}", where="--metric", fix=f"one of: {', '.join(METRICS)}")
    if not space:
        fix = "give a key several values or a range: train.lr=log:0.001..0.1"
        raise ConfigError("E106", "there is nothing to search", where="--search", fix=fix)
    if not any(text.startswith("data.validation=") for text in fixed):
        fixed.append(f"data.validation={VALIDATION}")
    found_search = SettingsSearch(recipe, tuple(fixed), space, read_seeds(seeds), metric, out)
    _check_validation(found_search)
    return found_search


def _bounds(text: str, log: str | None, low: str, high: str) -> tuple[float, float, bool]:
    whole = all(part.lstrip("+-").isdigit() for part in (low, high))
    first, last = (int(low), int(high)) if whole else (float(low), float(high))
    if not first < last or (log and first <= 0):
        fix = "the smaller number first" + (", and above 0 for log:" if log else "")
        raise ConfigError("E106", f"cannot read the range {text!r}", fix=fix)
    return first, last, bool(log)


def _check_validation(search: SettingsSearch) -> None:
    """Whether every trial is evaluated on training images: a search must never see the test images."""
    first = {key: value[0] for key, value in search.space.items()}
    recipe = search.cells(first)[0].resolved.recipe
    if recipe.sites is not None or recipe.data.validation is None:
        why = "images are at the sites" if recipe.sites is not None else "data.validation is null"
        raise ConfigError(
            "E106", "a search needs a validation part of training images", why=why, fix="data.validation=0.2"
        )


def search_settings(
    search: SettingsSearch,
    num_trials: int,
    at_once: int,
    run: Callable[[list[SweepCell]], Iterator[tuple[SweepCell, Result | Exception]]],
    told: Callable[[str], None],
) -> dict[str, Any]:
    """Run trials until there are ``num_trials`` finished ones in all; returns and writes what was found.

    ``run`` does the runs of several trials. A trial with a failed run counts as failed and teaches nothing.
    """
    study = _study(search)
    todo = [trial for trial in study.trials if not trial.state.is_finished()]
    while True:
        left = num_trials - sum(trial.state.is_finished() for trial in study.trials)
        batch = [(trial.number, dict(trial.params)) for trial in todo[:at_once]]
        del todo[:at_once]
        while not todo and len(batch) < min(at_once, left):
            batch.append(_ask(study, search))
        if not batch:
            return _summary(search, study)
        cells = {number: search.cells(chosen) for number, chosen in batch}
        outcomes = {one.folder: outcome for one, outcome in run([one for own in cells.values() for one in own])}
        for number, chosen in batch:
            told(_tell(study, search, number, chosen, [outcomes[one.folder] for one in cells[number]]))


def _study(search: SettingsSearch) -> Any:
    if find_spec("optuna") is None:
        raise ConfigError(
            "E500", "--search needs Optuna", where="--search", why="it is an extra", fix="pip install 'rescene[search]'"
        )
    import optuna
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    search.out.mkdir(parents=True, exist_ok=True)
    journal = search.out / JOURNAL
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(journal)))
    study = optuna.create_study(storage=storage, study_name="rescene", direction="maximize", load_if_exists=True)
    plan = json.loads(
        json.dumps({"fixed": search.fixed, "space": search.space, "seeds": search.seeds, "metric": search.metric})
    )
    before = study.user_attrs.get("plan")
    if before not in (None, plan):
        differ = ", ".join(key for key in plan if before.get(key) != plan[key])
        fix = "the same command as before, or another --out"
        raise ConfigError(
            "E106", "the folder holds another search", where=str(journal), why=f"other: {differ}", fix=fix
        )
    study.set_user_attr("plan", plan)
    return study


def _ask(study: Any, search: SettingsSearch) -> tuple[int, dict[str, Any]]:
    """The next trial. Its sampler starts from the number of the trial, so that a search that was stopped goes on the same."""
    import optuna

    seed = search.seeds[0] + len(study.trials)
    study.sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    trial = study.ask({key: _distribution(value) for key, value in search.space.items()})
    return trial.number, dict(trial.params)


def _distribution(value: Sequence[Any]) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if len(value) == 3 and isinstance(value[2], bool):
        low, high, log = value
        return (IntDistribution if isinstance(low, int) else FloatDistribution)(low, high, log=log)
    return CategoricalDistribution(list(value))


def _tell(
    study: Any, search: SettingsSearch, number: int, chosen: Mapping[str, Any], outcomes: Sequence[Result | Exception]
) -> str:
    """Note what a trial gave; returns a line about it."""
    from optuna.trial import TrialState

    words = " ".join(f"{key}={_short(value)}" for key, value in chosen.items())
    failed = [one for one in outcomes if not isinstance(one, Result)]
    values = [getattr(one.record, search.metric) for one in outcomes if isinstance(one, Result)]
    if failed or None in values:
        study.tell(number, state=TrialState.FAIL)
        return f"trial {number + 1}: {words} failed: {failed[0] if failed else 'nothing was measured'}"
    study.tell(number, fmean(values))
    return f"trial {number + 1}: {words}  validation {search.metric} {fmean(values):.2f}"


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _summary(search: SettingsSearch, study: Any) -> dict[str, Any]:
    """Everything that was tried, the best of it, and on which images it was chosen; also written to search.json."""
    trials = [{"trial": one.number + 1, **one.params, search.metric: one.value} for one in study.trials]
    good = [one for one in study.trials if one.value is not None]
    best = max(good, key=lambda one: (one.value, -one.number)) if good else None
    share = next(text.partition("=")[2] for text in search.fixed if text.startswith("data.validation="))
    found = {
        "recipe": search.recipe,
        "fixed": list(search.fixed),
        "space": {key: list(value) for key, value in search.space.items()},
        "seeds": list(search.seeds),
        "metric": search.metric,
        "chosen_on": f"a validation part of the training images (data.validation={share}); the test images took no part",
        "trials": trials,
        "best": None if best is None else {**best.params, search.metric: best.value},
        "test_command": None if best is None else search.test_command(best.params),
    }
    (search.out / SUMMARY).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found
