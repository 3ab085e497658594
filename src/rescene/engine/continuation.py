"""A finished run that goes on with new tasks: next month's classes, domains and sites.

The recipe grows by the new tasks, the run folder is copied, and the loop goes on from the last checkpoint of the copy. What ran
stays true, so only tasks and images may be new. The grown recipe says everything: a run that is made from it at once has the
same bits, unless sites came later.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from rescene.config import Recipe, Resolved
from rescene.config.compose import with_sites_of_data
from rescene.config.schema import PER_SITE, DataSection
from rescene.core.documents import read_yaml
from rescene.core.errors import ConfigError, DataError, RunError, command
from rescene.core.files import replacing
from rescene.core.json_files import record_of
from rescene.core.results import Partition, Results, results_of_row
from rescene.core.run_state import FINISHED, LOCK, read_object, state_of
from rescene.data import Dataset, plan_tasks
from rescene.data.derived_sets import narrowed
from rescene.engine.checkpoint import could_not_save, save_atomically, write_json
from rescene.engine.experiment import load_data, pick_device, seen_by
from rescene.engine.run_folder import RunFolder, words_of
from rescene.lens import through, users_own

Tasks = Sequence[Sequence[str]]
NOT_COPIED = ("results.json", "timing.json", "report.html", "command.txt", "csv", "model", FINISHED, LOCK, ".*.tmp")
ORIGIN = "rescene continue"


@dataclass(frozen=True)
class Finished:
    """What is known of a finished run."""

    folder: Path
    recipe: Recipe
    results: Results
    model: dict[str, Any]  # model/model.json
    partition: Partition
    fingerprint: str  # of its images, as the network saw them

    @property
    def by_domain(self) -> bool:
        return self.recipe.tasks.scenario == "domain"

    @property
    def tasks(self) -> list[list[str]]:
        """Names of the classes, or the domain, of each task."""
        return [[task.domain] if self.by_domain else list(task.classes) for task in self.results.tasks]

    @property
    def names(self) -> list[str]:
        """Classes, or domains, that have arrived."""
        return [name for task in self.tasks for name in task]


def continued(run: Path, tasks: Tasks | None, data: str | None, out: Path | None = None) -> tuple[Resolved, Path]:
    """The recipe of a finished run with new tasks, and the folder in which it goes on: ``out``, or RUN-continued.

    ``tasks``: names of the classes of each new task (of its domain, where tasks are domains); None: all new classes of ``data``
    are one task. ``data``: where the new images lie; None: among the images of the run. Nothing is written if something is wrong.
    """
    before = read_finished(run)
    target = out or run.with_name(f"{run.name}-continued")
    if target.resolve() == run.resolve():
        what = "a finished run stays as it is, and goes on in a folder of its own"
        raise ConfigError("E510", what, where=str(target), fix="another --out")
    _check_form(tasks, data, before)
    resolved = _grown(before, tasks, data)
    _check_noise(before, resolved.recipe)
    RunFolder(target).check(resolved)
    if not RunFolder(target).begun:
        _copy(before, resolved, target)
    return resolved, target


def read_finished(run: Path) -> Finished:
    """The run in this folder, if it is finished (E450), has its checkpoint (E451) and can take new tasks (E508)."""
    state = state_of(run)
    begun = RunFolder(run).begun
    if state != "done" or not begun:
        raise RunError(
            "E450",
            "only a finished run can be continued with new tasks",
            where=str(run),
            why=f"its state is: {state}" if begun else "it has no config.yaml, so it is no run folder",
            fix=_finish_first(run, state) if begun else "rescene runs lists the run folders",
        )
    recipe = Recipe.model_validate(read_yaml(run / "config.yaml"))
    results = results_of_row(_json(run, "results.json"), [])
    model, partition = _json(run, "model/model.json"), record_of(Partition, _json(run, "partition.json"), [])
    _refuse_kind(run, recipe, results)
    if RunFolder(run).checkpoints.load() is None:
        raise RunError(
            "E451",
            "this run has no checkpoint to go on from",
            where=str(run / "checkpoints"),
            why="checkpoints were removed (rescene runs --prune checkpoints), not copied, or are damaged",
            fix="put the folder checkpoints back, or run all tasks anew with tasks.plan=[[...], ...]",
        )
    fingerprint = str(_json(run, "env.json").get("data_fingerprint"))
    return Finished(run, recipe, results, model, partition, fingerprint)


def _finish_first(run: Path, state: str) -> str:
    return "wait until it is done" if state == "running" else f"{command('resume', run)} first, then the same command"


def _json(run: Path, name: str) -> dict[str, Any]:
    try:
        return read_object(run / name)
    except (OSError, ValueError) as error:
        raise RunError(
            "E452", f"{name} of this run cannot be read", where=str(run), why=str(error), fix="put the file back"
        ) from None


def _refuse_kind(run: Path, recipe: Recipe, results: Results) -> None:
    """E508 with the reason, for runs that cannot take new tasks."""
    why = fix = None
    if recipe.sites is not None:
        why, fix = "its images are at the sites of a federation", "rescene deploy add-classes FEDERATION new,classes"
    elif recipe.tasks.drift is not None:
        why = "its tasks are not announced (tasks.drift): the network had an output for each of its classes from the start"
        fix = "a new run with all classes"
    elif recipe.tasks.order == PER_SITE:
        why = (
            "every site has an order of its own (tasks.order=per-site), and a plan with new tasks has one order for all"
        )
        fix = "a new run with all classes"
    elif words := words_of(recipe):
        why = f"it was made from Python objects, which no folder keeps ({'; '.join(words)})"
        fix = "save the images as folders, or run all tasks anew in Python"
    elif results.forgotten:
        why = "it forgot a site, and its recipe is that of a run which never saw the site"
        fix = "continue the run it was made from, then rescene forget"
    if why:
        raise ConfigError("E508", "this run cannot take new tasks", where=str(run), why=why, fix=fix)


def _check_form(tasks: Tasks | None, data: str | None, before: Finished) -> None:
    """Each new task names something (E505), and nothing that has arrived before (E506)."""
    kind = "domain" if before.by_domain else "class"
    example = "tasks+=[[night]]" if before.by_domain else "tasks+=[[scratch, dent]]"
    if tasks is None and data is None:
        raise ConfigError(
            "E505", "no new task is named", where=str(before.folder), fix=f"'{example}', data.path=FOLDER"
        )
    if tasks is not None and (not tasks or not all(tasks)):
        raise ConfigError("E505", f"a new task has no {kind}", where="tasks+", fix=example)
    if before.by_domain and any(len(task) != 1 for task in tasks or ()):
        raise ConfigError("E505", "in this run each task is one domain", where="tasks+", fix=example)
    names = [name for task in tasks or () for name in task]
    twice = [name for name in names if name in before.names or names.count(name) > 1]
    if twice:
        raise ConfigError(
            "E506",
            f"the run has {kind} {twice[0]!r} already"
            if twice[0] in before.names
            else f"{kind} {twice[0]!r} is named twice",
            where="tasks+",
            why=f"a {kind} arrives once",
            fix=f"name only what is new; the run has: {', '.join(before.names[:20])}",
        )


def _grown(before: Finished, tasks: Tasks | None, path: str | None) -> Resolved:
    """The recipe with the new tasks and images, once its images of earlier tasks are known to be the same."""
    data = _with_new_images(before, path)
    for place in filter(None, [data.path, *(data.more or ())]):
        if not Path(place).expanduser().exists():
            raise _other_images(before, f"there is nothing at {place}")
    dataset = _load(before.recipe, data)
    pinned = _pinned(before, data, dataset)
    if pinned != data:
        data, dataset = pinned, _load(before.recipe, pinned)
    _check_images(before, dataset)
    arrived = dataset.domains if before.by_domain else dataset.classes
    new = [list(task) for task in tasks] if tasks is not None else _all_new(before, arrived, str(path))
    changes = {"per_task": None, "count": None, "sizes": None, "order": "natural", "limit": None}
    plan = before.recipe.tasks.model_dump(mode="json") | changes | {"plan": [*before.tasks, *new]}
    recipe = Recipe.model_validate(
        before.recipe.model_dump(mode="json") | {"data": data.model_dump(mode="json"), "tasks": plan}
    )
    plan_tasks(dataset, scenario=recipe.tasks.scenario, plan=recipe.tasks.plan)  # a name that is not there is told here
    origin = _json(before.folder, "origin.json")
    origins = dict(origin.get("origins", {}))
    name, asked = str(origin.get("recipe", before.folder.name)), {"federation.num_clients": ORIGIN}  # the data decide
    resolved = with_sites_of_data(Resolved(name, recipe, origins | asked))
    _check_sites(before, dataset)
    then = Resolved("", before.recipe, {}).flat()
    changed = {key: ORIGIN for key, value in resolved.flat().items() if then.get(key) != value}
    return replace(resolved, origins=origins | changed)


def _with_new_images(before: Finished, path: str | None) -> DataSection:
    """``data`` of the recipe: the new images beside the earlier ones, or in their place if all earlier ones are there too."""
    data = before.recipe.data
    known = [place for place in (data.path, *(data.more or ())) if place]
    if path is None or any(_same(path, place) for place in known):
        return data
    images = before.recipe.images.model_copy(update={"name": "auto", "path": path, "more": None})
    found = load_data(images)
    if set(before.names) <= set(found.domains if before.by_domain else found.classes):
        return data.model_copy(update={"name": "auto", "path": path, "more": None})
    return data.model_copy(update={"more": [*(data.more or ()), path]})


def _same(path: str, other: str) -> bool:
    return os.path.realpath(Path(path).expanduser()) == os.path.realpath(Path(other).expanduser())


def _load(recipe: Recipe, data: DataSection) -> Dataset:
    return load_data(recipe.model_copy(update={"data": data}).images)


def _pinned(before: Finished, data: DataSection, dataset: Dataset) -> DataSection:
    """``data`` with the size and the normalisation that the run began with, where a folder that grew would give others."""
    size = before.model.get("picture_size") or before.model["arch"]["image_size"]
    if dataset.image_size != size:
        data = data.model_copy(update={"image_size": size})
        dataset = _load(before.recipe, data)
    mean, std = tuple(before.model["mean"]), tuple(before.model["std"])
    look = seen_by(before.recipe, dataset).transform
    if before.recipe.model.lens is None and (look.mean, look.std) != (mean, std):
        data = data.model_copy(update={"mean": mean, "std": std})
    return data


def _check_images(before: Finished, dataset: Dataset) -> None:
    """The images of the earlier tasks are those that the run has seen (E252); a new domain has no new class (E253)."""
    classes = list(before.partition.classes)
    if before.by_domain and (new := [name for name in dataset.classes if name not in classes]):
        raise DataError(
            "E253",
            f"the new images have class {new[0]!r}, which the run does not know",
            where=dataset.name,
            why="in this run each task is a domain of the same classes",
            fix="leave this class out, or a run with tasks.scenario=class",
        )
    gone = [name for name in classes if name not in dataset.classes]
    if gone:
        raise _other_images(before, f"class {gone[0]!r} is not there any more")
    for seen in _seen_then(before, dataset, classes):
        if any(part.fingerprint() == before.fingerprint for part in (seen, _without_new(before, seen))):
            return
    raise _other_images(before, "some were added, removed or changed since")


def _seen_then(before: Finished, dataset: Dataset, classes: list[str]) -> Iterator[Dataset]:
    """The images of the classes that the run had, as its network saw them.

    Through a lens the last bits may depend on how many pictures are looked at together, so first as then, if the data of the run
    are as they were: these features are kept from then.
    """
    lens, device = before.recipe.model.lens, pick_device(before.recipe.device)
    if lens is not None:
        with contextlib.suppress(DataError, ConfigError):
            then = through(lens, _load(before.recipe, before.recipe.data), device, users_own())
            yield plan_tasks(then, scenario="class", plan=[classes])[0]
    same, _ = plan_tasks(dataset, scenario="class", plan=[classes])
    yield through(lens, _without_new(before, same), device, users_own())


def _without_new(before: Finished, dataset: Dataset) -> Dataset:
    return narrowed(dataset, before.names if before.by_domain else ())


def _other_images(before: Finished, why: str) -> DataError:
    return DataError(
        "E252",
        "the images of earlier tasks are not those that the run has seen",
        where=", ".join(filter(None, [before.recipe.data.path, *(before.recipe.data.more or ())]))
        or before.recipe.data.name,
        why=f"{why}; the test images of earlier tasks are needed, and results on other images could not stand beside the old ones",
        fix="put the images of earlier classes back as they were; new images of new classes go into a folder of their own",
    )


def _all_new(before: Finished, there: Sequence[str], path: str) -> list[list[str]]:
    """All classes that are new as one task; each new domain as a task of its own."""
    new = [name for name in there if name not in before.names]
    if not new:
        raise ConfigError(
            "E505",
            f"the images have no new {'domain' if before.by_domain else 'class'}",
            where=path,
            why=f"the run has all of them: {', '.join(before.names[:20])}",
            fix="data.path=FOLDER with images of new classes",
        )
    return [[name] for name in new] if before.by_domain else [new]


def _check_sites(before: Finished, dataset: Dataset) -> None:
    """Sites keep their numbers: what a site remembers is kept under its number (E254)."""
    then = before.partition.sites
    if then != dataset.sites[: len(then)]:
        raise DataError(
            "E254",
            f"the sites would get other numbers: {', '.join(then[:8])} would be {', '.join(dataset.sites[:8])}",
            where=dataset.name,
            why="what a site remembers is kept under its number",
            fix="put the images of new sites into a folder of their own: data.path=FOLDER",
        )


def _check_noise(before: Finished, recipe: Recipe) -> None:
    """Noise that was computed for so many tasks does not protect further ones, where images are used again (E507)."""
    num_tasks = len(before.tasks)
    if why := recipe.full_at(num_tasks, len(recipe.tasks.plan or ())):
        raise ConfigError(
            "E507",
            f"the noise of this run was computed for {num_tasks} task(s), so it cannot take a further one",
            where=str(before.folder),
            why=why,
            fix="a new run with all tasks planned, or with privacy.noise_multiplier: its total then grows with each task",
        )


def _copy(before: Finished, resolved: Resolved, target: Path) -> None:
    """The folder of the run with the grown recipe. It has its name only when it is complete."""
    origin = _json(before.folder, "origin.json") | {"origins": resolved.origins, "continued_from": str(before.folder)}
    try:
        with replacing(target) as unfinished:
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.copytree(before.folder, unfinished, ignore=shutil.ignore_patterns(*NOT_COPIED))
            config = yaml.safe_dump(resolved.recipe.model_dump(mode="json"), sort_keys=False)
            save_atomically(unfinished / "config.yaml", config.encode())
            write_json(unfinished / "origin.json", origin)
            if target.is_dir():
                target.rmdir()  # it is empty, else it would have been refused
    except (OSError, shutil.Error) as error:
        raise could_not_save(target, error) from error
