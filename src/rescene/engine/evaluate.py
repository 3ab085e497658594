"""Evaluation on the test images of every task seen so far: one head over all seen classes, no task identity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from rescene.core.record import record
from rescene.data import Dataset, SiteOrders, Task
from rescene.privacy.accounting import check_grid, least_deviation
from rescene.privacy.discrete import discrete_gaussian
from rescene.privacy.noise import Noise
from rescene.training import class_scores

TALLY_SENSITIVITY = math.sqrt(3)


@dataclass(frozen=True)
class Evaluation:
    """Percent per task, the same when the choice is only among the task's own classes, and the confusion counts."""

    per_task: list[float]
    within_task: list[float]
    overall: float
    confusion: list[list[int]]
    sizes: list[int]  # test images per task
    recall: list[float]  # percent per class, in the place of a confusion that nobody knows; else empty
    by_site: list[float] = field(default_factory=list)  # percent on the classes that each site has met, in own orders


def evaluate(net: nn.Module, dataset: Dataset, tasks: Sequence[Task], orders: SiteOrders | None = None) -> Evaluation:
    """Accuracy after these tasks. A task without test images counts as 0.

    With an order for each site, the accuracy on task j is the mean over the sites of that on the site's own j-th task.
    """
    test, transform = dataset.test, dataset.transform
    index = torch.cat([task.test for task in tasks]).to(test.labels.device)
    classes = tasks[-1].num_seen  # a head may know of classes that are still to come
    scores = class_scores(net, test.pixels[index], transform.normalise)[:, :classes]
    truth = test.labels[index]
    guesses = scores.argmax(dim=1)
    sizes = [len(task.test) for task in tasks]
    right = (guesses == truth).split(sizes)
    within = [_within(*own) for own in zip(scores.split(sizes), truth.split(sizes), tasks, strict=True)]
    confusion = torch.bincount(truth * classes + guesses, minlength=classes * classes).reshape(classes, classes)
    found = Evaluation([_percent(r) for r in right], within, _percent(guesses == truth), confusion.tolist(), sizes, [])
    return found if orders is None else _in_own_orders(found, scores, truth, orders)


def _in_own_orders(found: Evaluation, scores: Tensor, truth: Tensor, orders: SiteOrders) -> Evaluation:
    """The figures by task as means over sites; a site whose classes have no test image is left out of a mean.

    ``scores`` [n, classes] and ``truth`` [n] are of all test images of the classes that anybody has met.
    """
    sites, num_steps = range(len(orders.steps)), len(found.per_task)
    groups = {own for k in sites for own in (*orders.steps[k][:num_steps], orders.met(k, num_steps - 1))}
    right = {classes: _on_classes(scores, truth, classes) for classes in groups}
    per_task, within = (
        [_mean([right[orders.steps[k][t]][kind] for k in sites]) for t in range(num_steps)] for kind in (0, 1)
    )
    return replace(
        found,
        per_task=per_task,
        within_task=within,
        by_site=[right[orders.met(k, num_steps - 1)][0] for k in sites],
    )


def _on_classes(scores: Tensor, truth: Tensor, classes: tuple[int, ...]) -> tuple[float, float]:
    """Percent right on the images of these classes, among all classes and among these alone; NaN without images."""
    labels = torch.tensor(classes, device=scores.device)
    own = torch.isin(truth, labels)
    if not bool(own.any()):
        return math.nan, math.nan
    scores, truth = scores[own], truth[own]
    return _percent(scores.argmax(dim=1) == truth), _percent(labels[scores[:, labels].argmax(dim=1)] == truth)


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


@record
class Tally:
    """What a site tells about its hold-out: int64 [classes seen] each, and nothing else."""

    num: Tensor
    right: Tensor
    right_within: Tensor  # when the choice is only among the classes of the image's task


@torch.no_grad()
def tally(net: nn.Module, dataset: Dataset, tasks: Sequence[Task]) -> Tally:
    """Test images and right answers per class of these tasks."""
    num_seen, device = tasks[-1].num_seen, dataset.test.labels.device
    num, right, right_within = (torch.zeros(num_seen, dtype=torch.int64) for _ in range(3))
    for task in tasks:
        truth = dataset.test.labels[task.test]
        if not len(truth):
            continue
        scores = class_scores(net, dataset.test.pixels[task.test], dataset.transform.normalise)
        classes = torch.tensor(task.classes, device=device)
        inside = classes[scores[:, classes].argmax(dim=1)]
        for counts, chosen in ((num, truth), (right, scores.argmax(dim=1)), (right_within, inside)):
            counts += torch.bincount(truth[chosen == truth], minlength=num_seen).cpu()
    return Tally(num, right, right_within)


def noised(found: Tally, sigma: float, noise: Noise) -> Tally:
    """Counts behind discrete Gaussian noise, then made possible again: whole, none below 0, not more right than there are.

    An image adds at most 1 to each of three counts: the sensitivity is sqrt(3). The grid is so fine that the accountant's cost
    of a grid (``check_grid``) covers the noise.
    """
    counts = torch.stack([found.num, found.right, found.right_within])
    deviation = sigma * TALLY_SENSITIVITY
    grid = math.ceil(least_deviation(counts.numel()) / deviation)  # steps to one image
    check_grid(grid * deviation, counts.numel())
    drawn = discrete_gaussian(counts.numel(), grid * deviation, noise).reshape(counts.shape)
    counts = (counts * grid + drawn + grid // 2).div(grid, rounding_mode="floor")
    num = counts[0].clamp_min(0)
    return Tally(num, *(torch.minimum(right.clamp_min(0), num) for right in counts[1:]))


def summed(tallies: Sequence[Tally], tasks: Sequence[Task]) -> Evaluation:
    """The evaluation of all hold-outs together; NaN where nobody has an image. Who is mistaken for whom stays unknown."""
    zero = torch.zeros(tasks[-1].num_seen, dtype=torch.int64)
    num, right, within = (
        sum((getattr(one, name) for one in tallies), start=zero) for name in ("num", "right", "right_within")
    )
    own = [torch.tensor(task.classes) for task in tasks]
    sizes = torch.stack([num[classes].sum() for classes in own])
    per_task, inside = (_percents(torch.stack([part[c].sum() for c in own]), sizes) for part in (right, within))
    (overall,) = _percents(right.sum()[None], num.sum()[None])
    return Evaluation(per_task, inside, overall, [], sizes.tolist(), _percents(right, num))


def _percents(right: Tensor, num: Tensor) -> list[float]:
    return [100.0 * r / n if n else math.nan for r, n in zip(right.tolist(), num.tolist(), strict=True)]


def _within(scores: Tensor, truth: Tensor, task: Task) -> float:
    classes = torch.tensor(task.classes, device=scores.device)
    return _percent(classes[scores[:, classes].argmax(dim=1)] == truth)


def _percent(right: Tensor) -> float:
    return 100.0 * int(right.sum()) / max(len(right), 1)
