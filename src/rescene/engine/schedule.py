"""The steps of a run, in order: for each task begin, R rounds, end."""

from __future__ import annotations

from dataclasses import dataclass

from rescene.data import Task
from rescene.engine.experiment import Experiment


@dataclass(frozen=True)
class Step:
    """One step of a run: the beginning of a task, a round, or the end of a task."""

    task: Task
    round: int | None  # None: begin (ends=False) or end of the task
    ends: bool = False


def schedule(experiment: Experiment) -> list[Step]:
    """begin, rounds, end for each task."""
    steps = []
    for task in experiment.tasks:
        rounds = range(experiment.recipe.rounds_of(task.index))
        steps += [Step(task, None), *(Step(task, r) for r in rounds), Step(task, None, ends=True)]
    return steps
