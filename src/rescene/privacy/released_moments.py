"""Surrogates from noised moments of the pictures themselves: the private form of the start ``coloured``.

Per site, task and class of the task: one clipped sum of picture moments and a count, noised once. It does not depend on the
model, so it is released once per task; every later round draws fresh surrogates from the same numbers, which is free. Nothing
else touches the images, and every class of the task is treated alike whether the site has it or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rescene.core.rng import Rng
from rescene.data import Shard
from rescene.privacy.class_sums import noised_means
from rescene.privacy.mechanism import Mechanism, SitePrivacy, digest
from rescene.privacy.picture_moments import PictureLaw, drawn_pictures, picture_law, picture_moments
from rescene.privacy.released_embeddings import noised_sums
from rescene.training.condensation import CHUNK, Condensation, Surrogates, collect

WHOLE_TASK = -1  # the round under which the ledger keeps what is released once per task


def released_moments(shard: Shard, site: SitePrivacy, centre: Tensor | None = None) -> Tensor | None:
    """The site's noised sums [classes, d + 1], the same in every round of the task; None if it declines."""
    mechanism = site.mechanism
    found = replace(site, round=WHOLE_TASK).answer(
        digest([], mechanism, *["colour"] * mechanism.covariance_colour),
        lambda: {"sums": _sums(shard, site, centre)},
    )
    return None if found is None else found["sums"]


def laws_of(sums: Tensor, shape: torch.Size, mechanism: Mechanism, deviation: float) -> list[PictureLaw | None]:
    """What pictures of this shape are drawn from, for each class of sums with noise of this deviation; None: suppressed."""
    means, enough = noised_means(sums, mechanism.kappa, mechanism.least_count)
    counts = sums[:, -1] / mechanism.kappa
    return [
        picture_law(mean.float(), deviation / float(count), shape, *_grids(mechanism)) if sent else None
        for mean, count, sent in zip(means, counts, enough, strict=True)
    ]


def drawn_from_laws(
    shard: Shard, rng: Rng, laws: Sequence[PictureLaw | None] | None, settings: Condensation
) -> Surrogates:
    """Surrogates; the shard says which classes, size and device, and may be empty. No laws: the site declined."""
    if laws is None:
        return replace(collect(shard, []), num_declined=1)
    classes, images = [], []
    for label, law in zip(shard.task.classes, laws, strict=True):
        if law is not None:
            noise = torch.randn(settings.ipc, len(law.scale), generator=rng.at("condense", label).generator())
            images.append(shard.transform.possible(drawn_pictures(law, noise).to(shard.device)))
            classes.append(label)
    suppressed = len(laws) - len(classes)
    if not images:
        return replace(collect(shard, []), num_suppressed=suppressed)
    labels = torch.tensor(classes, device=shard.device).repeat_interleave(settings.ipc)
    pixels = torch.cat(images)
    return Surrogates(pixels, labels, pixels, loss=0.0, num_fallbacks=0, num_suppressed=suppressed)


def _sums(shard: Shard, site: SitePrivacy, centre: Tensor | None = None) -> Tensor:
    """The one look at the images: a noised clipped sum and count for every class of the task."""
    parts = shard.index.split(CHUNK[shard.device.type]) if len(shard) else (shard.index,)
    psi = (moments_of(shard.pictures(part), site.mechanism) for part in parts)
    return noised_sums(psi, shard, site.mechanism, site.noise, centre)


def moments_of(pictures: Tensor, mechanism: Mechanism) -> Tensor:
    """First and second moments of pictures on the mechanism's grids."""
    return picture_moments(pictures, *_grids(mechanism))


def num_rows(mechanism: Mechanism, channels: int) -> int:
    """Rows of the covariance that is released."""
    return mechanism.covariance_grid**2 * (channels if mechanism.covariance_colour else 1)


def _grids(mechanism: Mechanism) -> tuple[int, int, float, bool]:
    m = mechanism
    return m.mean_grid, m.covariance_grid, m.covariance_weight, m.covariance_colour
