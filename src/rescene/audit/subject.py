"""The whole audit of a recipe or a finished run, as one record that saves and prints, and what its numbers mean.

A run folder already holds what an attacker could use: a few uploads of each task, and the sites' ledgers. The words are for the
person who must sign.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from rescene.audit.canaries import canary_audit
from rescene.audit.membership import FALSE_POSITIVE_RATES, membership_attack
from rescene.audit.stage import Stage, as_promised, seeded, stage_of, without_noise
from rescene.config import Recipe
from rescene.core.errors import ConfigError
from rescene.engine.experiment import Experiment, prepare
from rescene.nets import check_fits, load_weights
from rescene.privacy import nearest_real
from rescene.privacy.accounting import Composition, epsilon_of, total_epsilon
from rescene.privacy.epsilon_bounds import most_to_show
from rescene.privacy.ledger import Charge, Ledger
from rescene.privacy.promise import Promise


def stored_uploads(folder: Path, experiment: Experiment) -> dict[str, Any] | None:
    """How many stored uploads have a training image as their nearest, and how many would if the sites had held none of them.

    Training and test images of a class are drawn alike, so an upload that knew neither would have a training image as its
    nearest with the training images' share of the two. None where nothing is stored.
    """
    if not (folder / "surrogates.safetensors").is_file():
        return None
    told = json.loads((folder / "surrogates.json").read_text(encoding="utf-8"))
    rows = told["pairs"] if isinstance(told, dict) else told  # a plain list in older folders
    pictures = load_file(folder / "surrogates.safetensors")["surrogates"]
    data = experiment.dataset
    labels = torch.tensor([data.classes.index(row["class"]) for row in rows])
    nearer, by_chance = [], []
    for label in labels.unique().tolist():
        had, never = (split.pixels[split.labels == label] for split in (data.train, data.test))
        images = data.transform.normalise(pictures[labels == label].to(had.device))
        distances = [nearest_real(images, pool, data.transform)[0] for pool in (had, never)]
        nearer.append((distances[0] < distances[1]).double())
        by_chance.append(torch.full((len(images),), len(had) / (len(had) + len(never)), dtype=torch.float64))
    shares = {"nearest_was_there": nearer, "by_chance": by_chance}
    return {"num_uploads": len(rows)} | {name: float(torch.cat(parts).mean()) for name, parts in shares.items()}


def ledger_epsilon(folder: Path, delta: float) -> tuple[float, int] | None:
    """What the books of the most-used site and task add up to, and in how many participations; None without books."""
    most: tuple[float, int] | None = None
    for path in sorted(folder.glob("client-*.jsonl")):
        tasks: dict[tuple[str, int], list[Charge]] = defaultdict(list)
        for charge in Ledger(path).charges():
            tasks[charge.run, charge.task].append(charge)
        for own in tasks.values():
            spent = total_epsilon([(c.sigma, Composition(c.steps, 1, c.rate)) for c in own], delta)
            most = max(most or (0.0, 0), (spent, len(own)))
    return most


Found = dict[str, Any]


def audit_words(found: Found) -> list[str]:
    """A few sentences on an audit; the first is the verdict."""
    return [_verdict(found), _strength(found), _membership(found["membership"]), *_stored(found)]


def control_words(rows: list[Found]) -> str:
    """One sentence on the controls."""
    fired = sum(row["fired"] for row in rows)
    if fired == len(rows):
        return (
            f"All {fired} controls fired: each breach made on purpose was noticed, and each sound twin was left alone."
        )
    return (
        f"Only {fired} of {len(rows)} controls fired: this audit would miss such a breach (or accuse a sound site), so its "
        "verdicts mean little. More canaries may help (--canaries)."
    )


def _verdict(found: Found) -> str:
    shown, sure = found["lower_bound"], f"{found['confidence']:.0%}"
    if found["verdict"] == "no promise":
        if shown == 0:
            return "Nothing is promised, and the canaries showed nothing. That is no evidence of privacy: other attacks may."
        return f"Nothing is promised, and rightly so: whatever epsilon somebody claims must be at least {shown:.2f} ({sure} sure)."
    claim = f"epsilon at most {found['promised']:.2f} (delta {found['delta']:g}) over {_times(found)}"
    if found["verdict"] == "contradicted":
        return (
            f"CONTRADICTED. The mechanism promises {claim}, but the attacks show at least {shown:.2f} ({sure} sure). Send "
            "nothing with this setting until the reason is known."
        )
    return (
        f"Not contradicted. The mechanism promises {claim}; the attacks show at least {shown:.2f} ({sure} sure). An audit "
        "can refute a promise, it cannot prove one."
    )


def _times(found: Found) -> str:
    num = found["participations"]
    return "one participation" if num == 1 else f"{num} participations"


def _strength(found: Found) -> str:
    most = found["most_to_show"]
    text = f"With {found['num_canaries']} canaries no attack, however good, could show more than {most:.2f}."
    if found["promised"] is not None and found["promised"] >= most:
        text += " The promise lies above that: only a larger audit (--canaries) could refute it."
    return text


def _membership(found: Found) -> str:
    if not found["num_pictures"]:
        return "Membership: no picture was uploaded (all classes were suppressed), so there was nothing to attack."
    rates, spread = ({rate: one[f"tpr_at_{rate:g}"] for rate in (0.001, 0.01)} for one in (found, found["spread"]))
    text = (
        f"Membership: of the images that a site held, the attack names {rates[0.001]:.1%} (+- {spread[0.001]:.1%}) while wrongly "
        f"accusing 0.1 % of those it did not hold, and {rates[0.01]:.1%} (+- {spread[0.01]:.1%}) at 1 %; a blind guess would name "
        f"0.1 % and 1 %. {found['num_in']} trials with and {found['num_out']} without the image; area under the curve {found['auc']:.2f}."
    )
    if (most := found.get("allowed", {}).get("tpr_at_0.001", 1.0)) < 1:
        text += f" The promise allows at most {most:.1%} for the first."
    if found["num_out"] < 1000:
        text += " Below 1,000 trials without, the first figure allows no wrong accusation at all."
    return text


def _stored(found: Found) -> list[str]:
    words = []
    if found.get("ledger"):
        books = found["ledger"]
        words.append(
            f"The books of the most-used site and task add up to epsilon {books['epsilon']:.2f} "
            f"({books['participations']} participations)."
        )
    if found.get("stored"):
        stored = found["stored"]
        words.append(
            f"Of {stored['num_uploads']} uploads stored with the run, {stored['nearest_was_there']:.0%} lie nearest to an image that was "
            f"trained on; {stored['by_chance']:.0%} would by chance."
        )
    return words


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
