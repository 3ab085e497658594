"""What the analysis of temporal herding says about a run (docs/theory.md). It needs the real images, so only a simulation can.

For any method whose state keeps uploads by round under ``pool`` and finished tasks under ``buffers``. Nothing here reaches
the method: states are read, features come from a network of its own, and no random stream of the run is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.core.json_files import Row, as_json
from rescene.core.results import DIGITS, ClassTheory, Theory
from rescene.core.rng import seeded_generator
from rescene.data import Task
from rescene.engine.experiment import Experiment
from rescene.engine.observers import Observer, RunView
from rescene.engine.run_context import RunContext
from rescene.functional import recent_window
from rescene.functional.herding_theory import Staleness, herding_facts, round_means, staleness
from rescene.methods.base import Model
from rescene.training import embed

REAL_PER_CLASS = 100  # real images per class behind the figures of each round; the task-end mean takes all of them
SKETCH_SIZE = 2**17  # distances of models are exact up to so many weights, and within about 1 % above
_DECIMALS = 8
_STALE = ("matching_error", "surrogate_drift", "real_drift", "model_distance")


class Pictures(NamedTuple):
    """Uploads of several rounds, or the buffers of several tasks, in one piece."""

    images: Tensor
    labels: Tensor
    rounds: Tensor  # 1-based


class TheoryWatch(Observer):
    """Looks at the state after each round and around the end of each task."""

    name = "theory"

    def __init__(self, context: RunContext) -> None:
        self.context, self.experiment = context, context.experiment
        self.rounds: dict[str, dict[str, Tensor]] = {}  # of the current task, by 1-based round; on the CPU
        self._signs = torch.zeros(0)

    def end_round(self, run: RunView) -> None:
        with self.context.timer.phase("theory"):
            self.round(run.task, (run.round or 0) + 1, run.before.model, run.state)

    def end_task(self, run: RunView) -> None:
        with self.context.timer.phase("theory"):
            self.context.facts.theory += self.task(run.task, run.before, run.state)

    def round(self, task: Task, number: int, model: Model, state: Any) -> None:
        """After a round: its uploads and the real images under ``model``, the one they were made with."""
        pool = _joined([part for part in _parts(state, "pool") if len(part.rounds) and int(part.rounds[0]) == number])
        recipe = self.experiment.recipe
        if pool is None or not self.experiment.has_images or recipe.tasks.drift is not None:
            return
        if recipe.method.get("buffer") == "none":
            return  # there is, or will be, nothing to tell
        net, sample = self.experiment.arch.restore(model), task.train[self._sample(task)]
        self.rounds[str(number)] = {
            "surrogates": _class_means(_features(net, pool.images), pool.labels, task).cpu(),
            "real": _class_means(self._real_features(net, sample), self._labels(sample), task).cpu(),
            "sketch": self._sketch(model).cpu(),
        }

    def task(self, task: Task, before: Any, after: Any) -> list[ClassTheory]:
        """At the end of a task: one record per class of which something was kept."""
        watched, self.rounds = self.rounds, {}
        pool = _joined(_parts(before, "pool"))
        kept = _joined(_parts(after, "buffers")[len(_parts(before, "buffers")) :])
        if (
            pool is None
            or kept is None
            or not self.experiment.has_images
            or self.experiment.recipe.tasks.drift is not None
        ):
            return []
        net = self.experiment.arch.restore(before.model)
        z, real, labels = _features(net, pool.images), self._real_features(net, task.train), self._labels(task.train)
        sample = self._sample(task)
        mu, mu_sampled = _class_means(real, labels, task), _class_means(real[sample], labels[sample], task).cpu()
        end = self._sketch(before.model).cpu().double()
        distances = {r: float((end - seen["sketch"][: len(end)].double()).norm()) for r, seen in watched.items()}
        found = []
        for i, label in enumerate(task.classes):
            own, stored = pool.labels == label, kept.labels == label
            # a model that diverged has no features
            is_finite = bool(z[own].isfinite().all() and mu[i].isfinite().all())
            if not bool(stored.any()) or not is_finite:
                continue
            rounds, budget = pool.rounds[own], int(stored.sum())
            window = recent_window(
                rounds, self.experiment.recipe.federation.num_rounds, self.experiment.method.recent_share()
            )
            buffer = z[own] if budget == len(rounds) else _features(net, kept.images[stored])
            stale = [
                staleness(seen["surrogates"][i], seen["real"][i], mean.cpu(), mu_sampled[i], distances[str(r)])
                if (seen := watched.get(str(r)))
                else None  # a run begun with an older version
                for r, _, mean in round_means(z[own], rounds)
            ]
            row = {
                "task": task.index,
                "class_name": self.experiment.dataset.classes[label],
                **herding_facts(z[own], rounds, window, budget, mu[i]),
                "kept_to_real": float((buffer.double().mean(dim=0) - mu[i]).norm()),
                "sampling_error": float((mu_sampled[i] - mu[i].cpu()).norm()),
            }
            row["rounds"]["num_kept"] = [int((kept.rounds[stored] == r).sum()) for r in row["rounds"]["round"]]
            found.append(ClassTheory(**as_json(_with_staleness(row, stale), _DECIMALS)))
        return found

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The rounds of the current task."""
        return dict(self.rounds)

    def restore(self, tree: dict[str, dict[str, Tensor]]) -> None:
        self.rounds = dict(tree)

    def _labels(self, index: Tensor) -> Tensor:
        return self.experiment.dataset.train.labels[index]

    def _sample(self, task: Task) -> Tensor:
        """Which of the task's images stand for their class in every round: evenly spaced ones; BoolTensor [n]."""
        labels = self._labels(task.train)
        chosen = torch.zeros(len(labels), dtype=torch.bool, device=labels.device)
        for label in task.classes:
            members = (labels == label).nonzero().squeeze(1)
            chosen[members[:: max(1, -(-len(members) // REAL_PER_CLASS))]] = True
        return chosen

    def _real_features(self, net: nn.Module, index: Tensor) -> Tensor:
        """z of the training images at these positions."""
        data = self.experiment.dataset
        return _features(net, data.train.pixels[index], data.transform.normalise)

    def _sketch(self, model: Model) -> Tensor:
        """Random signs, then sums over SKETCH_SIZE residue classes: the distance of two models survives, their size does not.

        Everything the features depend on counts, BatchNorm's running statistics included.
        """
        flat = torch.cat([value.detach().float().flatten() for value in model.values() if value.is_floating_point()])
        pad = -len(flat) % SKETCH_SIZE
        if len(self._signs) != len(flat) + pad:
            signs = torch.randint(2, (len(flat) + pad,), generator=seeded_generator(0), dtype=torch.int8) * 2 - 1
            self._signs = signs.to(flat.device)
        if len(flat) <= SKETCH_SIZE:
            return flat * self._signs[: len(flat)]
        return (F.pad(flat, (0, pad)) * self._signs).reshape(-1, SKETCH_SIZE).sum(dim=0)


def theory_of(experiment: Experiment, classes: Sequence[ClassTheory]) -> Theory:
    """The part of results.json; empty for a method that keeps nothing on the server."""
    if not classes:
        return Theory()
    rounds = experiment.recipe.federation.num_rounds
    return Theory(tuple(classes), experiment.method.recent_share(), rounds, REAL_PER_CLASS)


def theory_tables(theory: Theory) -> dict[str, tuple[list[str], list[list[Any]]]]:
    """The record as two tables, (header, rows) by name: one row per class, and one per class and round."""
    if not theory.classes:
        return {}
    classes = [as_json(one, DIGITS) for one in theory.classes]
    names, columns = [key for key in classes[0] if key != "rounds"], list(classes[0]["rounds"])
    rounds = [
        [row["task"], row["class"], *cells]
        for row in classes
        for cells in zip(*(row["rounds"][column] for column in columns), strict=True)
    ]
    return {
        "theory": (names, [[row[name] for name in names] for row in classes]),
        "theory_rounds": (["task", "class", *columns], rounds),
    }


def _parts(state: Any, name: str) -> Sequence[Any]:
    """The state's pictures under this name; none if it keeps something else there."""
    parts = getattr(state, name, ())
    fits = isinstance(parts, tuple) and all(hasattr(part, key) for part in parts for key in Pictures._fields)
    return parts if fits else ()


def _joined(parts: Sequence[Any]) -> Pictures | None:
    if not parts:
        return None
    return Pictures(*(torch.cat([getattr(part, name) for part in parts]) for name in Pictures._fields))


def _features(net: nn.Module, images: Tensor, prepare: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """z: features of unit length [n, d]."""
    return F.normalize(embed(net, images, prepare), dim=1, eps=1e-12)


def _class_means(z: Tensor, labels: Tensor, task: Task) -> Tensor:
    """Mean of z over each class of the task, float64 [classes, d]; zero where a class has none."""
    member = (labels == torch.tensor(task.classes, device=labels.device)[:, None]).double()
    return member @ z.double() / member.sum(dim=1, keepdim=True).clamp(min=1.0)


def _with_staleness(row: Row, stale: Sequence[Staleness | None]) -> Row:
    """Columns of Proposition 1 beside those of each round, and the smoothness they share."""
    smoothness = max((one.smoothness for one in stale if one), default=None)
    columns = {key: [getattr(one, key) if one else None for one in stale] for key in _STALE}
    bounds = [one.bound(smoothness) if one and smoothness is not None else None for one in stale]
    return row | {"smoothness": smoothness, "rounds": row["rounds"] | columns | {"staleness_bound": bounds}}
