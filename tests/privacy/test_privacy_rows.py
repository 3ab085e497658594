"""Noise against epsilon, and a ledger, as rows for people."""

import math

import pytest

from rescene.config import resolve
from rescene.privacy.accounting import Composition, epsilon_of
from rescene.privacy.ledger import Charge, Ledger, ledger_facts
from rescene.privacy.noise import Noise
from rescene.privacy.promise import EPSILONS, SIGMAS, trade_off_rows


@pytest.fixture(scope="module")
def promise():
    settings = ["method.start=noise", "privacy.mechanism=release", "privacy.epsilon=4", "privacy.max_participations=2"]
    return resolve("demo", settings).recipe.promise(5)


def test_both_directions_lead_to_each_other(promise):
    given = promise.mechanism, promise.composition, promise.delta
    (there,) = trade_off_rows(*given, epsilon=8.0)
    (back,) = trade_off_rows(*given, sigma=there["sigma"])
    assert there["direction"] == "given epsilon" and back["direction"] == "given sigma"
    assert back["epsilon, whole run"] == there["epsilon, whole run"] == pytest.approx(8.0, abs=1e-3)
    assert back["epsilon, one participation"] == epsilon_of(back["sigma"], Composition(1, 1), promise.delta)
    assert back["epsilon, one participation"] < back["epsilon, whole run"] < back["epsilon, image replaced"]


def test_without_a_question_there_are_usual_values_of_both(promise):
    rows = trade_off_rows(promise.mechanism, promise.composition, promise.delta)
    assert [row["sigma"] for row in rows[: len(SIGMAS)]] == list(SIGMAS)
    assert [row["epsilon, whole run"] for row in rows[len(SIGMAS) :]] == pytest.approx(EPSILONS, abs=1e-3)


def test_a_ledger_adds_up_release_by_release(tmp_path):
    ledger = Ledger(tmp_path / "client-0.jsonl")
    for task in range(2):
        charge = Charge("run", task, -1, "release", 2.0, 1, 1.0, why="sum_up")
        ledger.once(charge, "q", 1e-5, None, lambda: {"sums": Noise().normal(5)}, None)
    facts = ledger_facts(ledger)
    first, second = facts["releases"]
    assert (first["number"], second["number"]) == (1, 2) and (first["task"], second["task"]) == (0, 1)
    assert first["total"] == first["epsilon"] == second["epsilon"] == epsilon_of(2.0, Composition(1, 1), 1e-5)
    assert second["total"] == epsilon_of(2.0, Composition(1, 2), 1e-5) and first["images"] == "all"
    assert facts["delta"] == 1e-5 and math.isfinite(second["total"]) and facts["floor"].startswith("none. Simulated")
