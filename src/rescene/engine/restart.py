"""What a run writes after each step, and how it goes on from there."""

from __future__ import annotations

import math
from typing import Any

from rescene.engine.checkpoint import Saved
from rescene.engine.facts import plain, restored
from rescene.engine.parts import Parts
from rescene.engine.watch import warnings_to
from rescene.errors import RunError
from rescene.record import to_device


class Restartable(Parts):
    """A run that can be left after any step."""

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


def _changes(changed: dict[str, list[Any]]) -> list[str]:
    """
    >>> _changes({"threads": [4, 2], "code": ["0123456789abcdef" * 4, None]})
    ['threads: 4 -> 2', 'code: 0123456789ab -> unknown']
    """

    def short(value: Any) -> str:
        return "unknown" if value is None else value[:12] if len(str(value)) == 64 else str(value)

    return [f"{key}: {short(before)} -> {short(now)}" for key, (before, now) in changed.items()]
