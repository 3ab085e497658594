"""The statistics behind the screen: honest samples pass, a hostile minority does not, a majority always does."""

import pytest
import torch

from rescene.core.rng import seeded_generator
from rescene.functional.robust import far_off, geometric_median, outlyingness

DIMS = 16


def samples(generator, sizes, centre=0.0):
    return [centre + torch.randn(n, DIMS, generator=generator) for n in sizes]


def test_the_geometric_median_of_a_line_is_its_median():
    assert float(geometric_median(torch.tensor([[0.0], [1.0], [7.0]]))) == pytest.approx(1.0, abs=0.01)


def test_a_minority_does_not_move_the_geometric_median_far():
    points = torch.randn(11, DIMS, generator=seeded_generator(0))
    spoilt = torch.cat([points[:7], torch.full((4, DIMS), 1e4)])
    assert (
        geometric_median(spoilt) - geometric_median(points)
    ).norm() < 6  # the points themselves lie 4 apart from their centre
    assert (spoilt.mean(dim=0) - points.mean(dim=0)).norm() > 1e4


@pytest.mark.slow
def test_honest_groups_of_any_size_are_about_as_far_as_chance_explains():
    generator, ratios = seeded_generator(1), []
    for _ in range(200):
        ratios.append(outlyingness(samples(generator, (1, 2, 3, 5, 8, 10, 10))))
    found = torch.tensor(ratios)
    assert bool(((found.mean(dim=0) > 0.8) & (found.mean(dim=0) < 1.2)).all())
    assert float((found > 2).float().mean()) < 0.01


@pytest.mark.parametrize("size", [2, 10])
def test_one_hostile_group_is_found_and_nobody_else(size):
    generator, hits, wrong = seeded_generator(2), 0, 0
    for _ in range(50):
        hostile = samples(generator, [size], centre=2.0)
        found = far_off(hostile + samples(generator, (10, 3, 10, 6, 10)))
        hits, wrong = hits + (0 in found), wrong + len(found.keys() - {0})
    assert hits >= 48 and wrong <= 5


def test_groups_of_earlier_rounds_help_to_judge_the_only_one_of_a_class():
    generator = seeded_generator(3)
    (hostile,), earlier = samples(generator, [10], centre=3.0), samples(generator, (40, 40))
    assert far_off([hostile], earlier) and not far_off(samples(generator, [10]), earlier)


def test_of_two_that_differ_neither_is_judged():
    generator = seeded_generator(4)
    assert far_off(samples(generator, [10]) + samples(generator, [10], centre=9.0)) == {}


def test_a_majority_is_never_turned_away():
    generator = seeded_generator(5)
    apart = [group for k in range(7) for group in samples(generator, [5], centre=40.0 * k)]
    assert len(far_off(apart, limit=-100.0)) == 3


def test_sites_that_all_differ_a_little_are_not_taken_for_hostile():
    """Cameras differ: far beyond what chance explains, yet nobody is farther than the others."""
    generator = seeded_generator(6)
    shifted = [group + 3 * torch.randn(DIMS, generator=generator) for group in samples(generator, [10] * 9)]
    assert not far_off(shifted)


def test_single_pictures_that_agree_are_let_through():
    """Without two pictures of one site chance is unknown; then only the sites' own differences are the measure."""
    assert far_off(samples(seeded_generator(7), [1, 1, 1])) == {}
