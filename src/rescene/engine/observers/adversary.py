"""Hostile sites, simulated: what they make of their images, and how often the final model does what they wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from rescene.data import Dataset, Task
from rescene.data.images import Images
from rescene.engine.observers import Observer, RunView
from rescene.engine.run_context import RunContext
from rescene.methods.base import Client, Model
from rescene.training import class_scores

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
