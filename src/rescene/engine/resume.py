"""What a run writes after each step, and how it goes on from there."""

from __future__ import annotations

import math
from typing import Any

from rescene.core.errors import RunError
from rescene.core.record import to_device
from rescene.core.results import Grown, Moved
from rescene.engine.checkpoint import Saved
from rescene.engine.run_context import plain, restored, saved, warnings_to
from rescene.engine.run_setup import RunParts


def commit(run: RunParts, number: int) -> None:
    """Begin to write the state after ``number`` steps; it is written while the next step is under way."""
    context, folder = run.context, run.folder
    with context.timer.phase("checkpoint"):
        run.writer.wait()  # the commit before; its seconds belong into the facts of this one
        clients = {str(k): state for k, state in sorted(run.federation.client_states.items())}
        tree = {"state": run.state, "clients": clients, **_under_way(run), **run.observers.states()}
        facts = {
            "facts": saved(context.facts),
            "ledger": run.federation.ledger.facts(),
            "lengths": folder.lengths(),
            "timing": context.timer.report(),
            "made_on": run.made_on,
        }
        status = status_of(run, "running", number)

        def write() -> None:
            with context.timer.beside("checkpoint"):
                folder.sync()
                folder.checkpoints.save(number, tree, facts)
                run.done = number
                folder.status(**status)

        run.writer.start(write)


def _under_way(run: RunParts) -> dict[str, Any]:
    """Answers on their way to the server; nothing where all are on time."""
    late = run.federation.late_answers
    return {} if late is None else {"under_way": late.under_way_tree()}


def status_of(run: RunParts, state: str, done: int) -> dict[str, Any]:
    """What status.json says."""
    context = run.context
    aa = context.facts.incremental[-1] if context.facts.incremental else None
    (task, round), steps = context.place, len(run.steps)
    place = {"state": state, "task": task, "round": round, "done": done, "steps": steps, "aa": plain(aa)}
    return place | context.setting | {"num_rounds": run.experiment.recipe.rounds_of(task)}


def restore(run: RunParts, elsewhere: bool) -> int:
    """Load the newest good checkpoint; returns the number of steps done (0: from the beginning)."""
    context, folder = run.context, run.folder
    folder.sweep()
    with warnings_to(context.note_later):
        saved = folder.checkpoints.load()
        folder.cut(saved.facts["lengths"] if saved else dict.fromkeys(folder.lengths(), 0))
    if saved is None:
        folder.describe(run.experiment)
        for words in run.experiment.recipe.federation.simulated:
            context.note_later("warning", "W371", f"SIMULATED {words}")
    else:
        context.note_later("info", "I401", f"resumed after step {saved.step}")
        adopt(run, saved, elsewhere)
    context.note_kept()
    return saved.step if saved else 0


def adopt(run: RunParts, saved: Saved, elsewhere: bool) -> None:
    """Be where the checkpoint was made. With ``elsewhere`` that may have been other code or another machine."""
    context, e = run.context, run.experiment
    there = saved.facts.get("made_on") or run.folder.environment()
    changed = {key: [there.get(key), now] for key, now in run.made_on.items() if there.get(key) != now}
    if changed and not elsewhere:
        raise _refused(run, changed)
    run.state = to_device(saved.tree["state"], e.device)
    run.federation.client_states = {int(k): to_device(v, e.device) for k, v in saved.tree["clients"].items()}
    if run.federation.late_answers is not None:
        found = saved.tree.get("under_way", {})
        run.federation.late_answers.under_way = {int(k): to_device(v, e.device) for k, v in found.items()}
    context.facts = restored(saved.facts["facts"])
    _fit_plan(run, saved.step)
    run.federation.ledger.restore(saved.facts["ledger"])
    context.timer.resume(saved.facts["timing"])
    run.observers.restore(saved.tree)
    step = run.steps[saved.step - 1]
    context.place = (step.task.index, -1 if step.round is None else step.round)
    if changed:
        context.facts.elsewhere.append(Moved(saved.step, dict(changed)))
        told = f"went on elsewhere after step {saved.step}, not bit for bit: {'; '.join(_changes(changed))}"
        context.note_later("warning", "W403", told)


def _refused(run: RunParts, changed: dict[str, list[Any]]) -> RunError:
    """The error, also written to the events: the operator of a run across sites sees only those."""
    error = RunError(
        "E416",
        "this run began with other code or on another machine, so it would not end with the same bits",
        where=str(run.folder.path),
        why="\n".join(_changes(changed)),
        fix="go on where it began, or add --elsewhere (rescene resume, continue, run and deploy run have it): the results then say so",
    )
    run.context.note("error", error.code, f"{error.what}: {'; '.join(_changes(changed))}. {error.fix}")
    return error


def _fit_plan(run: RunParts, done: int) -> None:
    """The plan may have grown since the checkpoint: its matrix gets wider, and what is done must still be in it."""
    facts, folder = run.context.facts, run.folder
    ended = sum(step.ends for step in run.steps[:done])
    if done > len(run.steps) or ended != len(facts.matrix):
        raise RunError(
            "E409",
            "the plan has fewer rounds than were already held",
            where=str(folder.path),
            fix="put the rounds of finished tasks back; rescene deploy close-task ends one early",
        )
    num_tasks, at_sites = len(run.experiment.tasks), run.experiment.recipe.sites is not None
    grew = bool(facts.matrix) and len(facts.matrix[-1]) < num_tasks
    if grew and not at_sites:
        facts.continued.append(Grown(after_task=len(facts.matrix) - 1, num_tasks=num_tasks))
        told = f"{num_tasks - len(facts.matrix)} task(s) were added to a finished run of {len(facts.matrix)}"
        run.context.note_later("info", "I402", told)
    facts.matrix = [row + [math.nan] * (num_tasks - len(row)) for row in facts.matrix]
    if done < len(run.steps):
        (folder.path / "results.json").unlink(missing_ok=True)  # they were of the plan as it was before
    if grew or at_sites:
        folder.describe(run.experiment)


def _changes(changed: dict[str, list[Any]]) -> list[str]:
    """
    >>> _changes({"threads": [4, 2], "code": ["0123456789abcdef" * 4, None]})
    ['threads: 4 -> 2', 'code: 0123456789ab -> unknown']
    """

    def short(value: Any) -> str:
        return "unknown" if value is None else value[:12] if len(str(value)) == 64 else str(value)

    return [f"{key}: {short(before)} -> {short(now)}" for key, (before, now) in changed.items()]
