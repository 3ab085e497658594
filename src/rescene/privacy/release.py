"""Mechanism "release" in its two halves, and what travels between them where the server does the second.

    released            all of it that touches images: noised sums and counts of every class of the task
    condense_released   surrogates from these numbers, the broadcast and public randomness; no image is looked at

A site may do both and send the surrogates, or send the sums (``privacy.send=sums``). Then the server does the second half with
shards that hold no image and the very streams of randomness that the sites would have used: the same surrogates, up to the
rounding of the sums to float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rescene.core.rng import Rng
from rescene.data import Shard
from rescene.privacy.class_sums import noised_means
from rescene.privacy.mechanism import Mechanism, SitePrivacy
from rescene.privacy.released_embeddings import condensed_embeddings, embedded, networks, released_embeddings
from rescene.privacy.released_moments import (
    PictureLaw,
    drawn_from_laws,
    laws_of,
    moments_of,
    num_rows,
    released_moments,
)
from rescene.training.condensation import CHUNK, Condensation, Surrogates, assign


def released(
    net: nn.Module | None,
    shards: Sequence[Shard],
    settings: Condensation,
    noise_seed: int,
    sites: Sequence[SitePrivacy],
    centre: Tensor | None = None,
) -> list[Tensor | None]:
    """Each site's noised sums [classes, d + 1], from its ledger if it was asked before; None where it declines."""
    if settings.start == "coloured":
        return [released_moments(shard, site, centre) for shard, site in zip(shards, sites, strict=True)]
    assert net is not None  # only moments of pictures need none
    return released_embeddings(net, shards, settings, noise_seed, sites, centre)


def centre_of(
    net: nn.Module | None,
    pictures: Tensor,
    labels: Tensor,
    classes: Sequence[int],
    settings: Condensation,
    noise_seed: int,
    mechanism: Mechanism,
) -> Tensor:
    """a_c [classes, d]: mean psi of the class's pictures that earlier releases gave; where there are none, of all pictures."""
    if settings.start == "coloured":
        psi = moments_of(pictures, mechanism)
    else:
        assert net is not None
        before, thetas = networks(net.eval(), mechanism, settings, noise_seed, pictures.device)
        psi = embedded(net, lambda: pictures.split(CHUNK[pictures.device.type]), thetas, settings)
        assign(list(net.parameters()), before)
    own = [labels == label for label in classes]
    return torch.stack([psi[rows if bool(rows.any()) else slice(None)].mean(dim=0) for rows in own])


def condense_released(
    net: nn.Module | None,
    shards: Sequence[Shard],
    rngs: Sequence[Rng],
    settings: Condensation,
    noise_seed: int,
    mechanism: Mechanism,
    sums: Sequence[Tensor | None],
) -> list[Surrogates]:
    """Post-processing. The shards say which classes, what size and device; they may be empty."""
    if settings.start == "coloured":
        laws = _laws(sums, shards[0].images.pixels.shape[1:], mechanism)
        return [drawn_from_laws(shard, rng, own, settings) for shard, rng, own in zip(shards, rngs, laws, strict=True)]
    assert net is not None
    return condensed_embeddings(net, shards, rngs, settings, noise_seed, mechanism, sums)


def _laws(
    sums: Sequence[Tensor | None], shape: torch.Size, mechanism: Mechanism
) -> Iterable[list[PictureLaw | None] | None]:
    """What each site's pictures are drawn from, one site at a time; where sums are pooled found once, for all of them."""
    if not mechanism.pooled:
        return (None if own is None else laws_of(own, shape, mechanism, mechanism.deviation) for own in sums)
    total, deviation = pooled(sums, mechanism)
    together = None if total is None else laws_of(total, shape, mechanism, deviation)
    return (None if own is None else together for own in sums)


def pooled(sums: Sequence[Tensor | None], mechanism: Mechanism) -> tuple[Tensor | None, float]:
    """The sum of all that was sent, None if nothing was, and the deviation of the noise in it.

    Of a class that few sites sent the noise is less than that.
    """
    sent = [own for own in sums if own is not None]
    total = torch.stack(sent).sum(dim=0) if sent else None
    return total, mechanism.deviation * math.sqrt(len(sent))


def sums_upload(sums: Tensor | None, classes: Sequence[int], mechanism: Mechanism) -> dict[str, Any]:
    """What goes on the wire: the classes that are not suppressed, and their sums. A site that declines says just that."""
    if sums is None:
        return {"notes": {"num_declined": 1}}
    sums = sums.float()  # first, so that both sides compare the same numbers with the threshold
    _, enough = noised_means(sums.double(), mechanism.kappa, mechanism.least_count)
    return {"labels": torch.tensor(classes)[enough], "sums": sums[enough], "notes": {}}


def sums_received(upload: dict[str, Any], classes: Sequence[int]) -> Tensor | None:
    """Inverse of :func:`sums_upload`; a class that was suppressed has sum and count 0, so it is suppressed again."""
    if "sums" not in upload:
        return None
    own: Tensor = upload["sums"].cpu().double()
    where = torch.tensor([classes.index(label) for label in upload["labels"].tolist()], dtype=torch.int64)
    return own.new_zeros(len(classes), own.shape[1]).index_copy(0, where, own)


def sums_size(settings: Condensation, mechanism: Mechanism, head: torch.Size | None, channels: int = 3) -> int:
    """Numbers of one class, its count included. ``head``: shape [classes, features] of the broadcast network's last layer."""
    if settings.start == "coloured":
        rows = num_rows(mechanism, channels)
        return channels * mechanism.mean_grid**2 + rows * (rows + 1) // 2 + 1
    assert head is not None
    return mechanism.num_nets * (head[1] + head[0] * settings.match_logits) + 1
