"""Groups of condensation: its settings, what each class of each client starts from and sees, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import PositiveInt, model_validator
from torch import Tensor

from rescene.data import Shard
from rescene.functional import clip_groups
from rescene.functional.starts import coloured_noise, dead_leaves
from rescene.hyperparameters import Hyperparameters, hyper
from rescene.rng import Rng
from rescene.steps.moments import is_grey, possible


class Condensation(Hyperparameters):
    """Settings of condensation. ``literal`` restores the paper's printed form where our defaults depart from it."""

    ipc: int = hyper(10, "IPC", "App. A", "surrogates per class and client, at most", ge=1)
    num_steps: int = hyper(25, "S", "App. A", "condensation steps; 0 uploads the start images as they are", ge=0)
    image_lr: float = hyper(1.0, "-", "App. A", "learning rate on pixels", gt=0)
    image_momentum: float = hyper(0.0, "-", "[ours]", "momentum on pixels", ge=0, lt=1)
    radius: float = hyper(5.0, "rho", "App. A", "radius of the parameter perturbation", ge=0)
    clip: float | None = hyper(5.0, "C", "App. F", "bound on each class's pixel gradient; null for none", gt=0)
    step: Literal["fixed", "polyak"] = hyper(
        "fixed",
        "-",
        "[ours]",
        "fixed: image_lr as it is; polyak: for each class at most its loss over its squared gradient",
    )
    reduction: Literal["sum", "mean"] = hyper(
        "sum", "-", "Eq. 1", "squared distance summed or averaged over dimensions"
    )
    match_logits: bool = hyper(True, "-", "Eq. 1", "match mean logits as well as mean features")
    real_batch: PositiveInt | Literal["ipc", "all"] = hyper(
        256, "b", "App. F", "real images per class and step: a number, ipc (as many as surrogates) or all"
    )
    start: Literal["real", "noise", "leaves", "coloured"] = hyper(
        "real",
        "-",
        "App. F",
        "surrogates start as real images, white noise, dead leaves (random discs), or noise with the class's mean and covariance",
    )
    neighbours: int | None = hyper(
        None,
        "-",
        "[ours]",
        "coloured start: moments of this many images nearest to a first draw; null: of the class",
        ge=2,
    )
    match: tuple[Literal["features", "logits", "stages", "pixels", "covariance"], ...] | None = hyper(
        None, "-", "[ours]", "statistics to match by Adam, each divided by its scale; null: Eq. 1 by gradient descent"
    )
    random_nets: int = hyper(0, "-", "[ours]", "freshly drawn networks that match is also taken under", ge=0)
    own_net: bool = hyper(True, "-", "[ours]", "take match under the broadcast network")
    min_images: int = hyper(1, "-", "[ours]", "a class with fewer local images is not sent", ge=1)
    surrogates_per_class: Literal["half", "min", "fixed"] = hyper(
        "half", "-", "[ours]", "of n images: min(IPC, n//2), min(IPC, n), or always IPC (drawn with replacement)"
    )
    guard: bool = hyper(
        True, "-", "[ours]", "of a class with n <= IPC images, a surrogate that is still its start image is withheld"
    )
    precision: Literal["auto", "float32", "bfloat16"] = hyper(
        "auto", "-", "[ours]", "arithmetic of the network on a GPU; auto is bfloat16"
    )
    literal: bool = hyper(
        False, "-", "Eq. 1", "the paper's printed form: no clip, fixed steps, min(IPC, n) surrogates, no guard"
    )

    @model_validator(mode="before")
    @classmethod
    def _literal_defaults(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("literal") in (True, "true", "True"):
            return {"clip": None, "step": "fixed", "surrogates_per_class": "min", "guard": False} | values
        return values

    def bounded(self, gradient: Tensor, losses: Tensor, owner: Tensor) -> Tensor:
        """The gradient of each group, no longer than ``clip`` and ``step`` allow."""
        if self.clip is None and self.step == "fixed":
            return gradient
        reach = losses / self.image_lr if self.step == "polyak" else None
        return clip_groups(gradient, owner, len(losses), self.clip, reach)

    def num_surrogates(self, num_images: int) -> int:
        """How many surrogates a class of this many local images gets (0: the class is skipped)."""
        if num_images < self.min_images:
            return 0
        if self.surrogates_per_class == "half":  # nobody uploads a whole class
            return min(self.ipc, num_images // 2)
        return min(self.ipc, num_images) if self.surrogates_per_class == "min" else self.ipc * (num_images > 0)

    def real_batch_size(self, num_images: int, num_surrogates: int) -> int:
        wanted = {"ipc": num_surrogates, "all": num_images}.get(str(self.real_batch), self.real_batch)
        return min(int(wanted), num_images)


@dataclass(frozen=True)
class Surrogates:
    """What condensation gives one client: normalised images, their labels, and what happened on the way."""

    images: Tensor
    labels: Tensor
    start: Tensor
    loss: float
    num_fallbacks: int  # images that became non-finite and were replaced by their start image
    num_withheld: int = 0  # images that the guard kept at the site
    num_declined: int = 0  # 1: the site's privacy budget is spent
    num_suppressed: int = 0  # classes whose noised count is below the threshold

    def as_upload(self) -> dict[str, Any]:
        """What goes on the wire: the pictures, their labels, a few numbers for the log. The start images stay."""
        notes = {"matching_loss": self.loss, "num_fallbacks": self.num_fallbacks}
        notes |= {
            name: n for name in ("num_withheld", "num_declined", "num_suppressed") if (n := getattr(self, name)) > 0
        }
        return {"images": self.images, "labels": self.labels, "notes": notes}


@dataclass(frozen=True)
class Group:
    """One (client, class) pair: where its real images are, what it starts from, and which it sees at each step."""

    client: int
    label: int
    start: Tensor
    members: Tensor
    batches: Tensor | None  # [steps, b] into members; None: all of them at every step


@dataclass(frozen=True)
class Outcome:
    group: Group
    images: Tensor
    loss: float
    num_fallbacks: int
    num_withheld: int


def groups_of(client: int, shard: Shard, rng: Rng, settings: Condensation) -> Iterator[Group]:
    for label, members in shard.by_class().items():
        n = len(members)
        m = settings.num_surrogates(n)
        if m == 0:
            continue
        generator = rng.at("condense", label).generator()
        if settings.start == "noise":
            shape = (m, *shard.images.pixels.shape[1:])
            start = torch.randn(shape, generator=generator).to(shard.device)
        elif settings.start == "leaves":
            leaves = dead_leaves(m, shard.images.pixels.shape[-1], generator, grey=is_grey(shard.transform))
            start = shard.transform.normalise(255 * leaves.to(shard.device))
        elif settings.start == "coloured":
            drawn = coloured_noise(shard.pictures(members), m, generator, settings.neighbours)
            start = possible(drawn, shard.transform)
        else:
            # a fresh draw every round, so that the pool of a task sees many different images
            chosen = torch.randperm(n, generator=generator)[:m]
            if m > n:
                chosen = torch.cat([chosen, torch.randint(n, (m - n,), generator=generator)])
            start = shard.pictures(members[chosen.to(members.device)])
        b = settings.real_batch_size(n, m)
        batches = None
        if b < n and settings.num_steps:
            keys = torch.rand(settings.num_steps, n, generator=generator).to(members.device)
            batches = keys.argsort(dim=1)[:, :b]
        yield Group(client, label, start, members, batches)


def collect(shard: Shard, outcomes: list[Outcome]) -> Surrogates:
    """Put one client's groups together; a client without any gives empty tensors."""
    if not outcomes:
        empty = torch.zeros(0, *shard.images.pixels.shape[1:], device=shard.device)
        return Surrogates(empty, torch.zeros(0, dtype=torch.long, device=shard.device), empty, 0.0, 0)
    labels = [o.group.label for o in outcomes for _ in range(len(o.images))]
    return Surrogates(
        images=torch.cat([o.images for o in outcomes]),
        labels=torch.tensor(labels, dtype=torch.long, device=shard.device),
        start=torch.cat([o.group.start for o in outcomes]),
        loss=sum(o.loss for o in outcomes) / len(outcomes),
        num_fallbacks=sum(o.num_fallbacks for o in outcomes),
        num_withheld=sum(o.num_withheld for o in outcomes),
    )
