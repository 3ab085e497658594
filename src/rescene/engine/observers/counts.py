"""Observers that count: states and work in the row of each task, what sites say of their uploads, and closings of a stream's buffers.

Bytes and work are counted by the ledger itself. In ``notes`` a site says how many images fell back or stayed home, how often it
declined and how many classes it suppressed. A stream without announced tasks (``tasks.drift``) has a record of when classes truly
came and went, and when their buffers closed.
"""

from __future__ import annotations

from collections.abc import Sequence

from rescene.core.results import Stream, StreamClass
from rescene.engine.experiment import Experiment
from rescene.engine.federation import RunFederation
from rescene.engine.observers import Observer, RunView
from rescene.engine.run_context import RunContext
from rescene.methods import Uploads
from rescene.nets import state_bytes


class CostWatch(Observer):
    """The last of the engine's own observers, because others may work too."""

    def __init__(self, federation: RunFederation) -> None:
        self.federation, self.ledger = federation, federation.ledger

    def end_round(self, run: RunView) -> None:
        self.ledger.states(run.state, self.federation.largest_state(), state_bytes(run.state.model))

    def end_task(self, run: RunView) -> None:
        run.row.update(self.ledger.so_far())


MORE_IMAGES = "give each site more images of a class (federation.num_clients) or ask for fewer (method.ipc)"
COUNTED = ("num_fallbacks", "num_withheld", "num_declined", "num_suppressed")


def what_was_lost(withheld: int, sent: int) -> str:
    """What the server missed in a round, because images stayed home; empty where at least half of them were sent.

    >>> what_was_lost(5, 5), what_was_lost(6, 5), what_was_lost(6, 0)
    ('', 'most surrogates stayed home, so the server learned little new', 'no surrogate left any site, so the server learned nothing new')
    """
    if not sent:
        return "no surrogate left any site, so the server learned nothing new"
    return "most surrogates stayed home, so the server learned little new" if withheld > sent else ""


class UploadCounts(Observer):
    """Adds them up in the run's facts, and writes events about images."""

    def __init__(self, context: RunContext) -> None:
        self.context = context

    def uploads_received(self, run: RunView, uploads: Uploads) -> None:
        facts, note = self.context.facts, self.context.note
        counts = {name: sum(int(u.get("notes", {}).get(name, 0)) for u in uploads.values()) for name in COUNTED}
        for name, count in counts.items():
            setattr(facts, name, getattr(facts, name) + count)
        if withheld := counts["num_withheld"]:
            note("info", "I310", f"{withheld} surrogates were still real images of a small class and stayed home")
            if lost := what_was_lost(withheld, sum(len(u.get("images", ())) for u in uploads.values())):
                note("warning", "W311", f"{lost}: {MORE_IMAGES}")
        if fallbacks := counts["num_fallbacks"]:
            note("warning", "W301", f"{fallbacks} surrogates became non-finite and fell back to their start image")


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


def stream_of(experiment: Experiment, closings: Sequence[Sequence[int]]) -> Stream | None:
    """The part of results.json; rounds are 1-based and counted through the stream. None where tasks are announced.

    ``arrives`` and ``leaves`` are the first and last round in which any site may hold images of the class.
    """
    recipe = experiment.recipe
    drift, rounds, names = recipe.tasks.drift, recipe.federation.num_rounds, experiment.dataset.classes
    if drift is None:
        return None
    total = len(experiment.tasks) * rounds
    classes = [
        StreamClass(
            class_name=names[label],
            task=task.index,
            arrives=task.index * rounds + 1,
            leaves=min((task.index + 1) * rounds + drift, total),
            closed=tuple(number for own, number in closings if own == label),
        )
        for task in experiment.tasks
        for label in task.classes
    ]
    return Stream(tuple(classes), rounds_per_task=rounds, num_rounds=total, drift=drift)
