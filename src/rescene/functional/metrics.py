"""Metrics of continual learning.

``matrix[i][j]`` is the accuracy on task j after task i has been learned; entries with j > i are NaN (or None) and never
read. Units are the caller's (the program uses percent). ``test_sizes[j]`` weighs task j by its number of test images;
None weighs tasks equally, which is the macro mean used for domains.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Matrix = Sequence[Sequence[float | None]] | Any


def _square(matrix: Matrix) -> np.ndarray:
    array = np.array([[np.nan if v is None else float(v) for v in row] for row in matrix], dtype=float)
    if array.ndim != 2 or array.shape[0] != array.shape[1] or not len(array):
        raise ValueError(f"an accuracy matrix is square and not empty, this one has shape {array.shape}")
    return array


def _row_average(row: np.ndarray, test_sizes: Sequence[float] | None) -> float:
    weights = np.ones(len(row)) if test_sizes is None else np.asarray(test_sizes, dtype=float)[: len(row)]
    known = weights > 0  # a task that nobody could test has no accuracy, and no weight
    return float((row[known] * weights[known]).sum() / weights.sum()) if known.any() else float("nan")


def average_accuracy(matrix: Matrix, test_sizes: Sequence[float] | None = None) -> float:
    """AA: accuracy over all tasks after the last one (Sec. 4.1).

    >>> average_accuracy([[90, None], [60, 80]])
    70.0
    """
    return _row_average(_square(matrix)[-1], test_sizes)


def average_incremental_accuracy(matrix: Matrix, test_sizes: Sequence[float] | None = None) -> float:
    """AIA: the accuracy over all tasks seen so far, measured after every task and averaged (Sec. 4.1).

    >>> average_incremental_accuracy([[90, None], [60, 80]])
    80.0
    """
    array = _square(matrix)
    return float(np.mean([_row_average(array[i, : i + 1], test_sizes) for i in range(len(array))]))


def _nothing_yet(array: np.ndarray) -> float:
    """The change of a first task: 0, or NaN where its accuracy was not measured."""
    return 0.0 if np.isfinite(array[0, 0]) else float("nan")


def forgetting(matrix: Matrix) -> float:
    """Mean over all tasks but the last of (best accuracy so far minus final accuracy); 0 for a single task.

    NaN where accuracies were not measured, also for a single task.

    >>> forgetting([[90, None, None], [95, 80, None], [60, 70, 99]])
    22.5
    """
    array = _square(matrix)
    if len(array) == 1:
        return _nothing_yet(array)
    return float(np.mean([np.max(array[j:, j]) - array[-1, j] for j in range(len(array) - 1)]))


def backward_transfer(matrix: Matrix) -> float:
    """BWT: mean over all tasks but the last of (final accuracy minus accuracy right after learning it).

    >>> backward_transfer([[90, None], [60, 80]])
    -30.0
    """
    array = _square(matrix)
    if len(array) == 1:
        return _nothing_yet(array)
    return float(np.mean([array[-1, j] - array[j, j] for j in range(len(array) - 1)]))


def old_and_recent(matrix: Matrix) -> tuple[float, float]:
    """Final accuracy on the old half (first floor(T/2) tasks) and on the recent rest (Sec. 4.3). One task: it is both."""
    final = _square(matrix)[-1]
    half = len(final) // 2
    recent = float(final[half:].mean())
    return (float(final[:half].mean()) if half else recent), recent


def balanced_accuracy(confusion: Sequence[Sequence[float]] | Any) -> float:
    """Mean over classes of the recall, in percent; rows are the true classes, classes without test images are left out.

    >>> balanced_accuracy([[8, 2], [0, 100]])
    90.0
    """
    array = np.asarray(confusion, dtype=float)
    totals = array.sum(axis=1)
    present = totals > 0
    if not present.any():
        return float("nan")
    return float(100.0 * np.mean(np.diag(array)[present] / totals[present]))
