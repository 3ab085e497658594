"""How far off the accuracy of a run is, when its sites put noise on the counts of their test images."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rescene.core.results import EventRecord, Results

NOISED = "W374"  # a site put noise on its counts; the last word is the deviation, in images


def noise_line(events: Iterable[EventRecord], results: Results) -> str:
    """The sentence of the report, of the terminal and of `deploy status`; empty where no site put noise on its counts."""
    deviations = {row.client: _last_number(row.message) for row in events if row.code == NOISED}
    words = "Sites put noise on the counts behind every accuracy of this run"
    tested = sum(task.test_size or 0 for task in results.tasks)
    if not deviations or not tested:
        return f"{words}." if deviations else ""
    classes = sum(len(task.classes) for task in results.tasks)
    points = points_off(deviations.values(), classes, tested, results.aa or 0.0)
    return f"{words}: the one over all classes is off by about {points:.0f} points (one deviation), those of single classes by more."


def points_off(deviations: Iterable[float], num_classes: int, num_tested: int, accuracy: float) -> float:
    """One deviation of an accuracy (percent): right answers and images are both noised, for each class at each site.

    Three sites with evaluation_sigma 2 (a deviation of 2 sqrt 3), ten classes, 300 and 3000 test images in all:

    >>> [round(points_off([2 * 3**0.5] * 3, 10, num, 70.0), 1) for num in (300, 3000)]
    [7.7, 0.8]
    """
    counts = num_classes * sum(deviation**2 for deviation in deviations)
    return 100 * math.sqrt(counts * (1 + (accuracy / 100) ** 2)) / num_tested


def _last_number(words: str) -> float:
    last = words.rsplit(" ", 1)[-1]
    return float(last) if last.replace(".", "", 1).isdigit() else 0.0
