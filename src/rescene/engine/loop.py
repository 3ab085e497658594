"""The one loop that owns time.

A run is a schedule of steps: for each task, begin, R rounds, end. After each step the state is committed, so a run that
dies continues with the first step that was not; it is written while the next step is under way. What happens inside a step
belongs to the method. Observers see every step (``engine.observers``). The beginning of a run can be held again, to see whether a
recipe gives the numbers that somebody recorded for it (``first_rounds``).
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rescene.config import Resolved
from rescene.core.errors import ConfigError, RunError
from rescene.core.json_files import as_json
from rescene.core.results import written
from rescene.core.rng import torch_draws_from
from rescene.core.run_state import FINISHED
from rescene.data import Task
from rescene.engine.checkpoint import reach, write_json
from rescene.engine.evaluate import Evaluation, evaluate
from rescene.engine.method_mistakes import checked_payload, checked_state, naming_mistakes
from rescene.engine.observers import Guarded, RunView
from rescene.engine.results_writer import results_of, save_model, write_tables
from rescene.engine.run_context import Progress, memory_mb, notes_of, warnings_to
from rescene.engine.run_folder import RunFolder
from rescene.engine.run_parts import Step, check_transport, set_up
from rescene.engine.transport import InProcess, Transport
from rescene.methods import Method, Payload, Uploads
from rescene.nets import flops_to


def run(
    resolved: Resolved,
    folder: RunFolder,
    progress: Progress = lambda event: None,
    transport: Transport | None = None,
    elsewhere: bool = False,
    callbacks: Sequence[Guarded] = (),
) -> dict[str, Any]:
    """Run, or continue, the experiment of this folder; returns what results.json holds. ``transport`` reaches the sites.

    ``elsewhere`` lets a run go on with other code or on another machine than it began with; its results then say so.
    """
    transport = transport or InProcess()
    check_transport(resolved, transport)
    folder.check(resolved)
    with folder:
        return Run(resolved, folder, progress, transport, elsewhere, callbacks).complete()


class Run:
    """One run in progress: its parts, and the loop over its steps."""

    def __init__(
        self,
        resolved: Resolved,
        folder: RunFolder,
        progress: Progress = lambda event: None,
        transport: Transport | None = None,
        elsewhere: bool = False,
        callbacks: Sequence[Guarded] = (),
    ) -> None:
        self.elsewhere = elsewhere
        self.closed: Callable[[Task], bool] = lambda task: False  # whether somebody wants this task to end
        self.parts = set_up(resolved, folder, progress, transport or InProcess(), callbacks)
        self.context, self.federation, self.observers = self.parts.context, self.parts.federation, self.parts.observers
        self.folder = folder
        self._counted: tuple[int, Mapping[str, Tensor], Evaluation] | None = None  # tasks, model, what sites counted
        self.federation.observe = self._uploads_received

    def complete(self) -> dict[str, Any]:
        """All steps that are not done yet; if something stops them, the status says so and the checkpoint stands."""
        parts, context = self.parts, self.context
        parts.restore(self.elsewhere)
        context.tell("start", done=parts.done, steps=len(parts.steps), left_out=context.experiment.left_out)
        try:
            with self.listening():
                self._begin()
                number = parts.done
                while number < len(parts.steps):
                    e = self.context.experiment
                    with torch_draws_from(e.rng.at("step", number), e.arch.draws):
                        self.perform(self._next(number))
                    number += 1
                    reach("step done")
                    self.commit(number)
                with context.timer.phase("checkpoint"):
                    parts.writer.wait()
                results = self.finish()
        except BaseException as error:
            state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            with contextlib.suppress(RunError):  # the disk may be what failed
                self._last_write()
                parts.tell_status(state)
            with contextlib.suppress(RunError):  # what stopped the run matters more
                self.observers.tell("close")
            raise
        try:
            with self.listening():
                self.observers.tell("end_run", self._view(), results)
        finally:
            self.observers.tell("close")
        return results

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Warnings inside become events of the run, and work is counted."""
        with warnings_to(self.context.note), flops_to(self.federation.ledger.meter.add):
            yield

    def commit(self, number: int) -> None:
        """The first ``number`` steps are done."""
        self.parts.commit(number)

    def _begin(self) -> None:
        for name in self.observers.filters:
            if name not in self.context.facts.filtered_by:
                self.context.facts.filtered_by.append(name)
                words = f"the observer {name} filters uploads, so results depend on it"
                self.context.note("warning", "W303", words)
        self.observers.tell("begin_run", self._view())

    def _next(self, number: int) -> Step:
        """The step to take; a task that was closed goes to its end, once a round of it has been held."""
        step = self.parts.steps[number]
        if step.round and self.closed(step.task):
            self.parts.shorten(step.task.index, step.round)
        return self.parts.steps[number]

    def _last_write(self) -> None:
        """Something else stopped the run: let the write under way end; its error is told too, but does not replace that."""
        try:
            self.parts.writer.wait()
        except RunError as error:
            self.context.note("error", error.code, error.what)

    def perform(self, step: Step) -> None:
        """Take one step of the schedule."""
        self.context.place = (step.task.index, -1 if step.round is None else step.round)
        self.federation.num_rounds = self.context.experiment.rounds_told(step.task)
        with _naming(self.context.experiment.method) if self.parts.state is not None else contextlib.nullcontext():
            self._perform(step)

    def _perform(self, step: Step) -> None:
        if step.round is not None:
            self._round(step.task, step.round)
            return
        told, _ = self.context.experiment.told(step.task, -1)
        self.federation.move(told, None)
        if step.ends:
            self._end_task(step.task, told)
        else:
            self._begin_task(step.task, told)

    def _begin_task(self, task: Task, told: Task) -> None:
        e, parts = self.context.experiment, self.parts
        self.observers.tell("begin_task", self._view())
        with self.context.timer.phase("server"):
            if parts.state is None:
                net = e.initial_net()
                with naming_mistakes(e.method, "init"):
                    parts.state = e.method.init(net, e.rng.at("init"))
                checked_state(e.method, "init", parts.state)
            if told.announced or task is e.tasks[0]:
                rng = e.rng.at("server", task.index, "begin")
                with naming_mistakes(e.method, "begin_task"):
                    state = e.method.begin_task(parts.state, told, self.federation, rng)
                parts.state = checked_state(e.method, "begin_task", state)

    def _end_task(self, task: Task, told: Task) -> None:
        e, parts, before = self.context.experiment, self.parts, self.parts.state
        plan, last = e.recipe.sites, task is e.tasks[-1]
        if plan is not None and plan.tasks[task.index].closed:
            words = f"task {task.index + 1} was closed after {plan.tasks[task.index].rounds} rounds"
            self.context.note("info", "I340", words)
        if told.announced or last:
            with self.context.timer.phase("server"):
                rng = e.rng.at("server", task.index, "end")
                with naming_mistakes(e.method, "end_task"):
                    state = e.method.end_task(before, told, self.federation, rng)
                parts.state = checked_state(e.method, "end_task", state)
        if last:
            save_model(self.folder, e, parts.state.model)
        row = self.record(task, self.evaluate(task))
        self.observers.tell("end_task", self._view(before, row))
        self.write_row(row)

    def _round(self, task: Task, r: int) -> None:
        before, every = self.parts.state, self.context.experiment.recipe.federation.evaluate_every
        uploads, self.parts.state = self._held(task, r)
        found = self.evaluate(task) if every and (r + 1) % every == 0 else None
        up, down = self.federation.traffic
        row = {
            "kind": "round",
            "task": task.index,
            "round": r,
            "participants": list(self.federation.participants),
            "accuracy": found.overall if found else None,
            "by_task": found.per_task if found else [],
            "uplink_bytes": up,
            "downlink_bytes": down,
            "sites": self.federation.traffic_by_site(),
            "notes": notes_of(self.parts.state, uploads),
        }
        if self.federation.summed is not None:
            row["summed"] = sorted(self.federation.summed)
        self.observers.tell("end_round", self._view(before, row))
        with self.context.timer.phase("checkpoint"):
            self.parts.writer.wait()  # a round counts as finished once the one before is safe, so at most one is run again
        self.context.timer.memory_mb.append(memory_mb(self.context.experiment.device))
        self.write_row(row)

    def write_row(self, row: dict[str, Any]) -> None:
        """Append the row of a round or task to metrics.jsonl, and tell of it."""
        self.folder.append("metrics.jsonl", as_json(row))
        self.context.tell(row["kind"], **row)

    def _held(self, task: Task, r: int) -> tuple[Uploads, Any]:
        """A round, held again with other sites while too few answer: a task whose rounds were skipped would end unlearned.

        A site that is asked again answers the same, because its randomness has the same address.
        """
        e, states = self.context.experiment, dict(self.federation.client_states)
        told, number = e.told(task, r)
        for attempt in range(e.recipe.federation.retries + 1):
            self.federation.move(told, number, e.participants(task, r, attempt), attempt)
            try:
                return self._hold(task, r, number)
            except RunError as error:
                if error.code != "E320" or attempt == e.recipe.federation.retries:
                    raise
                self.federation.client_states = dict(states)
                faults = self.context.facts.faults
                faults["held_again"] = faults.get("held_again", 0) + 1
                self.context.note("warning", "W370", f"{error.what}; the round is held again with other sites")
        raise AssertionError("a round ends with an answer or an error")

    def _hold(self, task: Task, r: int, number: int) -> tuple[Uploads, Any]:
        """As in the contract: broadcast, ask, learn."""
        method, state, federation = self.context.experiment.method, self.parts.state, self.federation
        rng = self.context.experiment.rng.at("server", task.index, r)
        self.context.tell("phase", phase="clients")
        with self.context.timer.phase("server"):
            with naming_mistakes(method, "broadcast"):
                payload = method.broadcast(state, number, federation, rng.at("broadcast"))
            checked_payload(method, "broadcast", payload)
            with naming_mistakes(method, "client_round"):
                uploads = federation.ask(federation.participants, "client_round", payload)
            self.context.tell("phase", phase="server")
            uploads = self.observers.filter_uploads(self._view(), uploads)
            with naming_mistakes(method, "server_round"):
                after = method.server_round(state, uploads, number, federation, rng.at("round"))
            return uploads, checked_state(method, "server_round", after)

    def _uploads_received(self, uploads: Mapping[int, Payload]) -> None:
        self.observers.tell("uploads_received", self._view(), uploads)

    def _view(self, before: Any = None, row: dict[str, Any] | None = None) -> RunView:
        """The run as observers see it now."""
        context, (task, r) = self.context, self.context.place
        e = context.experiment
        return RunView(
            folder=self.folder.path,
            recipe=context.recipe,
            classes=e.dataset.classes,
            num_tasks=len(e.tasks),
            task=e.tasks[task],
            round=None if r < 0 else r,
            row={} if row is None else row,
            net=e.arch.restore,
            note=lambda words: context.note("info", "I303", words),
            _state=self.parts.state,
            _before=before,
        )

    def record(self, task: Task, found: Evaluation) -> dict[str, Any]:
        """Write down what was measured after the newest task; returns the task's row of metrics.jsonl."""
        facts, e = self.context.facts, self.context.experiment
        missing = len(e.tasks) - task.index - 1
        facts.matrix[task.index :] = [found.per_task + [math.nan] * missing]
        facts.incremental[task.index :] = [_overall(found, e.recipe.tasks.scenario)]
        facts.within_task, facts.confusion = found.within_task, found.confusion
        facts.recall, facts.test_sizes = found.recall, found.sizes
        row = {"kind": "task", "task": task.index, "accuracy": found.per_task, "aa": facts.incremental[-1]}
        if e.orders is not None:
            facts.by_site[task.index :] = [found.by_site]
            row["by_site"] = found.by_site
        return row

    def evaluate(self, task: Task) -> Evaluation:
        """The model on the test images of all tasks so far."""
        e, model = self.context.experiment, self.parts.state.model
        self.context.tell("phase", phase="evaluate")
        with self.context.timer.phase("evaluate"), self.federation.ledger.meter.on("evaluation"):
            tasks = e.tasks[: task.index + 1]
            if e.tested_at_sites:
                return self._counted_at_sites(model, tasks)
            return evaluate(self.federation.net(model), e.dataset, tasks, e.orders)

    def _counted_at_sites(self, model: Mapping[str, Tensor], tasks: Sequence[Task]) -> Evaluation:
        """What the sites count on their hold-outs. Nobody is asked twice about one model: behind a guarantee an answer costs."""
        if self._counted is None or self._counted[0] != len(tasks) or not _alike(self._counted[1], model):
            self._counted = len(tasks), model, self.federation.evaluate(model, tasks)
        return self._counted[2]

    def finish(self) -> dict[str, Any]:
        """The model first, then the tables: whatever happens later, the result of the training is safe."""
        path, e = self.folder.path, self.context.experiment
        save_model(self.folder, e, self.parts.state.model)
        found = results_of(e, self.context.facts, self.federation.ledger, self.parts.state.model)
        write_tables(self.folder.directory("csv"), found, path / "metrics.jsonl")
        write_json(path / "timing.json", self.context.timer.report())
        results = written(found)
        write_json(path / "results.json", results)
        shutil.rmtree(path / FINISHED, ignore_errors=True)  # the results of the tasks before
        self.parts.tell_status("done")
        self.context.tell("done", results=results)
        return results


@contextlib.contextmanager
def _naming(method: Method) -> Iterator[None]:
    """A model that does not fit the network is the method's from the first task on, so the error names the method."""
    try:
        yield
    except ConfigError as error:
        if error.code == "E134":
            error.what = f"{method.title} ({method.name}) made a model that does not fit the network: '{error.where}'"
            error.fix = "let the method send and return a model with all keys and shapes of the one that it was given"
        raise


def _alike(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether two models have the same weights."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def _overall(found: Evaluation, scenario: str) -> float:
    """Accuracy over all seen test images; the macro mean over domains when tasks are domains."""
    return sum(found.per_task) / len(found.per_task) if scenario == "domain" else found.overall


class _Enough(Exception):
    """As many rounds as were asked for are held."""


class _Beginning(Run):
    """A run that stops after so many rounds, or once the time is over and a round is held."""

    num_rounds, end = 1, 0.0

    def _next(self, number: int) -> Step:
        held = sum(step.round is not None for step in self.parts.steps[:number])
        if held >= self.num_rounds or (held and time.monotonic() > self.end):
            raise _Enough
        return super()._next(number)


def first_rounds(resolved: Resolved, folder: Path, num_rounds: int, seconds: float) -> list[dict[str, Any]]:
    """The first rows of metrics.jsonl that this recipe gives here: at most so many rounds, and at least one.

    No round begins after ``seconds``. The files of the beginning stay in ``folder``, which must be new.
    """
    place = RunFolder(folder)
    with place:
        run = _Beginning(resolved, place)
        run.num_rounds, run.end = num_rounds, time.monotonic() + seconds
        with contextlib.suppress(_Enough):
            run.complete()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
