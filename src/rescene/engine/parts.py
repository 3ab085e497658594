"""What a run consists of, put together from its recipe, and the events it tells of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rescene.config import Resolved
from rescene.data import Task
from rescene.engine.adversary import Adversary
from rescene.engine.class_means import may_record
from rescene.engine.experiment import Experiment, prepare
from rescene.engine.facts import Facts
from rescene.engine.faults import Faults
from rescene.engine.federation import InProcess
from rescene.engine.folder import RunFolder, made_on
from rescene.engine.ledger import FlopMeter, Ledger
from rescene.engine.schedule import schedule
from rescene.engine.screen import Screen
from rescene.engine.sites import Sites
from rescene.engine.theory import TheoryWatch
from rescene.engine.watch import LeakageWatch, Progress, Timer, warnings_to
from rescene.engine.writer import Writer


class Parts:
    """The method's state, the federation, and what is noticed on the way."""

    def __init__(
        self,
        resolved: Resolved,
        folder: RunFolder,
        progress: Progress,
        federate: Callable[..., InProcess] = InProcess,
        elsewhere: bool = False,
    ) -> None:
        self.elsewhere = elsewhere  # may go on here although it began with other code or on another machine
        self.folder, self.progress, self.timer, self.resolved = folder, progress, Timer(), resolved
        self.closed: Callable[[Task], bool] = lambda task: False  # whether somebody wants this task to end
        self.facts, self.place = Facts(), (0, -1)
        self.early: list[dict[str, Any]] = []
        with self.timer.phase("prepare"), warnings_to(self._keep_early):
            self.experiment: Experiment = prepare(resolved.recipe)
        folder.create(resolved)
        e = self.experiment
        self.writer, self.done = Writer(e.device), 0  # steps whose checkpoint is on disk
        self.steps = schedule(e)
        self.made_on = made_on(e.device)
        self.leakage = LeakageWatch(e.dataset, e.recipe.federation.num_rounds, may_record(e.recipe, len(e.tasks)))
        self.theory = TheoryWatch(e)
        self.ledger = Ledger(FlopMeter(e.arch))
        federation = resolved.recipe.federation
        sites = Sites(e, resolved.digest(), folder.path / "ledgers")
        self.faults, self.attempt = Faults(federation.faults, e.rng), 0
        self.adversary = Adversary(federation.faults.attack, federation.faults.attackers, e.dataset, e.tasks)
        promise = e.recipe.promise(len(e.tasks))
        self.screen = Screen(folder, e.dataset, self.note)
        self.federation: InProcess = federate(
            e.method,
            e.arch,
            lambda task, client: self.adversary.at(
                client,
                e.shard(
                    e.tasks[self.place[0]],
                    client,
                    self.federation.net,
                    sites.at(task.index, self.place[1], client),
                    self.leakage.see_start,
                    self.place[1],
                ),
            ),
            self.ledger,
            self.note,
            num_clients=federation.num_clients,
            num_rounds=federation.num_rounds,
            transform=e.dataset.transform,
            device=e.device,
            rng=e.rng,
            form=federation.engine,
            quorum=federation.quorum,
            wire=federation.wire,
            mechanism=promise.mechanism if promise else None,
        )
        self.federation.clients = self.federation.participants = e.clients
        self.federation.observe = self._observe
        self.federation.absent = lambda clients: self.faults.absent(
            clients, self.place, self.attempt, self.facts.faults, self.note
        )
        self.federation.phase = lambda: self.timer.phase("client")
        self.state: Any = None
        self._setting = {
            "method": e.method.title,
            "num_tasks": len(e.tasks),
            "num_rounds": federation.num_rounds,
        }

    def _observe(self, uploads: Any) -> None:
        with self.timer.phase("leakage"):
            self.leakage.look(uploads)
        counts = {
            name: sum(int(u.get("notes", {}).get(name, 0)) for u in uploads.values())
            for name in ("num_fallbacks", "num_withheld", "num_declined", "num_suppressed")
        }
        for name, count in counts.items():
            setattr(self.facts, name, getattr(self.facts, name) + count)
        if withheld := counts["num_withheld"]:
            self.note("info", "I310", f"{withheld} surrogates were still real images of a small class and stayed home")
            if not any(len(u.get("images", ())) for u in uploads.values()):
                fix = "give each site more images of a class (federation.num_clients) or ask for fewer (method.ipc)"
                self.note("warning", "W311", f"no surrogate left any site, so the server learned nothing new: {fix}")
        if fallbacks := counts["num_fallbacks"]:
            self.note("warning", "W301", f"{fallbacks} surrogates became non-finite and fell back to their start image")

    def note(self, level: str, code: str, message: str, client: int | None = None) -> None:
        """Write an event; failures of clients are counted."""
        if client is not None and level == "error":
            self.facts.num_client_failures += 1
        task, round = self.place
        row = {"task": task, "round": round, "level": level, "code": code, "message": message, "client": client}
        self.folder.append("events.jsonl", row)
        self._tell("event", **row)

    def _keep_early(self, level: str, code: str, message: str) -> None:
        self.early.append({"level": level, "code": code, "message": message})

    def _tell_early(self) -> None:
        for event in self.early:
            self.note(**event)

    def _tell(self, what: str, **fields: Any) -> None:
        self.progress({"event": what, "place": self.place, "elapsed_s": self.timer.total(), **self._setting, **fields})
