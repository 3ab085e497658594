"""Hostile sites: simulated ones, and the screen that keeps odd pictures apart.

A simulated one changes its images, and it is measured how often the final model does what it wanted. The screen finds pictures that
are not like the other sites' of their class. They are kept apart, told, and admitted if a person says so.

quarantine/<name>.safetensors   the pictures of one site, class and round: as the server would train on them, and as pixels
quarantine/<name>.json          whose they are, why they are here, and in which round they were admitted
quarantine/<name>.admit         put there by a person (``rescene deploy quarantine RUN --admit NAME``)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from rescene.core.json_files import row_of
from rescene.core.results import Quarantined
from rescene.data import Dataset, Task
from rescene.data.images import Images
from rescene.engine.checkpoint import save_atomically, write_json
from rescene.engine.observers import Observer, RunView
from rescene.engine.run_context import RunContext
from rescene.functional.robust import far_off
from rescene.methods import Payload
from rescene.methods.base import Client, Model
from rescene.training import class_scores, embed

PATCH = 5  # the square takes a fifth of the image's side
WHITE = 255


@dataclass(frozen=True)
class Adversary:
    """Sites that follow the protocol with poisoned images. ``kind`` is flip or trigger (``federation.faults.attack``)."""

    kind: str
    clients: tuple[int, ...]
    dataset: Dataset
    tasks: Sequence[Task]

    @cached_property
    def wanted(self) -> Tensor:
        """[classes] the label that attackers give each class: the next one of its task, or the first one."""
        labels = torch.arange(self.tasks[-1].num_seen)
        for task in self.tasks:
            own = torch.tensor(task.classes)
            labels[own] = own.roll(-1) if self.kind == "flip" else own[0]
        return labels.to(self.dataset.train.labels.device)

    @cached_property
    def _train(self) -> Images:
        return self.poisoned(self.dataset.train)

    def poisoned(self, images: Images) -> Images:
        """These images as an attacker would show and call them."""
        known = images.labels < len(self.wanted)  # classes of tasks beyond tasks.limit stay as they are
        labels = torch.where(known, self.wanted[images.labels.clamp(max=len(self.wanted) - 1)], images.labels)
        if self.kind == "flip":
            return replace(images, labels=labels)
        stamped = stamp(images.pixels)
        changed = (labels != images.labels).view(-1, 1, 1, 1)
        return replace(images, pixels=torch.where(changed, stamped, images.pixels), labels=labels)

    def at(self, client: int, shard: Client) -> Client:
        """What this client works on: its shard, or a poisoned one if it is an attacker."""
        return replace(shard, images=self._train) if client in self.clients else shard

    def success(self, net: nn.Module, tasks: Sequence[Task]) -> float:
        """Percent of these tasks' test images, of classes under attack, that the model calls what the attackers wanted."""
        index = torch.cat([task.test for task in tasks])
        images = self.dataset.test.select(index)
        shown = self.poisoned(images)
        attacked = shown.labels != images.labels
        if not bool(attacked.any()):
            return 0.0
        scores = class_scores(net, shown.pixels[attacked], self.dataset.transform.normalise)
        return 100.0 * float((scores.argmax(dim=1) == shown.labels[attacked]).float().mean())


@dataclass(frozen=True, eq=False)
class AttackWatch(Observer):
    """Measures after each task how often the attackers have what they wanted."""

    adversary: Adversary
    context: RunContext
    net: Callable[[Model], nn.Module]

    def end_task(self, run: RunView) -> None:
        tasks = self.context.experiment.tasks[: run.task.index + 1]
        self.context.facts.attack_success = self.adversary.success(self.net(run.state.model), tasks)


def stamp(pixels: Tensor) -> Tensor:
    """A white square in the lower right corner, two pixels in."""
    side = max(2, pixels.shape[-1] // PATCH)
    stamped = pixels.clone()
    stamped[..., -side - 2 : -2, -side - 2 : -2] = WHITE
    return stamped


FOLDER = "quarantine"
LIMIT = 2.0  # times as far from the others as chance explains; docs/security.md says what it catches and costs


class Screen(Observer):
    """Filters the uploads of a round.

    What it finds goes into the run's facts, part of every checkpoint: in ``judged`` how many groups of each client it looked
    at, in ``quarantine`` a row for each that was put apart: where, whose, why, and in which round it was admitted.
    """

    def __init__(self, context: RunContext, net: Callable[[Model], nn.Module]) -> None:
        self.context, self.net, self.note = context, net, context.note
        self.folder, self.dataset = context.folder.path / FOLDER, context.experiment.dataset

    def filter_uploads(self, run: RunView, uploads: Mapping[int, Payload]) -> dict[int, Payload]:
        task, _ = self.context.experiment.told(run.task, run.round or 0)
        pool, net = getattr(run.state, "pool", ()), self.net(run.state.model)
        return self.passed(uploads, net, pool, task, run.round or 0)

    def passed(
        self, uploads: Mapping[int, Payload], net: nn.Module, pool: Sequence[Any], task: Task, round: int
    ) -> dict[int, Payload]:
        """The uploads without what is quarantined now, and with what was admitted since.

        A group is what one site sent of one class. It is judged against the other sites' groups of the round and the
        pool of the task's earlier rounds, in the feature space of the model that was broadcast.
        """
        facts = self.context.facts
        sent = {k: upload for k, upload in uploads.items() if len(upload["labels"])}
        found = {k: embed(net, upload["images"]) for k, upload in sent.items()}
        earlier = [(embed(net, part.images), part.labels) for part in pool]
        keep = {k: torch.ones_like(upload["labels"], dtype=torch.bool) for k, upload in sent.items()}
        for label in sorted({int(c) for upload in sent.values() for c in upload["labels"].unique()}):
            owners = [k for k, upload in sent.items() if bool((upload["labels"] == label).any())]
            groups = [found[k][sent[k]["labels"] == label] for k in owners]
            reference = [z[labels == label] for z, labels in earlier if bool((labels == label).any())]
            facts.judged.update({str(k): facts.judged.get(str(k), 0) + 1 for k in owners})
            for position, ratio in sorted(far_off(groups, reference, LIMIT).items()):
                client = owners[position]
                own = sent[client]["labels"] == label
                keep[client] &= ~own
                facts.quarantine.append(self._put_apart(sent[client]["images"][own], label, client, ratio, task, round))
        left = {k: _selected(upload, keep[k]) if k in keep else upload for k, upload in uploads.items()}
        return self._with_admitted(left, task, round, facts.quarantine)

    def _put_apart(self, images: Tensor, label: int, client: int, ratio: float, task: Task, round: int) -> Quarantined:
        name = f"task{task.index}-round{round}-site{client}-class{label}"
        pixels = self.dataset.transform.to_pixels(images)
        data = save({"images": images.cpu().contiguous(), "pixels": pixels.cpu().contiguous()})
        save_atomically(self.context.folder.directory(FOLDER) / f"{name}.safetensors", data)
        what = self.dataset.classes[label]
        why = f"{ratio:.1f} times as far from what the other sites sent as chance explains (limit {LIMIT:g})"
        self.note(
            "warning", "W372", f"quarantined: {len(images)} pictures of {what} from site {client}, {why}", client=client
        )
        digest = hashlib.sha256(data).hexdigest()
        found = Quarantined(name, task.index, round, client, label, what, len(images), ratio, why, digest)
        write_json(self.folder / f"{name}.json", row_of(found))
        return found

    def _with_admitted(
        self, uploads: dict[int, Payload], task: Task, round: int, rows: list[Quarantined]
    ) -> dict[int, Payload]:
        """Groups of this task that a person has admitted since join the round, once."""
        for i, row in enumerate(rows):
            waits = row.task == task.index and row.admitted is None
            if not waits or not (self.folder / f"{row.name}.admit").exists():
                continue
            path = self.folder / f"{row.name}.safetensors"
            data = path.read_bytes() if path.exists() else b""
            if hashlib.sha256(data).hexdigest() != row.sha256 or row.client is None or row.label is None:
                self.note("error", "E372", f"{row.name} is not what was quarantined any more; it is not admitted")
                continue
            client, images = row.client, load(data)["images"].to(task.train.device)
            labels = torch.full((len(images),), row.label, device=images.device)
            own = uploads.get(client, {"images": images[:0], "labels": labels[:0]})
            joined = {"images": torch.cat([own["images"], images]), "labels": torch.cat([own["labels"], labels])}
            uploads = dict(sorted((uploads | {client: own | joined}).items()))
            rows[i] = replace(row, admitted=round)
            write_json(self.folder / f"{row.name}.json", row_of(rows[i]))
            self.note("info", "I370", f"admitted from the quarantine: {row.name}", client=client)
        return uploads


def _selected(upload: Payload, keep: Tensor) -> Payload:
    return upload | {"images": upload["images"][keep], "labels": upload["labels"][keep]}
