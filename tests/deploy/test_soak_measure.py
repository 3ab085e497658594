"""benchmarks/soak_measure.py: what breathes is no leak, and what leaks is found, with the link's own figures."""

import random

import pytest
import soak_measure


def link(rounds, leak=lambda r: 0, connections=lambda r: 10):
    """Twelve looks in each round at files and threads that come and go with the letters."""
    chance = random.Random(0)
    looks = [
        {
            "round": r,
            "mb": 150.0,
            "files": chance.randint(21, 25) + leak(r),
            "threads": chance.randint(6, 12),
            "database": 2 * connections(r) + 1,
        }
        for r in range(rounds)
        for _ in range(12)
    ]
    return soak_measure.bounded(soak_measure.judged_by_halves(soak_measure.middle_of_each_round(looks), 10))


@pytest.mark.parametrize("rounds", [30, 90])
def test_breathing_is_no_growth(rounds):
    assert link(rounds)


@pytest.mark.parametrize(("rounds", "every"), [(30, 1), (30, 2), (90, 10)])
def test_a_file_that_is_never_given_back_is_found(rounds, every):
    assert not link(rounds, leak=lambda r: r // every)


def test_pools_of_connections_may_fill_and_not_more():
    assert link(90, connections=lambda r: min(10, 4 + r // 8))
    assert not link(90, connections=lambda r: 4 + r // 2)
