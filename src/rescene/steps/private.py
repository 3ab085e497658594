"""Condensation behind a privacy mechanism. The shard's site says which one; the ledger sees every release.

release           embed each record once under m perturbed networks, clip, sum per class of the task, add noise once.
                  Everything after that looks at the noised sums alone, so steps and surrogates are free.
per-example       the paper's proposition: at each step the pixel gradient of each sampled record is clipped on its own, and
                  noise is added to their sum. The number of records is replaced by a public guess.
paper-experiment  the paper's privacy runs (App. F.2): one clip per class, noise sigma C / b, start from real images.
                  Kept to compare with; it certifies nothing.

In the first two every class of the task is treated alike whether the site has it or not, and the start is white noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from rescene.data import Shard
from rescene.functional import clip_groups, perturbed
from rescene.functional.release import class_sums, clip_rows, noised_means
from rescene.privacy.mechanism import Mechanism, Site, digest, refuse_batch_statistics
from rescene.privacy.noise import Noise
from rescene.rng import Rng, seeded_generator
from rescene.steps.condense import (
    CHUNK,
    Condensation,
    Gradient,
    Group,
    Move,
    Surrogates,
    assign,
    collect,
    descended,
    embedding,
    groups_of,
    loss_and_gradient,
    matching_gradient,
)

_VECTORS = 64  # gradients of single records held at once


def condense_privately(
    net: nn.Module, shards: Sequence[Shard], rngs: Sequence[Rng], settings: Condensation, noise_seed: int
) -> list[Surrogates]:
    """As :func:`rescene.steps.condense.condense`, one answer per shard; a site that declines answers with nothing."""
    site: Site = shards[0].site  # all sites of a run have the same mechanism
    if site.mechanism.kind == "release" and settings.start == "coloured":
        from rescene.steps.private_moments import draw_from_moments

        return draw_from_moments(shards, rngs, settings)
    net.eval()
    question = digest(net.state_dict().items(), site.mechanism, settings, noise_seed)
    if site.mechanism.kind == "release":
        return _from_releases(net, shards, rngs, settings, noise_seed, question)
    one = _per_example if site.mechanism.kind == "per-example" else _paper_experiment
    made = []
    for shard, rng in zip(shards, rngs, strict=True):

        def draw(shard: Shard = shard, rng: Rng = rng) -> dict[str, Tensor]:
            return _as_tensors(one(net, shard, rng, settings, noise_seed))

        found = shard.site.answer(question, draw)
        made.append(replace(collect(shard, []), num_declined=1) if found is None else _from_tensors(found, shard))
    return made


def _as_tensors(made: Surrogates) -> dict[str, Tensor]:
    numbers = torch.tensor([made.loss, made.num_fallbacks, made.num_withheld], dtype=torch.float64)
    return {"images": made.images, "labels": made.labels, "start": made.start, "numbers": numbers}


def _from_tensors(found: dict[str, Tensor], shard: Shard) -> Surrogates:
    images, labels, start = (found[name].to(shard.device) for name in ("images", "labels", "start"))
    loss, fallbacks, withheld = found["numbers"].tolist()
    return Surrogates(images, labels, start, loss, int(fallbacks), int(withheld))


@torch.no_grad()
def embeddings(net: nn.Module, shard: Shard, thetas: Sequence[Sequence[Tensor]], settings: Condensation) -> Tensor:
    """psi(x) = m^-1/2 [phi_1, f_1, .., phi_m, f_m] of every record of the shard: [n, m (d + C)], one pass per network."""
    refuse_batch_statistics(net)
    parts = []
    for theta in thetas:
        assign(list(net.parameters()), theta)
        rows = [_row(net, shard.pictures(part), settings) for part in shard.index.split(CHUNK[shard.device.type])]
        parts.append(torch.cat(rows) if rows else torch.zeros(0, _size(net, settings), device=shard.device))
    return torch.cat(parts, dim=1) / math.sqrt(len(thetas))


def noised_sums(psi: Tensor, shard: Shard, mechanism: Mechanism, noise: Noise) -> Tensor:
    """The one look at the data: a noised clipped sum and count for EVERY class of the task, [classes, m (d + C) + 1]."""
    classes = torch.tensor(shard.task.classes, device=shard.device)
    groups = (shard.labels.unsqueeze(1) == classes).long().argmax(dim=1)
    sums = class_sums(psi, groups, len(classes), mechanism.clip, mechanism.kappa).cpu()
    return sums + mechanism.deviation * noise.normal(*sums.shape)


def clipped_gradient_sum(net: nn.Module, pixels: Tensor, real: Tensor, clip: float, settings: Condensation) -> Tensor:
    """Sum over records x_i of clip_C(2 J^T (mu_s - psi(x_i))), J the Jacobian of the surrogates' mean embedding.

    Features and logits are one vector, clipped jointly. Norms are exact: each record has a vector-Jacobian product of its
    own. pixels [m, 3, H, W], real [b, 3, H, W] -> as pixels, float64; no record gives 0.
    """
    refuse_batch_statistics(net)
    total = torch.zeros(pixels.numel(), dtype=torch.float64, device=pixels.device)
    if not len(real):
        return total.reshape(pixels.shape)
    with torch.no_grad():
        psi = torch.cat([_row(net, part, settings) for part in real.split(CHUNK[pixels.device.type])])
    x = pixels.detach().requires_grad_(True)
    mean = _row(net, x, settings).mean(dim=0)
    for part in (2.0 * (mean.detach() - psi)).split(_VECTORS):
        (rows,) = torch.autograd.grad(mean, x, part, is_grads_batched=True, retain_graph=True)
        total += clip_rows(rows.flatten(1), clip).sum(dim=0)
    _count(net, len(pixels) * (len(real) - 1))  # a backward pass for each record; hooks of the network saw one
    return total.reshape(pixels.shape)


def _from_releases(
    net: nn.Module, shards: Sequence[Shard], rngs: Sequence[Rng], settings: Condensation, noise_seed: int, question: str
) -> list[Surrogates]:
    mechanism: Mechanism = shards[0].site.mechanism
    before = [p.detach().clone() for p in net.parameters()]
    stream = seeded_generator(noise_seed, shards[0].device)
    thetas = [perturbed(before, settings.radius, stream) for _ in range(mechanism.num_nets)]
    groups: list[Group] = []
    targets: list[Tensor] = []
    declined, suppressed = [0] * len(shards), [0] * len(shards)
    for client, (shard, rng) in enumerate(zip(shards, rngs, strict=True)):
        looked: list[int] = []

        def draw(shard: Shard = shard, looked: list[int] = looked) -> dict[str, Tensor]:
            looked.append(len(shard))
            psi = embeddings(net, shard, thetas, settings)
            return {"sums": noised_sums(psi, shard, mechanism, shard.site.noise)}

        found = shard.site.answer(question, draw)
        if found is not None and not looked:  # replayed: the work was done once, and it counts once
            _count(net, len(thetas) * len(shard))
        if found is None:
            declined[client] = 1
            continue
        means, enough = noised_means(found["sums"], mechanism.kappa, mechanism.least_count)
        suppressed[client] = int((~enough).sum())
        for label, mean in zip(
            (c for c, e in zip(shard.task.classes, enough, strict=True) if e), means[enough], strict=True
        ):
            groups.append(Group(client, label, _white(shard, rng, label, settings), shard.index[:0], None))
            targets.append(mean.float() * math.sqrt(mechanism.num_nets))
    assign(list(net.parameters()), before)
    made = descended(
        net,
        shards,
        groups,
        settings,
        noise_seed,
        move=_in_turn(thetas),
        gradient=_towards(torch.stack(targets).to(shards[0].device), mechanism.num_nets, settings) if targets else None,
    )
    return [replace(m, num_declined=d, num_suppressed=s) for m, d, s in zip(made, declined, suppressed, strict=True)]


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
        return losses, found if settings.clip is None else clip_groups(found, owner, len(targets), settings.clip)

    return gradient


def _per_example(net: nn.Module, shard: Shard, rng: Rng, settings: Condensation, noise_seed: int) -> Surrogates:
    site: Site = shard.site
    m, own = site.mechanism, shard.by_class()
    start = torch.cat([_white(shard, rng, label, settings) for label in shard.task.classes])
    pixels, velocity = start.clone(), torch.zeros_like(start)
    parameters = list(net.parameters())
    theta, stream = [p.detach().clone() for p in parameters], seeded_generator(noise_seed, shard.device)
    net.requires_grad_(False)
    for _ in range(settings.num_steps):
        assign(parameters, perturbed(theta, settings.radius, stream))
        sums = []
        for label, block in zip(shard.task.classes, pixels.split(settings.ipc), strict=True):
            members = own.get(label, shard.index[:0])
            chosen = members[site.noise.chosen(len(members), m.composition.rate).to(members.device)]
            total = clipped_gradient_sum(net, block, shard.pictures(chosen), m.clip, settings)
            sums.append(total + m.deviation * site.noise.normal(*block.shape).to(block.device))
        gradient = torch.cat(sums) / (m.composition.rate * m.typical_count)
        velocity = settings.image_momentum * velocity + gradient.to(pixels.dtype)
        pixels = pixels - settings.image_lr * velocity
    assign(parameters, theta)
    net.requires_grad_(True)
    finite = torch.isfinite(pixels).flatten(1).all(dim=1)
    labels = torch.tensor(shard.task.classes, device=shard.device).repeat_interleave(settings.ipc)
    pixels = torch.where(finite.reshape(-1, 1, 1, 1), pixels, start)
    return Surrogates(pixels, labels, start, loss=math.nan, num_fallbacks=int((~finite).sum()))  # the loss is private


def _paper_experiment(net: nn.Module, shard: Shard, rng: Rng, settings: Condensation, noise_seed: int) -> Surrogates:
    site: Site = shard.site
    groups = list(groups_of(0, shard, rng, settings))
    if not groups:
        return collect(shard, [])
    batch = torch.tensor([settings.real_batch_size(len(g.members), len(g.start)) for g in groups], device=shard.device)
    usual = matching_gradient(shard, groups, settings)

    def gradient(net: nn.Module, pixels: Tensor, owner: Tensor, step: int) -> tuple[Tensor, Tensor]:
        losses, found = usual(net, pixels, owner, step)
        scale = (site.mechanism.deviation / batch)[owner].reshape(-1, 1, 1, 1)
        return losses, found + scale * site.noise.normal(*found.shape).to(found)

    return descended(net, [shard], groups, settings, noise_seed, gradient=gradient)[0]


def _count(net: nn.Module, num_passes: int) -> None:
    count = getattr(net, "count_passes", None)
    if count is not None:
        count(num_passes)


def _white(shard: Shard, rng: Rng, label: int, settings: Condensation) -> Tensor:
    """White noise to start from: no image of the site, and as many as the recipe says whatever the site holds."""
    generator = rng.at("condense", label).generator()
    return torch.randn((settings.ipc, *shard.images.pixels.shape[1:]), generator=generator).to(shard.device)


def _row(net: nn.Module, x: Tensor, settings: Condensation) -> Tensor:
    features, logits = embedding(net, x, settings)
    return torch.cat([features, logits], dim=1) if settings.match_logits else features


def _size(net: nn.Module, settings: Condensation) -> int:
    return int(net.feature_size) + (len(net.head.weight) if settings.match_logits else 0)  # type: ignore[arg-type, union-attr]
