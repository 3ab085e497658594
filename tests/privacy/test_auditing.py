"""The bound on epsilon: against closed forms, a second way to compute it, and mechanisms whose epsilon is known."""

import math

import pytest
import torch

from rescene.privacy.accounting import gaussian_epsilon
from rescene.privacy.epsilon_bounds import GUESSES, bounds, epsilon_lower_bound, most_to_show, p_value


def coins(generator, m):
    return torch.rand(m, generator=generator) < 0.5


def randomised_response(generator, included, epsilon):
    """The most revealing mechanism there is at this epsilon: each coin is told truly with probability e^eps / (1 + e^eps)."""
    truly = torch.rand(len(included), generator=generator) < 1 / (1 + math.exp(-epsilon))
    return torch.where(truly == included, 1.0, -1.0)


def test_without_a_wrong_guess_the_bound_has_a_closed_form():
    for r, risk in ((10, 0.05), (100, 0.05), (100, 0.001)):
        q = risk ** (1 / r)  # q^r = risk
        assert epsilon_lower_bound(r, r, r, 0.0, risk) == pytest.approx(math.log(q / (1 - q)), abs=2e-5)
    assert epsilon_lower_bound(100, 100, 50, 0.0, 0.05) == 0.0
    assert epsilon_lower_bound(100, 0, 0, 1e-5, 0.05) == 0.0, "who never guesses shows nothing"


def test_the_p_value_is_the_papers_sum():
    """Term by term with exact binomials: P[W >= v] + 2 m delta max_i P[v > W >= v - i] / i."""
    for m, r, v, epsilon, delta in ((50, 20, 15, 0.7, 1e-3), (300, 300, 250, 1.5, 1e-5), (9, 9, 0, 0.3, 0.1)):
        q = 1 / (1 + math.exp(-epsilon))
        pmf = [math.comb(r, k) * q**k * (1 - q) ** (r - k) for k in range(r + 1)]
        alpha = max((sum(pmf[v - i : v]) / i for i in range(1, v + 1)), default=0.0)
        assert p_value(m, r, v, epsilon, delta) == pytest.approx(min(1, sum(pmf[v:]) + 2 * m * delta * alpha), rel=1e-9)


def test_delta_and_abstained_canaries_weaken_the_bound():
    plain = epsilon_lower_bound(100, 100, 75, 0.0, 0.05)
    assert epsilon_lower_bound(100, 100, 75, 1e-4, 0.05) < plain
    assert epsilon_lower_bound(1000, 100, 75, 1e-4, 0.05) < epsilon_lower_bound(100, 100, 75, 1e-4, 0.05)


@pytest.mark.parametrize("wrong", [(10, 11, 5), (10, 5, 6), (10, 5, -1)])
def test_impossible_counts_are_refused(wrong):
    with pytest.raises(ValueError, match="cannot be"):
        p_value(*wrong, 1.0, 0.0)


@pytest.mark.parametrize("epsilon", [0.2, 1.0, 3.0])
def test_randomised_response_is_never_overestimated_and_nearly_reached(epsilon):
    g = torch.Generator().manual_seed(0)
    found = []
    for _ in range(100):
        included = coins(g, 300)
        found.append(bounds({"a": (randomised_response(g, included, epsilon), included)}, 0.0)["a"].epsilon)
    assert sum(bound > epsilon for bound in found) <= 5, "95 % of the bounds must hold"
    included = coins(g, 20_000)
    (many,) = bounds({"a": (randomised_response(g, included, epsilon), included)}, 0.0).values()
    assert epsilon - 0.15 < many.epsilon <= epsilon


@pytest.mark.parametrize("sigma", [0.7, 1.5, 4.0])
def test_a_gaussian_mechanism_stays_below_its_epsilon(sigma):
    """Canaries of size 1 in noise of size sigma, the exact log-likelihood ratio as score, one, two or three such attacks."""
    g, delta = torch.Generator().manual_seed(1), 1e-5
    epsilon = gaussian_epsilon(sigma, 1, delta)
    found = []
    for trial in range(30):
        attacks = {}
        for name in range(1 + trial % 3):
            included = coins(g, 400)
            seen = included + sigma * torch.randn(400, generator=g, dtype=torch.float64)
            attacks[str(name)] = (seen - 0.5, included)
        found.append(max(bound.epsilon for bound in bounds(attacks, delta).values()))
    assert max(found) <= epsilon
    if sigma < 1:
        assert min(found) > 0.3, "and it sees something where there is something to see"


def test_a_score_of_zero_abstains_and_only_the_surest_count():
    included = torch.tensor([True] * 10 + [False] * 90)
    scores = torch.zeros(100)
    scores[:10] = 5.0  # ten that are sure, and right
    (found,) = bounds({"a": (scores, included)}, 0.0).values()
    assert (found.num_guesses, found.num_right) == (10, 10)
    (nothing,) = bounds({"a": (torch.zeros(100), included)}, 0.0).values()
    assert (nothing.epsilon, nothing.num_guesses) == (0.0, 0)


def test_more_attacks_are_paid_for():
    included = torch.rand(200, generator=torch.Generator().manual_seed(0)) < 0.5
    right = torch.where(included, 1.0, -1.0)
    one = bounds({"a": (right, included)}, 1e-5)["a"].epsilon
    two = bounds({"a": (right, included), "b": (-right, included)}, 1e-5)
    assert two["b"].epsilon == 0.0 and two["a"].epsilon < one
    assert one == most_to_show(200, 1e-5, 1) == epsilon_lower_bound(200, 200, 200, 1e-5, 0.05 / len(GUESSES))
