"""plan.yaml in the folder of a federation: the operator opens tasks in it and closes them; the run folder keeps what was held.

The operator writes plan.yaml, the server writes its run folder, and each only reads the other's: nobody waits for a lock.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rescene.config import Recipe, Resolved
from rescene.config.compose import explain
from rescene.config.site_sections import PlannedTask, SitesSection
from rescene.core.documents import read_yaml
from rescene.core.errors import ConfigError, ResceneWarning, did_you_mean
from rescene.core.results import read_status
from rescene.engine.checkpoint import save_atomically
from rescene.privacy.promise import HOW_TO_MEASURE, NO_COUNTS

HEADER = """\
# The plan of this federation. Classes get their numbers in this order, for ever: rescene deploy add-classes opens the next
# task, rescene deploy remove-classes takes one out again before its task begins, rescene deploy close-task ends the current
# task early. Before the first run the first five lines may be changed.
# test: a folder on the server with test images, one folder per class; null: the sites evaluate on their hold-outs.
"""


def read_plan(path: Path) -> SitesSection | None:
    """The plan; None if the federation has none (yet)."""
    if not path.exists():
        return None
    try:
        return SitesSection.model_validate(read_yaml(path))
    except (OSError, ValidationError) as error:
        raise _bad(error, str(path)) from None


def write_plan(path: Path, plan: SitesSection) -> None:
    """Write the plan as YAML, with a header for the person who edits it."""
    text = yaml.safe_dump(plan.model_dump(mode="json"), sort_keys=False, default_flow_style=None, allow_unicode=True)
    save_atomically(path, (HEADER + text).encode())


def is_closed(path: Path, task: int) -> bool:
    """Whether the operator wants this task to end; a plan that cannot be read wants nothing."""
    with contextlib.suppress(ConfigError):
        plan = read_plan(path)
        return plan is not None and plan.tasks[task].closed
    return False


@dataclass(frozen=True)
class Held:
    """How far the run of a plan is. ``task`` is the current one; None before the first run and when all are ended."""

    task: int | None = None
    rounds: int = 0  # held in it
    begun: bool = False  # whether the plan has run at all

    @staticmethod
    def of(run: Path) -> Held:
        """From the run folder: the steps done of its schedule (begin, rounds, end of each task)."""
        done, tasks = read_status(run).done, _tasks(run)
        for task, planned in enumerate(tasks):
            length = int(planned["rounds"]) + 2
            if done < length:
                return Held(task, min(max(done - 1, 0), length - 2), begun=True)
            done -= length
        return Held(begun=bool(tasks))


def add_classes(path: Path, run: Path, names: list[str], rounds: int | None, image_size: int | None) -> SitesSection:
    """Open the next task, or the first one; refused while a task runs."""
    plan, held = read_plan(path), Held.of(run)
    if not names:
        raise ConfigError("E193", "no class is named", fix="rescene deploy add-classes FEDERATION scratch,dent")
    if plan is not None and image_size not in (None, plan.image_size):
        raise ConfigError(
            "E193", f"the plan has images of {plan.image_size} pixels, for ever", fix="leave out --image-size"
        )
    if plan is not None and held.task is not None:
        raise ConfigError(
            "E192",
            f"task {held.task + 1} has not ended",
            why=f"{held.rounds} of {_tasks(run)[held.task]['rounds']} rounds are held",
            fix="rescene deploy run goes on with it; rescene deploy close-task ends it early",
        )
    facts: dict[str, Any] = plan.model_dump(mode="json") if plan else {"image_size": image_size or 32, "tasks": []}
    if plan is None and rounds:
        facts["rounds"] = rounds
    default = facts.get("rounds", SitesSection.model_fields["rounds"].default)
    twice = [name for name in names if plan and name in plan.classes]
    if twice:
        raise ConfigError("E193", f"the federation has class {twice[0]!r} already", why="a class arrives once")
    facts["tasks"] = [*facts["tasks"], {"classes": names, "rounds": rounds or default}]
    try:
        grown = SitesSection.model_validate(facts)
        if held.begun:
            _check_noise(Recipe.model_validate(_config(run)), len(_tasks(run)), len(grown.tasks))
    except ValidationError as error:
        raise _bad(error, "add-classes") from None
    write_plan(path, grown)
    return grown


def remove_classes(path: Path, run: Path, names: list[str]) -> SitesSection | None:
    """Take classes out of tasks that have not begun, such as mistyped ones; None if nothing is left of the plan."""
    plan, begun = read_plan(path), _tasks(run)
    known = [name for task in plan.tasks for name in task.classes] if plan else []
    for name in names:
        if name not in known:
            fix = did_you_mean(name, known, "{!r}") or f"planned: {', '.join(known) or 'nothing'}"
            raise ConfigError("E193", f"the plan has no class {name!r}", where=str(path), fix=fix)
        if any(name in task["classes"] for task in begun):
            why = "its task has begun: sites have answered, and classes keep their numbers for ever"
            raise ConfigError("E192", f"class {name!r} cannot be taken out any more", where=str(path), why=why)
    if plan is None or not names:
        raise ConfigError("E193", "no class is named", fix="rescene deploy remove-classes FEDERATION scracth")
    tasks = [task.model_dump(mode="json") for task in plan.tasks]
    tasks = [task | {"classes": [name for name in task["classes"] if name not in names]} for task in tasks]
    left = [task for task in tasks if task["classes"]]
    if not left:
        path.unlink()
        return None
    shorter = SitesSection.model_validate(plan.model_dump(mode="json") | {"tasks": left})
    write_plan(path, shorter)
    return shorter


def close_task(path: Path, run: Path) -> tuple[int, Held]:
    """Mark the current task as closed: the server ends it after the round under way, but not before its first."""
    plan, held = read_plan(path), Held.of(run)
    if plan is None or held.task is None:
        why = "it has no plan" if plan is None else "all its tasks have ended" if held.begun else "it has not run yet"
        raise ConfigError("E192", "no task of this federation is running", why=why, fix="rescene deploy add-classes")
    task = plan.tasks[held.task]
    if task.closed:
        raise ConfigError(
            "E192", f"task {held.task + 1} is closed already", fix="rescene deploy run brings it to its end"
        )
    if held.rounds >= task.rounds:
        raise ConfigError("E192", f"task {held.task + 1} has held all its rounds, and ends by itself")
    write_plan(path, plan.closing(held.task, task.rounds))
    return held.task, held


def with_plan(resolved: Resolved, plan: SitesSection, num_sites: int, run: Path) -> Resolved:
    """The recipe for a federation with a plan: all its sites, the plan's classes, and the rounds held where one was closed."""
    held = [PlannedTask.model_validate(task) for task in _tasks(run)]
    for number, task in enumerate(held[: len(plan.tasks)]):
        if task.closed:
            plan = plan.closing(number, task.rounds)
    given = resolved.recipe.model_dump(mode="json", exclude={"data", "tasks"})
    per_round = min(given["federation"]["per_round"], num_sites)
    given["federation"] |= {"num_clients": num_sites, "per_round": per_round, "num_rounds": plan.rounds}
    try:
        recipe = Recipe.model_validate(given | {"sites": plan.model_dump(mode="json")})
    except ValidationError as error:
        found = explain(error, resolved.origins, {})  # the plan by itself was read before
        found.fix = "change this in the recipe or on the command line; rescene show RECIPE lists every key"
        raise found from None
    if held:
        _check_noise(recipe, len(held), len(plan.tasks))
    return replace(resolved, recipe=recipe)


def accuracy_warning(recipe: Recipe) -> ResceneWarning | None:
    """W560 for a run whose accuracy no site will tell: it has a guarantee, and the plan names no test images."""
    if recipe.sites is None or recipe.sites.test is not None or not recipe.formal:
        return None
    what = f"accuracy is measured at those sites only whose floor has evaluation_sigma: {NO_COUNTS}"
    return ResceneWarning("W560", what, fix=f"to have it measured, {HOW_TO_MEASURE}")


def _check_noise(recipe: Recipe, before: int, after: int) -> None:
    if why := recipe.full_at(before, after):
        raise ConfigError(
            "E193",
            f"the noise of this run was reckoned for {before} task(s), so no further one can be opened",
            why=why,
            fix="a new federation with all tasks planned before its first run, or with privacy.noise_multiplier: epsilon then grows",
        )


def _bad(error: Exception, where: str) -> ConfigError:
    why = str(error)
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        why = f"{'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}".removeprefix(": ")
    fix = "a class name is text without comma or slash; a task has classes and rounds"
    return ConfigError("E191", "the plan of the federation makes no sense", where=where, why=why, fix=fix)


def _tasks(run: Path) -> list[dict[str, Any]]:
    """The tasks of the plan as the run folder knows it."""
    return list((_config(run).get("sites") or {}).get("tasks", []))


def _config(run: Path) -> dict[str, Any]:
    try:
        return dict(read_yaml(run / "config.yaml"))
    except (OSError, ConfigError, TypeError, ValueError):
        return {}
