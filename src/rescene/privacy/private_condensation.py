"""Condensation behind a privacy mechanism. Each site brings its mechanism, its noise and its ledger, which sees every release.

release           clip and sum what each record tells, per class of the task, and add noise once (``release.py``).
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

from rescene.core.rng import Rng, seeded_generator
from rescene.data import Shard
from rescene.functional import perturbed
from rescene.nets import count_passes
from rescene.privacy.mechanism import SitePrivacy, clip_rows, in_steps, refuse_batch_statistics
from rescene.privacy.release import condense_released, question_of, released, row_of, white_noise
from rescene.training.condensation import (
    CHUNK,
    Condensation,
    Surrogates,
    assign,
    collect,
    descended,
    groups_of,
    matching_gradient,
)

_VECTORS = 64  # gradients of single records held at once


def condense_privately(
    net: nn.Module,
    shards: Sequence[Shard],
    rngs: Sequence[Rng],
    settings: Condensation,
    noise_seed: int,
    sites: Sequence[SitePrivacy],
) -> list[Surrogates]:
    """As :func:`rescene.training.condensation.condense`, one answer per shard; a site that declines answers with nothing."""
    mechanism = sites[0].mechanism  # all sites of a run have the same
    if mechanism.kind == "release":
        sums = released(net, shards, settings, noise_seed, sites)
        return condense_released(net, shards, rngs, settings, noise_seed, mechanism, sums)
    question = question_of(net, mechanism, settings, noise_seed)
    one = _per_example if mechanism.kind == "per-example" else _paper_experiment
    made = []
    for shard, rng, site in zip(shards, rngs, sites, strict=True):

        def draw(shard: Shard = shard, rng: Rng = rng, site: SitePrivacy = site) -> dict[str, Tensor]:
            return _as_tensors(one(net, shard, rng, settings, noise_seed, site))

        found = site.answer(question, draw)
        made.append(replace(collect(shard, []), num_declined=1) if found is None else _from_tensors(found, shard))
    return made


def _as_tensors(made: Surrogates) -> dict[str, Tensor]:
    numbers = torch.tensor([made.loss, made.num_fallbacks, made.num_withheld], dtype=torch.float64)
    return {"images": made.images, "labels": made.labels, "start": made.start, "numbers": numbers}


def _from_tensors(found: dict[str, Tensor], shard: Shard) -> Surrogates:
    images, labels, start = (found[name].to(shard.device) for name in ("images", "labels", "start"))
    loss, fallbacks, withheld = found["numbers"].tolist()
    return Surrogates(images, labels, start, loss, int(fallbacks), int(withheld))


def clipped_gradient_sum(
    net: nn.Module, pixels: Tensor, real: Tensor, clip: float, step: float, settings: Condensation
) -> Tensor:
    """Sum over records x_i of clip_C(2 J^T (mu_s - psi(x_i))), J the Jacobian of the surrogates' mean embedding.

    Features and logits are one vector, clipped jointly. Norms are exact: each record has a vector-Jacobian product of its
    own. pixels [m, 3, H, W], real [b, 3, H, W] -> as pixels, int64 in whole steps, each record rounded by itself; no record
    gives 0.
    """
    refuse_batch_statistics(net, settings.norm_statistics == "batch")
    total = torch.zeros(pixels.numel(), dtype=torch.int64, device=pixels.device)
    if not len(real):
        return total.reshape(pixels.shape)
    with torch.no_grad():
        psi = torch.cat([row_of(net, part, settings) for part in real.split(CHUNK[pixels.device.type])])
    x = pixels.detach().requires_grad_(True)
    mean = row_of(net, x, settings).mean(dim=0)
    for part in (2.0 * (mean.detach() - psi)).split(_VECTORS):
        (rows,) = torch.autograd.grad(mean, x, part, is_grads_batched=True, retain_graph=True)
        total += in_steps(clip_rows(rows.flatten(1), clip), step).sum(dim=0)
    count_passes(net, len(pixels) * (len(real) - 1))  # a backward pass for each record; hooks of the network saw one
    return total.reshape(pixels.shape)


def _per_example(
    net: nn.Module, shard: Shard, rng: Rng, settings: Condensation, noise_seed: int, site: SitePrivacy
) -> Surrogates:
    m, own = site.mechanism, shard.by_class()
    start = torch.cat([white_noise(shard, rng, label, settings) for label in shard.task.classes])
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
            total = clipped_gradient_sum(net, block, shard.pictures(chosen), m.clip, m.step, settings)
            sums.append(m.noised(total.flatten(), site.noise).reshape(block.shape).to(block.device))
        gradient = torch.cat(sums) / (m.composition.rate * m.typical_count)
        velocity = settings.image_momentum * velocity + gradient.to(pixels.dtype)
        pixels = pixels - settings.image_lr * velocity
    assign(parameters, theta)
    net.requires_grad_(True)
    finite = torch.isfinite(pixels).flatten(1).all(dim=1)
    labels = torch.tensor(shard.task.classes, device=shard.device).repeat_interleave(settings.ipc)
    pixels = torch.where(finite.reshape(-1, 1, 1, 1), pixels, start)
    return Surrogates(pixels, labels, start, loss=math.nan, num_fallbacks=int((~finite).sum()))  # the loss is private


def _paper_experiment(
    net: nn.Module, shard: Shard, rng: Rng, settings: Condensation, noise_seed: int, site: SitePrivacy
) -> Surrogates:
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
