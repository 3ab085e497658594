"""Condensation: real images of a class become a few surrogates with the same mean embedding (Sec. 3.2, Eq. 1).

All classes of all given clients are condensed in one pass. A group is one (client, class) pair; the loss is separable over
groups and the network runs in eval mode, so images do not influence each other and the batched form equals one client at a
time. The perturbation noise comes from one seed for everybody; everything else a client draws comes from its own stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import PositiveInt, model_validator
from torch import Tensor, nn

from rescene.data import Shard
from rescene.functional import clip_groups, group_means, matching_loss, perturbed
from rescene.functional.starts import coloured_noise, dead_leaves
from rescene.hyperparameters import Hyperparameters, hyper
from rescene.privacy.leakage import NEAR_COPY_DB, nearest_real, psnr
from rescene.rng import Rng, seeded_generator
from rescene.steps.moments import descend_moments, is_grey, possible

CHUNK = {"cpu": 256, "cuda": 2048}  # images that pass through the network at once: what fits the cache, or the memory

Move = Callable[[Sequence[Tensor], torch.Generator], Sequence[Tensor]]  # theta, noise -> the parameters of one step
Term = Callable[[Tensor, Tensor], Tensor]  # mean logits of the surrogates [g, C], label [g] of each group -> loss [g]


class Condensation(Hyperparameters):
    """Settings of condensation. ``literal`` restores the paper's printed form where our defaults depart from it."""

    ipc: int = hyper(10, "IPC", "App. A", "surrogates per class and client, at most", ge=1)
    num_steps: int = hyper(25, "S", "App. A", "condensation steps; 0 uploads the start images as they are", ge=0)
    image_lr: float = hyper(1.0, "-", "App. A", "learning rate on pixels", gt=0)
    image_momentum: float = hyper(0.0, "-", "[ours]", "momentum on pixels", ge=0, lt=1)
    radius: float = hyper(5.0, "rho", "App. A", "radius of the parameter perturbation", ge=0)
    clip: float | None = hyper(5.0, "C", "App. F", "bound on each class's pixel gradient; null for none", gt=0)
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
    precision: Literal["auto", "float32", "bfloat16"] = hyper(
        "auto", "-", "[ours]", "arithmetic of the network on a GPU; auto is bfloat16"
    )
    literal: bool = hyper(False, "-", "Eq. 1", "the paper's printed form: no clip, min(IPC, n) surrogates")

    @model_validator(mode="before")
    @classmethod
    def _literal_defaults(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("literal") in (True, "true", "True"):
            return {"clip": None, "surrogates_per_class": "min"} | values
        return values

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

    def as_upload(self) -> dict[str, Any]:
        """What goes on the wire: the pictures, their labels, two numbers for the log. The start images stay."""
        notes = {"matching_loss": self.loss, "num_fallbacks": self.num_fallbacks}
        return {"images": self.images, "labels": self.labels, "notes": notes}


@dataclass(frozen=True)
class _Group:
    """One (client, class) pair: where its real images are, what it starts from, and which it sees at each step."""

    client: int
    label: int
    start: Tensor
    members: Tensor
    batches: Tensor | None  # [steps, b] into members; None: all of them at every step


@dataclass(frozen=True)
class _Outcome:
    group: _Group
    images: Tensor
    loss: float
    num_fallbacks: int


def condense(
    net: nn.Module,
    shards: Sequence[Shard],
    rngs: Sequence[Rng],
    settings: Condensation,
    noise_seed: int,
    *,
    move: Move | None = None,
    term: Term | None = None,
) -> list[Surrogates]:
    """Condense every class of every shard under ``net`` (eval mode, weights restored at the end). One answer per shard.

    ``move`` replaces the perturbation in the ball of radius rho; ``term`` is added to Eq. 1 for every group.
    """
    groups = [g for k, (s, r) in enumerate(zip(shards, rngs, strict=True)) for g in _groups(k, s, r, settings)]
    outcomes: list[list[_Outcome]] = [[] for _ in shards]
    if groups:
        sizes = [len(group.start) for group in groups]
        owner = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(sizes)).to(shards[0].device)
        start = torch.cat([group.start for group in groups])
        # all shards in one process share their image tensor and transform, so any of them can fetch for all
        most = len(shards) * len(shards[0].task.classes)
        pixels, losses = _descend(net, shards[0], groups, start, owner, settings, noise_seed, most, move, term)
        finite = torch.isfinite(pixels).flatten(1).all(dim=1)
        pixels = torch.where(finite.reshape(-1, 1, 1, 1), pixels, start)
        lost = torch.bincount(owner, weights=(~finite).float(), minlength=len(groups))
        for group, block, loss, count in zip(groups, pixels.split(sizes), losses.tolist(), lost.tolist(), strict=True):
            outcomes[group.client].append(_Outcome(group, block, loss, int(count)))
    return [_collect(shard, own) for shard, own in zip(shards, outcomes, strict=True)]


def _groups(client: int, shard: Shard, rng: Rng, settings: Condensation) -> Iterator[_Group]:
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
            start = _no_copies(possible(drawn, shard.transform), shard, members)
            if not len(start):
                continue
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
        yield _Group(client, label, start, members, batches)


def _no_copies(drawn: Tensor, shard: Shard, members: Tensor) -> Tensor:
    """Those of the drawn pictures that are not, by chance, near-copies of one of the client's own images of the class."""
    _, nearest = nearest_real(drawn, shard.images.pixels[members], shard.transform)
    decibel = psnr(drawn, shard.pictures(members[nearest]), shard.transform)
    return drawn[decibel <= NEAR_COPY_DB]


def _descend(
    net: nn.Module,
    shard: Shard,
    groups: list[_Group],
    pixels: Tensor,
    owner: Tensor,
    settings: Condensation,
    noise_seed: int,
    most_groups: int,
    move: Move | None,
    term: Term | None,
) -> tuple[Tensor, Tensor]:
    """Gradient descent on the pixels of all groups; returns them and each group's loss at the last step."""
    if settings.match is not None:
        members = [group.members for group in groups]
        return descend_moments(net, shard, members, pixels, owner, settings, noise_seed)
    if pixels.is_cuda and move is None and term is None and settings.num_steps:
        return _replayed(net, shard, groups, pixels, owner, settings, noise_seed, most_groups)
    device = pixels.device
    labels = torch.tensor([group.label for group in groups], device=device)
    velocity = torch.zeros_like(pixels)
    losses = torch.zeros(len(groups), device=device)
    parameters = list(net.parameters())
    theta = [p.detach().clone() for p in parameters]
    noise = seeded_generator(noise_seed, device)
    net.eval().requires_grad_(False)
    if device.type == "cuda":
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for step in range(settings.num_steps):
        _assign(parameters, move(theta, noise) if move else perturbed(theta, settings.radius, noise))
        real = _real_means(net, shard, groups, step, settings)
        losses, gradient = _loss_and_gradient(net, pixels, owner, real, settings, labels, term)
        if settings.clip is not None:
            gradient = clip_groups(gradient, owner, len(groups), settings.clip)
        velocity = settings.image_momentum * velocity + gradient
        pixels = pixels - settings.image_lr * velocity
    _assign(parameters, theta)  # restored from the copy, not by subtracting the noise
    net.requires_grad_(True)
    return pixels, losses


def _replayed(
    net: nn.Module,
    shard: Shard,
    groups: list[_Group],
    pixels: Tensor,
    owner: Tensor,
    settings: Condensation,
    noise_seed: int,
    most_groups: int,
) -> tuple[Tensor, Tensor]:
    """The same on a GPU, as recorded CUDA graphs."""
    from rescene.steps.captured_condense import descend_captured

    steps = settings.num_steps
    parts = [g.members.expand(steps, -1) if g.batches is None else g.members[g.batches] for g in groups]
    real = torch.cat(parts, dim=1)
    sizes = torch.tensor([part.shape[1] for part in parts])
    real_owner = torch.repeat_interleave(torch.arange(len(groups)), sizes).to(owner.device)
    found = descend_captured(
        net, shard, pixels, owner, real, real_owner, settings, noise_seed, len(groups), most_groups
    )
    count = getattr(net, "count_passes", None)  # no hook of the network saw the replays
    if count is not None:
        count(steps * (real.shape[1] + 2 * len(owner)))
    return found


@torch.no_grad()
def _assign(parameters: list[nn.Parameter], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def _embedding(net: nn.Module, x: Tensor, settings: Condensation) -> tuple[Tensor, Tensor]:
    """(features, logits) in float32; half precision inside the network only on a GPU."""
    half = x.is_cuda and settings.precision != "float32"
    with torch.autocast(x.device.type, torch.bfloat16, enabled=half, cache_enabled=False):
        features = net.features(x)  # type: ignore[operator]
        logits = net.head(features)  # type: ignore[operator]
    return features.float(), logits.float()


@torch.no_grad()
def _real_means(
    net: nn.Module, shard: Shard, groups: list[_Group], step: int, settings: Condensation
) -> tuple[Tensor, Tensor]:
    """Mean features and mean logits of each group's real minibatch of this step, in chunks."""
    members = [g.members if g.batches is None else g.members[g.batches[step]] for g in groups]
    owner = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor([len(m) for m in members]))
    parts = [
        _embedding(net, shard.pictures(chunk), settings) for chunk in torch.cat(members).split(CHUNK[shard.device.type])
    ]
    owner = owner.to(shard.device)
    features, logits = (torch.cat(part) for part in zip(*parts, strict=True))
    return group_means(features, owner, len(groups)), group_means(logits, owner, len(groups))


def _loss_and_gradient(
    net: nn.Module,
    pixels: Tensor,
    owner: Tensor,
    real: tuple[Tensor, Tensor],
    settings: Condensation,
    labels: Tensor,
    term: Term | None,
) -> tuple[Tensor, Tensor]:
    """Eq. 1 for every group, and its gradient with respect to the pixels; groups are cut into chunks of whole groups."""
    losses, gradients = [], []
    for first, last, rows in _chunks_of_groups(owner, len(real[0])):
        x = pixels[rows].detach().requires_grad_(True)
        features, logits = _embedding(net, x, settings)
        local = owner[rows] - first
        loss = matching_loss(group_means(features, local, last - first), real[0][first:last], settings.reduction)
        means = group_means(logits, local, last - first)
        if settings.match_logits:
            loss = loss + matching_loss(means, real[1][first:last], settings.reduction)
        if term is not None:
            loss = loss + term(means, labels[first:last])
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        losses.append(loss.detach())
        gradients.append(gradient)
    return torch.cat(losses), torch.cat(gradients)


def _chunks_of_groups(owner: Tensor, num_groups: int) -> Iterator[tuple[int, int, slice]]:
    """(first group, last group + 1, their rows) such that a chunk holds about CHUNK images and no group is cut."""
    limit = CHUNK[owner.device.type]
    ends = torch.bincount(owner, minlength=num_groups).cumsum(0).tolist()
    first, begin = 0, 0
    for group, end in enumerate(ends):
        if group == num_groups - 1 or ends[group + 1] - begin > limit:
            yield first, group + 1, slice(begin, end)
            first, begin = group + 1, end


def _collect(shard: Shard, outcomes: list[_Outcome]) -> Surrogates:
    """Put one client's groups together; a client without any gives empty tensors."""
    if not outcomes:
        empty = torch.zeros(0, *shard.images.pixels.shape[1:], device=shard.device)
        return Surrogates(empty, torch.zeros(0, dtype=torch.long, device=shard.device), empty, 0.0, 0)
    labels = [o.group.label for o in outcomes for _ in range(len(o.images))]
    return Surrogates(
        images=torch.cat([o.images for o in outcomes]),
        labels=torch.tensor(labels, device=shard.device),
        start=torch.cat([o.group.start for o in outcomes]),
        loss=sum(o.loss for o in outcomes) / len(outcomes),
        num_fallbacks=sum(o.num_fallbacks for o in outcomes),
    )
