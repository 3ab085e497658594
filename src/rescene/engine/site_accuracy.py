"""Accuracy at each natural site: of the run's one model, and of a model whose head the site has tuned on its own images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rescene.core.errors import DataError
from rescene.core.results import rounded
from rescene.data import Images
from rescene.engine.experiment import Experiment
from rescene.nets import Net
from rescene.training import class_scores, embed


def site_records(model: Mapping[str, Tensor], experiment: Experiment) -> dict[str, Any]:
    """``sites``: name, images and percent right of each, over all classes; ``worst_site``. Nothing where test images have no site."""
    held = _tested(experiment)
    if held is None:
        return {}
    test, site = held
    num_seen = experiment.tasks[-1].num_seen
    net = experiment.arch.restore(model).to(experiment.device)
    scores = class_scores(net, test.pixels, experiment.dataset.transform.normalise)[:, :num_seen]
    right = scores.argmax(dim=1) == test.labels
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "train_size": sum(len(shards[k]) for shards in experiment.shards),
            "test_size": int((site == k).sum()),
            "accuracy": _percent(right[site == k]),
        }
        for k, name in enumerate(experiment.dataset.sites)
    ]
    known = [row["accuracy"] for row in rows if not math.isnan(row["accuracy"])]
    found: dict[str, Any] = rounded({"sites": rows, "worst_site": min(known, default=math.nan)})
    return found


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
        before = _percent(_answers(seen, *shared) == held_out.labels)
        head = tuned_head(features, own.labels, shared, tuning) if len(own) else shared
        after = _percent(_answers(seen, *head) == held_out.labels)
        row = {"site": name, "train": len(own), "test": len(held_out), "shared head": before, "tuned head": after}
        rows.append(rounded(row | {"gain": after - before}))
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


def _percent(right: Tensor) -> float:
    return 100.0 * int(right.sum()) / len(right) if len(right) else math.nan
