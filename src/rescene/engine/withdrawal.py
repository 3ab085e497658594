"""Withdrawal: what a site uploaded leaves the server, and the model is made anew from what remains.

new run folder <- recipe of the run with the site in federation.exclude: it is never asked again
server state   <- that of its newest checkpoint, without what the site sent (``Method.forget``)
model          <- of pictures: the run's first weights, trained on what remains for as many epochs as the run has trained
                  of sums: solved from what remains, which is the model that never met the site
                  of secure sums: nobody holds the site's part, so the sums over the other sites are taken anew, with fresh
                  noise; their images are charged again, and the old sums are in no state of the new run

With pictures this is removal of uploads and training from scratch. It is no proof of unlearning: see ``REMAINS``.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from typing import Any

import torch

from rescene.config import Resolved
from rescene.core.errors import ConfigError, DataError, RunError, command
from rescene.core.files import replacing
from rescene.core.record import to_device
from rescene.core.results import Forgotten
from rescene.data import Task
from rescene.engine.checkpoint import Saved, save_atomically
from rescene.engine.evaluate import summed
from rescene.engine.experiment import Experiment
from rescene.engine.loop import Run
from rescene.engine.run_context import Progress
from rescene.engine.run_folder import APPENDED, RunFolder
from rescene.engine.transport import ledger_in
from rescene.methods.base import Kept, Method, Model
from rescene.nets import grow_head
from rescene.privacy.ledger_file import Declined
from rescene.privacy.promise import Promise
from rescene.privacy.totals import threshold
from rescene.training import class_scores

REMAINS = (
    "surrogates of other sites were made under models that had seen this site's",
    "which surrogates of finished tasks were kept was decided while its own were among them, and their places stay empty",
    "accuracies of earlier tasks' ends, in the matrix, are those measured before it left",
)
REMAINS_OF_SUMS = REMAINS[-1:]
REMAINS_OF_SECURE_SUMS = (
    "sums with the site in them were released before it left and stay released; epsilon counts them and the new ones",
)


def forget(
    source: RunFolder,
    resolved: Resolved,
    client: int,
    out: RunFolder,
    progress: Progress = lambda event: None,
    name: str | None = None,
    charge: bool = False,
) -> dict[str, Any]:
    """Make ``out`` the run of ``source`` (with this recipe) that goes on without the client; returns what was done.

    A finished run is finished again at once; any other stands where it stood, to be resumed. ``source`` is not touched.
    An ``out`` in which it was done before is left as it is. ``charge`` is consent to charge the other sites' images again,
    where that is the only way.
    """
    check_can_forget(resolved, client, source)
    without = without_site(resolved, client)
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
        if sums_again(resolved):
            if not charge:
                raise _no_consent(resolved, client, source)
            check_charge(resolved, client, source)
            with out:
                Withdrawal(without, out, progress).sum_again(source, saved, client, name)
        else:
            _check_known(saved.tree["state"], client, resolved, source)
            with out:
                Withdrawal(without, out, progress).forget(source, saved, client, name)
        done = out.checkpoints.load()
    records = done.facts["facts"]["forgotten"] if done else []
    found = [record for record in records if record["client"] == client]
    if not found:
        raise RunError("E406", "the folder holds a run that forgot nobody", where=str(out.path), fix="another --out")
    return dict(found[-1])


def check_can_forget(resolved: Resolved, client: int, source: RunFolder, across: bool = False) -> None:
    """A site there is, of a method whose server keeps uploads by site. ``across``: the run's sites are other machines."""
    recipe, method = resolved.recipe, resolved.recipe.build_method()
    gone = recipe.federation.exclude or []
    if not 0 <= client < recipe.federation.num_clients or client in gone:
        why = "it left before" if client in gone else f"sites are 0 to {recipe.federation.num_clients - 1}"
        raise ConfigError("E161", f"the run has no site {client} to forget", where=str(source.path), why=why)
    if len(gone) + 1 == recipe.federation.num_clients:
        raise ConfigError("E161", "no site would be left", where=str(source.path), fix="remove the run folder")
    if recipe.privacy.pool:
        what, why = "a site's part cannot be taken out again: all sites' sums were added up", "privacy.pool=true"
    elif sums_again(resolved):
        _check_can_sum_again(resolved, client, source, across)
        return
    elif not method.can_forget():
        what = f"{method.title} cannot take a site out of its model"
        why = f"its server keeps no uploads by site that could be removed; what sites send: {method.leaves_site}"
    else:
        return
    fix = f"train again without it: {again(resolved, client, source)}"
    raise ConfigError("E162", what, where=str(source.path), why=why, fix=fix)


def sums_again(resolved: Resolved) -> bool:
    """Whether the run's sums are secure, so that a site leaves through new sums over the others."""
    return resolved.recipe.privacy.honest_sites is not None


def without_site(resolved: Resolved, client: int) -> Resolved:
    """The run without the client; behind secure sums also with the number of those that were opened before."""
    recipe, changed = resolved.recipe.without(client), ["federation.exclude"]
    if sums_again(resolved):
        recipe, changed = resolved.recipe.summed_again(client), [*changed, "privacy.earlier_sums"]
    return replace(resolved, recipe=recipe, origins=resolved.origins | dict.fromkeys(changed, "rescene forget"))


def cost_of(resolved: Resolved, client: int) -> tuple[Promise, Promise]:
    """What is promised to an image of another site before and after sums are taken anew without the client."""
    before, after = (one.recipe.promise(1) for one in (resolved, without_site(resolved, client)))
    assert before is not None and after is not None  # secure sums have a mechanism
    return before, after


def cost_in_words(resolved: Resolved, client: int) -> str:
    """What the withdrawal of a site costs the others in privacy, in words."""
    before, after = cost_of(resolved, client)
    return (
        "Each image of the other sites is charged again for every task that was summed. "
        f"Before: {before.words()} After, old and new sums together: {after.words()}"
    )


def _no_consent(resolved: Resolved, client: int, source: RunFolder) -> DataError:
    return DataError(
        "E232",
        "to forget this site, the sums over the other sites must be taken anew, and that costs their images privacy",
        where=str(source.path),
        why=cost_in_words(resolved, client),
        fix=f"if the other sites agree: {command('forget', source.path, '--client', client, '--charge')}",
    )


def _check_can_sum_again(resolved: Resolved, client: int, source: RunFolder, across: bool) -> None:
    """Sites that are simulated here, and enough of them for a sum."""
    privacy, federation = resolved.recipe.privacy, resolved.recipe.federation
    least = threshold(federation.num_clients, federation.quorum, privacy.honest_sites)
    left = federation.num_clients - len(federation.exclude or ()) - 1
    if left < least:
        raise DataError(
            "E233",
            f"{left} sites would be left, and a secure sum needs {least}",
            where=str(source.path),
            why=f"privacy.honest_sites={privacy.honest_sites}, federation.quorum={federation.quorum:g} of "
            f"{federation.num_clients} sites: a smaller sum would not hide its sites from each other",
            fix="remove the run folder; no model without this site can be made from these sums",
        )
    if across or resolved.recipe.sites is not None:
        raise DataError(
            "E230",
            "nobody holds this site's part of the sums, so it cannot be taken out",
            where=str(source.path),
            why="privacy.honest_sites is set: under a secure sum the server sees the sum over sites alone",
            fix="new sums over the other sites, which cost each of their images its epsilon again: "
            + again(resolved, client, source, across=True),
        )


def check_charge(resolved: Resolved, client: int, source: RunFolder) -> None:
    """Refuse before anything is drawn if a site's own limits do not allow the new sums."""
    run, after = resolved.digest(), without_site(resolved, client)
    promise = after.recipe.promise(1)
    assert promise is not None  # secure sums have a mechanism
    gone, most = after.recipe.federation.exclude or (), promise.composition.participations
    for site in range(after.recipe.federation.num_clients):
        ledger = ledger_in(source.path / "ledgers", site)
        new = [replace(one, run=after.digest()) for one in ledger.charges() if one.run == run and site not in gone]
        try:
            ledger.allow(new, promise.delta, most)
        except Declined as refusal:
            raise DataError(
                "E234",
                f"site {site} does not allow the new sums: {refusal.what}",
                where=str(ledger.floor_path),
                why=cost_in_words(resolved, client),
                fix="the site's own limit stands; only its operator may raise it",
            ) from None


def again(resolved: Resolved, client: int, source: RunFolder, across: bool = False) -> str:
    """The command that runs the same recipe as if the site had never been there."""
    recipe = without_site(resolved, client).recipe
    gone = ",".join(map(str, recipe.federation.exclude or ()))
    across = across or resolved.recipe.sites is not None
    program = ["deploy", "run", "FEDERATION"] if across else ["run"]
    folder = [] if across else ["--out", f"{source.path}-never-{client}"]
    # another number of earlier sums is another run, for which sites draw fresh noise
    earlier = [f"privacy.earlier_sums={recipe.privacy.earlier_sums}"] if recipe.privacy.earlier_sums else []
    return command(*program, source.path / "config.yaml", f"federation.exclude=[{gone}]", *earlier, *folder)


def _check_known(state: Any, client: int, resolved: Resolved, source: RunFolder) -> None:
    """All that the server keeps must say who sent it, and some must be somebody else's."""
    senders = set(resolved.recipe.build_method().kept(state)) if state else set()
    if -1 in senders:
        raise RunError(
            "E418",
            "the run did not record who sent the uploads that its server holds",
            where=str(source.path),
            why="it began with a version of rescene that did not record it",
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


class Withdrawal:
    """Makes the run that goes on without a client; nothing is written that still holds its uploads."""

    def __init__(self, resolved: Resolved, folder: RunFolder, progress: Progress) -> None:
        self.run = Run(resolved, folder, progress)
        self.parts, self.context, self.federation = self.run.parts, self.run.context, self.run.federation

    def forget(self, source: RunFolder, saved: Saved, client: int, name: str | None) -> None:
        parts, e = self.parts, self.context.experiment
        _copy_history(source, parts.folder, saved, client)
        parts.adopt(saved, elsewhere=True)
        self._start(done=saved.step)
        step, before = parts.steps[saved.step - 1], parts.state
        held = sum(one.round is not None for one in parts.steps[: saved.step])
        with self.run.listening():
            self.federation.num_rounds = e.rounds_told(step.task)
            self.federation.move(e.told(step.task, -1)[0], None)
            old = self._measured(client)
            with self.context.timer.phase("server"):
                rng = e.rng.at("forget", client, saved.step)
                parts.state = e.method.forget(before, client, self._fresh(), held, self.federation, rng)
            self.federation.client_states.pop(client, None)
            parts.leakage.forget(client)
            new = self._measured(client)
            if step.ends:
                row = self.run.record(step.task, new["found"] or summed([], e.tasks[: step.task.index + 1]))
                self.run.write_row(row | self.federation.ledger.so_far())
            self._write_down(client, name, saved.step, held, before, old, new)
            self._close(saved.step)

    def sum_again(self, source: RunFolder, saved: Saved, client: int, name: str | None) -> None:
        """Every step of the run up to the checkpoint is taken again, with the other sites: new sums, new charges."""
        parts, e = self.parts, self.context.experiment
        for file in APPENDED:
            save_atomically(parts.folder.path / file, b"")  # of one that was killed on the way
        _copy_ledgers(source, parts.folder, client)
        self._start(done=0)
        with self.run.listening():
            last = parts.steps[saved.step - 1]
            self.context.place = (last.task.index, -1 if last.round is None else last.round)
            parts.state = to_device(saved.tree["state"], e.device)
            old, before, parts.state = self._measured(client), parts.state, None
            for step in parts.steps[: saved.step]:
                self.run.perform(step)
            kept = e.method.kept
            if kept(before) and not kept(parts.state):
                raise RunError(
                    "E379",
                    "none of the new sums was opened, so there is no model without this site",
                    where=str(parts.folder.path),
                    why="too few sites answered; events.jsonl names each",
                    fix="the same command when they are there; the run as it was is not touched",
                )
            held = sum(one.round is not None for one in parts.steps[: saved.step])
            self._write_down(client, name, saved.step, held, before, old, self._measured(client))
            self._close(saved.step)

    def _start(self, done: int) -> None:
        self.parts.folder.describe(self.context.experiment)
        self.context.note_kept()
        self.context.tell("start", done=done, steps=len(self.parts.steps))

    def _close(self, step: int) -> None:
        """Write down where the run stands; one that was finished is finished again."""
        self.run.commit(step)
        self.parts.writer.wait()
        if step == len(self.parts.steps):
            self.run.finish()
        else:
            self.parts.tell_status("interrupted")

    def _fresh(self) -> Model:
        """The weights the run began with, with a head for the classes it knows by now."""
        e, task = self.context.experiment, self.federation.task
        weights = {key: value.detach().clone() for key, value in e.initial_net().state_dict().items()}
        head = grow_head(weights, task.num_seen, e.rng.at("forget", "head").generator())
        return to_device(head, e.device)  # type: ignore[no-any-return]

    def _measured(self, client: int) -> dict[str, Any]:
        """The model on all test images of the tasks so far, and on the client's own images; None where they are away."""
        e, task = self.context.experiment, self.context.experiment.tasks[self.context.place[0]]
        found = None if e.tested_at_sites else self.run.evaluate(task)
        return {"found": found, "own": accuracy_on(e, self.parts.state.model, client, e.tasks[: task.index + 1])}

    def _write_down(
        self, client: int, name: str | None, step: int, held: int, before: Any, old: dict[str, Any], new: dict[str, Any]
    ) -> None:
        method = self.context.experiment.method
        own = method.kept(before).get(client, Kept(Counter(), 0))
        left = sum((kept.images for kept in method.kept(self.parts.state).values()), Counter())
        classes = self.context.experiment.dataset.classes
        lost = sorted({label for _, label, _ in own.images} - {label for _, label, _ in left})
        again = sums_again(self.context.resolved)
        epochs = 0 if method.additive else held * self.context.experiment.recipe.train.server_epochs
        record = Forgotten(
            client=client,
            name=name or "",
            step=step,
            task=self.context.place[0],
            num_images=None if again else sum(own.images.values()),
            bytes=own.num_bytes,
            num_images_left=sum(left.values()),
            removed=tuple(self._rows(own.images)),
            classes_lost=tuple(classes[label] for label in lost),
            epochs=epochs,
            exact=method.additive,
            accuracy_before=old["found"].overall if old["found"] else None,
            accuracy_after=new["found"].overall if new["found"] else None,
            per_task_before=tuple(old["found"].per_task) if old["found"] else (),
            per_task_after=tuple(new["found"].per_task) if new["found"] else (),
            own_images_before=old["own"],
            own_images_after=new["own"],
            remains=_remains(method, again),
            **(self._charged() if again else {}),
        )
        self.context.facts.forgotten.append(record)
        if self.parts.leakage.samples:
            self.parts.leakage.save_gallery()
        done = (
            "sums over the other sites were taken anew, with fresh noise, and their images charged again"
            if again
            else f"its sums over {record.num_images} images were subtracted, and the model solved anew"
            if method.additive
            else f"{record.num_images} of its images were removed, and the model trained anew"
        )
        self.context.note("info", "I402", f"site {name or client} left: {done}", client=client)
        if lost:
            names = ", ".join(record.classes_lost)
            self.context.note("warning", "W404", f"nobody else sent images of {names}: the model has lost them")

    def _charged(self) -> dict[str, Any]:
        """What new sums have cost an image of another site: epsilon before and after; null in test mode."""
        after = self.context.experiment.recipe.promise(len(self.context.experiment.tasks))
        assert after is not None  # secure sums have a mechanism
        both = {"before": replace(after, earlier_sums=after.earlier_sums - 1), "after": after}
        return {
            "summed_again": True,
            **{f"epsilon_{when}": promise.epsilon() for when, promise in both.items()},
            **{f"epsilon_replaced_{when}": promise.epsilon_replaced() for when, promise in both.items()},
        }

    def _rows(self, removed: Counter[tuple[int, int, str]]) -> list[dict[str, Any]]:
        """Per task and class, what lay in the buffer and what in the pool, or what the sums were made of."""
        classes, tasks = self.context.experiment.dataset.classes, self.context.experiment.tasks
        named = self.context.experiment.recipe.tasks.scenario == "class"
        rows: dict[tuple[int, int], dict[str, Any]] = {}
        for (number, label, kind), count in sorted(removed.items()):
            task = next(t.index for t in tasks if label in t.classes) if named else number
            kinds = {"sums": 0} if kind == "sums" else {"buffer": 0, "pool": 0}
            row = {"task": task if task >= 0 else "all", "class": classes[label], **kinds}
            rows.setdefault((task, label), row)[kind] += count
        return [rows[key] for key in sorted(rows)]


def _copy_history(source: RunFolder, out: RunFolder, saved: Saved, client: int) -> None:
    """Rounds, events and the other sites' privacy ledgers, as far as the checkpoint knows them."""
    _copy_ledgers(source, out, client)
    for name in APPENDED:
        data = (source.path / name).read_bytes() if (source.path / name).is_file() else b""
        save_atomically(out.path / name, data[: saved.facts["lengths"][name]])


def _copy_ledgers(source: RunFolder, out: RunFolder, client: int) -> None:
    """All but the client's own. Ledgers that are there already may have charges of their own, and stay."""
    old, new = source.path / "ledgers", out.path / "ledgers"
    if old.is_dir() and not new.exists():
        own = shutil.ignore_patterns(f"client-{client}.jsonl", f"client-{client}")
        with replacing(new) as half:
            shutil.rmtree(half, ignore_errors=True)
            shutil.copytree(old, half, ignore=own)


def _remains(method: Method, again: bool) -> tuple[str, ...]:
    if again:
        return REMAINS_OF_SECURE_SUMS
    return REMAINS_OF_SUMS if method.additive else REMAINS
