"""Condensation: real images of a class become a few surrogates with the same mean embedding (Sec. 3.2, Eq. 1).

    for each step s = 1 .. S:
        theta_s = theta + a random move of length at most rho            the same for every client of the round
        L_c(x)  = || mean phi(x) - mean phi(real) ||^2 + the same of the logits, for each class c of each client
        x       = x - image_lr * gradient of L_c, bounded for each class by clip and step

A group is one class of one client. The loss is separable over groups and the network runs in eval mode. So all groups of all clients
descend in one pass, and the result equals that of one client at a time. The random moves come from one seed for everybody;
everything else that a client draws comes from its own stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from pydantic import PositiveInt, model_validator
from torch import Tensor, nn

from rescene.accel.condensation_graph import descend_captured
from rescene.core.hyperparameters import Hyperparameters, hyper
from rescene.core.rng import Rng, seeded_generator
from rescene.data import Shard
from rescene.functional import clip_groups, group_means, matching_loss, perturbed
from rescene.functional.pictures import coloured_noise, dead_leaves
from rescene.nets import count_passes, is_recordable, laps
from rescene.training.moment_matching import descend_moments

CHUNK = {"cpu": 256, "cuda": 2048}  # images that pass through the network at once: what fits the cache, or the memory
HELD = 8192  # real images at most that are kept in floating point for all steps: 100 MB of 32 x 32 pixels

Move = Callable[[Sequence[Tensor], torch.Generator], Sequence[Tensor]]  # theta, noise -> the parameters of one step
Term = Callable[[Tensor, Tensor], Tensor]  # mean logits of the surrogates [g, C], label [g] of each group -> loss [g]
Gradient = Callable[[nn.Module, Tensor, Tensor, int], tuple[Tensor, Tensor]]
"""Network, pixels, group of each picture, step -> (loss of each group, what to descend)."""


class Condensation(Hyperparameters):
    """Settings of condensation. ``literal`` restores the paper's printed form where our defaults depart from it."""

    ipc: int = hyper(10, "IPC", "App. A", "surrogates per class and client, at most", ge=1)
    num_steps: int = hyper(25, "S", "App. A", "condensation steps; 0 uploads the start images as they are", ge=0)
    image_lr: float = hyper(1.0, "-", "App. A", "learning rate on pixels", gt=0)
    image_momentum: float = hyper(0.0, "-", "[ours]", "momentum on pixels", ge=0, lt=1)
    radius: float = hyper(5.0, "rho", "App. A", "radius of the parameter perturbation", ge=0)
    clip: float | None = hyper(5.0, "C", "[App. F]", "bound on each class's pixel gradient; null for none", gt=0)
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
        256, "b", "[App. F]", "real images per class and step: a number, ipc (as many as surrogates) or all"
    )
    start: Literal["real", "noise", "leaves", "coloured"] = hyper(
        "real",
        "-",
        "[App. F]",
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
    random_nets: int = hyper(0, "-", "[ours]", "random networks on which statistics are also matched", ge=0)
    own_net: bool = hyper(True, "-", "[ours]", "match statistics on the broadcast network")
    min_images: int = hyper(1, "-", "[ours]", "a class with fewer local images is not sent", ge=1)
    surrogates_per_class: Literal["half", "min", "fixed"] = hyper(
        "min",
        "-",
        "[ours]",
        "of n images: min(IPC, n), always IPC (drawn with replacement), or min(IPC, n//2): nobody sends a whole class",
    )
    guard: bool = hyper(
        True, "-", "[ours]", "of a class with n <= IPC images, a surrogate that is still its start image is withheld"
    )
    norm_statistics: Literal["server", "batch"] = hyper(
        "server",
        "-",
        "[ours]",
        "BatchNorm while condensing: the server's running statistics (eval mode), or those of each class's batch (train mode)",
    )
    precision: Literal["auto", "float32", "bfloat16"] = hyper(
        "auto", "-", "[ours]", "arithmetic of the network on a GPU; auto is bfloat16"
    )
    literal: bool = hyper(
        False, "-", "Eq. 1", "Eq. 1 as printed: no clip, fixed steps, min(IPC, n) surrogates, no guard"
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
        if self.surrogates_per_class == "half":
            return min(self.ipc, num_images // 2)
        return min(self.ipc, num_images) if self.surrogates_per_class == "min" else self.ipc * (num_images > 0)

    def real_batch_size(self, num_images: int, num_surrogates: int) -> int:
        """Real images of a class that one step is compared with."""
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
    """What came out of one group: its surrogates, its last loss, and how many were replaced or withheld."""

    group: Group
    images: Tensor
    loss: float
    num_fallbacks: int
    num_withheld: int


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
    """Condense every class of every shard under ``net``; one answer per shard.

    The network runs in eval mode and gets its weights back at the end. ``move`` replaces the perturbation in the ball of
    radius rho. ``term`` is added to Eq. 1 for every group.
    """
    groups = [g for k, (s, r) in enumerate(zip(shards, rngs, strict=True)) for g in groups_of(k, s, r, settings)]
    return descended(net, shards, groups, settings, noise_seed, move=move, term=term)


def descended(
    net: nn.Module,
    shards: Sequence[Shard],
    groups: list[Group],
    settings: Condensation,
    noise_seed: int,
    *,
    move: Move | None = None,
    term: Term | None = None,
    gradient: Gradient | None = None,
) -> list[Surrogates]:
    """The surrogates of these groups, one answer per shard. ``gradient`` takes the place of Eq. 1's, clip included."""
    outcomes: list[list[Outcome]] = [[] for _ in shards]
    if groups:
        sizes = [len(group.start) for group in groups]
        owner = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(sizes)).to(shards[0].device)
        start = torch.cat([group.start for group in groups])
        pixels, losses = _descend(net, shards, groups, start, owner, settings, noise_seed, move, term, gradient)
        finite = torch.isfinite(pixels).flatten(1).all(dim=1)
        pixels = torch.where(finite.reshape(-1, 1, 1, 1), pixels, start)
        lost = torch.bincount(owner, weights=(~finite).float(), minlength=len(groups))
        for group, block, loss, count in zip(groups, pixels.split(sizes), losses.tolist(), lost.tolist(), strict=True):
            outcomes[group.client].append(_guarded(shards[0], settings, Outcome(group, block, loss, int(count), 0)))
    return [collect(shard, own) for shard, own in zip(shards, outcomes, strict=True)]


def _guarded(shard: Shard, settings: Condensation, made: Outcome) -> Outcome:
    """If a class has at most IPC images, surrogates that are unchanged at 8 bits are not sent."""
    group = made.group
    if not settings.guard or settings.start != "real" or len(group.members) > settings.ipc:
        return made
    before, after = (shard.transform.to_pixels(images) for images in (group.start, made.images))
    moved = (before != after).flatten(1).any(dim=1)
    if bool(moved.all()):
        return made
    kept = replace(group, start=group.start[moved])
    return replace(made, group=kept, images=made.images[moved], num_withheld=int((~moved).sum()))


def groups_of(client: int, shard: Shard, rng: Rng, settings: Condensation) -> Iterator[Group]:
    """One group for each class of the shard that gets surrogates at all."""
    for label, members in shard.by_class().items():
        n = len(members)
        m = settings.num_surrogates(n)
        if m == 0:
            continue
        generator = rng.at("condense", label).generator()
        start = _start(shard, members, m, generator, settings)
        b = settings.real_batch_size(n, m)
        batches = None
        if b < n and settings.num_steps:
            keys = torch.rand(settings.num_steps, n, generator=generator).to(members.device)
            batches = keys.argsort(dim=1)[:, :b]
        yield Group(client, label, start, members, batches)


def _start(shard: Shard, members: Tensor, m: int, generator: torch.Generator, settings: Condensation) -> Tensor:
    """The ``m`` pictures that a group starts from. Real ones are a fresh draw every round, so the pool sees many images."""
    n, transform = len(members), shard.transform
    if settings.start == "noise":
        return torch.randn((m, *shard.images.pixels.shape[1:]), generator=generator).to(shard.device)
    if settings.start == "leaves":
        leaves = dead_leaves(m, shard.images.pixels.shape[-1], generator, grey=transform.is_grey)
        return transform.normalise(255 * leaves.to(shard.device))
    if settings.start == "coloured":
        return transform.possible(coloured_noise(shard.pictures(members), m, generator, settings.neighbours))
    chosen = torch.randperm(n, generator=generator)[:m]
    if m > n:
        chosen = torch.cat([chosen, torch.randint(n, (m - n,), generator=generator)])
    return shard.pictures(members[chosen.to(members.device)])


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


def _descend(
    net: nn.Module,
    shards: Sequence[Shard],
    groups: list[Group],
    pixels: Tensor,
    owner: Tensor,
    settings: Condensation,
    noise_seed: int,
    move: Move | None,
    term: Term | None,
    gradient: Gradient | None,
) -> tuple[Tensor, Tensor]:
    """Gradient descent on the pixels of all groups; returns them and each group's loss at the last step."""
    shard = shards[
        0
    ]  # all shards in one process share their image tensor and transform, so any of them can fetch for all
    if settings.num_steps == 0:
        return pixels, torch.zeros(len(groups), device=pixels.device)
    if settings.match is not None and gradient is None:
        members = [group.members for group in groups]
        return descend_moments(net, shard, members, pixels, owner, settings, noise_seed)
    if settings.norm_statistics == "batch" and gradient is None:
        gradient = _group_by_group(shard, groups, settings, term)
    if pixels.is_cuda and is_recordable(net) and move is None and term is None and gradient is None:
        most_groups = len(shards) * len(shard.task.classes)
        return _descend_recorded(net, shard, groups, pixels, owner, settings, noise_seed, most_groups)
    device = pixels.device
    gradient = gradient or matching_gradient(shard, groups, settings, term)
    velocity = torch.zeros_like(pixels)
    losses = torch.zeros(len(groups), device=device)
    parameters = list(net.parameters())
    theta = [p.detach().clone() for p in parameters]
    noise = seeded_generator(noise_seed, device)
    net.eval().requires_grad_(False)
    if device.type == "cuda":
        net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for step in laps(settings.num_steps):
        assign(parameters, move(theta, noise) if move else perturbed(theta, settings.radius, noise))
        losses, found = gradient(net, pixels, owner, step)
        velocity = settings.image_momentum * velocity + found
        pixels = pixels - settings.image_lr * velocity
    assign(parameters, theta)  # restored from the copy, not by subtracting the noise
    net.requires_grad_(True)
    return pixels, losses


def matching_gradient(shard: Shard, groups: list[Group], settings: Condensation, term: Term | None = None) -> Gradient:
    """Eq. 1 against the real images of each group, clipped per group."""
    labels = torch.tensor([group.label for group in groups], device=shard.device)
    fetch = _fetcher(shard, groups)

    def gradient(net: nn.Module, pixels: Tensor, owner: Tensor, step: int) -> tuple[Tensor, Tensor]:
        real = _real_means(net, *fetch(step), len(groups), settings)
        losses, found = loss_and_gradient(net, pixels, owner, real, settings, labels, term)
        return losses, settings.bounded(found, losses, owner)

    return gradient


def _group_by_group(shard: Shard, groups: list[Group], settings: Condensation, term: Term | None) -> Gradient:
    """The same with BatchNorm in train mode: each class passes alone, its real images and its surrogates apart."""
    parts = [matching_gradient(shard, [group], settings, term) for group in groups]

    def gradient(net: nn.Module, pixels: Tensor, owner: Tensor, step: int) -> tuple[Tensor, Tensor]:
        sizes = torch.bincount(owner, minlength=len(groups)).tolist()
        with batch_statistics(net):
            found = [
                part(net, own, torch.zeros(len(own), dtype=torch.long, device=own.device), step)
                for part, own in zip(parts, pixels.split(sizes), strict=True)
            ]
        return torch.cat([losses for losses, _ in found]), torch.cat([moves for _, moves in found])

    return gradient


@contextmanager
def batch_statistics(net: nn.Module) -> Iterator[None]:
    """BatchNorm takes mean and variance of each batch; the running statistics stay as they are."""
    norms = [module for module in net.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    before = [(norm.training, norm.track_running_stats) for norm in norms]
    for norm in norms:
        norm.training, norm.track_running_stats = True, False
    try:
        yield
    finally:
        for norm, (training, tracked) in zip(norms, before, strict=True):
            norm.training, norm.track_running_stats = training, tracked


def _descend_recorded(
    net: nn.Module,
    shard: Shard,
    groups: list[Group],
    pixels: Tensor,
    owner: Tensor,
    settings: Condensation,
    noise_seed: int,
    most_groups: int,
) -> tuple[Tensor, Tensor]:
    """The same on a GPU, as recorded CUDA graphs."""
    steps = settings.num_steps
    parts = [g.members.expand(steps, -1) if g.batches is None else g.members[g.batches] for g in groups]
    real = torch.cat(parts, dim=1)
    sizes = torch.tensor([part.shape[1] for part in parts])
    real_owner = torch.repeat_interleave(torch.arange(len(groups)), sizes).to(owner.device)
    found = descend_captured(
        net, shard, pixels, owner, real, real_owner, settings, noise_seed, len(groups), most_groups
    )
    count_passes(net, steps * (real.shape[1] + 2 * len(owner)))  # no hook of the network saw the replays
    return found


@torch.no_grad()
def assign(parameters: list[nn.Parameter], values: Sequence[Tensor]) -> None:
    """Copy these values into the parameters, in order."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def embedding(net: nn.Module, x: Tensor, settings: Condensation) -> tuple[Tensor, Tensor]:
    """(features, logits) in float32; half precision inside the network only on a GPU."""
    half = x.is_cuda and settings.precision != "float32"
    with torch.autocast(x.device.type, torch.bfloat16, enabled=half, cache_enabled=False):
        features = net.features(x)  # type: ignore[operator]
        logits = net.head(features)  # type: ignore[operator]
    return features.float(), logits.float()


def _fetcher(shard: Shard, groups: list[Group]) -> Callable[[int], tuple[Iterable[Tensor], Tensor]]:
    """step -> (chunks of the real images of all groups, the group of each image).

    Where every step sees the same images, and they are few, they are looked at once.
    """

    def positions(step: int) -> list[Tensor]:
        return [g.members if g.batches is None else g.members[g.batches[step]] for g in groups]

    def chunks(step: int) -> Iterator[Tensor]:
        return (shard.pictures(part) for part in torch.cat(positions(step)).split(CHUNK[shard.device.type]))

    sizes = torch.tensor([len(part) for part in positions(0)])
    owner = torch.repeat_interleave(torch.arange(len(groups)), sizes).to(shard.device)
    if all(g.batches is None for g in groups) and len(owner) <= HELD:
        held = list(chunks(0))
        return lambda step: (held, owner)
    return lambda step: (chunks(step), owner)


@torch.no_grad()
def _real_means(
    net: nn.Module, chunks: Iterable[Tensor], owner: Tensor, num_groups: int, settings: Condensation
) -> tuple[Tensor, Tensor]:
    """Mean features and mean logits of each group's real minibatch of a step, in chunks."""
    parts = [embedding(net, chunk, settings) for chunk in chunks]
    features, logits = (torch.cat(part) for part in zip(*parts, strict=True))
    return group_means(features, owner, num_groups), group_means(logits, owner, num_groups)


def loss_and_gradient(
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
        features, logits = embedding(net, x, settings)
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
