"""``rescene privacy``: epsilon for a noise multiplier and back, for the whole run of a recipe, with the reasons in words."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from typing import Any

from rescene.cli.listing import print_rows
from rescene.config import Resolved
from rescene.config.privacy import Promise
from rescene.engine.experiment import load_data, planned
from rescene.errors import ConfigError, DataError
from rescene.methods import method_class
from rescene.privacy.accounting import NEIGHBOURS, check_target, epsilon_of, replaced_epsilon, sigma_for
from rescene.privacy.meaning import OUTSIDE, trust
from rescene.privacy.mechanism import FORMAL

SIGMAS, EPSILONS = (0.5, 1.0, 3.0, 5.0), (1.0, 2.0, 4.0, 8.0)


def show_privacy(
    resolved: Resolved, epsilon: float | None, sigma: float | None, delta: float | None, as_json: bool
) -> None:
    """Both directions, or the one that was asked for."""
    if epsilon is not None and sigma is not None:
        raise ConfigError("E176", "--epsilon and --sigma cannot both be given", fix="one of them; the other follows")
    recipe = resolved.recipe
    method, kind = method_class(recipe.method["name"]), recipe.privacy.mechanism
    if kind == "paper-experiment":
        if epsilon is not None or sigma is not None:
            raise ConfigError("E176", "the paper's experiment has no epsilon", fix="privacy.mechanism=release")
        _print({"method": method.title, "mechanism": kind, "statement": _empirical(recipe.promise(1))}, [], as_json)
        return
    if kind == "none" and not set(FORMAL) & set(method.mechanisms):
        statement = f"Not private, and no mechanism covers it: {method.unprotected or method.leaves_site}."
        _print({"method": method.title, "mechanism": kind, "statement": statement}, [], as_json)
        return
    if sigma is not None and not sigma > 0:
        raise ConfigError("E171", f"noise multiplier {sigma:g} is not possible", fix="a number above 0")
    num_records, num_tasks = _sizes(resolved)
    promise = _promise(resolved, delta, num_tasks)
    check_target(epsilon, promise.delta, num_records)
    facts = {
        "method": method.title,
        "mechanism": kind,
        "leaves the site": method.leaving(promise.mechanism if kind in FORMAL else None),
        "statement": promise.words() if kind in FORMAL else f"Not private. With {promise.mechanism.kind} it would be:",
        "neighbours": NEIGHBOURS,
        "trust": trust(promise.mechanism.honest_sites).removeprefix("Trust: "),
        "composition": promise.composition.words(),
        "delta": promise.delta,
    }
    _print(facts, _rows(promise, epsilon, sigma), as_json, asdict(promise.composition))


def _promise(resolved: Resolved, delta: float | None, num_tasks: int) -> Promise:
    """The recipe's promise, at another delta if one is given; without a mechanism, what its method's first would promise."""
    check_target(delta=delta)
    recipe = resolved.recipe
    change: dict[str, Any] = {} if delta is None else {"delta": delta}
    if recipe.privacy.mechanism == "none":
        usable = method_class(recipe.method["name"]).mechanisms
        change |= {"mechanism": next(kind for kind in usable if kind in FORMAL), "noise_multiplier": 1.0}
    section = recipe.privacy.model_copy(update=change)
    found = recipe.model_copy(update={"privacy": section}).promise(num_tasks)
    assert found is not None  # it has a mechanism
    return found


def _rows(promise: Promise, epsilon: float | None, sigma: float | None) -> list[dict[str, Any]]:
    whole, delta = promise.composition, promise.delta
    once = promise.mechanism.composition  # the ledger's entry for one round
    factor = promise.mechanism.replaced / promise.mechanism.sensitivity
    sigmas = SIGMAS if sigma is None else (sigma,)
    epsilons = EPSILONS if epsilon is None else (epsilon,)
    pairs = [("given sigma", s) for s in sigmas if epsilon is None]
    pairs += [("given epsilon", sigma_for(e, whole, delta)) for e in epsilons if sigma is None]
    return [
        {
            "direction": direction,
            "sigma": s,
            "epsilon, one participation": epsilon_of(s, once, delta),
            "epsilon, whole run": epsilon_of(s, whole, delta),
            "epsilon, image replaced": replaced_epsilon(s, whole, delta, factor),
        }
        for direction, s in pairs
    ]


def _sizes(resolved: Resolved) -> tuple[int | None, int]:
    """Training images and tasks. A plan for data that are elsewhere is checked when it runs; tasks must then be stated."""
    recipe = resolved.recipe
    try:
        data = load_data(recipe.images)
    except DataError:
        if recipe.tasks.limit is None and method_class(recipe.method["name"]).reuses_records:
            raise
        return None, recipe.tasks.limit or 1
    return len(data.train), len(planned(recipe, data)[1])


def _empirical(promise: Promise | None) -> str:
    assert promise is not None  # it has a mechanism
    return promise.words()


def _print(
    facts: dict[str, Any], rows: list[dict[str, Any]], as_json: bool, composition: dict[str, Any] | None = None
) -> None:
    if as_json:
        print(json.dumps(facts | {"rows": rows, "counts": composition}))
        return
    for key, value in facts.items():
        print(textwrap.fill(f"{key}: {value}", 118, subsequent_indent="  "))
    if rows:
        print()
        print_rows([{k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows])
        print(OUTSIDE)
