"""The discrete Gaussian against its law."""

import math
from fractions import Fraction

import pytest
import torch

from rescene.core.errors import RunError
from rescene.privacy import noise as noise_module
from rescene.privacy.noise import Noise, discrete_gaussian, sampler_error


def seeded(seed=0):
    return Noise(torch.Generator().manual_seed(seed))


def law(sigma, largest):
    """Probabilities of -largest .. largest."""
    k = torch.arange(-largest, largest + 1, dtype=torch.float64)
    weights = torch.exp(-(k**2) / (2 * sigma**2))
    return weights / weights.sum()


def chance(counts, probabilities):
    """p-value of a chi-square test; cells are put together until each expects at least 10."""
    expected = probabilities * counts.sum()
    cells = (torch.cumsum(expected, 0) / 10).long()
    observed, expected = (
        torch.zeros(int(cells[-1]) + 1).double().index_add(0, cells, v.double()) for v in (counts, expected)
    )
    used = expected > 5
    statistic = ((observed - expected)[used] ** 2 / expected[used]).sum()
    return float(torch.special.gammaincc((used.sum() - 1) / 2, statistic.float() / 2))


@pytest.mark.parametrize("sigma", [1.0, 1.7, 12.5, 300.0])
def test_numbers_follow_the_law(sigma):
    x = discrete_gaussian(1_000_000, sigma, seeded(7))
    assert x.dtype == torch.int64
    largest = math.ceil(8 * sigma)
    assert int(x.abs().max()) <= largest
    assert chance(torch.bincount(x + largest, minlength=2 * largest + 1), law(sigma, largest)) > 1e-4


def test_the_test_itself_would_notice_a_wrong_law():
    x = discrete_gaussian(1_000_000, 12.5, seeded(7))
    assert chance(torch.bincount(x + 100, minlength=201), law(12.8, 100)) < 1e-6


@pytest.mark.parametrize("sigma", [1.0e4, 2.0**18, 2.0**30, 2.0**40])
def test_large_numbers_follow_the_law_in_their_high_and_low_digits(sigma):
    x = discrete_gaussian(400_000, sigma, seeded(3))
    cells = torch.special.ndtr(x.double() / sigma).mul(200).long()
    assert chance(torch.bincount(cells, minlength=200), torch.full((200,), 1 / 200).double()) > 1e-4
    for modulus in (2, 7, 64, 1448):
        even = torch.full((modulus,), 1 / modulus).double()
        assert chance(torch.bincount(x % modulus, minlength=modulus), even) > 1e-4
    assert abs(float(x.double().square().mean()) / sigma**2 - 1) < 0.012  # five deviations of this estimate


def test_tails_reach_as_far_as_a_gaussian():
    x = discrete_gaussian(2_000_000, 50.0, seeded(1)).abs()
    for reach in (3, 4):
        found, right = int((x > reach * 50).sum()), 2_000_000 * math.erfc((reach + 0.01) / math.sqrt(2))
        assert abs(found - right) < 5 * math.sqrt(right)


def test_a_sum_of_parts_has_the_law_of_one(monkeypatch):
    """Exactly, without drawing: the laws of the tables are folded together and compared with the discrete Gaussian."""
    monkeypatch.setattr(noise_module, "_FACTOR", 4)
    monkeypatch.setattr(noise_module, "_TABLED", 40 * 16)
    (one, fine), (four, coarse) = noise_module._parts.__wrapped__(Fraction(900))
    assert (one, four) == (1, 4)
    found, largest = {}, 330
    for i, p in law_of(fine).items():
        for j, q in law_of(coarse).items():
            found[i + 4 * j] = found.get(i + 4 * j, 0.0) + p * q
    difference = sum(abs(found.get(k - largest, 0.0) - p) for k, p in enumerate(law(30.0, largest).tolist()))
    assert difference < 1e-12


def law_of(table):
    sizes = [b - a for a, b in zip([0, *table.exact], table.exact, strict=False)]
    chances = {k: size / 2**189 / (2 if k else 1) for k, size in enumerate(sizes)}
    return chances | {-k: p for k, p in chances.items()}


def test_the_table_is_the_law_to_the_last_bit():
    table = noise_module._table(Fraction(4))
    assert table.exact[-1] == 2**189
    exact = law_of(table)
    for k in range(20):
        assert exact[k] == pytest.approx(float(law(2.0, 60)[60 + k]), rel=1e-12)


def test_a_word_that_meets_an_entry_is_settled_by_more_bits():
    table = noise_module._table(Fraction(9))
    entry, rest = int(table.leading[2]), table.exact[2] & (2**126 - 1)

    def after(more):
        given = iter([torch.tensor([entry]), torch.tensor([more >> 63, more & (2**63 - 1)])])
        return noise_module._from_table(table, lambda count: next(given), 1).tolist()

    assert after(rest - 1) == [2]
    assert after(rest) == [3]


def test_a_seed_gives_the_same_numbers_and_entropy_others():
    assert discrete_gaussian(1000, 2.0**30, seeded(5)).equal(discrete_gaussian(1000, 2.0**30, seeded(5)))
    assert discrete_gaussian(5, 3.0, seeded(5)).tolist() == [-2, 3, -2, 4, -7]  # the same on every machine
    assert not discrete_gaussian(1000, 2.0**30, Noise()).equal(discrete_gaussian(1000, 2.0**30, Noise()))
    assert len(discrete_gaussian(0, 3.0, Noise())) == 0


def test_long_vectors_are_not_a_short_one_repeated():
    x = discrete_gaussian(100_000, 2.0**30, Noise())
    assert len(x.unique()) > 99_900


@pytest.mark.parametrize("sigma", [0.0, 0.99, 2.0**40 * 1.01, math.inf, math.nan, -3.0])
def test_deviations_out_of_reach_are_refused(sigma):
    with pytest.raises(RunError) as refused:
        discrete_gaussian(1, sigma, Noise())
    assert refused.value.code == "E430"


def test_the_error_of_a_number_is_far_below_any_delta():
    assert all(0 < sampler_error(2.0**bits) < 2.0**-169 for bits in range(41))
