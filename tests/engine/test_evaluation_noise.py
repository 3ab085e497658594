"""Counts of a hold-out leave a site behind the same discrete noise as every other release."""

import math

import pytest
import torch

from rescene.data import Task
from rescene.engine.evaluate import Tally, noised, summed
from rescene.privacy.accounting import check_grid
from rescene.privacy.noise import Noise

TALLY_SENSITIVITY = math.sqrt(3)  # an image adds at most 1 to each of three counts


class Extreme(Noise):
    """Random words that are all ones: the largest noise that can be drawn."""

    def words(self):
        return lambda count: torch.full((count,), 2**63 - 1)


def tally_of(num, classes):
    return Tally(*(torch.full((classes,), num) for _ in range(3)))


def test_no_count_within_sixteen_deviations_is_impossible():
    """A generator that ends at eight deviations makes counts beyond them a certain proof."""
    found = noised(tally_of(0, 4), 10.0, Extreme())
    assert int(found.num.min()) > 16 * 10.0 * TALLY_SENSITIVITY


@pytest.mark.parametrize("sigma", [0.05, 1.0, 40.0])
def test_the_noise_has_the_deviation_that_is_charged(sigma):
    classes, middle = 20_000, 10**6
    found = noised(tally_of(middle, classes), sigma, Noise(torch.Generator().manual_seed(0)))
    moved = (found.num - middle).double()
    deviation = math.hypot(sigma * TALLY_SENSITIVITY, 0 if sigma < 0.2 else math.sqrt(1 / 12))
    assert found.num.dtype == torch.int64
    if sigma < 0.2:  # less than half an image: rounding takes nearly all of it away
        assert moved.abs().max() <= 1
    else:
        assert abs(float(moved.std()) / deviation - 1) < 0.03 and abs(float(moved.mean())) < 5 * deviation / 141


def test_counts_stay_possible():
    found = noised(tally_of(3, 1000), 5.0, Noise(torch.Generator().manual_seed(1)))
    assert (found.num >= 0).all() and (found.right >= 0).all()
    assert (found.right <= found.num).all() and (found.right_within <= found.num).all()


def test_accuracy_within_a_task_lies_between_that_among_all_classes_and_100():
    """Two counts with noise of their own are no two counts that can be; the accuracies made of them are."""
    none = torch.zeros(0, dtype=torch.int64)
    tasks = [Task(0, (0, 1), 2, None, none, none), Task(1, (2, 3), 4, None, none, none)]

    def found(right, within, seen):
        half = [torch.tensor(counts) for counts in ([10] * 2 * seen, right, within)]
        return summed([Tally(*half), Tally(*half)], tasks[:seen])

    low = found([7, 7, 2, 2], [6, 5, 11, 12], 2)
    assert low.per_task == [70.0, 20.0] and low.within_task == [70.0, 100.0] and low.overall == 45.0
    assert found([7, 7, 2, 2], [8, 8, 5, 4], 2).within_task == [80.0, 45.0], "what can be stays as it is"
    for within in ([6, 5], [9, 9]):
        only = found([7, 7], within, 1)
        assert only.within_task == only.per_task == [70.0], "one task: there is nothing to choose between"


def test_the_grid_is_fine_enough_for_the_accountant(monkeypatch):
    """What the accountant allows for a grid covers the noise that is drawn, for any number of classes."""
    drawn = []

    def watched(count, deviation, noise):
        drawn.append((deviation, count))
        return torch.zeros(count, dtype=torch.int64)

    monkeypatch.setattr("rescene.privacy.mechanism.discrete_gaussian", watched)
    for sigma, classes in ((0.3, 2), (5.0, 1000), (1e5, 3)):
        assert torch.equal(noised(tally_of(7, classes), sigma, Noise()).num, torch.full((classes,), 7))
    for deviation, count in drawn:
        check_grid(deviation, count)
