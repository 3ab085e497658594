"""The parts of a run, put together from its recipe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rescene.config import Resolved
from rescene.core.errors import ConfigError
from rescene.data import Task
from rescene.engine.background_writer import Writer
from rescene.engine.cost_ledger import CostLedger
from rescene.engine.experiment import Experiment, prepare
from rescene.engine.faults import Faults
from rescene.engine.federation import RunFederation
from rescene.engine.late_answers import LateAnswers
from rescene.engine.observers import Guarded, Observer, Observers
from rescene.engine.observers.adversary import Adversary, AttackWatch
from rescene.engine.observers.cost_watch import CostWatch
from rescene.engine.observers.drift_record import ClosingsWatch
from rescene.engine.observers.leakage_watch import LeakageWatch
from rescene.engine.observers.screen import Screen
from rescene.engine.observers.theory_watch import TheoryWatch
from rescene.engine.observers.upload_counts import UploadCounts
from rescene.engine.run_context import Progress, RunContext, warnings_to
from rescene.engine.run_folder import RunFolder, made_on
from rescene.engine.schedule import Step, schedule
from rescene.engine.site_privacy import Sites
from rescene.engine.transport import Call, FederationSettings, Transport
from rescene.methods.base import Client
from rescene.nets.cost import FlopMeter


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
