"""A stream without announced tasks (``tasks.drift``): when classes truly came and went, and when their buffers closed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rescene.engine.experiment import Experiment
from rescene.engine.observers import Observer, RunView
from rescene.engine.run_context import RunContext


class ClosingsWatch(Observer):
    """Notes the buffers that the method has closed by itself, because nobody announces the end of a task."""

    def __init__(self, context: RunContext) -> None:
        self.context = context

    def end_round(self, run: RunView) -> None:
        for label, number in getattr(run.state, "closings", ())[len(getattr(run.before, "closings", ())) :]:
            self.context.facts.closings.append([label, number])
            name = self.context.experiment.dataset.classes[label]
            words = f"class {name} stayed away: its buffer closed after round {number} of the stream"
            self.context.note("info", "I302", words)


def stream_record(experiment: Experiment, closings: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The part of results.json; rounds are 1-based and counted through the stream. Empty where tasks are announced.

    ``arrives`` and ``leaves`` are the first and last round in which any site may hold images of the class.
    """
    recipe = experiment.recipe
    drift, rounds, names = recipe.tasks.drift, recipe.federation.num_rounds, experiment.dataset.classes
    if drift is None:
        return {}
    total = len(experiment.tasks) * rounds
    classes = [
        {
            "class": names[label],
            "task": task.index,
            "arrives": task.index * rounds + 1,
            "leaves": min((task.index + 1) * rounds + drift, total),
            "closed": [number for own, number in closings if own == label],
        }
        for task in experiment.tasks
        for label in task.classes
    ]
    return {"stream": {"drift": drift, "num_rounds": total, "rounds_per_task": rounds, "classes": classes}}
