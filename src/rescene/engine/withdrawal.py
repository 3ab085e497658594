"""Withdrawal: what a site uploaded leaves the server, and the model is made anew from what remains.

new run folder <- recipe of the run with the site in federation.exclude: it is never asked again
server state   <- that of its newest checkpoint, without what the site sent (``Method.forget``)
model          <- of pictures: the run's first weights, trained on what remains for as many epochs as the run has trained
                  of sums: solved from what remains, which is the model that never met the site

With pictures this is removal of uploads and training from scratch. It is no proof of unlearning: see ``REMAINS``.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from rescene.config import Resolved
from rescene.data import Task
from rescene.engine.checkpoint import Saved, write_atomically
from rescene.engine.evaluate import summed
from rescene.engine.experiment import Experiment
from rescene.engine.folder import APPENDED, RunFolder
from rescene.engine.loop import Run
from rescene.engine.products import save_gallery
from rescene.engine.watch import Progress, warnings_to
from rescene.errors import ConfigError, DataError, RunError, command
from rescene.methods.base import Kept, Model
from rescene.nets import flops_to, grow_head
from rescene.record import to_device
from rescene.steps import class_scores

REMAINS = (
    "surrogates of other sites were made under models that had seen this site's",
    "which surrogates of finished tasks were kept was decided while its own were among them, and their places stay empty",
    "accuracies of earlier tasks' ends, in the matrix, are those measured before it left",
)
REMAINS_OF_SUMS = REMAINS[-1:]


def forget(
    source: RunFolder,
    resolved: Resolved,
    client: int,
    out: RunFolder,
    progress: Progress = lambda event: None,
    name: str | None = None,
) -> dict[str, Any]:
    """Make ``out`` the run of ``source`` (with this recipe) that goes on without the client; returns what was done.

    A finished run is finished again at once; any other stands where it stood, to be resumed. ``source`` is not touched.
    An ``out`` in which it was done before is left as it is.
    """
    check_can_forget(resolved, client, source)
    recipe = resolved.recipe.without(client)
    without = replace(resolved, recipe=recipe, origins=resolved.origins | {"federation.exclude": "rescene forget"})
    out.check(without)
    done = out.checkpoints.load()
    if done is None:
        saved = source.checkpoints.load()
        if saved is None:
            raise RunError(
                "E417",
                "the run has no checkpoint, so nobody knows which uploads the server holds",
                where=str(source.path),
                why="it has not begun, or its checkpoints were pruned",
                fix=again(resolved, client, source),
            )
        _check_known(saved.tree["state"], client, resolved, source)
        with out:
            Withdrawal(without, out, progress, elsewhere=True).forget(source, saved, client, name)
        done = out.checkpoints.load()
    records = done.facts["facts"]["forgotten"] if done else []
    found = [record for record in records if record["client"] == client]
    if not found:
        raise RunError("E406", "the folder holds a run that forgot nobody", where=str(out.path), fix="another --out")
    return dict(found[-1])


def check_can_forget(resolved: Resolved, client: int, source: RunFolder) -> None:
    """A site there is, of a method whose server keeps uploads by site."""
    recipe, method = resolved.recipe, resolved.recipe.build_method()
    gone = recipe.federation.exclude or []
    if not 0 <= client < recipe.federation.num_clients or client in gone:
        why = "it left before" if client in gone else f"sites are 0 to {recipe.federation.num_clients - 1}"
        raise ConfigError("E161", f"the run has no site {client} to forget", where=str(source.path), why=why)
    if len(gone) + 1 == recipe.federation.num_clients:
        raise ConfigError("E161", "no site would be left", where=str(source.path), fix="remove the run folder")
    if recipe.privacy.pool:
        what, why = "a site's part cannot be taken out again: all sites' sums were added up", "privacy.pool=true"
    elif method.forgets_exactly and recipe.privacy.honest_sites is not None:
        raise DataError(
            "E230",
            "nobody holds this site's part of the sums, so it cannot be taken out",
            where=str(source.path),
            why="privacy.honest_sites is set: under a secure sum the server sees the sum over sites alone",
            fix=f"a new sum over the other sites, which costs each of their images its epsilon again: {again(resolved, client, source)}",
        )
    elif not method.can_forget:
        what = f"{method.title} cannot take a site out of its model"
        why = f"its server keeps no uploads by site that could be removed; what sites send: {method.leaves_site}"
    else:
        return
    fix = f"train again without it: {again(resolved, client, source)}"
    raise ConfigError("E162", what, where=str(source.path), why=why, fix=fix)


def again(resolved: Resolved, client: int, source: RunFolder) -> str:
    """The command that runs the same recipe as if the site had never been there."""
    gone = ",".join(map(str, resolved.recipe.without(client).federation.exclude or ()))
    program = ["run"] if resolved.recipe.sites is None else ["deploy", "run", "FEDERATION"]
    folder = ["--out", f"{source.path}-never-{client}"] if resolved.recipe.sites is None else []
    return command(*program, source.path / "config.yaml", f"federation.exclude=[{gone}]", *folder)


def _check_known(state: Any, client: int, resolved: Resolved, source: RunFolder) -> None:
    """All that the server keeps must say who sent it, and some must be somebody else's."""
    senders = set(resolved.recipe.build_method().kept(state)) if state else set()
    if -1 in senders:
        raise RunError(
            "E418",
            "the run does not know who sent the uploads its server holds",
            where=str(source.path),
            why="it began with a version of rescene that did not write it down",
            fix=f"train again without it: {again(resolved, client, source)}",
        )
    if not senders - {client}:
        raise RunError(
            "E419",
            "nothing would be left to learn from",
            where=str(source.path),
            why="the server holds no upload of another site",
            fix=f"train again without it: {again(resolved, client, source)}",
        )


def accuracy_on(experiment: Experiment, model: Model, client: int, tasks: list[Task]) -> float | None:
    """Percent of the client's own images of these tasks that the model names right; None where they are not here."""
    if not experiment.has_images:
        return None
    data = experiment.dataset
    index = torch.cat([experiment.shards[task.index][client] for task in tasks])
    net = experiment.arch.restore(model).to(experiment.device)
    right = class_scores(net, data.train.pixels[index], data.transform.normalise).argmax(1) == data.train.labels[index]
    return 100.0 * int(right.sum()) / len(right) if len(right) else None


class Withdrawal(Run):
    """The run that goes on without a client; nothing is written that still holds its uploads."""

    def forget(self, source: RunFolder, saved: Saved, client: int, name: str | None) -> None:
        _copy_history(source, self.folder, saved, client)
        self._adopt(saved)
        self.folder.describe(self.experiment)
        self._tell_early()
        step, before = self.steps[saved.step - 1], self.state
        held = sum(one.round is not None for one in self.steps[: saved.step])
        self._tell("start", done=saved.step, steps=len(self.steps))
        with warnings_to(self.note), flops_to(self.ledger.meter.add):
            self.federation.num_rounds = self.experiment.rounds_told(step.task)
            self.federation.move(self.experiment.told(step.task, -1)[0], None)
            old = self._measured(client)
            with self.timer.phase("server"):
                rng = self.experiment.rng.at("forget", client, saved.step)
                self.state = self.experiment.method.forget(before, client, self._fresh(), held, self.federation, rng)
            self.federation.client_states.pop(client, None)
            self.leakage.forget(client)
            new = self._measured(client)
            if step.ends:
                tasks = self.experiment.tasks[: step.task.index + 1]
                self._record(step.task, new["found"] or summed([], tasks))
            self._write_down(client, name, saved.step, held, before, old, new)
            self._commit(saved.step)
            self.writer.wait()
            if saved.step == len(self.steps):
                self._finish()
            else:
                self.folder.status(**self._status("interrupted", saved.step))

    def _fresh(self) -> Model:
        """The weights the run began with, with a head for the classes it knows by now."""
        e, task = self.experiment, self.federation.task
        weights = {key: value.detach().clone() for key, value in e.initial_net().state_dict().items()}
        head = grow_head(weights, task.num_seen, e.rng.at("forget", "head").generator())
        return to_device(head, e.device)  # type: ignore[no-any-return]

    def _measured(self, client: int) -> dict[str, Any]:
        """The model on all test images of the tasks so far, and on the client's own images; None where they are away."""
        e, task = self.experiment, self.experiment.tasks[self.place[0]]
        found = None if e.tested_at_sites else self._evaluate(task)
        return {"found": found, "own": accuracy_on(e, self.state.model, client, e.tasks[: task.index + 1])}

    def _write_down(
        self, client: int, name: str | None, step: int, held: int, before: Any, old: dict[str, Any], new: dict[str, Any]
    ) -> None:
        method = self.experiment.method
        own = method.kept(before).get(client, Kept(Counter(), 0))
        left = sum((kept.images for kept in method.kept(self.state).values()), Counter())
        classes = self.experiment.dataset.classes
        lost = sorted({label for _, label, _ in own.images} - {label for _, label, _ in left})
        epochs = 0 if method.forgets_exactly else held * self.experiment.recipe.train.server_epochs
        record = {
            "client": client,
            "name": name,
            "step": step,
            "task": self.place[0],
            "num_images": sum(own.images.values()),
            "bytes": own.num_bytes,
            "num_images_left": sum(left.values()),
            "removed": self._rows(own.images),
            "classes_lost": [classes[label] for label in lost],
            "epochs": epochs,
            "exact": method.forgets_exactly,
            "accuracy_before": old["found"].overall if old["found"] else None,
            "accuracy_after": new["found"].overall if new["found"] else None,
            "per_task_before": old["found"].per_task if old["found"] else None,
            "per_task_after": new["found"].per_task if new["found"] else None,
            "own_images_before": old["own"],
            "own_images_after": new["own"],
            "remains": list(REMAINS_OF_SUMS if method.forgets_exactly else REMAINS),
        }
        self.facts.forgotten.append(record)
        if self.leakage.samples:
            save_gallery(self.folder, self.leakage)
        done = (
            f"its sums over {record['num_images']} images were subtracted, and the model solved anew"
            if method.forgets_exactly
            else f"{record['num_images']} of its images were removed, and the model trained anew"
        )
        self.note("info", "I402", f"site {name or client} left: {done}", client=client)
        if lost:
            names = ", ".join(record["classes_lost"])
            self.note("warning", "W404", f"nobody else sent images of {names}: the model has lost them")

    def _rows(self, removed: Counter[tuple[int, int, str]]) -> list[dict[str, Any]]:
        """Per task and class, what lay in the buffer and what in the pool, or what the sums were made of."""
        classes, tasks = self.experiment.dataset.classes, self.experiment.tasks
        named = self.experiment.recipe.tasks.scenario == "class"
        rows: dict[tuple[int, int], dict[str, Any]] = {}
        for (number, label, kind), count in sorted(removed.items()):
            task = next(t.index for t in tasks if label in t.classes) if named else number
            kinds = {"sums": 0} if kind == "sums" else {"buffer": 0, "pool": 0}
            row = {"task": task if task >= 0 else "all", "class": classes[label], **kinds}
            rows.setdefault((task, label), row)[kind] += count
        return [rows[key] for key in sorted(rows)]


def _copy_history(source: RunFolder, out: RunFolder, saved: Saved, client: int) -> None:
    """Rounds, events and the other sites' privacy ledgers, as far as the checkpoint knows them."""
    for name in APPENDED:
        data = (source.path / name).read_bytes() if (source.path / name).is_file() else b""
        write_atomically(out.path / name, data[: saved.facts["lengths"][name]])
    if (source.path / "ledgers").is_dir():
        own = shutil.ignore_patterns(f"client-{client}.jsonl", f"client-{client}")
        shutil.copytree(source.path / "ledgers", out.path / "ledgers", ignore=own, dirs_exist_ok=True)
