"""Which classes (or domains) arrive when, for all sites alike or at each site in an order of its own.

Class-incremental: the data set is relabelled in arrival order, so that task t brings consecutive labels and the labels
known so far are always 0..num_seen-1. Domain-incremental: one task per domain, with all labels from the start.

Orders of their own (``tasks.order=per-site``) are as in FedWeIT (Yoon et al., ICML 2021). A site keeps the images that it has
under one order for all; only the step changes in which it meets them. So two runs that differ in the order alone differ in nothing
else. Labels are numbered in the order in which anybody meets the classes first, so that the labels known so far are
0..num_seen-1 here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rescene.core.errors import ConfigError, DataError, did_you_mean
from rescene.core.rng import Rng
from rescene.data.images import Dataset, Images, Task


def plan_tasks(
    dataset: Dataset,
    *,
    scenario: str = "class",
    per_task: int | None = None,
    count: int | None = None,
    sizes: Sequence[int] | None = None,
    plan: Sequence[Sequence[str]] | None = None,
    order: str = "natural",
    seed: int = 0,
) -> tuple[Dataset, list[Task]]:
    """Split a data set into tasks; returns it relabelled in arrival order, and the tasks.

    ``scenario="class"`` takes exactly one of ``per_task`` (chunks, the last takes the remainder), ``count`` (tasks as
    equal as possible, larger ones first), ``sizes`` (must sum to the number of classes) and ``plan`` (lists of class
    names; classes it leaves out are dropped, with a note). ``order`` is ``natural`` or ``seeded``.
    ``scenario="domain"`` takes none of them, or a ``plan`` with one domain for each task.
    """
    asked = {"per_task": per_task, "count": count, "sizes": sizes, "plan": plan}
    given = [name for name, value in asked.items() if value is not None]
    if scenario == "domain":
        return dataset, _domain_tasks(dataset, [name for name in given if name != "plan"], order, plan)
    if scenario != "class":
        raise _bad_plan(f"unknown scenario {scenario!r}", fix="scenario: class or domain")
    if len(given) != 1:
        named = ", ".join(given) or "none of them"
        fix = (
            f"leave out the others, as in tasks.{given[0]}=null"
            if given
            else "tasks.count=N, or tasks.plan=[[cat,dog],[car]]"
        )
        raise _bad_plan(
            "a task plan needs exactly one of per_task, count, sizes and plan", why=f"given: {named}", fix=fix
        )
    if plan is not None:
        arrival, sizes = _named_plan(dataset.classes, plan, order)
    else:
        arrival = _class_order(len(dataset.classes), order, seed)
        sizes = _task_sizes(len(arrival), per_task, count, sizes)
    return _class_tasks(relabel(dataset, arrival), sizes)


def _bad_plan(what: str, *, why: str | None = None, fix: str | None = None) -> ConfigError:
    return ConfigError("E207", what, where="task plan", why=why, fix=fix)


def _class_order(num_classes: int, order: str, seed: int) -> list[int]:
    if order == "natural":
        return list(range(num_classes))
    if order == "seeded":
        return torch.randperm(num_classes, generator=Rng(seed).at("class-order").generator()).tolist()
    raise _bad_plan(f"unknown class order {order!r}", fix="order: natural or seeded")


def _task_sizes(num_classes: int, per_task: int | None, count: int | None, sizes: Sequence[int] | None) -> list[int]:
    """Number of classes of each task, from whichever of the three is given.

    >>> _task_sizes(5, 2, None, None), _task_sizes(10, None, 3, None)
    ([2, 2, 1], [4, 3, 3])
    """
    if per_task is not None:
        if per_task < 1:
            raise _bad_plan(f"per_task must be at least 1, not {per_task}")
        return [min(per_task, num_classes - start) for start in range(0, num_classes, per_task)]
    if count is not None:
        if not 1 <= count <= num_classes:
            raise _bad_plan(f"cannot make {count} tasks of {num_classes} classes", fix=f"count: 1 to {num_classes}")
        return [num_classes // count + (t < num_classes % count) for t in range(count)]
    sizes = list(sizes or ())
    if sum(sizes) != num_classes or min(sizes, default=0) < 1:
        why = f"{' + '.join(map(str, sizes)) or 'nothing'} = {sum(sizes)}, but there are {num_classes} classes"
        raise _bad_plan("the sizes of the tasks do not add up", why=why, fix="positive sizes that sum to the classes")
    return sizes


def _named_plan(
    classes: tuple[str, ...], plan: Sequence[Sequence[str]], order: str, what: str = "class"
) -> tuple[list[int], list[int]]:
    """Arrival order (old labels) and task sizes of a plan by class names."""
    if order != "natural":
        raise _bad_plan("a named plan fixes the order of the classes itself", fix="leave out order, or use per_task")
    names = [str(name) for task in plan for name in task]
    for name in names:
        if name not in classes:
            fix = did_you_mean(name, classes, "{!r}") or f"there are: {', '.join(classes[:20])}"
            raise _bad_plan(f"no {what} is called {name!r}", fix=fix)
        if names.count(name) > 1:
            raise _bad_plan(f"{what} {name!r} appears twice", why=f"a {what} arrives once", fix="keep one of them")
    if not all(plan) or not names:
        raise _bad_plan("a task of the plan has no class", fix="remove the empty list")
    return [classes.index(name) for name in names], [len(task) for task in plan]


def relabel(dataset: Dataset, arrival: list[int]) -> Dataset:
    """The data set with old label ``arrival[i]`` called i; pictures of other classes are left out."""
    if arrival == list(range(len(dataset.classes))):
        return dataset
    new_label = torch.full((len(dataset.classes),), -1)
    new_label[arrival] = torch.arange(len(arrival))
    dropped = [name for c, name in enumerate(dataset.classes) if new_label[c] < 0]
    notes = (f"classes not in the task plan, dropped: {', '.join(dropped)}",) if dropped else ()
    return replace(
        dataset,
        classes=tuple(dataset.classes[c] for c in arrival),
        train=_renamed(dataset.train, new_label),
        test=_renamed(dataset.test, new_label),
        notes=(*dataset.notes, *notes),
    )


def _renamed(images: Images, new_label: Tensor) -> Images:
    labels = new_label.to(images.labels.device)[images.labels]
    renamed = images.relabelled(labels)
    return renamed if bool((labels >= 0).all()) else renamed.select(labels >= 0)


def _class_tasks(dataset: Dataset, sizes: Sequence[int]) -> tuple[Dataset, list[Task]]:
    counts = torch.bincount(dataset.train.labels, minlength=len(dataset.classes)).tolist()
    empty = [name for name, n in zip(dataset.classes, counts, strict=True) if n == 0]
    if empty:
        what = f"no training image of class {', '.join(empty)}"
        raise DataError("E204", what, where=dataset.name, fix="add images, or leave the class out of the task plan")
    return dataset, [tested(dataset, task) for task in cut(dataset, sizes)]


def cut(dataset: Dataset, sizes: Sequence[int]) -> list[Task]:
    """Tasks of so many classes each, in the order of the labels; some of them may have no picture here."""
    tasks, seen = [], 0
    for t, size in enumerate(sizes):
        classes = tuple(range(seen, seen + size))
        seen += size
        train, test = (_positions(images.labels, classes) for images in (dataset.train, dataset.test))
        tasks.append(Task(t, classes, seen, None, train, test))
    return tasks


def tested(dataset: Dataset, task: Task) -> Task:
    """The task itself; without a test image its accuracy would be undefined."""
    if len(task.test) == 0:
        names = ", ".join(dataset.classes[c] for c in task.classes[:5])
        where = names if task.domain is None else f"domain {dataset.domains[task.domain]}"
        raise DataError("E202", f"task {task.index + 1} has no test image", where=where, fix="add test images")
    return task


def _positions(labels: Tensor, classes: tuple[int, ...]) -> Tensor:
    return torch.nonzero((labels >= classes[0]) & (labels <= classes[-1])).flatten()


def _domain_tasks(
    dataset: Dataset, given: list[str], order: str, plan: Sequence[Sequence[str]] | None = None
) -> list[Task]:
    if given or order != "natural":
        named = ", ".join(given) or f"order={order}"
        raise _bad_plan(f"{named} has no meaning when tasks are domains", fix="leave it out, or scenario: class")
    if not dataset.domains or dataset.train.domains is None or dataset.test.domains is None:
        raise _bad_plan(
            f"{dataset.name} has no domains", fix="use <domain>/<class>/* folders or a CSV with a domain column"
        )
    labels = tuple(range(len(dataset.classes)))
    arrival = list(range(len(dataset.domains))) if plan is None else _planned_domains(dataset.domains, plan)
    tasks = []
    for t, d in enumerate(arrival):
        train, test = (
            torch.nonzero(domains == d).flatten() for domains in (dataset.train.domains, dataset.test.domains)
        )
        if len(train) == 0:
            what = f"no training image in domain {dataset.domains[d]}"
            raise DataError("E204", what, where=dataset.name, fix="add images to it")
        tasks.append(tested(dataset, Task(t, labels, len(labels), d, train, test)))
    return tasks


def _planned_domains(domains: tuple[str, ...], plan: Sequence[Sequence[str]]) -> list[int]:
    """Numbers of the domains in the order in which they arrive, by a plan with one for each task."""
    if any(len(task) != 1 for task in plan) or not plan:
        raise _bad_plan("when tasks are domains, each task of a plan has one domain", fix="tasks.plan=[[day], [night]]")
    return _named_plan(domains, plan, "natural", "domain")[0]


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
