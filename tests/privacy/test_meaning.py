"""What epsilon stands for: discrete noise counted as continuous, an image replaced instead of added, and the words for it."""

import math
from dataclasses import replace

import pytest
import torch

from rescene.config import resolve
from rescene.config.privacy import PrivacySection, promise_of
from rescene.core.errors import RunError
from rescene.privacy.accounting import (
    GRID_COST,
    Composition,
    check_grid,
    epsilon_of,
    gaussian_epsilon,
    replaced_epsilon,
    sigma_for,
)
from rescene.privacy.mechanism import Mechanism, class_sums, digest
from rescene.privacy.noise import Noise, sampler_error
from rescene.privacy.promise import limit

ONCE = Composition(1, 1)


def laws(sigma):
    """Numbers k >= 0, the discrete Gaussian P and the rounded continuous one Q."""
    k = torch.arange(math.ceil(9 * sigma), dtype=torch.float64)
    p = torch.exp(-(k**2) / (2 * sigma**2))
    q = [
        math.erfc((i - 0.5) / sigma / math.sqrt(2)) - math.erfc((i + 0.5) / sigma / math.sqrt(2)) for i in range(len(k))
    ]
    return k, p / (2 * p.sum() - 1), torch.tensor(q, dtype=torch.float64) / 2


@pytest.mark.parametrize("sigma", [2.0, 5.0, 20.0])
def test_discrete_and_rounded_noise_are_as_close_as_the_accountant_says(sigma):
    k, p, q = laws(sigma)
    ratio = q / p
    assert bool((ratio >= math.exp(-1 / (24 * sigma**2)) * (1 - 1e-9)).all())
    assert bool((ratio <= torch.exp(k**2 / (24 * sigma**4)) * (1 + 1e-9)).all())
    assert float(ratio.min()) < 1 - 0.9 / (24 * sigma**2), "a smaller bound would be wrong"


@pytest.mark.parametrize(("sigma", "shift"), [(40.0, 60), (40.0, 20), (100.0, 37)])
def test_epsilon_of_discrete_noise_on_one_number(sigma, shift):
    """Exactly, for a sum that moves by ``shift`` steps: delta at the accountant's epsilon is within its delta."""
    size = math.ceil(12 * sigma) + shift
    k = torch.arange(-size, size + 1, dtype=torch.float64)
    p = torch.exp(-(k**2) / (2 * sigma**2))
    p = p / p.sum()
    moved = torch.zeros_like(p)
    moved[shift:] = p[:-shift]
    delta = 1e-5
    epsilon = gaussian_epsilon(sigma / shift, 1, delta) + 1 / (8 * sigma**2)
    assert float((moved - math.exp(epsilon) * p).clamp(min=0).sum()) <= delta * math.exp(1 / (24 * sigma**2))


def test_coarse_grids_are_refused_and_those_of_the_mechanisms_are_fine():
    with pytest.raises(RunError) as refused:
        check_grid(2.0**14, 10)
    assert refused.value.code == "E431" and "finer grid" in refused.value.fix
    check_grid(2.0**19, 131_328)
    with pytest.raises(RunError):
        check_grid(2.0**18, 131_328)
    for kind in ("release", "per-example", "dp-sgd"):
        for sigma in (1e-3, 0.6, 50.0):
            m = Mechanism(kind, sigma, 5.0, ONCE, kappa=1.6)
            check_grid(m.steps(2**27), 2**27)
            assert m.steps(10**7) * m.step == pytest.approx(m.deviation, rel=2e-3), "hardly more noise than promised"
            assert m.steps(10**7) * m.step > m.deviation
    assert epsilon_of(2.0, ONCE, 1e-5) - gaussian_epsilon(2.0, 1, 1e-5) == pytest.approx(GRID_COST, abs=2e-6)


def test_the_sampler_costs_less_than_the_part_of_delta_kept_for_it():
    worst = (1 + math.exp(60)) * 1e4 * 2**32 * max(sampler_error(2.0**bits) for bits in (28, 31, 36, 40))
    assert worst < 1e-6 * 1e-5


def test_noise_of_a_mechanism_has_its_size_and_shares_add_up():
    m = Mechanism("release", 2.0, 3.0, ONCE, kappa=1.0)
    one = m.noised(torch.zeros(200, 100, dtype=torch.int64), Noise())
    assert float(one.std()) == pytest.approx(m.deviation, rel=0.03)
    part = replace(m, honest_sites=4)
    assert part.deviation == m.deviation / 2 and part.sensitivity == m.sensitivity
    assert digest([], m) != digest([], part), "its answer is not given to who asks for the whole noise"
    four = sum(part.noised(torch.zeros(200, 100, dtype=torch.int64), Noise()) for _ in range(4))
    assert float(four.std()) == pytest.approx(m.deviation, rel=0.03)


def test_replacing_an_image_never_moves_a_sum_further_than_the_bound():
    """900 pairs; images that point in opposite directions reach the bound."""
    g, worst = torch.Generator().manual_seed(0), 0.0
    for i in range(900):
        clip, kappa = (10 ** (2 * torch.rand(2, generator=g) - 1)).tolist()
        m = Mechanism("release", 1.0, clip, ONCE, kappa=kappa)
        psi = 100 * torch.randn(2, 5, generator=g)
        psi[1] = -psi[0] if i % 3 == 0 else psi[1]
        labels = torch.randint(2, (2,), generator=g)
        one, other = (class_sums(psi[j : j + 1], labels[j : j + 1], 2, clip, kappa, m.step) for j in (0, 1))
        moved = float((one - other).double().norm()) * m.step / m.replaced
        worst = max(worst, moved)
        assert moved <= 1 + 1e-8
    assert worst > 0.999


def test_replacing_costs_more_than_adding():
    sigma = sigma_for(8.0, ONCE, 1e-5)
    assert replaced_epsilon(sigma, ONCE, 1e-5, 2.0) == pytest.approx(gaussian_epsilon(sigma / 2, 1, 1e-5), abs=1e-5)
    assert 17 < replaced_epsilon(sigma, ONCE, 1e-5, 1.9) < 20


def test_replacing_under_sampling_stays_below_twice_over():
    pytest.importorskip("dp_accounting", reason="rescene[privacy]")
    sampled = Composition(5, 1, 0.2)
    added, replaced = epsilon_of(1.5, sampled, 1e-5), replaced_epsilon(1.5, sampled, 1e-5, 2.0)
    assert 2 * added <= replaced < gaussian_epsilon(1.5 / 2, 5, 1e-5)


def test_a_promise_says_both_and_what_it_rests_on():
    section = PrivacySection(mechanism="release", epsilon=8.0)
    promise = promise_of(section, num_rounds=1, num_steps=1)
    assert promise.epsilon() == pytest.approx(8, abs=1e-4) and 17 < promise.epsilon_replaced() < 19
    said = promise.statement()
    for words in ("(8.00, 1e-05)", f"({promise.epsilon_replaced():.2f}, 1e-05)", "each image over the whole run, all tasks",
                  "added or removed", "takes its place", "each site adds the whole noise", "class names"):  # fmt: skip
        assert words in said
    shared = replace(promise, mechanism=replace(promise.mechanism, honest_sites=5)).statement()
    assert "at least 5 honest sites" in shared and "whole noise" not in shared
    seeded = promise_of(section.model_copy(update={"noise": "seeded"}), 1, 1)
    assert seeded.epsilon_replaced() is None and "Not private" in seeded.statement()


@pytest.mark.parametrize(
    ("sites", "quorum", "honest", "words"),
    [
        (3, 0.5, 2, "only while no site tells"),
        (10, 0.5, 4, "at most one site tells"),
        (10, 0.7, 4, "at most 3 sites tell"),
    ],
)
def test_a_secure_sum_says_how_many_sites_may_be_dishonest(sites, quorum, honest, words):
    changes = {"federation.num_clients": sites, "federation.quorum": quorum, "privacy.honest_sites": honest}
    recipe = resolve("own", [f"{key}={value}" for key, value in changes.items()]).recipe
    assert words in recipe.promise(1).statement()


def test_a_site_reads_its_limit_both_ways():
    assert "epsilon 8 at delta 1e-05" in limit(8.0, 1e-5) and "about 19" in limit(8.0, 1e-5)
    assert "not set" in limit(None, 1e-5)
