"""The accountant against closed forms, a finer grid and Opacus; and what it refuses."""

import math
import random
import sys

import pytest

from rescene.core.errors import ConfigError
from rescene.privacy.accounting import (
    GRID_COST,
    Composition,
    _pld_curve,
    check_target,
    epsilon_of,
    gaussian_epsilon,
    sigma_for,
    total_epsilon,
)

pytest.importorskip("dp_accounting", reason="rescene[privacy]")


def settings(count, seed=0):
    """Random settings of the sizes a run has: noise, composition, delta."""
    draw = random.Random(seed)
    for _ in range(count):
        steps, participations = draw.choice([1, 5, 25]), draw.randint(1, 20)
        rate = math.exp(draw.uniform(math.log(0.02), math.log(0.9)))
        sigma = draw.uniform(0.8, 4) * max(1.0, rate * math.sqrt(steps * participations) / 4)
        yield sigma, Composition(steps, participations, rate), 10 ** draw.uniform(-7, -4)


def test_the_published_table_of_the_closed_form():
    """sigma = 1, 3, 5 for 1, 10 and 20 participations of 25 steps at delta 1e-5, worked out apart from this code."""
    table = {1: (33.1, 191.5, 344.5), 3: (8.0, 35.6, 58.8), 5: (4.4, 17.9, 28.4)}
    for sigma, row in table.items():
        for participations, expected in zip((1, 10, 20), row, strict=True):
            assert epsilon_of(sigma, Composition(25, participations), 1e-5) == pytest.approx(expected, abs=0.051)


def test_pld_equals_the_closed_form_when_every_record_enters():
    for sigma, sampled, delta in settings(50):
        whole = Composition(sampled.steps, sampled.participations)
        scaled = sigma * math.sqrt(whole.releases) / 2
        exact = gaussian_epsilon(scaled, whole.releases, delta)
        assert _pld_curve([(scaled, whole)], 1e-3)(delta) == pytest.approx(exact, abs=1e-3)


@pytest.mark.parametrize("count", [5, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:Optimal order")
def test_pld_with_sampling_agrees_with_a_finer_grid_and_with_opacus(count):
    from opacus.accountants import PRVAccountant

    for sigma, composition, delta in settings(count):
        ours = epsilon_of(sigma, composition, delta)
        assert ours == pytest.approx(_pld_curve([(sigma, composition)], 2.5e-4)(delta), abs=1e-3)
        other = PRVAccountant()
        other.history = [(sigma, composition.rate, composition.releases)]
        assert ours == pytest.approx(other.get_epsilon(delta), abs=0.05)


@pytest.mark.parametrize("rate", [1.0, pytest.param(0.2, marks=pytest.mark.slow)])
def test_sigma_for_inverts_epsilon_of_and_never_undershoots(rate):
    for epsilon in (0.5, 2.0, 8.0):
        composition = Composition(5, 4, rate)
        sigma = sigma_for(epsilon, composition, 1e-5)
        assert epsilon - 1e-3 < epsilon_of(sigma, composition, 1e-5) <= epsilon


def test_more_use_costs_more_and_no_noise_promises_nothing():
    costs = [epsilon_of(2.0, Composition(1, p), 1e-5) for p in (1, 2, 5, 20)]
    assert costs == sorted(costs) and costs[0] < costs[-1]
    assert epsilon_of(0.0, Composition(1, 1), 1e-5) == math.inf
    halves = [(2.0, Composition(1, 2)), (4.0, Composition(1, 12))]  # 2 / 2^2 + 12 / 4^2 = 5 / 2^2
    assert total_epsilon(halves, 1e-5) == pytest.approx(costs[2])
    assert epsilon_of(1e9, Composition(1, 1), 1e-5) == GRID_COST


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ({"epsilon": 0.0}, "E172"),
        ({"epsilon": -1.0}, "E172"),
        ({"epsilon": math.nan}, "E172"),
        ({"delta": 0.0}, "E173"),
        ({"delta": 1.0}, "E173"),
        ({"delta": 1e-3, "num_records": 1000}, "E173"),
    ],
)
def test_targets_that_promise_nothing_are_refused(target, code):
    with pytest.raises(ConfigError) as caught:
        check_target(**target)
    assert caught.value.code == code
    check_target(8.0, 9e-4, 1000)


@pytest.mark.parametrize("wrong", [(0, 1, 1.0), (1, 0, 1.0), (1, 1, 0.0), (1, 1, 1.5)])
def test_impossible_compositions_are_refused(wrong):
    with pytest.raises(ConfigError, match="cannot account"):
        Composition(*wrong)


def test_without_the_extra_the_closed_form_works_and_sampling_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    assert epsilon_of(5.0, Composition(25, 1), 1e-5) == pytest.approx(4.4, abs=0.05)
    with pytest.raises(ConfigError) as caught:
        epsilon_of(5.0, Composition(25, 1, 0.5), 1e-5)
    assert caught.value.code == "E174" and "rescene[privacy]" in caught.value.fix
