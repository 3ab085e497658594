"""Evaluation on the test images of every task seen so far: one head over all seen classes, no task identity."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rescene.data import Dataset, Task
from rescene.steps import class_scores


@dataclass(frozen=True)
class Evaluation:
    """Percent per task, the same when the choice is only among the task's own classes, and the confusion counts."""

    per_task: list[float]
    within_task: list[float]
    overall: float
    confusion: list[list[int]]


def evaluate(net: nn.Module, dataset: Dataset, tasks: Sequence[Task]) -> Evaluation:
    """Accuracy after these tasks. A task without test images counts as 0."""
    test, transform = dataset.test, dataset.transform
    index = torch.cat([task.test for task in tasks]).to(test.labels.device)
    scores = class_scores(net, test.pixels[index], transform.normalise)
    truth = test.labels[index]
    guesses = scores.argmax(dim=1)
    sizes = [len(task.test) for task in tasks]
    right = (guesses == truth).split(sizes)
    within = [_within(*own) for own in zip(scores.split(sizes), truth.split(sizes), tasks, strict=True)]
    classes = tasks[-1].num_seen
    confusion = torch.bincount(truth * classes + guesses, minlength=classes * classes).reshape(classes, classes)
    return Evaluation([_percent(r) for r in right], within, _percent(guesses == truth), confusion.tolist())


def _within(scores: Tensor, truth: Tensor, task: Task) -> float:
    classes = torch.tensor(task.classes, device=scores.device)
    return _percent(classes[scores[:, classes].argmax(dim=1)] == truth)


def _percent(right: Tensor) -> float:
    return 100.0 * int(right.sum()) / max(len(right), 1)
