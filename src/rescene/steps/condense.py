"""Condensation: real images of a class become a few surrogates with the same mean embedding (Sec. 3.2, Eq. 1).

All classes of all given clients are condensed in one pass. A group is one (client, class) pair; the loss is separable over
groups and the network runs in eval mode, so images do not influence each other and the batched form equals one client at a
time. The perturbation noise comes from one seed for everybody; everything else a client draws comes from its own stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from rescene.data import Shard
from rescene.rng import Rng
from rescene.steps.groups import Condensation, Group, Outcome, Surrogates, collect, groups_of
from rescene.steps.matching import Gradient, Move, Term, descend


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
    if shards and shards[0].site is not None:
        from rescene.steps.private import condense_privately

        return _noticed(shards, condense_privately(net, shards, rngs, settings, noise_seed))
    groups = [g for k, (s, r) in enumerate(zip(shards, rngs, strict=True)) for g in groups_of(k, s, r, settings)]
    return _noticed(shards, descended(net, shards, groups, settings, noise_seed, move=move, term=term))


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
        # all shards in one process share their image tensor and transform, so any of them can fetch for all
        most = len(shards) * len(shards[0].task.classes)
        pixels, losses = descend(net, shards[0], groups, start, owner, settings, noise_seed, most, move, term, gradient)
        finite = torch.isfinite(pixels).flatten(1).all(dim=1)
        pixels = torch.where(finite.reshape(-1, 1, 1, 1), pixels, start)
        lost = torch.bincount(owner, weights=(~finite).float(), minlength=len(groups))
        for group, block, loss, count in zip(groups, pixels.split(sizes), losses.tolist(), lost.tolist(), strict=True):
            outcomes[group.client].append(_guarded(shards[0], settings, Outcome(group, block, loss, int(count), 0)))
    return [collect(shard, own) for shard, own in zip(shards, outcomes, strict=True)]


def _guarded(shard: Shard, settings: Condensation, made: Outcome) -> Outcome:
    """Where all images of a class fit among its surrogates, those that are the same picture as at the start stay home."""
    group = made.group
    if not settings.guard or settings.start != "real" or len(group.members) > settings.ipc:
        return made
    before, after = (shard.transform.to_pixels(images) for images in (group.start, made.images))
    moved = (before != after).flatten(1).any(dim=1)
    if bool(moved.all()):
        return made
    kept = replace(group, start=group.start[moved])
    return replace(made, group=kept, images=made.images[moved], num_withheld=int((~moved).sum()))


def _noticed(shards: Sequence[Shard], made: list[Surrogates]) -> list[Surrogates]:
    for shard, own in zip(shards, made, strict=True):
        if shard.notice is not None and len(own.labels):
            shard.notice(own.images, own.start)
    return made
