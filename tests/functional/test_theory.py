"""The quantities of App. C: values derived by hand, the definitions word for word, and the theorems where they must hold."""

import math

import pytest
import torch
import torch.nn.functional as F

from rescene.functional import herd, recent_window
from rescene.functional import herding_theory as theory
from rescene.functional.herding_theory import (
    approach,
    coherent_bias,
    coverage_fails_at,
    herding_facts,
    non_increasing,
    staleness,
)

E1, E2 = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])


def cloud(generator, num, size=6, shift=0.0):
    return F.normalize(torch.randn(num, size, generator=generator) + shift, dim=1)


# --- Lemma 1 and directional coverage -----------------------------------------------------------------------------------


def test_two_candidates_by_hand():
    z = torch.stack([E1, E2])
    one = approach(z, z.mean(dim=0), 1)  # either is sqrt(1/2) away, which is Delta / sqrt(1): the bound is tight
    assert one.distance == pytest.approx(math.sqrt(0.5)) and one.bound == pytest.approx(one.distance)
    assert one.random == pytest.approx(math.sqrt(0.5)) and one.coverage_fails_at is None
    both = approach(z, z.mean(dim=0), 2)
    assert both.distance == pytest.approx(0.0) and both.random == pytest.approx(0.0)
    assert both.bound == pytest.approx(0.5) and both.coverage_fails_at is None


def test_without_coverage_the_bound_breaks_and_is_reported():
    """W = {e1}, nine copies of e2 beside it, all ten kept. r_2 = e1 - e2 and every d left is e2 - e1: step 3 fails."""
    z = torch.stack([E1] + [E2] * 9)
    found = approach(z, E1, 10)
    assert found.coverage_fails_at == 3
    assert found.distance == pytest.approx(0.9 * math.sqrt(2)) and found.bound == pytest.approx(math.sqrt(2 / 10))
    assert found.distance > found.bound
    assert found.random == pytest.approx(found.distance)  # everything is kept: there is nothing to draw


def literal_coverage(z, target, picks):
    """Assumption 1 word for word."""
    z, target = z.double(), target.double()
    for step in range(1, len(picks) + 1):
        before = picks[: step - 1]
        r = (step - 1) * target - sum((z[i] for i in before), torch.zeros_like(target))
        left = [q for q in range(len(z)) if q not in before]
        if max(float(r @ (z[q] - target)) for q in left) < -1e-12:
            return step
    return None


@pytest.mark.parametrize("block", [2, 256])
def test_coverage_equals_the_literal_form(block, monkeypatch):
    monkeypatch.setattr(theory, "_BLOCK", block)
    seen = set()
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        z = cloud(generator, 24)
        target = z[18:].mean(dim=0)
        picks = herd(z, target, 6 + seed % 18)
        found = coverage_fails_at(z, target, picks)
        assert found == literal_coverage(z, target, picks.tolist())
        seen.add(found is None)
    assert seen == {True, False}


def test_keeping_everything_still_has_an_order():
    z = cloud(torch.Generator().manual_seed(2), 15)
    target = z[12:].mean(dim=0)
    order = theory._greedy_order(z, target, 15).tolist()
    assert sorted(order) == list(range(15)) and order[:14] == herd(z, target, 14).tolist()
    assert theory._greedy_order(z[:1], target, 1).tolist() == [0]


def test_random_is_the_mean_over_all_draws():
    """Every pair of four candidates, by enumeration."""
    z = cloud(torch.Generator().manual_seed(4), 4).double()
    target = z[3]
    pairs = [(i, j) for i in range(4) for j in range(i)]
    squares = [float(((z[i] + z[j]) / 2 - target).square().sum()) for i, j in pairs]
    assert approach(z, target, 2).random == pytest.approx(math.sqrt(sum(squares) / 6))


# --- Assumption 2 -------------------------------------------------------------------------------------------------------


def test_non_increasing_by_hand():
    assert non_increasing(torch.tensor([1.0, 2.0, 3.0])).tolist() == [2.0, 2.0, 2.0]
    assert non_increasing(torch.tensor([5.0, 1.0, 3.0, 2.0, -4.0])).tolist() == [5.0, 2.0, 2.0, 2.0, 0.0]
    assert non_increasing(torch.tensor([-1.0, -2.0])).tolist() == [0.0, 0.0]


def test_a_coherent_bias_is_found_exactly():
    u = F.normalize(torch.tensor([1.0, -2.0, 2.0]).double(), dim=0)
    fit = coherent_bias(torch.tensor([3.0, 2.0, 2.0, 0.5]).double()[:, None] * u)
    assert fit.bias.tolist() == pytest.approx([3.0, 2.0, 2.0, 0.5]) and fit.sigma == pytest.approx(0.0, abs=1e-12)
    assert float(fit.direction @ u) == pytest.approx(1.0)


def test_a_growing_bias_becomes_deviation():
    """a_r may not grow: of 1, 2, 3 along one direction the fit keeps 2, 2, 2, and the deviation is 1 at both ends."""
    fit = coherent_bias(torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]))
    assert fit.bias.tolist() == pytest.approx([2.0] * 3) and fit.deviation.tolist() == pytest.approx([1.0, 0.0, 1.0])


def test_no_error_and_one_round():
    assert coherent_bias(torch.zeros(3, 4)).sigma == 0.0
    one = coherent_bias(torch.tensor([[3.0, 4.0]]))
    assert one.bias.tolist() == pytest.approx([5.0]) and one.sigma == pytest.approx(0.0, abs=1e-12)


# --- Theorem 1 and Corollary 1 ------------------------------------------------------------------------------------------


def facts_of(z, rounds, num_rounds, fraction, budget, mu):
    return herding_facts(z, rounds, recent_window(rounds, num_rounds, fraction), budget, mu)


def stale_pool(first_shift, later_shift):
    """Four rounds around e1 in 32 dimensions: 800 candidates of round 1 and 200 of each later one, pushed along e2."""
    generator = torch.Generator().manual_seed(0)
    rounds = torch.tensor([1] * 800 + [2] * 200 + [3] * 200 + [4] * 200)
    push = torch.where(rounds == 1, first_shift, later_shift)
    z = 0.05 * torch.randn(len(rounds), 32, generator=generator)
    z[:, 0] += 1.0
    z[:, 1] += push
    real = 0.05 * torch.randn(4000, 32, generator=generator)
    real[:, 0] += 1.0
    return F.normalize(z, dim=1), rounds, F.normalize(real, dim=1).mean(dim=0)


def test_where_the_assumptions_hold_the_theorems_hold():
    z, rounds, mu = stale_pool(first_shift=1.0, later_shift=0.0)
    found = facts_of(z, rounds, 4, 0.75, 400, mu)
    assert found["coverage_fails_at"] is None and found["full_pool_coverage_fails_at"] is None
    assert found["removed_bias"] > found["corollary_needs"] > found["theorem_needs"]
    assert found["target_distance"] <= found["target_bound"] and found["full_pool_distance"] <= found["full_pool_bound"]
    assert found["herded_to_real"] < found["pool_to_real"]
    assert found["herded_to_real"] < found["full_pool_to_real"]
    assert found["num_window"] == 600 and found["rounds"]["num"] == [800, 200, 200, 200]
    # e_1 = m_1 - mu has a length of about |normalise(1, 1) - (1, 0)| = 0.765, the others of about 0
    assert found["bias_pool"] == pytest.approx(0.765 * 800 / 1400, rel=0.03) and found["coherence"] > 0.99


def test_where_late_rounds_are_the_bad_ones_nothing_is_promised_and_the_buffer_loses():
    z, rounds, mu = stale_pool(first_shift=0.0, later_shift=1.0)
    found = facts_of(z, rounds, 4, 0.75, 400, mu)
    assert found["removed_bias"] == pytest.approx(0.0, abs=1e-9) and found["removed_bias"] < found["theorem_needs"]
    assert found["largest_margin"] < 0 and found["herded_to_real"] > found["pool_to_real"]
    assert found["sigma"] > 0.3


def test_the_theorems_are_never_contradicted():
    """Random pools of every kind: where the assumptions hold, so do the conclusions; both cases must occur."""
    covered, promised = set(), set()
    for seed in range(120):
        generator = torch.Generator().manual_seed(seed)
        num = int(torch.randint(40, 120, (1,), generator=generator))
        rounds = torch.randint(1, 6, (num,), generator=generator)
        z = 0.1 * torch.randn(num, 8, generator=generator)
        z[:, 0] += 1.0
        z[:, 1] += (seed % 4) * (5.0 - rounds) ** 2 / 16
        mu = F.normalize(z[rounds == rounds.max()], dim=1).mean(dim=0) if seed % 2 else F.normalize(z, dim=1)[0]
        found = facts_of(F.normalize(z, dim=1), rounds, 5, 0.4, max(1, num * (1 + seed % 5) // 6), mu)
        both = found["coverage_fails_at"] is None, found["full_pool_coverage_fails_at"] is None
        if both[0]:
            assert found["target_distance"] <= found["target_bound"] + 1e-9
        if both[1]:
            assert found["full_pool_distance"] <= found["full_pool_bound"] + 1e-9
        promise = found["removed_bias"] > found["theorem_needs"]
        if both[0] and promise:
            assert found["herded_to_real"] < found["pool_to_real"]
        if all(both) and found["removed_bias"] > found["corollary_needs"]:
            assert found["herded_to_real"] < found["full_pool_to_real"]
        assert found["removed_bias"] + 1e-12 >= 0
        assert found["removed_bias"] - 2 * found["sigma"] <= found["largest_margin"] + 1e-9
        covered.add(both[0])
        promised.add(promise)
    assert covered == promised == {True, False}


def test_a_window_of_all_rounds_removes_nothing():
    generator = torch.Generator().manual_seed(1)
    z, rounds = cloud(generator, 30), torch.arange(30) % 3 + 1
    found = facts_of(z, rounds, 3, 1.0, 10, z[0])
    assert found["removed_bias"] == 0.0 and found["largest_margin"] == 0.0
    assert found["herded_to_real"] == found["full_pool_to_real"]


# --- Proposition 1 ------------------------------------------------------------------------------------------------------


def test_staleness_by_hand():
    found = staleness(E1, E1, E2, 0.5 * E2, model_distance=2.0)
    assert found.matching_error == 0.0 and found.task_end_error == 0.5
    assert found.surrogate_drift == pytest.approx(math.sqrt(2)) and found.real_drift == pytest.approx(math.sqrt(1.25))
    assert found.smoothness == pytest.approx(math.sqrt(2) / 2)
    assert found.bound(found.smoothness) == pytest.approx(2 * math.sqrt(2))
    assert staleness(E1, E2, E1, E2, 0.0).smoothness == 0.0


def test_the_staleness_bound_holds_with_its_own_smoothness():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        found = staleness(*cloud(generator, 4), model_distance=float(torch.rand(1, generator=generator)) + 0.1)
        assert found.task_end_error <= found.bound(found.smoothness) + 1e-6
