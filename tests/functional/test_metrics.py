"""Metrics by hand, and on rows printed in the paper."""

import math

import pytest

from rescene.functional import (
    average_accuracy,
    average_incremental_accuracy,
    backward_transfer,
    balanced_accuracy,
    forgetting,
    old_and_recent,
)

NAN = math.nan
MATRIX = [[90.0, NAN, NAN], [70.0, 80.0, NAN], [60.0, 85.0, 95.0]]


def test_by_hand():
    assert average_accuracy(MATRIX) == pytest.approx(80.0)
    assert average_incremental_accuracy(MATRIX) == pytest.approx((90 + 75 + 80) / 3)
    assert forgetting(MATRIX) == pytest.approx(((90 - 60) + (85 - 85)) / 2)
    assert backward_transfer(MATRIX) == pytest.approx(((60 - 90) + (85 - 80)) / 2)
    assert old_and_recent(MATRIX) == pytest.approx((60.0, 90.0))


def test_unequal_tasks_weigh_by_test_size():
    assert average_accuracy(MATRIX, [100, 100, 200]) == pytest.approx((60 + 85 + 2 * 95) / 4)
    assert average_incremental_accuracy(MATRIX, [100, 300, 0]) == pytest.approx(
        (90 + (70 + 240) / 4 + (60 + 255) / 4) / 3
    )


def test_one_task():
    assert (
        average_accuracy([[50.0]]) == 50.0 and forgetting([[50.0]]) == 0.0 and old_and_recent([[50.0]]) == (50.0, 50.0)
    )


def test_null_stands_for_nan():
    assert average_incremental_accuracy([[90, None], [60, 80]]) == 80.0


@pytest.mark.parametrize("bad", [[], [[1.0, 2.0]]])
def test_a_matrix_is_square(bad):
    with pytest.raises(ValueError):
        average_accuracy(bad)


@pytest.mark.parametrize(
    ("row", "aa"),  # final per-task accuracies and AA as printed for CIFAR-10 (per-task table, main table)
    [
        ([75.3, 36.2, 52.1, 70.5, 74.8], 61.78),
        ([77.4, 43.9, 57.8, 74.4, 86.3], 67.96),
        ([23.4, 17.9, 50.9, 80.5, 80.9], 50.73),
    ],
)
def test_rows_of_the_paper_average_to_its_aa(row, aa):
    matrix = [[NAN] * 5 for _ in range(4)] + [row]
    assert average_accuracy(matrix) == pytest.approx(aa, abs=0.06)


def test_old_and_recent_split_of_the_paper():
    matrix = [[NAN] * 5 for _ in range(4)] + [[10.0, 20.0, 30.0, 40.0, 50.0]]
    assert old_and_recent(matrix) == (15.0, 40.0)  # old is T0, T1 of five


def test_balanced_accuracy_ignores_class_sizes_and_absent_classes():
    assert balanced_accuracy([[8, 2, 0], [0, 100, 0], [0, 0, 0]]) == pytest.approx(90.0)
    assert math.isnan(balanced_accuracy([[0]]))
