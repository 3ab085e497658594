"""The one loop that owns time.

A run is a schedule of steps: for each task, begin, R rounds, end. After each step the state is committed, so a run that
dies continues with the first step that was not; it is written while the next step is under way. What happens inside a step
belongs to the method.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rescene.config import Resolved
from rescene.data import Task
from rescene.engine.checkpoint import write_json
from rescene.engine.crashpoints import reach
from rescene.engine.evaluate import Evaluation, evaluate
from rescene.engine.facts import notes_of, plain
from rescene.engine.federation import InProcess
from rescene.engine.folder import RunFolder
from rescene.engine.products import save_gallery, save_model
from rescene.engine.restart import Restartable
from rescene.engine.results import results_of, write_tables
from rescene.engine.schedule import Step, schedule
from rescene.engine.watch import Progress, memory_mb, warnings_to
from rescene.errors import ConfigError, RunError
from rescene.methods import Uploads
from rescene.nets import flops_to, state_bytes


def run(
    resolved: Resolved,
    folder: RunFolder,
    progress: Progress = lambda event: None,
    federate: Callable[..., InProcess] = InProcess,
    elsewhere: bool = False,
) -> dict[str, Any]:
    """Run, or continue, the experiment of this folder; returns what results.json holds. ``federate`` reaches the sites.

    ``elsewhere`` lets a run go on with other code or on another machine than it began with; its results then say so.
    """
    if resolved.recipe.sites is not None and federate is InProcess:
        raise ConfigError(
            "E190",
            "this recipe's images live at the sites, so one machine cannot run it",
            fix="rescene deploy run FEDERATION RECIPE",
        )
    if resolved.recipe.federation.faults.words and federate is not InProcess:
        raise ConfigError(
            "E177",
            "this recipe simulates faults, which real sites should be spared",
            why="; ".join(resolved.recipe.federation.faults.words),
            fix="leave federation.faults out",
        )
    folder.check(resolved)
    with folder:
        return Run(resolved, folder, progress, federate, elsewhere).complete()


class Run(Restartable):
    """One run in progress."""

    def complete(self) -> dict[str, Any]:
        """All steps that are not done yet; if something stops them, the status says so and the checkpoint stands."""
        self.done = self._restore()
        self._tell("start", done=self.done, steps=len(self.steps))
        try:
            with warnings_to(self.note), flops_to(self.ledger.meter.add):
                number = self.done
                while number < len(self.steps):
                    self._perform(self._next(number))
                    number += 1
                    reach("step done")
                    self._commit(number)
                with self.timer.phase("checkpoint"):
                    self.writer.wait()
                return self._finish()
        except BaseException as error:
            state = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            with contextlib.suppress(RunError):  # the disk may be what failed
                self._last_write()
                self.folder.status(**self._status(state, self.done))
            raise

    def _next(self, number: int) -> Step:
        """The step to take; a task that was closed goes to its end, once a round of it has been held."""
        step = self.steps[number]
        if step.round and self.closed(step.task):
            self._shorten(step.task.index, step.round)
        return self.steps[number]

    def _shorten(self, task: int, held: int) -> None:
        """From now on this run is one whose plan had only the rounds held; a run that dies here goes on as that one."""
        recipe = self.experiment.recipe.closing(task, held)
        self.resolved = replace(self.resolved, recipe=recipe)
        self.folder.create(self.resolved)
        self.experiment = replace(self.experiment, recipe=recipe)
        self.steps = schedule(self.experiment)

    def _last_write(self) -> None:
        """Something else stopped the run: let the write under way end; its error is told too, but does not replace that."""
        try:
            self.writer.wait()
        except RunError as error:
            self.note("error", error.code, error.what)

    def _perform(self, step: Step) -> None:
        task, method, rng = step.task, self.experiment.method, self.experiment.rng.at("server", step.task.index)
        self.place = (task.index, -1 if step.round is None else step.round)
        self.federation.num_rounds = self.experiment.rounds_told(task)
        if step.round is not None:
            self._round(task, step.round)
            return
        told, _ = self.experiment.told(task, -1)
        self.federation.move(told, None)
        if step.ends:
            plan, before = self.experiment.recipe.sites, self.state
            if plan is not None and plan.tasks[task.index].closed:
                self.note("info", "I340", f"task {task.index} was closed after {plan.tasks[task.index].rounds} rounds")
            if told.announced or task is self.experiment.tasks[-1]:
                with self.timer.phase("server"):
                    self.state = method.end_task(self.state, told, self.federation, rng.at("end"))
            if task is self.experiment.tasks[-1]:
                save_model(self.folder, self.experiment, self.state.model)
            with self.timer.phase("theory"):
                self.facts.theory += self.theory.task(task, before, self.state)
            self._after_task(task)
            return
        self.leakage.begin(self.experiment.present(task))
        with self.timer.phase("server"):
            if self.state is None:
                self.state = method.init(self.experiment.initial_net(), self.experiment.rng.at("init"))
            if told.announced or task is self.experiment.tasks[0]:
                self.state = method.begin_task(self.state, told, self.federation, rng.at("begin"))

    def _round(self, task: Task, r: int) -> None:
        e, before, self.leakage.round = self.experiment, self.state, r
        uploads, self.state = self._held(task, r)
        with self.timer.phase("theory"):
            self.theory.round(task, r + 1, before.model, self.state)
        self._note_closings(before)
        self.ledger.states(self.state, self.federation.largest_state(), state_bytes(self.state.model))
        every = e.recipe.federation.evaluate_every
        accuracy = self._evaluate(task).overall if every and (r + 1) % every == 0 else None
        up, down = self.federation.traffic
        row = {
            "kind": "round",
            "task": task.index,
            "round": r,
            "participants": list(self.federation.participants),
            "accuracy": accuracy,
            "uplink_bytes": up,
            "downlink_bytes": down,
            "sites": self.federation.traffic_by_site(),
            "notes": notes_of(self.state, uploads),
        }
        with self.timer.phase("checkpoint"):
            self.writer.wait()  # a round counts as finished once the one before is safe, so at most one is ever run again
        self.folder.append("metrics.jsonl", plain(row))
        self.timer.memory_mb.append(memory_mb(e.device))
        self._tell("round", **row)

    def _held(self, task: Task, r: int) -> tuple[Uploads, Any]:
        """A round, held again with other sites while too few answer: a task whose rounds were skipped would end unlearned.

        A site that is asked again answers the same, because its randomness has the same address.
        """
        e, states = self.experiment, dict(self.federation.client_states)
        told, number = e.told(task, r)
        for attempt in range(e.recipe.federation.retries + 1):
            self.attempt = attempt
            self.federation.move(told, number, e.participants(task, r, attempt))
            try:
                return self._hold(task, r)
            except RunError as error:
                if error.code != "E320" or attempt == e.recipe.federation.retries:
                    raise
                self.federation.client_states = dict(states)
                self.facts.faults["held_again"] = self.facts.faults.get("held_again", 0) + 1
                self.note("warning", "W370", f"{error.what}; the round is held again with other sites")
        raise AssertionError("a round ends with an answer or an error")

    def _hold(self, task: Task, r: int) -> tuple[Uploads, Any]:
        """As in the contract: broadcast, ask, learn."""
        e, rng = self.experiment, self.experiment.rng.at("server", task.index, r)
        told, number = e.told(task, r)
        self._tell("phase", phase="clients")
        with self.timer.phase("server"):
            payload = e.method.broadcast(self.state, number, self.federation, rng.at("broadcast"))
            uploads = self.federation.ask(self.federation.participants, "client_round", payload)
            self._tell("phase", phase="server")
            if e.recipe.federation.screen != "none":
                net, pool = self.federation.net(self.state.model), getattr(self.state, "pool", ())
                uploads = self.screen.passed(uploads, net, pool, told, r, self.facts)
            return uploads, e.method.server_round(self.state, uploads, number, self.federation, rng.at("round"))

    def _note_closings(self, before: Any) -> None:
        """Buffers that the method has closed by itself, because nobody announces the end of a task."""
        for label, number in getattr(self.state, "closings", ())[len(getattr(before, "closings", ())) :]:
            self.facts.closings.append([label, number])
            name = self.experiment.dataset.classes[label]
            self.note("info", "I302", f"class {name} stayed away: its buffer closed after round {number} of the stream")

    def _after_task(self, task: Task) -> None:
        found = self._evaluate(task)
        if self.adversary.clients:
            net = self.federation.net(self.state.model)
            self.facts.attack_success = self.adversary.success(net, self.experiment.tasks[: task.index + 1])
        with self.timer.phase("leakage"):
            summary = self.leakage.summary()
        if summary is not None:
            self.facts.leakage.append({"task": task.index, **summary})
            with self.timer.phase("leakage"):
                self.leakage.means.end(self.experiment.present(task))
            save_gallery(self.folder, self.leakage)
        self._record(task, found)

    def _record(self, task: Task, found: Evaluation) -> None:
        """What was measured after the newest task."""
        facts, missing = self.facts, len(self.experiment.tasks) - task.index - 1
        facts.matrix[task.index :] = [found.per_task + [math.nan] * missing]
        facts.incremental[task.index :] = [_overall(found, self.experiment.recipe.tasks.scenario)]
        facts.within_task, facts.confusion = found.within_task, found.confusion
        facts.recall, facts.test_sizes = found.recall, found.sizes
        row = {"kind": "task", "task": task.index, "accuracy": found.per_task, "aa": facts.incremental[-1]}
        row |= {f"{side}_flops": self.ledger.meter.flops[side] for side in ("client", "server")}  # so far
        self.folder.append("metrics.jsonl", plain(row))
        self._tell("task", **row)

    def _evaluate(self, task: Task) -> Evaluation:
        self._tell("phase", phase="evaluate")
        with self.timer.phase("evaluate"), self.ledger.meter.on("evaluation"):
            tasks = self.experiment.tasks[: task.index + 1]
            if self.experiment.tested_at_sites:
                return self.federation.evaluate(self.state.model, tasks)
            return evaluate(self.federation.net(self.state.model), self.experiment.dataset, tasks)

    def _finish(self) -> dict[str, Any]:
        """The model first, then the tables: whatever happens later, the result of the training is safe."""
        path, e = self.folder.path, self.experiment
        save_model(self.folder, self.experiment, self.state.model)
        results = results_of(e, vars(self.facts), self.ledger)
        write_tables(self.folder.directory("csv"), results, path / "metrics.jsonl")
        write_json(path / "timing.json", self.timer.report())
        write_json(path / "results.json", results)
        self.folder.status(**self._status("done", self.done))
        self._tell("done", results=results)
        return results


def _overall(found: Evaluation, scenario: str) -> float:
    """Accuracy over all seen test images; the macro mean over domains when tasks are domains."""
    return sum(found.per_task) / len(found.per_task) if scenario == "domain" else found.overall
