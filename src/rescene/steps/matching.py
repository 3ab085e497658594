"""The descent of condensation: Eq. 1 for all groups at once, and its gradient with respect to the surrogates' pixels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from rescene.data import Shard
from rescene.functional import group_means, matching_loss, perturbed
from rescene.nets import count_passes
from rescene.rng import seeded_generator
from rescene.steps.groups import Condensation, Group
from rescene.steps.moments import descend_moments

CHUNK = {"cpu": 256, "cuda": 2048}  # images that pass through the network at once: what fits the cache, or the memory
HELD = 8192  # real images at most that are kept in floating point for all steps: 100 MB of 32 x 32 pixels

Move = Callable[[Sequence[Tensor], torch.Generator], Sequence[Tensor]]  # theta, noise -> the parameters of one step
Gradient = Callable[
    [nn.Module, Tensor, Tensor, int], tuple[Tensor, Tensor]
]  # net, pixels, owner, step -> loss of each group, what to descend
Term = Callable[[Tensor, Tensor], Tensor]  # mean logits of the surrogates [g, C], label [g] of each group -> loss [g]


def descend(
    net: nn.Module,
    shard: Shard,
    groups: list[Group],
    pixels: Tensor,
    owner: Tensor,
    settings: Condensation,
    noise_seed: int,
    most_groups: int,
    move: Move | None,
    term: Term | None,
    gradient: Gradient | None,
) -> tuple[Tensor, Tensor]:
    """Gradient descent on the pixels of all groups; returns them and each group's loss at the last step."""
    if settings.num_steps == 0:
        return pixels, torch.zeros(len(groups), device=pixels.device)
    if settings.match is not None and gradient is None:
        members = [group.members for group in groups]
        return descend_moments(net, shard, members, pixels, owner, settings, noise_seed)
    if pixels.is_cuda and move is None and term is None and gradient is None:
        return _replayed(net, shard, groups, pixels, owner, settings, noise_seed, most_groups)
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
    for step in range(settings.num_steps):
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


def _replayed(
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
    from rescene.steps.captured_condense import descend_captured

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
