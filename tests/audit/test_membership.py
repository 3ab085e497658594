"""The likelihood ratio of membership: what it knows, what it must not know, and how it is scored."""

import pytest
import torch

from rescene.audit.membership import area_under_curve, log_likelihood_ratios, true_positive_rate


def world(effect, shadows=60, targets=40, seed=0):
    """Statistics with a level for each target, standard normal around it, shifted by ``effect`` when the target is in."""
    g = torch.Generator().manual_seed(seed)
    z = torch.rand(shadows, targets, generator=g) < 0.5
    level = 5 * torch.randn(targets, 1, generator=g)
    return level + torch.randn(shadows, targets, 1, generator=g) + effect * z.unsqueeze(2), z


def test_it_finds_the_log_likelihood_ratio_of_two_normals():
    """For N(a + e, 1) against N(a, 1) it is e (x - a) - e^2 / 2, so members have mean e^2 / 2 and deviation e."""
    x, z = world(3.0, shadows=2000)
    ratios = log_likelihood_ratios(x, z)
    assert float(ratios[z].mean()) == pytest.approx(4.5, abs=0.15) and float(ratios[z].std()) == pytest.approx(
        3, abs=0.15
    )
    assert float(ratios[~z].mean()) == pytest.approx(-4.5, abs=0.15)


def test_each_condensation_is_judged_without_itself():
    """With few condensations and no effect, a ratio fitted to its own sample would find members anyway."""
    x, z = world(0.0, shadows=6, targets=4000)
    ratios = log_likelihood_ratios(x, z)
    assert area_under_curve(ratios[z], ratios[~z]) == pytest.approx(0.5, abs=0.02)


def test_missing_statistics_say_nothing():
    x, z = world(3.0)
    x[10] = torch.nan
    ratios = log_likelihood_ratios(x, z)
    assert torch.isfinite(ratios).all() and torch.equal(ratios[10], torch.zeros(40, dtype=torch.float64))
    both = log_likelihood_ratios(torch.cat([x, torch.full_like(x, torch.nan)], dim=2), z)
    assert torch.allclose(both, ratios, rtol=1e-12)
    assert torch.equal(log_likelihood_ratios(x[:1], z[:1]), torch.zeros(1, 40, dtype=torch.float64)), (
        "nobody to learn from"
    )


def test_rates_at_few_false_alarms():
    outside = torch.arange(1000.0)
    inside = torch.tensor([998.5, 999.0, 999.5, 10.0])
    assert true_positive_rate(inside, outside, 0.0) == 0.25, "nobody outside may lie above the threshold"
    assert true_positive_rate(inside, outside, 0.001) == 0.75
    assert true_positive_rate(torch.zeros(5), torch.zeros(50), 0.1) == 0.0, "ties accuse nobody"
    assert area_under_curve(torch.zeros(5), torch.zeros(50)) == 0.5
