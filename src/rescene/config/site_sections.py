"""Sections of a recipe about sites: the plan of sites that hold their own images, and what goes wrong at simulated ones.

The plan is what all agree on in the place of a common data set.
A federation lives for months and its plan grows: a task is added when classes arrive, and may be closed before its last
round. What was opened never changes, so that a class keeps its number and a finished task its place.

Simulated sites can be lost, slow or hostile. A federation of real sites needs none of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from rescene.core.hyperparameters import Section

ChannelTriple = tuple[float, float, float]
ClassName = Annotated[str, Field(min_length=1, max_length=100, pattern=r"^[^,/\\\x00-\x1f]+$")]
Deviation = Annotated[float, Field(gt=0)]


class PlannedTask(Section):
    """One task of a plan across sites: its classes and its rounds."""

    classes: tuple[ClassName, ...] = Field(min_length=1, description="classes that are new in this task")
    rounds: int = Field(
        ge=1, description="rounds planned for this task; after the task was closed, the rounds that were held"
    )
    closed: bool = Field(False, description="true after the operator ended the task; the round under way is its last")


class SitesSection(Section):
    """plan.yaml. Nothing in it may be measured on private images."""

    image_size: int = Field(32, ge=8, le=1024, description="side of the pictures in pixels; sites resize theirs")
    mean: ChannelTriple = Field(
        (0.5, 0.5, 0.5),
        description="mean of each channel for normalisation; it is stated, because nobody sees all images",
    )
    std: tuple[Deviation, Deviation, Deviation] = Field(
        (0.25, 0.25, 0.25), description="standard deviation of each channel"
    )
    rounds: int = Field(20, ge=1, description="rounds of a task that is opened without a number of rounds")
    test: str | None = Field(None, description="folder of test images on the server; null: evaluated at the sites")
    tasks: tuple[PlannedTask, ...] = Field(min_length=1, description="the tasks in their order")

    @model_validator(mode="after")
    def _a_class_arrives_once(self) -> SitesSection:
        twice = sorted({name for name in self.classes if self.classes.count(name) > 1})
        if twice:
            raise ValueError(f"class {twice[0]!r} appears twice; a class arrives once")
        return self

    @property
    def classes(self) -> tuple[str, ...]:
        """In the order of their numbers."""
        return tuple(name for task in self.tasks for name in task.classes)

    def closing(self, task: int, rounds: int) -> SitesSection:
        """The plan with this task closed after so many rounds."""
        closed = self.tasks[task].model_copy(update={"rounds": rounds, "closed": True})
        return self.model_copy(update={"tasks": (*self.tasks[:task], closed, *self.tasks[task + 1 :])})


def grows(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> bool:
    """Whether tasks (as plain values) only grew: new ones at the end, and fewer rounds where one was closed.

    >>> old = [{"classes": ["a"], "rounds": 3}]
    >>> grows(old, [*old, {"classes": ["b"], "rounds": 5}]), grows(old, [{"classes": ["b"], "rounds": 3}])
    (True, False)
    """
    return len(before) <= len(after) and all(
        list(old["classes"]) == list(new["classes"])
        and (old["rounds"] == new["rounds"] or (bool(new.get("closed")) and new["rounds"] < old["rounds"]))
        and not (old.get("closed") and not new.get("closed"))
        for old, new in zip(before, after, strict=False)
    )


SiteNumber = Annotated[int, Field(ge=0)]


class FaultsSection(Section):
    """All simulated; a run that has any says so in its events, results and report."""

    dropout: float = Field(
        0.0, ge=0, lt=1, description="simulated: chance that an asked site does not answer in the round"
    )
    slow: tuple[SiteNumber, ...] = Field((), description="simulated: numbers of the sites that are slow")
    slowdown: float = Field(
        10.0, ge=1, description="simulated: a slow site takes this many times as long as a normal one"
    )
    deadline: float | None = Field(
        None,
        gt=0,
        description="simulated: answers slower than this multiple of a normal site's time are dropped; null waits for every site",
    )
    attack: Literal["none", "flip", "trigger"] = Field(
        "none",
        description="simulated: flip, attackers call each class the next one of its task; trigger, they call every class the "
        "first of its task and paint a white square on it",
    )
    attackers: tuple[SiteNumber, ...] = Field((), description="simulated: numbers of the sites that attack")

    @model_validator(mode="after")
    def _someone_attacks(self) -> FaultsSection:
        if (self.attack == "none") != (not self.attackers):
            raise ValueError(
                "attack and attackers go together: federation.faults.attack=flip federation.faults.attackers=[0]"
            )
        return self

    @property
    def words(self) -> tuple[str, ...]:
        """What is simulated, for people."""
        told = []
        if self.attack != "none":
            told.append(f"attack: {self.attack} by {_sites(self.attackers)}")
        if self.dropout:
            told.append(f"{100 * self.dropout:g} % of the sites lost per round")
        if self.slow:
            told.append(f"{_sites(self.slow)} {self.slowdown:g} times as slow")
        if self.deadline is not None:
            told.append(f"deadline after {self.deadline:g} times an ordinary answer")
        return tuple(told)


def _sites(clients: tuple[int, ...]) -> str:
    return f"{'site' if len(clients) == 1 else 'sites'} {', '.join(map(str, clients))}"
