"""Evaluation on the test images of every task seen so far: one head over all seen classes, no task identity.

Where the data have natural sites, also at each site: of the run's one model, and of a model whose head the site has tuned on its
own images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.core.errors import DataError
from rescene.core.json_files import as_json
from rescene.core.record import record
from rescene.core.results import DIGITS, SiteAccuracy
from rescene.data import Dataset, Images, SiteOrders, Task
from rescene.engine.experiment import Experiment
from rescene.nets import Net
from rescene.privacy.mechanism import noised_counts
from rescene.privacy.noise import Noise
from rescene.training import class_scores, embed


@dataclass(frozen=True)
class Evaluation:
    """Percent per task, the same when the choice is only among the task's own classes, and the confusion counts."""

    per_task: list[float]
    within_task: list[float]
    overall: float
    confusion: list[list[int]]
    sizes: list[int]  # test images per task
    recall: list[float]  # percent per class, in the place of a confusion that nobody knows; else empty
    by_site: list[float] = field(default_factory=list)  # percent on the classes that each site has met, in own orders


def evaluate(net: nn.Module, dataset: Dataset, tasks: Sequence[Task], orders: SiteOrders | None = None) -> Evaluation:
    """Accuracy after these tasks. A task without test images counts as 0.

    With an order for each site, the accuracy on task j is the mean over the sites of that on the site's own j-th task.
    """
    test, transform = dataset.test, dataset.transform
    index = torch.cat([task.test for task in tasks]).to(test.labels.device)
    classes = tasks[-1].num_seen  # a head may know of classes that are still to come
    scores = class_scores(net, test.pixels[index], transform.normalise)[:, :classes]
    truth = test.labels[index]
    guesses = scores.argmax(dim=1)
    sizes = [len(task.test) for task in tasks]
    right = (guesses == truth).split(sizes)
    within = [_within(*own) for own in zip(scores.split(sizes), truth.split(sizes), tasks, strict=True)]
    confusion = torch.bincount(truth * classes + guesses, minlength=classes * classes).reshape(classes, classes)
    found = Evaluation([_percent(r) for r in right], within, _percent(guesses == truth), confusion.tolist(), sizes, [])
    return found if orders is None else _in_own_orders(found, scores, truth, orders)


def _in_own_orders(found: Evaluation, scores: Tensor, truth: Tensor, orders: SiteOrders) -> Evaluation:
    """The figures by task as means over sites; a site whose classes have no test image is left out of a mean.

    ``scores`` [n, classes] and ``truth`` [n] are of all test images of the classes that anybody has met.
    """
    sites, num_steps = range(len(orders.steps)), len(found.per_task)
    groups = {own for k in sites for own in (*orders.steps[k][:num_steps], orders.met(k, num_steps - 1))}
    right = {classes: _on_classes(scores, truth, classes) for classes in groups}
    per_task, within = (
        [mean_of_known([right[orders.steps[k][t]][kind] for k in sites]) for t in range(num_steps)] for kind in (0, 1)
    )
    return replace(
        found,
        per_task=per_task,
        within_task=within,
        by_site=[right[orders.met(k, num_steps - 1)][0] for k in sites],
    )


def _on_classes(scores: Tensor, truth: Tensor, classes: tuple[int, ...]) -> tuple[float, float]:
    """Percent right on the images of these classes, among all classes and among these alone; NaN without images."""
    labels = torch.tensor(classes, device=scores.device)
    own = torch.isin(truth, labels)
    if not bool(own.any()):
        return math.nan, math.nan
    scores, truth = scores[own], truth[own]
    return _percent(scores.argmax(dim=1) == truth), _percent(labels[scores[:, labels].argmax(dim=1)] == truth)


def mean_of_known(values: Sequence[float]) -> float:
    """The mean without NaN; NaN if nothing is left."""
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


@record
class Tally:
    """What a site tells about its hold-out: int64 [classes seen] each, and nothing else."""

    num: Tensor
    right: Tensor
    right_within: Tensor  # when the choice is only among the classes of the image's task


@torch.no_grad()
def tally(net: nn.Module, dataset: Dataset, tasks: Sequence[Task]) -> Tally:
    """Test images and right answers per class of these tasks."""
    num_seen, device = tasks[-1].num_seen, dataset.test.labels.device
    num, right, right_within = (torch.zeros(num_seen, dtype=torch.int64) for _ in range(3))
    for task in tasks:
        truth = dataset.test.labels[task.test]
        if not len(truth):
            continue
        scores = class_scores(net, dataset.test.pixels[task.test], dataset.transform.normalise)
        classes = torch.tensor(task.classes, device=device)
        inside = classes[scores[:, classes].argmax(dim=1)]
        for counts, chosen in ((num, truth), (right, scores.argmax(dim=1)), (right_within, inside)):
            counts += torch.bincount(truth[chosen == truth], minlength=num_seen).cpu()
    return Tally(num, right, right_within)


def noised(found: Tally, sigma: float, noise: Noise) -> Tally:
    """Counts behind noise (``privacy.noised_counts``), then made possible again: none below 0, not more right than there are."""
    counts = noised_counts(torch.stack([found.num, found.right, found.right_within]), sigma, noise)
    num = counts[0].clamp_min(0)
    return Tally(num, *(torch.minimum(right.clamp_min(0), num) for right in counts[1:]))


def summed(tallies: Sequence[Tally], tasks: Sequence[Task]) -> Evaluation:
    """The evaluation of all hold-outs together; NaN where nobody has an image. Who is mistaken for whom stays unknown.

    Noise on the counts can make the right answers within a task fewer than those among all classes, or more than the
    images. They are brought between the two here; for a task that has all classes they are equal. This looks at noised
    numbers alone, so it costs no privacy. Counts without noise stay as they are.
    """
    zero = torch.zeros(tasks[-1].num_seen, dtype=torch.int64)
    num, right, within = (
        sum((getattr(one, name) for one in tallies), start=zero) for name in ("num", "right", "right_within")
    )
    own = [torch.tensor(task.classes) for task in tasks]
    sizes = torch.stack([num[classes].sum() for classes in own])
    among_all, inside = (torch.stack([part[classes].sum() for classes in own]) for part in (right, within))
    whole = torch.tensor([len(classes) == len(num) for classes in own])
    inside = torch.where(whole, among_all, inside.clamp(among_all, sizes))
    (overall,) = _percents(right.sum()[None], num.sum()[None])
    return Evaluation(
        _percents(among_all, sizes), _percents(inside, sizes), overall, [], sizes.tolist(), _percents(right, num)
    )


def _percents(right: Tensor, num: Tensor) -> list[float]:
    return [100.0 * r / n if n else math.nan for r, n in zip(right.tolist(), num.tolist(), strict=True)]


def _within(scores: Tensor, truth: Tensor, task: Task) -> float:
    classes = torch.tensor(task.classes, device=scores.device)
    return _percent(classes[scores[:, classes].argmax(dim=1)] == truth)


def _percent(right: Tensor) -> float:
    return 100.0 * int(right.sum()) / max(len(right), 1)


def site_accuracies(model: Mapping[str, Tensor], experiment: Experiment) -> tuple[SiteAccuracy, ...]:
    """Name, images and percent right of each site, over all classes. Nothing where test images have no site."""
    held = _tested(experiment)
    if held is None:
        return ()
    test, site = held
    num_seen = experiment.tasks[-1].num_seen
    net = experiment.arch.restore(model).to(experiment.device)
    scores = class_scores(net, test.pixels, experiment.dataset.transform.normalise)[:, :num_seen]
    right = scores.argmax(dim=1) == test.labels
    return tuple(
        SiteAccuracy(
            name=name,
            train_size=sum(len(shards[k]) for shards in experiment.shards),
            test_size=int((site == k).sum()),
            accuracy=_percent_or_nan(right[site == k]),
        )
        for k, name in enumerate(experiment.dataset.sites)
    )


@dataclass(frozen=True)
class Tuning:
    """How a site tunes the head: full-batch gradient steps on its own training images. Fixed, never chosen on test images."""

    steps: int = 100
    lr: float = 0.1
    decay: float = 0.01  # pull towards the head that all sites share


def tuned_records(net: Net, experiment: Experiment, tuning: Tuning) -> list[dict[str, Any]]:
    """One row per site: accuracy on its own test images with the shared head and with its tuned head, and the difference."""
    held = _tested(experiment)
    if held is None:
        what = "this run has no test images that belong to sites"
        fix = "run with federation.partition=sites, on images with a folder or a column of sites"
        raise DataError("E249", what, where=experiment.dataset.name, fix=fix)
    test, test_site = held
    shared = (net.head.weight.detach().clone(), net.head.bias.detach().clone())
    rows = []
    for k, name in enumerate(experiment.dataset.sites):
        own = experiment.dataset.train.select(torch.cat([shards[k] for shards in experiment.shards]))
        held_out = test.select(test_site == k)
        features, seen = (_features(net, images, experiment) for images in (own, held_out))
        before = _percent_or_nan(_answers(seen, *shared) == held_out.labels)
        head = tuned_head(features, own.labels, shared, tuning) if len(own) else shared
        after = _percent_or_nan(_answers(seen, *head) == held_out.labels)
        row = {"site": name, "train": len(own), "test": len(held_out), "shared head": before, "tuned head": after}
        rows.append(as_json(row | {"gain": after - before}, DIGITS))
    return rows


def tuned_head(
    features: Tensor, labels: Tensor, shared: tuple[Tensor, Tensor], tuning: Tuning
) -> tuple[Tensor, Tensor]:
    """Logistic regression from the shared head on, with a pull towards it: a site with few images stays near it.

    Features are scaled by their mean norm and scores by their spread, so that one step size suits every network.
    """
    scale = features.norm(dim=1).mean().clamp_min(1e-6)
    spread = (features @ shared[0].T + shared[1]).std().clamp_min(1e-6)
    z = features / scale
    moved = [(value * unit / spread).clone().requires_grad_() for value, unit in zip(shared, (scale, 1.0), strict=True)]
    start = [value.detach().clone() for value in moved]
    optimiser = torch.optim.SGD(moved, lr=tuning.lr)
    with torch.enable_grad():
        for _ in range(tuning.steps):
            pull = sum((a - b).square().sum() for a, b in zip(moved, start, strict=True))
            loss = F.cross_entropy(z @ moved[0].T + moved[1], labels) + tuning.decay * pull
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return moved[0].detach() * spread / scale, moved[1].detach() * spread


def _tested(experiment: Experiment) -> tuple[Images, Tensor] | None:
    """The run's test images and the site of each."""
    test = experiment.dataset.test
    if test.sites is None or experiment.recipe.federation.partition != "sites":
        return None
    held = test.select(torch.cat([task.test for task in experiment.tasks]))
    assert held.sites is not None
    return held, held.sites


def _features(net: Net, images: Images, experiment: Experiment) -> Tensor:
    if not len(images):
        return net.head.weight.new_zeros(0, net.head.in_features)
    return embed(net, images.pixels, experiment.dataset.transform.normalise)


def _answers(features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (features @ weight.T + bias).argmax(dim=1)


def _percent_or_nan(right: Tensor) -> float:
    return 100.0 * int(right.sum()) / len(right) if len(right) else math.nan
