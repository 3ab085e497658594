"""The parts of a run, put together from its recipe: among them its steps in order, and the thread that writes beside the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any

import torch

from rescene.accel.cuda_graph import lasting_stream
from rescene.config import Resolved
from rescene.core.errors import ConfigError
from rescene.data import Task
from rescene.engine.cost_ledger import CostLedger
from rescene.engine.experiment import Experiment, prepare
from rescene.engine.faults import Faults, LateAnswers
from rescene.engine.federation import RunFederation
from rescene.engine.in_process import Sites
from rescene.engine.observers import Guarded, Observer, Observers
from rescene.engine.observers.counts import ClosingsWatch, CostWatch, UploadCounts
from rescene.engine.observers.hostile_sites import Adversary, AttackWatch, Screen
from rescene.engine.observers.leakage_watch import LeakageWatch
from rescene.engine.observers.theory_watch import TheoryWatch
from rescene.engine.run_context import Progress, RunContext, warnings_to
from rescene.engine.run_folder import RunFolder, made_on
from rescene.engine.transport import Call, FederationSettings, Transport
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
    section, promise, faults = (
        e.recipe.federation,
        e.recipe.promise(len(e.tasks)),
        Faults(e.recipe.federation.faults, e.rng),
    )
    sites = Sites(e, context.resolved.digest(), context.folder.path / "ledgers")

    def client(task: Task, number: int) -> Client:
        """What this client works with now: its images, or poisoned ones if it attacks, and its mechanism."""
        here, round = context.place
        site = sites.at(task.index, round, number)
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
