"""Observers watch a run. The engine's own are in this folder; a user adds more (docs/extend.md).

An observer sees each event of the loop and may keep a state that survives an interruption. It cannot change results: a user's
observer is given copies. The one exception is ``filter_uploads``, and a run that was filtered says so in its results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rescene.core.errors import ConfigError, ResceneError, RunError, did_you_mean
from rescene.core.plugins import installed, note_registered
from rescene.core.record import Tree, check_tree, map_tensors
from rescene.nets import flops_to

if TYPE_CHECKING:
    from torch import nn

    from rescene.data import Task
    from rescene.methods import Uploads
    from rescene.methods.base import Model


@dataclass(frozen=True)
class RunView:
    """What an observer sees of a run at one moment."""

    folder: Path  # of the run
    recipe: Mapping[str, Any]  # every key of the recipe with its value, as in "federation.num_rounds"
    classes: Sequence[str]  # names, by label
    num_tasks: int
    task: Task  # the current one; task.index counts from 0
    round: int | None  # of the task, from 0; None before the first round and after the last
    row: dict[str, Any]  # what metrics.jsonl gets: at the end of a round or task accuracy, bytes, notes; else empty
    net: Callable[[Model], nn.Module]  # the network with these weights: run.net(run.state.model)
    note: Callable[[str], None]  # writes a line into the events of the run
    _state: Any = None
    _before: Any = None
    copies: bool = False

    @property
    def state(self) -> Any:
        """The server's state, with the global model under ``state.model``; None before the first task."""
        return copied(self._state) if self.copies else self._state

    @property
    def before(self) -> Any:
        """The server's state before this round, or before the end of this task."""
        return copied(self._before) if self.copies else self._before


class Observer:
    """Watches a run. Override the hooks that you need; they are called in this order.

    A run that was interrupted and goes on calls ``restore`` and then ``begin_run`` again. A round that was not safely on disk
    is run again, and told again.
    """

    name: str = ""  # in errors and in the checkpoint; empty: the name of the class

    def begin_run(self, run: RunView) -> None:
        """Before the first step, and whenever the run goes on after an interruption."""

    def begin_task(self, run: RunView) -> None:
        """Before the server and the sites begin a task."""

    def uploads_received(self, run: RunView, uploads: Uploads) -> None:
        """After every exchange: what each client sent, by its number. A secure sum shows no uploads."""

    def filter_uploads(self, run: RunView, uploads: Uploads) -> Uploads:
        """The uploads of a round that the server may learn from. This hook can change results; leave it out to watch only."""
        return uploads

    def end_round(self, run: RunView) -> None:
        """After the server has learned from a round."""

    def end_task(self, run: RunView) -> None:
        """After a task has ended and was evaluated."""

    def end_run(self, run: RunView, results: dict[str, Any]) -> None:
        """Once, when results.json is written."""

    def close(self) -> None:
        """Last of all, however the run ended."""

    def state(self) -> Tree:
        """What the checkpoint keeps: dicts, lists, tensors and plain values. None keeps nothing."""
        return None

    def restore(self, state: Any) -> None:
        """Take back what ``state`` gave when the checkpoint was written."""


class Guarded:
    """A user's observer: it is given copies, its work is not counted as the run's, and its errors name it (E327)."""

    def __init__(self, inner: Observer) -> None:
        self.inner, self.name = inner, inner.name or type(inner).__name__

    def overrides(self, hook: str) -> bool:
        return getattr(type(self.inner), hook) is not getattr(Observer, hook)

    def call(self, hook: str, *given: Any) -> Any:
        """Let it see this event, if it wants to."""
        if not self.overrides(hook):
            return None
        shown = [self._shown(one) if isinstance(one, RunView) else copied(one) for one in given]
        with self._named(hook):
            return copied(getattr(self.inner, hook)(*shown))

    def filter_uploads(self, run: RunView, uploads: Uploads) -> Uploads:
        if not self.overrides("filter_uploads"):
            return uploads
        left = self.call("filter_uploads", run, uploads)
        with self._named("filter_uploads"):
            for client, upload in left.items():
                check_tree(upload, f"the upload of client {client}")
            return dict(sorted(left.items()))

    def state(self) -> Tree:
        state = self.call("state")
        with self._named("state"):
            check_tree(state, "its state")
        return state

    def _shown(self, run: RunView) -> RunView:
        return replace(run, row=copied(run.row), note=lambda words: run.note(f"{self.name}: {words}"), copies=True)

    @contextmanager
    def _named(self, hook: str) -> Iterator[None]:
        try:
            with flops_to(lambda flops: None):
                yield
        except ResceneError:
            raise
        except Exception as error:
            raise RunError(
                "E327",
                f"the observer {self.name} failed in {hook}: {type(error).__name__}: {error}",
                why="an observer is code of yours; the last checkpoint of the run stands",
                fix="mend it and resume the run, or resume without it; --debug shows the whole traceback",
            ) from error


class Observers:
    """All observers of a run: the engine's ``own``, then those that a user ``added``."""

    def __init__(self, own: Sequence[Observer], added: Sequence[Guarded]) -> None:
        self.own, self.added = own, added
        self._kept: dict[str, Tree] = {}  # states of added ones in the checkpoint, also of those that are not here now

    @property
    def filters(self) -> list[str]:
        """Those of a user that can change results."""
        return [one.name for one in self.added if one.overrides("filter_uploads")]

    def tell(self, hook: str, *given: Any) -> None:
        for own in self.own:
            getattr(own, hook)(*given)
        for added in self.added:
            added.call(hook, *given)

    def filter_uploads(self, run: RunView, uploads: Uploads) -> Uploads:
        for own in self.own:
            uploads = own.filter_uploads(run, uploads)
        for added in self.added:
            uploads = added.filter_uploads(run, uploads)
        return uploads

    def states(self) -> dict[str, Tree]:
        """Entries of the checkpoint's tree: one for each of our own that keeps something, and one for all added ones."""
        own = {one.name: state for one in self.own if (state := one.state()) is not None}
        self._kept |= {one.name: state for one in self.added if (state := one.state()) is not None}
        return own | ({"observers": dict(self._kept)} if self._kept else {})

    def restore(self, tree: dict[str, Any]) -> None:
        self._kept = dict(tree.get("observers", {}))
        for own in self.own:
            if own.name in tree:
                own.restore(tree[own.name])
        for added in self.added:
            if added.name in self._kept:
                added.call("restore", self._kept[added.name])


O = TypeVar("O", bound=type[Observer])  # noqa: E741
_REGISTERED: list[type[Observer]] = []


def register_observer(cls: O) -> O:
    """Class decorator: one of these watches every run of this process. A ``--plugin`` file uses it."""
    _REGISTERED.append(cls)
    note_registered(cls)
    return cls


def open_callbacks(callbacks: Sequence[str | Observer] = ()) -> list[Guarded]:
    """The observers of a user: those given, as objects or by the name of an entry point, and those registered."""
    given = [_by_name(one) if isinstance(one, str) else one for one in callbacks]
    for one in given:
        if not isinstance(one, Observer):
            what = f"{type(one).__name__} is no observer"
            raise ConfigError("E504", what, where="callbacks", fix="a subclass of rescene.Observer, as an object")
    made = [Guarded(one) for one in [*given, *(cls() for cls in _REGISTERED)]]
    twice = {one.name for one in made if sum(one.name == other.name for other in made) > 1}
    if twice:
        what = f"two observers are called {sorted(twice)[0]}"
        raise ConfigError("E504", what, where="callbacks", fix="give one of them another `name`")
    return made


def _by_name(name: str) -> Observer:
    """Of an installed package: its entry point in ``rescene.observers`` names the class."""
    found = {entry.name: entry for entry in installed("rescene.observers")}
    if name not in found:
        fix = did_you_mean(name, found) or "install the package that brings it, or give the object itself"
        raise ConfigError("E504", f"there is no observer {name!r}", where="callbacks", fix=fix)
    made: Observer = found[name].load()()
    return made


def copied(tree: Any) -> Any:
    """The same tree in memory of its own."""
    return map_tensors(torch.clone, tree)
