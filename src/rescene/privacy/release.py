"""Mechanism "release" on embeddings: sums under the round's perturbed networks, noised once, then matched by surrogates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from rescene.core.rng import Rng, seeded_generator
from rescene.data import Shard
from rescene.functional import perturbed
from rescene.nets import count_passes
from rescene.privacy.class_sums import class_sums, moved_back, noised_means
from rescene.privacy.mechanism import Mechanism, SitePrivacy, digest, refuse_batch_statistics
from rescene.privacy.noise import Noise
from rescene.training.condensation import (
    CHUNK,
    Condensation,
    Gradient,
    Group,
    Move,
    Surrogates,
    assign,
    descended,
    embedding,
    loss_and_gradient,
)


def released_embeddings(
    net: nn.Module,
    shards: Sequence[Shard],
    settings: Condensation,
    noise_seed: int,
    sites: Sequence[SitePrivacy],
    centre: Tensor | None = None,
) -> list[Tensor | None]:
    """Each site's noised sums under the round's networks, [classes, m (d + C) + 1]; None where it declines."""
    mechanism = sites[0].mechanism
    question = question_of(net, mechanism, settings, noise_seed)
    before, thetas = networks(net, mechanism, settings, noise_seed, shards[0].device)
    sums: list[Tensor | None] = []
    for shard, site in zip(shards, sites, strict=True):
        looked: list[int] = []

        def draw(shard: Shard = shard, site: SitePrivacy = site, looked: list[int] = looked) -> dict[str, Tensor]:
            looked.append(len(shard))
            psi = embeddings(net, shard, thetas, settings)
            return {"sums": noised_sums([psi], shard, mechanism, site.noise, centre)}

        found = site.answer(question, draw)
        if found is not None and not looked:  # replayed: the work was done once, and it counts once
            count_passes(net, len(thetas) * len(shard))
        sums.append(None if found is None else found["sums"])
    assign(list(net.parameters()), before)
    return sums


def condensed_embeddings(
    net: nn.Module,
    shards: Sequence[Shard],
    rngs: Sequence[Rng],
    settings: Condensation,
    noise_seed: int,
    mechanism: Mechanism,
    sums: Sequence[Tensor | None],
) -> list[Surrogates]:
    """Surrogates whose embeddings have the noised means, by Eq. 1 from white noise."""
    _, thetas = networks(net, mechanism, settings, noise_seed, shards[0].device)
    groups: list[Group] = []
    targets: list[Tensor] = []
    suppressed = [0] * len(shards)
    for client, (shard, rng, own) in enumerate(zip(shards, rngs, sums, strict=True)):
        if own is None:
            continue
        means, enough = noised_means(own, mechanism.kappa, mechanism.least_count)
        suppressed[client] = int((~enough).sum())
        for label, mean in zip(not_suppressed(shard.task.classes, enough), means[enough], strict=True):
            groups.append(Group(client, label, white_noise(shard, rng, label, settings), shard.index[:0], None))
            targets.append(mean.float() * math.sqrt(mechanism.num_nets))
    made = descended(
        net,
        shards,
        groups,
        settings,
        noise_seed,
        move=_in_turn(thetas),
        gradient=_towards(torch.stack(targets).to(shards[0].device), mechanism.num_nets, settings) if targets else None,
    )
    return [
        replace(m, num_declined=int(own is None), num_suppressed=s)
        for m, own, s in zip(made, sums, suppressed, strict=True)
    ]


def embeddings(net: nn.Module, shard: Shard, thetas: Sequence[Sequence[Tensor]], settings: Condensation) -> Tensor:
    """psi of every record of the shard: [n, m (d + C)]."""
    refuse_batch_statistics(net, settings.norm_statistics == "batch")
    parts = shard.index.split(CHUNK[shard.device.type])
    return embedded(net, lambda: map(shard.pictures, parts), thetas, settings)


@torch.no_grad()
def embedded(
    net: nn.Module,
    pictures: Callable[[], Iterable[Tensor]],
    thetas: Sequence[Sequence[Tensor]],
    settings: Condensation,
) -> Tensor:
    """psi(x) = m^-1/2 [phi_1, f_1, .., phi_m, f_m] of every picture, one pass per network."""
    parts = []
    for theta in thetas:
        assign(list(net.parameters()), theta)
        parts.append(torch.cat([row_of(net, part, settings) for part in pictures()]))
    return torch.cat(parts, dim=1) / math.sqrt(len(thetas))


def noised_sums(
    parts: Iterable[Tensor], shard: Shard, mechanism: Mechanism, noise: Noise, centre: Tensor | None = None
) -> Tensor:
    """The one look at the data: a noised clipped sum and count for EVERY class of the task, float64 [classes, d + 1].

    ``parts`` [n_k, d] are the embeddings of the shard's records, in its order, and never needed all at once.
    """
    classes = torch.tensor(shard.task.classes, device=shard.device)
    groups = (shard.labels.unsqueeze(1) == classes).long().argmax(dim=1)
    first, units = 0, torch.zeros((), dtype=torch.int64, device=shard.device)
    for psi in parts:
        own = groups[first : first + len(psi)]
        units = units + class_sums(psi, own, len(classes), mechanism.clip, mechanism.kappa, mechanism.step, centre)
        first += len(psi)
    sums = mechanism.noised(units, noise)
    return sums if centre is None else moved_back(sums, centre, mechanism.kappa)


def not_suppressed(classes: Sequence[int], enough: Tensor) -> list[int]:
    """The classes whose noised count reached the threshold."""
    return [c for c, e in zip(classes, enough.tolist(), strict=True) if e]


def question_of(net: nn.Module, mechanism: Mechanism, settings: Condensation, noise_seed: int) -> str:
    """A hash of everything that decides the answer, so that a repeated question gets the stored answer."""
    return digest(net.eval().state_dict().items(), mechanism, settings, noise_seed)


def networks(
    net: nn.Module, mechanism: Mechanism, settings: Condensation, noise_seed: int, device: torch.device
) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The broadcast weights, and the m perturbed ones that follow from the seed of the round for everybody alike."""
    before = [p.detach().clone() for p in net.parameters()]
    stream = seeded_generator(noise_seed, device)
    return before, [perturbed(before, settings.radius, stream) for _ in range(mechanism.num_nets)]


def _in_turn(thetas: Sequence[Sequence[Tensor]]) -> Move:
    turn = iter(range(10**9))
    return lambda theta, noise: thetas[next(turn) % len(thetas)]


def _towards(targets: Tensor, num_nets: int, settings: Condensation) -> Gradient:
    """Eq. 1 with noised means in the place of real ones; step s uses network s mod m and its part of the targets."""
    blocks = targets.chunk(num_nets, dim=1)

    def gradient(net: nn.Module, pixels: Tensor, owner: Tensor, step: int) -> tuple[Tensor, Tensor]:
        block, size = blocks[step % num_nets], int(net.feature_size)  # type: ignore[arg-type]
        labels = owner.new_zeros(len(targets))  # only a term would look at them
        losses, found = loss_and_gradient(
            net, pixels, owner, (block[:, :size], block[:, size:]), settings, labels, None
        )
        return losses, settings.bounded(found, losses, owner)

    return gradient


def white_noise(shard: Shard, rng: Rng, label: int, settings: Condensation) -> Tensor:
    """White noise to start from: no image of the site, and as many as the recipe says whatever the site holds."""
    generator = rng.at("condense", label).generator()
    return torch.randn((settings.ipc, *shard.images.pixels.shape[1:]), generator=generator).to(shard.device)


def row_of(net: nn.Module, x: Tensor, settings: Condensation) -> Tensor:
    """What one image adds to a sum: its features, and its logits if those are matched."""
    features, logits = embedding(net, x, settings)
    return torch.cat([features, logits], dim=1) if settings.match_logits else features
