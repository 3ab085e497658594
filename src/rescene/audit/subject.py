"""The whole audit of a recipe or a finished run, as one record that saves and prints."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rescene.audit.canaries import canary_audit
from rescene.audit.shadows import FALSE_POSITIVE_RATES, membership_attack
from rescene.audit.stage import Stage, as_promised, seeded, stage_of, without_noise
from rescene.audit.stored import ledger_epsilon, stored_uploads
from rescene.config import Recipe
from rescene.config.privacy import Promise
from rescene.core.errors import ConfigError
from rescene.engine.experiment import Experiment, prepare
from rescene.nets import check_fits, load_weights
from rescene.privacy.accounting import Composition, epsilon_of
from rescene.privacy.epsilon_bounds import most_to_show

CONFIDENCE = 0.95


@dataclass(frozen=True)
class AuditScale:
    """How much an audit does. None: as many participations as the promise covers, one where there is no promise."""

    num_canaries: int = 200
    num_shadows: int = 64
    num_targets: int = 64
    participations: int | None = None


def audit(
    recipe: Recipe,
    run: Path | None = None,
    scale: AuditScale = AuditScale(),
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Attack the recipe's mechanism on its own images; of a run its final network, last task, books and stored uploads."""
    experiment = prepare(recipe)
    stage = stage_of(experiment) if run is None else _stage_of_run(experiment, run)
    promise = recipe.promise(len(experiment.tasks))
    books = None
    if run is not None and promise is not None and promise.formal:
        books = ledger_epsilon(run / "ledgers", promise.delta)
    turns = scale.participations or (books[1] if books else promise.composition.participations if promise else 1)
    delta = promise.delta if promise else recipe.privacy.delta
    per_site = len(stage.task.classes)
    num_canaries = per_site * math.ceil(scale.num_canaries / per_site)  # whole sites
    say(f"canaries: {num_canaries} of each kind, {turns} participation(s)")
    canaries = _canaries(stage, promise, delta, num_canaries, turns)
    say(f"membership: {scale.num_shadows} shadow condensations of {scale.num_targets} targets")
    shadowed = as_promised(promise.mechanism if promise else None)
    membership = membership_attack(stage, shadowed, scale.num_shadows, scale.num_targets, turns)
    promised = _promised(promise, turns)
    if promised is not None:
        membership["allowed"] = {
            f"tpr_at_{fpr:g}": min(1.0, math.exp(promised) * fpr + delta) for fpr in FALSE_POSITIVE_RATES
        }
    worst = max(row["epsilon"] for row in canaries)
    return {
        "schema": 1,
        "subject": "recipe" if run is None else "run",
        "method": experiment.method.title,
        "data": experiment.dataset.name,
        "mechanism": recipe.privacy.mechanism,
        "start": stage.settings.start,
        "test_mode": bool(promise and promise.test_mode),
        "sigma": promise.mechanism.sigma if promise else None,
        "delta": delta,
        "participations": turns,
        "promised": promised,
        "promised_whole_run": promise.epsilon() if promise else None,
        "ledger": None if books is None else {"epsilon": books[0], "participations": books[1]},
        "confidence": CONFIDENCE,
        "num_canaries": num_canaries,
        "most_to_show": most_to_show(num_canaries, delta, len(canaries)),
        "canaries": canaries,
        "lower_bound": worst,
        "membership": membership,
        "stored": None if run is None else stored_uploads(run, experiment),
        "verdict": "no promise" if promised is None else "contradicted" if worst > promised else "not contradicted",
    }


def _stage_of_run(experiment: Experiment, run: Path) -> Stage:
    weights = run / "model" / "final.safetensors"
    if not weights.is_file():
        raise ConfigError(
            "E181",
            "this run has no final network to attack with",
            where=str(weights),
            why="the run is not finished",
            fix="rescene resume it first, or audit its recipe: rescene audit RUN/config.yaml",
        )
    state = load_weights(weights)
    check_fits(experiment.arch, state)
    return stage_of(experiment, experiment.arch.restore(state).to(experiment.device), experiment.tasks[-1])


def _canaries(
    stage: Stage, promise: Promise | None, delta: float, num_canaries: int, turns: int
) -> list[dict[str, Any]]:
    """Nothing is suppressed, which only helps the attacker; in the test mode it knows the noise as well."""
    mechanism = None if promise is None else replace(promise.mechanism, threshold=0.0)
    real, imagined = as_promised(mechanism), without_noise(mechanism)
    if promise is not None and mechanism is not None and promise.test_mode:
        real = imagined = seeded(mechanism, stage.rng, stage.task.index)
    return canary_audit(stage, real, imagined, delta, num_canaries, turns)


def _promised(promise: Promise | None, turns: int) -> float | None:
    """Epsilon of the participations that were attacked; None where nothing is promised."""
    if promise is None or not promise.formal:
        return None
    each = promise.mechanism.composition
    return epsilon_of(promise.mechanism.sigma, Composition(each.steps, turns, each.rate), promise.delta)
