"""Every site meets the classes in an order of its own (``tasks.order=per-site``), as in FedWeIT (Yoon et al., ICML 2021).

A site keeps the images that it has under one order for all; only the step changes in which it meets them. So two runs that
differ in the order alone differ in nothing else. Labels are numbered in the order in which anybody meets the classes first, so
that the labels known so far are 0..num_seen-1 here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rescene.core.rng import Rng
from rescene.data.images import Dataset, Task
from rescene.data.tasks import relabel

Steps = tuple[tuple[int, ...], ...]  # the classes of each step, ascending


@dataclass(frozen=True)
class SiteOrders:
    """``steps[site][t]`` are the classes that the site meets in step t, and in no other step."""

    steps: tuple[Steps, ...]

    def met(self, site: int, step: int) -> tuple[int, ...]:
        """Classes that the site has met when this step is over, ascending."""
        return tuple(sorted(c for classes in self.steps[site][: step + 1] for c in classes))

    def in_play(self, step: int) -> tuple[int, ...]:
        """Classes that some site meets in this step, ascending."""
        return tuple(sorted({c for own in self.steps for c in own[step]}))

    def arrival(self) -> list[int]:
        """Classes in the order in which somebody meets them first; those of one step ascending."""
        arrived: list[int] = []
        for t in range(len(self.steps[0])):
            arrived += [c for c in self.in_play(t) if c not in arrived]
        return arrived

    def renamed(self, arrival: Sequence[int]) -> SiteOrders:
        """The same orders where class ``arrival[i]`` is called i."""
        name = {c: i for i, c in enumerate(arrival)}
        return SiteOrders(
            tuple(tuple(tuple(sorted(name[c] for c in classes)) for classes in own) for own in self.steps)
        )


def draw_orders(sizes: Sequence[int], num_sites: int, num_steps: int, seed: int) -> SiteOrders:
    """A random order of sum(``sizes``) classes for each site, cut into steps of these sizes; the first ``num_steps`` of them.

    Site k's order depends on the seed and on k alone, not on how many sites or steps there are.
    """
    drawn = []
    for site in range(num_sites):
        generator = Rng(seed).at("class-order", site).generator()
        parts = torch.randperm(sum(sizes), generator=generator).split(list(sizes))
        drawn.append(tuple(tuple(sorted(part.tolist())) for part in parts[:num_steps]))
    return SiteOrders(tuple(drawn))


def in_own_orders(
    dataset: Dataset, tasks: Sequence[Task], shards: Sequence[Sequence[Tensor]], seed: int, limit: int | None = None
) -> tuple[Dataset, list[Task], list[list[Tensor]], SiteOrders]:
    """From one order for all sites to an order for each: data set with new labels, steps, shards, and who meets what when.

    ``tasks`` and ``shards`` [task][site] are those of the one order, all of them; ``limit`` keeps the first steps. A step is a
    Task: see :func:`_step` for what it says.
    """
    num_sites, num_steps = len(shards[0]), len(tasks[:limit])
    orders = draw_orders([len(task.classes) for task in tasks], num_sites, num_steps, seed)
    arrival = orders.arrival()
    arrival += [c for c in range(len(dataset.classes)) if c not in arrival]  # nobody meets them within the limit
    dataset, orders = relabel(dataset, arrival), orders.renamed(arrival)
    own = [torch.cat([parts[site] for parts in shards]).sort().values for site in range(num_sites)]
    found = [
        [images[_is_of(dataset.train.labels[images], orders.steps[site][t])] for site, images in enumerate(own)]
        for t in range(num_steps)
    ]
    return dataset, [_step(dataset, orders, t, found[t]) for t in range(num_steps)], found, orders


def _step(dataset: Dataset, orders: SiteOrders, t: int, held: Sequence[Tensor]) -> Task:
    """``classes``: those that some site meets in the step, also if others met them before; ``num_seen``: those that anybody has
    met so far; ``train``: all sites' images of the step; ``test``: test images of the classes that are new to everybody."""
    met = {c for k in range(len(orders.steps)) for c in orders.met(k, t)}
    before = {c for k in range(len(orders.steps)) for c in orders.met(k, t - 1)}
    labels = dataset.test.labels
    test = torch.nonzero(_is_of(labels, tuple(sorted(met - before)))).flatten()
    return Task(t, orders.in_play(t), len(met), None, torch.cat(list(held)).sort().values, test)


def _is_of(labels: Tensor, classes: Sequence[int]) -> Tensor:
    return torch.isin(labels, torch.tensor(classes, dtype=labels.dtype, device=labels.device))
