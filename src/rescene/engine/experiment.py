"""From a recipe to everything a run needs: images on the device, tasks, the split over sites, network, method."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rescene.config import Recipe
from rescene.config.schema import PER_SITE, DataSection, FederationSection
from rescene.config.site_sections import SitesSection
from rescene.core.errors import ConfigError, ResceneWarning
from rescene.core.rng import Rng
from rescene.data import Dataset, LazySplit, SiteOrders, Task, Transform, load, partition, plan_tasks
from rescene.data.derived_sets import away, joined, validation_part
from rescene.data.inspection import (
    warn_of_leaks,
    warn_of_one_class,
    warn_of_repeats,
    warn_of_series,
    warn_of_thin_tests,
)
from rescene.data.objects import is_own_dataset
from rescene.data.partition import by_site, warn_of_unused_sites
from rescene.data.tasks import cut, in_own_orders, tested
from rescene.lens import FeatureCache, sized, through, users_own
from rescene.methods import Method
from rescene.methods.base import Client
from rescene.nets import Arch, is_own, own_model
from rescene.nets.model_file import initial_weights
from rescene.privacy.ledger import Touched
from rescene.privacy.mechanism import SitePrivacy
from rescene.privacy.promise import check_records


class Digests(NamedTuple):
    """A digest of each picture as it was before any lens, by position; behind a mechanism, else nothing."""

    view: str = ""
    train: Sequence[bytes] = ()
    test: Sequence[bytes] = ()

    @staticmethod
    def of(dataset: Dataset) -> Digests:
        """The digests of a data set's pictures."""
        return Digests(f"{list(dataset.train.pixels.shape[1:])}", dataset.train.digests, dataset.test.digests)

    def at(self, digests: Sequence[bytes], index: Tensor) -> Touched:
        """What a ledger wants to know of the pictures at these positions."""
        return Touched(self.view, [digests[i] for i in index.tolist()])


@dataclass(frozen=True)
class Experiment:
    """Immutable set-up of one run; two runs with the same recipe have the same experiment."""

    recipe: Recipe
    method: Method
    dataset: Dataset
    tasks: list[Task]
    shards: list[Sequence[Tensor]]  # [task][client] -> positions into dataset.train
    arch: Arch
    device: torch.device
    rng: Rng
    digests: Digests = Digests()
    orders: SiteOrders | None = None  # None: all sites meet the classes in one order

    @property
    def has_images(self) -> bool:
        """Whether training images are here, so that uploads can be compared with them."""
        return self.recipe.sites is None

    @property
    def tested_at_sites(self) -> bool:
        """Whether the sites hold the test images, as in a federation without a test set of its own."""
        return self.recipe.sites is not None and self.recipe.sites.test is None

    @property
    def left_out(self) -> str:
        """What ``tasks.limit`` leaves out, in words; empty if nothing."""
        limit, domain = self.recipe.tasks.limit, self.recipe.tasks.scenario == "domain"
        used = len(self.tasks) if domain else self.tasks[-1].num_seen
        total = len(self.dataset.domains if domain else self.dataset.classes)
        if limit is None or used >= total:
            return ""
        return f"uses {used} of {total} {'domains' if domain else 'classes'}: tasks.limit={limit} leaves the others out"

    def shard(
        self,
        task: Task,
        client: int,
        net: Callable[..., nn.Module],
        site: SitePrivacy | None = None,
        notice: Any = None,
        round: int = -1,
    ) -> Client:
        told, _ = self.told(task, round)
        index = self.held(task, client, round)
        if site is not None:
            site = replace(site, images=lambda: self.digests.at(self.digests.train, index))
        return Client(self.dataset.train, index, told, self.dataset.transform, net, site, notice)

    def held(self, task: Task, client: int, round: int) -> Tensor:
        """The client's images in a round: those of the task; while it drifts in, some of it and some of the one before.

        In drift round j of L (from 0) the share (j + 1) / (L + 1) of the new ones is there and as many old ones are gone.
        """
        own, drift = self.shards[task.index][client], self.recipe.tasks.drift or 0
        if task.index == 0 or not 0 <= round < drift:
            return own
        share = (round + 1) / (drift + 1)
        come, gone = self._in_order(task.index, client), self._in_order(task.index - 1, client)
        come, gone = come[: math.ceil(share * len(come))], gone[math.ceil(share * len(gone)) :]
        return torch.cat([gone, come]).sort().values

    def _in_order(self, task: int, client: int) -> Tensor:
        """The client's images of a task in the order in which they come and go."""
        own = self.shards[task][client]
        generator = self.rng.at("drift", task, client).generator()
        return own[torch.randperm(len(own), generator=generator).to(own.device)]

    def new_classes(self, task: Task) -> Sequence[int]:
        """Labels that arrive with the task; with an order for each site, those that nobody had met before, which may be none."""
        if self.orders is None:
            return task.classes
        return range(self.tasks[task.index - 1].num_seen if task.index else 0, task.num_seen)

    def present(self, task: Task) -> Task:
        """The task with all images that anybody may hold during it."""
        if not self.recipe.tasks.drift or task.index == 0:
            return task
        return replace(task, train=torch.cat([self.tasks[task.index - 1].train, task.train]))

    def told(self, task: Task, round: int) -> tuple[Task, int]:
        """Task and round as the method sees them. With ``tasks.drift`` it sees one long task with consecutive rounds: it knows
        how many classes there are, but not when they come."""
        if self.recipe.tasks.drift is None:
            return task, round
        return self._stream, round if round < 0 else task.index * self.recipe.federation.num_rounds + round

    def rounds_told(self, task: Task) -> int:
        """Rounds of what a method is told to be the task."""
        announced = self.recipe.tasks.drift is None
        return self.recipe.rounds_of(task.index) if announced else len(self.tasks) * self.recipe.federation.num_rounds

    @cached_property
    def _stream(self) -> Task:
        num_seen = self.tasks[-1].num_seen
        train, test = (torch.cat([getattr(task, name) for task in self.tasks]) for name in ("train", "test"))
        return Task(0, tuple(range(num_seen)), num_seen, None, train, test, announced=False)

    def initial_net(self) -> nn.Module:
        """The network before the first task: fresh, or from ``model.init``."""
        num_classes, model = self.tasks[0].num_seen, self.recipe.model
        if not model.init:
            return self.arch.build(num_classes, self.rng.at("init").generator()).to(self.device)
        file, classes, generator = Path(model.init), self.dataset.classes, self.rng.at("init", "head").generator()
        weights = initial_weights(file.expanduser(), self.arch, model.lens, classes[:num_classes], generator)
        return self.arch.restore(weights).to(self.device)

    def check_start(self) -> None:
        """A file to start from that does not fit is found here, before there is a run folder; a run that goes on needs none."""
        if self.recipe.model.init:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they are told when the run begins
                self.initial_net()

    @property
    def clients(self) -> Sequence[int]:
        """Numbers of the sites that may be asked."""
        everybody, gone = range(self.recipe.federation.num_clients), self.recipe.federation.exclude
        return [client for client in everybody if client not in gone] if gone else everybody

    def participants(self, task: Task, round: int, attempt: int = 0) -> list[int]:
        """K of N without replacement; depends on seed, task and round only, so every method meets the same sites.

        In the place of a site that left comes the next one drawn: the others' turns stay as they were. A round that is held
        again, for want of a quorum, meets others.
        """
        federation, again = self.recipe.federation, (attempt,) if attempt else ()
        generator = self.rng.at("participants", task.index, round, *again).generator()
        drawn = torch.randperm(federation.num_clients, generator=generator)
        if federation.exclude:
            drawn = drawn[~torch.isin(drawn, torch.tensor(federation.exclude))]
        return sorted(drawn[: federation.per_round].tolist())

    @property
    def is_lazy(self) -> bool:
        """Sites' images are drawn when they are asked for: nobody may go through all of them."""
        return isinstance(self.shards[0], LazySplit)

    def counts(self) -> dict[str, Any]:
        """Images per site and class, for partition.json; no counts where only the sites know them or they are drawn lazily."""
        labels = self.dataset.train.labels.cpu()
        rows = []
        for task, shards in zip(self.tasks, self.shards, strict=True):
            told = self.has_images and not self.is_lazy
            counts = _by_site_and_class(shards, labels, task) if told else []
            rows.append({"task": task.index, "classes": list(task.classes), "counts": counts})
        names = {"sites": list(self.dataset.sites)} if self.recipe.federation.partition == "sites" else {}
        return {"num_clients": len(self.shards[0]), "classes": list(self.dataset.classes), **names, "tasks": rows}


def prepare(recipe: Recipe, dataset: Dataset | None = None, kept: FeatureCache | None = None) -> Experiment:
    """Load the data unless they are given, plan the tasks, draw the split. Everything random has its own address.

    ``kept`` is where features of a lens lie between runs: the user's cache folder, or a site's own.
    """
    if recipe.sites is not None:
        return _prepare_planned(recipe, recipe.sites, dataset, kept)
    return _prepare_simulated(
        recipe, dataset, lambda pictures, device: through(recipe.model.lens, pictures, device, kept or users_own())
    )


def prepare_sizes(recipe: Recipe, dataset: Dataset | None = None) -> Experiment:
    """The same sites, tasks and sizes, for plans and forecasts: nothing is looked at through the lens."""
    if recipe.sites is not None:
        return _prepare_planned(recipe, recipe.sites, dataset, None)
    return _prepare_simulated(recipe, dataset, lambda pictures, device: sized(recipe.model.lens, pictures))


def _prepare_simulated(
    recipe: Recipe, dataset: Dataset | None, look: Callable[[Dataset, torch.device], Dataset]
) -> Experiment:
    device = pick_device(recipe.device)
    rng = Rng(recipe.seed)
    method = recipe.build_method()
    hidden, given = recipe.privacy.mechanism != "none", dataset is not None
    if dataset is None:
        dataset = load_data(recipe.images)
        _ = dataset.train.digests, dataset.test.digests  # the images that the tasks use know theirs then
    used = planned(recipe, dataset)[0] if hidden or not given else dataset  # in the order of the tasks
    if not given:
        _warn_of_tests(recipe, used)
    digests = Digests.of(used) if hidden else Digests()
    dataset, tasks = planned(recipe, seen_by(recipe, look(dataset, device)))
    warn_of_one_class(dataset.classes[: tasks[-1].num_seen])
    _warn_of_untrained_features(recipe, method)
    check_records(recipe.promise(len(tasks)), sum(len(task.train) for task in tasks))
    dataset = dataset.to(device)
    tasks = [replace(task, train=task.train.to(device), test=task.test.to(device)) for task in tasks]
    if recipe.federation.partition == "sites":
        shards: list[Sequence[Tensor]] = [by_site(dataset, task, recipe.federation.num_clients) for task in tasks]
    else:
        warn_of_unused_sites(dataset)
        shards = [_split(task, dataset.train.labels[task.train].cpu(), recipe.federation, rng) for task in tasks]
    orders = None
    if recipe.tasks.order == PER_SITE:
        dataset, tasks, shards[:], orders = in_own_orders(dataset, tasks, shards, recipe.seed, recipe.tasks.limit)
    return Experiment(recipe, method, dataset, tasks, shards, arch_of(recipe, dataset), device, rng, digests, orders)


def _prepare_planned(recipe: Recipe, plan: SitesSection, own: Dataset | None, kept: FeatureCache | None) -> Experiment:
    """One place of a federation with a plan: a site with ``own`` images, all its own, or the server, which has none."""
    device, sizes = pick_device(recipe.device), [len(task.classes) for task in plan.tasks]
    warn_of_one_class(plan.classes)
    if own is None:
        test = load(path=plan.test, image_size=plan.image_size) if plan.test else None
        dataset = through(recipe.model.lens, away(plan.classes, look_of(plan), plan.image_size, test)).to(device)
        dataset = seen_by(recipe, dataset)
        tasks = [tested(dataset, task) if plan.test else task for task in cut(dataset, sizes)]
    else:
        warn_of_leaks(own)
        if recipe.privacy.mechanism != "none":
            warn_of_repeats(own)
        dataset = seen_by(recipe, through(recipe.model.lens, own, device, kept).to(device))
        tasks = cut(dataset, sizes)
        check_records(recipe.promise(len(tasks)), max((len(task.train) for task in tasks), default=0))
    shards: list[Sequence[Tensor]] = [[task.train] * recipe.federation.num_clients for task in tasks]
    digests = Digests() if own is None or recipe.privacy.mechanism == "none" else Digests.of(own)
    arch, rng = arch_of(recipe, dataset), Rng(recipe.seed)
    return Experiment(recipe, recipe.build_method(), dataset, tasks, shards, arch, device, rng, digests)


def arch_of(recipe: Recipe, dataset: Dataset) -> Arch:
    """The network's architecture; one of the user's own is taken apart here, so what is wrong with it is told before a run.

    A network that the method cannot use is refused here, too.
    """
    model = recipe.model
    arch = Arch(model.name, dataset.image_size, model.norm, model.width, dataset.num_channels)
    if is_own(model.name):
        own_model(model.name).taken_apart(dataset.image_size)
    recipe.build_method().check_network(arch)
    return arch


def seen_by(recipe: Recipe, dataset: Dataset) -> Dataset:
    """The data set with the normalisation of the network, where the network brings one: its weights were trained with it."""
    if recipe.model.lens is not None or not is_own(recipe.model.name):
        return dataset
    model = own_model(recipe.model.name)
    if model.mean is None or model.std is None:
        return dataset
    return replace(dataset, transform=Transform(model.mean, model.std, dataset.transform.pad))


def look_of(plan: SitesSection) -> Transform:
    """How pictures are normalised and cropped in a federation across sites."""
    return Transform(plan.mean, plan.std, plan.image_size // 8)


def _by_site_and_class(shards: Sequence[Tensor], labels: Tensor, task: Task) -> list[list[int]]:
    """How many images of each class of the task each shard has; counted in one go, because there may be many sites."""
    site = torch.repeat_interleave(torch.tensor([len(shard) for shard in shards]))
    place = site * task.num_seen + labels[torch.cat(list(shards)).cpu()]
    counts = torch.bincount(place, minlength=len(shards) * task.num_seen).reshape(len(shards), task.num_seen)
    found: list[list[int]] = counts[:, list(task.classes)].tolist()
    return found


def _split(task: Task, labels: Tensor, federation: FederationSection, rng: Rng) -> Sequence[Tensor]:
    """Who holds which images of a task."""
    num_clients, seed = federation.num_clients, rng.at("split", task.index).integer()
    if federation.partition == "lazy-dirichlet":
        size = federation.min_size if federation.min_size > 1 else max(1, len(labels) // num_clients)
        return LazySplit(task.train, labels, num_clients, federation.beta, size, seed)
    parts = partition(
        labels, num_clients, kind=federation.partition, beta=federation.beta, seed=seed, min_size=federation.min_size
    )
    return [task.train[part.to(task.train.device)] for part in parts]


def _warn_of_tests(recipe: Recipe, used: Dataset) -> None:
    """Of the images that the tasks use; those of classes that a plan leaves out do not count."""
    warn_of_leaks(used)
    if recipe.images.path is not None or is_own_dataset(recipe.images.name):  # published sets are what they are
        warn_of_series(used)
        warn_of_thin_tests(used)
        if recipe.privacy.mechanism != "none":
            warn_of_repeats(used)


def _warn_of_untrained_features(recipe: Recipe, method: Method) -> None:
    """Say that a method of sums gets the features of a network that nothing has trained (W567)."""
    model = recipe.model
    if (
        method.additive
        and model.lens is None
        and model.init is None
        and model.name != "linear"
        and not is_own(model.name)
    ):
        what = (
            f"{method.title} trains no network, and the body of {model.name} has random weights: its features tell less than "
            "those of a lens"
        )
        fix = "model.lens=waves model.name=linear train.augment=false; the recipes lens and own have a lens"
        warnings.warn(ResceneWarning("W567", what, fix=fix), stacklevel=2)


def planned(recipe: Recipe, dataset: Dataset) -> tuple[Dataset, list[Task]]:
    """The data set relabelled in the order of arrival, and the tasks of this run.

    With an order for each site: those of the one order that each site's is drawn from, all of them.
    """
    plan = recipe.tasks
    own_orders = plan.order == PER_SITE
    dataset, tasks = plan_tasks(
        dataset,
        scenario=plan.scenario,
        per_task=plan.per_task,
        count=plan.count,
        sizes=plan.sizes,
        plan=plan.plan,
        order="natural" if own_orders else plan.order,
        seed=recipe.seed,
    )
    return dataset, tasks if own_orders else tasks[: plan.limit]


def load_data(data: DataSection) -> Dataset:
    """The images of a recipe, those of ``data.more`` behind those of ``data.path``."""
    dataset = _load_one(data)
    for path in data.more or ():
        later = data.model_copy(update={"name": "auto", "path": path, "image_size": dataset.image_size})
        dataset = joined(dataset, _load_one(later), path)
    if data.mean is None and data.std is None:
        return dataset
    mean, std = data.mean or dataset.transform.mean, data.std or dataset.transform.std
    return replace(dataset, transform=replace(dataset.transform, mean=mean, std=std))


def _load_one(data: DataSection) -> Dataset:
    """The images of ``data.path``. With ``data.validation`` the test images are a part of the training images."""
    dataset = load(
        data.name,
        data.path,
        image_size=data.image_size,
        test_fraction=data.test_fraction,
        seed=data.seed,
        held_out=data.held_out,
        skip_unreadable=data.skip_unreadable,
        layout=data.layout,
        outside=data.outside,
        columns=data.columns.given,
    )
    if data.validation is None:
        return dataset
    return validation_part(dataset, data.validation, data.seed, data.held_out)


def pick_device(name: str) -> torch.device:
    """The device of this name; ``auto`` is the first GPU, else the CPU. An absent device is a ConfigError (E107)."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError("E107", f"unknown device {name!r}", fix="device=auto, cpu, cuda or cuda:0") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("E107", f"device {name!r} is not there", why="torch sees no CUDA device", fix="device=cpu")
    return device


def use_all_cores() -> None:
    """Threads for torch: what the machine lets this process use (containers often show more cores than they give)."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1))
