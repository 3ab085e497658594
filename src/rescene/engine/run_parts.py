"""The parts of a run: put together from its recipe, saved after each step, and restored from what was saved.

Among them are the steps in order, and the thread that writes beside the loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any

import torch

from rescene.accel.cuda_graph import lasting_stream
from rescene.config import Resolved
from rescene.core.errors import ConfigError, RunError
from rescene.core.json_files import as_json
from rescene.core.record import to_device
from rescene.core.results import Grown, Moved
from rescene.data import Task
from rescene.engine.checkpoint import Saved
from rescene.engine.cost_ledger import CostLedger
from rescene.engine.experiment import Experiment, prepare
from rescene.engine.faults import Faults, LateAnswers
from rescene.engine.federation import RunFederation
from rescene.engine.observers import Guarded, Observer, Observers
from rescene.engine.observers.counts import ClosingsWatch, CostWatch, UploadCounts
from rescene.engine.observers.hostile_sites import Adversary, AttackWatch, Screen
from rescene.engine.observers.leakage_watch import LeakageWatch
from rescene.engine.observers.theory_watch import TheoryWatch
from rescene.engine.run_context import Progress, RunContext, restored, warnings_to
from rescene.engine.run_folder import RunFolder, made_on
from rescene.engine.transport import Call, FederationSettings, Transport, simulated_site
from rescene.methods.base import Client
from rescene.nets.cost import FlopMeter


class Writer:
    """At most one piece of work is under way. Its error is raised by the next ``start`` or ``wait``, never lost."""

    def __init__(self, device: torch.device) -> None:
        self._stream = lasting_stream(device) if device.type == "cuda" else None
        self._under_way: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin ``work`` once what was started before is done. It must read only what nobody changes any more."""
        self.wait()
        if self._stream is not None:  # what is to be copied from the device may still be being computed there
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        thread = ThreadPoolExecutor(1, thread_name_prefix="rescene-writer")
        self._under_way = thread.submit(copy_context().run, self._do, work)  # warnings reach the run that started it
        thread.shutdown(wait=False)  # it ends with its work; an exiting interpreter waits for it

    def wait(self) -> None:
        """Until nothing is under way. An interrupt while waiting leaves the work going, to be waited for again."""
        if self._under_way is not None:
            error = self._under_way.exception()
            self._under_way = None
            if error is not None:
                raise error

    def _do(self, work: Callable[[], None]) -> None:
        with torch.cuda.stream(self._stream):  # no stream: nothing changes
            work()


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


@dataclass
class RunParts:
    """What a run consists of. ``state`` is the method's, and ``done`` counts the steps whose checkpoint is on disk."""

    context: RunContext
    federation: RunFederation
    observers: Observers
    leakage: LeakageWatch
    steps: list[Step]
    writer: Writer
    made_on: dict[str, Any]
    state: Any = None
    done: int = 0

    @property
    def experiment(self) -> Experiment:
        return self.context.experiment

    @property
    def folder(self) -> RunFolder:
        return self.context.folder

    def shorten(self, task: int, held: int) -> None:
        """From now on this run is one whose plan had only the rounds held; a run that dies here goes on as that one."""
        context, recipe = self.context, self.experiment.recipe.closing(task, held)
        context.resolved = replace(context.resolved, recipe=recipe)
        self.folder.create(context.resolved)
        context.experiment = replace(self.experiment, recipe=recipe)
        self.steps = schedule(self.experiment)

    def commit(self, number: int) -> None:
        """Begin to write the state after ``number`` steps; it is written while the next step is under way."""
        context, folder, late = self.context, self.folder, self.federation.late_answers
        with context.timer.phase("checkpoint"):
            self.writer.wait()  # the commit before; its seconds belong into the facts of this one
            clients = {str(k): state for k, state in sorted(self.federation.client_states.items())}
            under_way = {} if late is None else {"under_way": late.under_way_tree()}
            tree = {"state": self.state, "clients": clients, **under_way, **self.observers.states()}
            facts = {
                "facts": as_json(context.facts),
                "ledger": self.federation.ledger.facts(),
                "lengths": folder.lengths(),
                "timing": context.timer.report(),
                "made_on": self.made_on,
            }
            status = self._status("running", number)

            def write() -> None:
                with context.timer.beside("checkpoint"):
                    folder.sync()
                    folder.checkpoints.save(number, tree, facts)
                    self.done = number
                    folder.status(**status)

            self.writer.start(write)

    def tell_status(self, state: str) -> None:
        """Write into status.json where the run stands."""
        self.folder.status(**self._status(state, self.done))

    def _status(self, state: str, done: int) -> dict[str, Any]:
        context = self.context
        after = context.facts.incremental
        measured = {"aa": as_json(after[-1] if after else None), "aa_tasks": len(after)}
        (task, round), steps = context.place, len(self.steps)
        place = {"state": state, "task": task, "round": round, "done": done, "steps": steps}
        return place | measured | context.setting | {"num_rounds": self.experiment.recipe.rounds_of(task)}

    def restore(self, elsewhere: bool) -> None:
        """Load the newest good checkpoint, if there is one. With ``elsewhere`` it may be of other code or another machine."""
        context, folder = self.context, self.folder
        folder.sweep()
        with warnings_to(context.note_later):
            saved = folder.checkpoints.load()
            folder.cut(saved.facts["lengths"] if saved else dict.fromkeys(folder.lengths(), 0))
        if saved is None:
            folder.describe(self.experiment)
            for words in self.experiment.recipe.federation.simulated:
                context.note_later("warning", "W371", f"SIMULATED {words}")
        else:
            context.note_later("info", "I401", f"resumed after step {saved.step}")
            self.adopt(saved, elsewhere)
        context.note_kept()
        self.done = saved.step if saved else 0

    def adopt(self, saved: Saved, elsewhere: bool) -> None:
        """Be where the checkpoint was made. With ``elsewhere`` that may have been other code or another machine."""
        context, e, federation = self.context, self.experiment, self.federation
        there = saved.facts.get("made_on") or self.folder.environment()
        changed = {key: [there.get(key), now] for key, now in self.made_on.items() if there.get(key) != now}
        if changed and not elsewhere:
            raise self._refusal(changed)
        self.state = to_device(saved.tree["state"], e.device)
        federation.client_states = {int(k): to_device(v, e.device) for k, v in saved.tree["clients"].items()}
        if federation.late_answers is not None:
            found = saved.tree.get("under_way", {})
            federation.late_answers.under_way = {int(k): to_device(v, e.device) for k, v in found.items()}
        context.facts = restored(saved.facts["facts"])
        self._fit_plan(saved.step)
        federation.ledger.restore(saved.facts["ledger"])
        context.timer.resume(saved.facts["timing"])
        self.observers.restore(saved.tree)
        step = self.steps[saved.step - 1]
        context.place = (step.task.index, -1 if step.round is None else step.round)
        if changed:
            context.facts.elsewhere.append(Moved(saved.step, dict(changed)))
            told = f"went on elsewhere after step {saved.step}, not bit for bit: {'; '.join(_changes(changed))}"
            context.note_later("warning", "W403", told)

    def _refusal(self, changed: dict[str, list[Any]]) -> RunError:
        """The error, also written to the events: the operator of a run across sites sees only those."""
        error = RunError(
            "E416",
            "this run began with other code or on another machine, so it would not end with the same bits",
            where=str(self.folder.path),
            why="\n".join(_changes(changed)),
            fix="go on where it began, or add --elsewhere (rescene resume, continue, run and deploy run have it): the results then say so",
        )
        self.context.note("error", error.code, f"{error.what}: {'; '.join(_changes(changed))}. {error.fix}", tell=False)
        return error

    def _fit_plan(self, done: int) -> None:
        """The plan may have grown since the checkpoint: its matrix gets wider, and what is done must still be in it."""
        facts, folder = self.context.facts, self.folder
        ended = sum(step.ends for step in self.steps[:done])
        if done > len(self.steps) or ended != len(facts.matrix):
            raise RunError(
                "E409",
                "the plan has fewer rounds than were already held",
                where=str(folder.path),
                fix="put the rounds of finished tasks back; rescene deploy close-task ends one early",
            )
        num_tasks, at_sites = len(self.experiment.tasks), self.experiment.recipe.sites is not None
        grew = bool(facts.matrix) and len(facts.matrix[-1]) < num_tasks
        if grew and not at_sites:
            facts.continued.append(Grown(after_task=len(facts.matrix) - 1, num_tasks=num_tasks))
            told = f"{num_tasks - len(facts.matrix)} task(s) were added to a finished run of {len(facts.matrix)}"
            self.context.note_later("info", "I402", told)
        facts.matrix = [row + [math.nan] * (num_tasks - len(row)) for row in facts.matrix]
        if done < len(self.steps):
            folder.set_aside()  # results of the plan as it was before
        if grew or at_sites:
            folder.describe(self.experiment)


def _changes(changed: dict[str, list[Any]]) -> list[str]:
    """
    >>> _changes({"threads": [4, 2], "code": ["0123456789abcdef" * 4, None]})
    ['threads: 4 -> 2', 'code: 0123456789ab -> unknown']
    """

    def short(value: Any) -> str:
        return "unknown" if value is None else value[:12] if len(str(value)) == 64 else str(value)

    return [f"{key}: {short(before)} -> {short(now)}" for key, (before, now) in changed.items()]


def check_transport(resolved: Resolved, transport: Transport) -> None:
    """Refuse a recipe that this transport cannot run."""
    if resolved.recipe.sites is not None and transport.here:
        raise ConfigError(
            "E190",
            "this recipe's images live at the sites, so one machine cannot run it",
            fix="rescene deploy run FEDERATION RECIPE",
        )
    if resolved.recipe.federation.simulated and not transport.here:
        raise ConfigError(
            "E177",
            "this recipe simulates faults, which real sites should be spared",
            why="; ".join(resolved.recipe.federation.simulated),
            fix="leave federation.faults and federation.delay out",
        )


def set_up(
    resolved: Resolved, folder: RunFolder, progress: Progress, transport: Transport, callbacks: Sequence[Guarded] = ()
) -> RunParts:
    """Prepare the experiment of this folder and everything that takes part in it."""
    context = RunContext(resolved, folder, progress)
    with context.timer.phase("prepare"), warnings_to(context.note_later):
        e = context.experiment = prepare(resolved.recipe)
    if not folder.begun:
        e.check_start()
    folder.create(resolved)
    section, leakage = e.recipe.federation, LeakageWatch(context)
    adversary = Adversary(section.faults.attack, section.faults.attackers, e.dataset, e.tasks)
    federation = _federation(context, transport, leakage, adversary)
    own: list[Observer] = [leakage, TheoryWatch(context), UploadCounts(context), ClosingsWatch(context)]
    own += [Screen(context, federation.net)] if section.screen != "none" else []
    own += [AttackWatch(adversary, context, federation.net)] if adversary.clients else []
    observers = Observers([*own, CostWatch(federation)], callbacks)
    return RunParts(context, federation, observers, leakage, schedule(e), Writer(e.device), made_on(e.device))


def _federation(
    context: RunContext, transport: Transport, leakage: LeakageWatch, adversary: Adversary
) -> RunFederation:
    e = context.experiment
    section, promise = e.recipe.federation, e.recipe.promise(len(e.tasks))
    faults = Faults(section.faults, e.rng)
    digest, ledgers = context.resolved.digest(), context.folder.path / "ledgers"

    def client(task: Task, number: int) -> Client:
        """What this client works with now: its images, or poisoned ones if it attacks, and its mechanism."""
        here, round = context.place
        site = simulated_site(e, digest, ledgers, task.index, round, number)
        shard = context.experiment.shard(e.tasks[here], number, federation.net, site, leakage.see_start, round)
        return adversary.at(number, shard)

    def absent(clients: Sequence[int], call: Call) -> tuple[Sequence[int], Sequence[int]]:
        return faults.absent(clients, context.place, call.attempt, context.facts.faults, context.note)

    settings = FederationSettings(
        e.method,
        e.arch,
        client,
        CostLedger(FlopMeter(e.arch)),
        context.note,
        num_clients=section.num_clients,
        num_rounds=section.num_rounds,
        transform=e.dataset.transform,
        device=e.device,
        rng=e.rng,
        clients=e.clients,
        form=section.engine,
        quorum=section.quorum,
        wire=section.wire,
        mechanism=promise.mechanism if promise else None,
        absent=absent,
    )
    federation = RunFederation(settings, transport, _late_answers(context) if section.delay else None)
    federation.phase = lambda: context.timer.phase("client")
    return federation


def _late_answers(context: RunContext) -> LateAnswers:
    e = context.experiment
    section = e.recipe.federation
    return LateAnswers(
        e.method,
        section.delay,
        section.staleness,
        section.staleness_exponent,
        section.num_rounds,
        e.rng,
        context.note,
        lambda: context.facts.late_answers,  # of the facts of a checkpoint, once there are some
    )
