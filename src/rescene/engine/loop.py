"""The one loop that owns time.

A run is a schedule of steps: for each task, begin, R rounds, end. After each step the state is committed, so a run that
dies continues with the first step that was not; it is written while the next step is under way. What happens inside a step
belongs to the method.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from safetensors.torch import save

from rescene.config import Resolved
from rescene.data import Task
from rescene.engine.adversary import Adversary
from rescene.engine.checkpoint import Saved, write_atomically, write_json
from rescene.engine.crashpoints import reach
from rescene.engine.evaluate import Evaluation, evaluate
from rescene.engine.experiment import Experiment, prepare
from rescene.engine.facts import Facts, notes_of, plain, restored
from rescene.engine.faults import Faults
from rescene.engine.federation import InProcess
from rescene.engine.folder import RunFolder, made_on
from rescene.engine.ledger import FlopMeter, Ledger
from rescene.engine.results import results_of, write_tables
from rescene.engine.screen import Screen
from rescene.engine.sites import Sites
from rescene.engine.theory import TheoryWatch
from rescene.engine.watch import LeakageWatch, Progress, Timer, memory_mb, warnings_to
from rescene.engine.writer import Writer
from rescene.errors import ConfigError, RunError
from rescene.methods import Uploads
from rescene.nets import flops_to, state_bytes
from rescene.record import to_device
from rescene.versions import MODEL


@dataclass(frozen=True)
class Step:
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
    return Run(resolved, folder, progress, federate, elsewhere).complete()


class Run:
    """One run in progress: the method's state, the federation, and what is noticed on the way."""

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
        self.leakage = LeakageWatch(e.dataset)
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
                self._save_model()
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
        summary = self.leakage.summary()
        if summary is not None:
            self.facts.leakage.append({"task": task.index, **summary})
            self._save_gallery()
        self._record(task, found)

    def _record(self, task: Task, found: Evaluation) -> None:
        """What was measured after the newest task."""
        facts, missing = self.facts, len(self.experiment.tasks) - task.index - 1
        facts.matrix[task.index :] = [found.per_task + [math.nan] * missing]
        facts.incremental[task.index :] = [_overall(found, self.experiment.recipe.tasks.scenario)]
        facts.within_task, facts.confusion = found.within_task, found.confusion
        facts.recall, facts.test_sizes = found.recall, found.sizes
        row = {"kind": "task", "task": task.index, "accuracy": found.per_task, "aa": facts.incremental[-1]}
        self.folder.append("metrics.jsonl", plain(row))
        self._tell("task", **row)

    def _evaluate(self, task: Task) -> Evaluation:
        self._tell("phase", phase="evaluate")
        with self.timer.phase("evaluate"), self.ledger.meter.on("evaluation"):
            tasks = self.experiment.tasks[: task.index + 1]
            if self.experiment.tested_at_sites:
                return self.federation.evaluate(self.state.model, tasks)
            return evaluate(self.federation.net(self.state.model), self.experiment.dataset, tasks)

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

    def _tell(self, what: str, **fields: Any) -> None:
        self.progress({"event": what, "place": self.place, "elapsed_s": self.timer.total(), **self._setting, **fields})

    def _commit(self, number: int) -> None:
        with self.timer.phase("checkpoint"):
            self.writer.wait()  # the commit before; its seconds belong into the facts of this one
            tree = {
                "state": self.state,
                "clients": {str(k): state for k, state in sorted(self.federation.client_states.items())},
                "leakage": self.leakage.tree(),
                "theory": self.theory.tree(),
            }
            facts = {
                "facts": plain(vars(self.facts)),
                "ledger": self.ledger.facts(),
                "lengths": self.folder.lengths(),
                "timing": self.timer.report(),
                "made_on": self.made_on,
            }
            status = self._status("running", number)

            def write() -> None:
                with self.timer.beside("checkpoint"):
                    self.folder.sync()
                    self.folder.checkpoints.save(number, tree, facts)
                    self.done = number
                    self.folder.status(**status)

            self.writer.start(write)

    def _status(self, state: str, done: int) -> dict[str, Any]:
        aa = self.facts.incremental[-1] if self.facts.incremental else None
        (task, round), steps = self.place, len(self.steps)
        place = {"state": state, "task": task, "round": round, "done": done, "steps": steps, "aa": plain(aa)}
        return place | self._setting | {"num_rounds": self.experiment.recipe.rounds_of(task)}

    def _restore(self) -> int:
        """Load the newest good checkpoint; returns the number of steps done (0: from the beginning)."""
        self.folder.sweep()
        with warnings_to(self._keep_early):
            saved = self.folder.checkpoints.load()
            self.folder.cut(saved.facts["lengths"] if saved else dict.fromkeys(self.folder.lengths(), 0))
        if saved is None:
            self.folder.describe(self.experiment)
            for words in self.experiment.recipe.federation.faults.words:
                self._keep_early("warning", "W371", f"SIMULATED {words}")
        else:
            self._keep_early("info", "I401", f"resumed after step {saved.step}")
            self._adopt(saved)
        self._tell_early()
        return saved.step if saved else 0

    def _adopt(self, saved: Saved) -> None:
        """Be where the checkpoint was made."""
        e, there = self.experiment, saved.facts.get("made_on") or self.folder.environment()
        changed = {key: [there.get(key), now] for key, now in self.made_on.items() if there.get(key) != now}
        if changed and not self.elsewhere:
            raise self._refused(changed)
        self.state = to_device(saved.tree["state"], e.device)
        self.federation.client_states = {int(k): to_device(v, e.device) for k, v in saved.tree["clients"].items()}
        self.facts = restored(saved.facts["facts"])
        self._fit_plan(saved.step)
        self.ledger.restore(saved.facts["ledger"])
        self.timer.resume(saved.facts["timing"])
        step = self.steps[saved.step - 1]
        self.leakage.restore(e.present(step.task), saved.tree["leakage"])
        self.theory.restore(saved.tree.get("theory", {}))
        self.place = (step.task.index, -1 if step.round is None else step.round)
        if changed:
            self.facts.elsewhere.append({"step": saved.step, "changed": changed})
            told = f"went on elsewhere after step {saved.step}, not bit for bit: {'; '.join(_changes(changed))}"
            self._keep_early("warning", "W403", told)

    def _tell_early(self) -> None:
        for event in self.early:
            self.note(**event)

    def _refused(self, changed: dict[str, list[Any]]) -> RunError:
        """In the events too: of a run across sites the operator sees those."""
        error = RunError(
            "E416",
            "this run began with other code or on another machine, so it would not end with the same bits",
            where=str(self.folder.path),
            why="\n".join(_changes(changed)),
            fix="go on where it began, or add --elsewhere (rescene resume, run and deploy run have it): the results then say so",
        )
        self.note("error", error.code, f"{error.what}: {'; '.join(_changes(changed))}. {error.fix}")
        return error

    def _fit_plan(self, done: int) -> None:
        """The plan may have grown since the checkpoint: its matrix gets wider, and what is done must still be in it."""
        ended = sum(step.ends for step in self.steps[:done])
        if done > len(self.steps) or ended != len(self.facts.matrix):
            raise RunError(
                "E409",
                "the plan has fewer rounds than were already held",
                where=str(self.folder.path),
                fix="put the rounds of finished tasks back; rescene deploy close-task ends one early",
            )
        num_tasks = len(self.experiment.tasks)
        self.facts.matrix = [row + [math.nan] * (num_tasks - len(row)) for row in self.facts.matrix]
        if done < len(self.steps):
            (self.folder.path / "results.json").unlink(missing_ok=True)  # they were of the plan as it was before
        if self.experiment.recipe.sites is not None:
            self.folder.describe(self.experiment)

    def _finish(self) -> dict[str, Any]:
        """The model first, then the tables: whatever happens later, the result of the training is safe."""
        path, e = self.folder.path, self.experiment
        self._save_model()
        results = results_of(e, vars(self.facts), self.ledger)
        write_tables(self.folder.directory("csv"), results, path / "metrics.jsonl")
        write_json(path / "timing.json", self.timer.report())
        write_json(path / "results.json", results)
        self.folder.status(**self._status("done", self.done))
        self._tell("done", results=results)
        return results

    def _save_model(self) -> None:
        """The final model, before anything is evaluated or exported that might fail."""
        e, folder = self.experiment, self.folder.directory("model")
        model = {key: value.detach().cpu().contiguous() for key, value in self.state.model.items()}
        write_atomically(folder / "final.safetensors", save(model))
        card = {"schema": MODEL, "arch": vars(e.arch), "classes": list(e.dataset.classes[: e.tasks[-1].num_seen])}
        look: dict[str, Any] = {"mean": e.dataset.transform.mean, "std": e.dataset.transform.std}
        if e.recipe.model.lens is not None:
            look |= {"lens": e.recipe.model.lens, "picture_size": e.dataset.picture_size}
        write_json(folder / "model.json", card | look)

    def _save_gallery(self) -> None:
        """A few surrogates per class beside their nearest real images, of all tasks so far."""
        pictures, rows = self.leakage.gallery()
        write_atomically(self.folder.path / "surrogates.safetensors", save(pictures))
        write_json(self.folder.path / "surrogates.json", {"schema": 1, "pairs": rows})


def _changes(changed: dict[str, list[Any]]) -> list[str]:
    """
    >>> _changes({"threads": [4, 2], "code": ["0123456789abcdef" * 4, None]})
    ['threads: 4 -> 2', 'code: 0123456789ab -> unknown']
    """

    def short(value: Any) -> str:
        return "unknown" if value is None else value[:12] if len(str(value)) == 64 else str(value)

    return [f"{key}: {short(before)} -> {short(now)}" for key, (before, now) in changed.items()]


def _overall(found: Evaluation, scenario: str) -> float:
    """Accuracy over all seen test images; the macro mean over domains when tasks are domains."""
    return sum(found.per_task) / len(found.per_task) if scenario == "domain" else found.overall
