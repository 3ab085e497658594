"""How close an uploaded image is to a real one. Only a simulation can know, so only a simulation can tell.

Distances are RMS over pixels in normalised units (a standard deviation of the data is 1) and PSNR in dB with pixels in
[0, 1]. A PSNR above 30 dB is an image that a person would take for the same picture: a near-copy. That figure looks at every
upload and sees plain copies only.

A *traced* upload is one whose source stands out among all real images, after mirror, small moves, gain, offset, negative and blur are
undone (privacy/likeness.py). It takes longer, so it looks at ``MOST_TRACED`` uploads of a task. Beside it stands the same
figure for as many images that no site had: what pictures of this kind score by chance.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rescene.data import Transform
from rescene.privacy.likeness import CUT, margins

NEAR_COPY_DB = 30.0
EXACT_RMS = 1e-6  # normalised units; below it an upload is the real image up to rounding
MOST_TRACED = 12  # uploads of a task, and unseen images beside them
_CHUNK = 4096


@torch.no_grad()
def nearest_real(images: Tensor, real_pixels: Tensor, transform: Transform) -> tuple[Tensor, Tensor]:
    """For each normalised image its nearest real one: (RMS distance [m], position into ``real_pixels`` [m]).

    Candidates come from |a|^2 + |b|^2 - 2 a.b in chunks of the real side; the distance to the winner is then computed
    directly, because the expansion loses the digits that matter for near-copies.
    """
    a = images.flatten(1)
    best = torch.full((len(a),), torch.inf, device=a.device)
    where = torch.zeros(len(a), dtype=torch.long, device=a.device)
    for first in range(0, len(real_pixels), _CHUNK):
        b = transform.normalise(real_pixels[first : first + _CHUNK]).flatten(1)
        square = b.square().sum(dim=1) - 2.0 * (a @ b.T)
        value, index = square.min(dim=1)
        closer = value < best
        best, where = torch.where(closer, value, best), torch.where(closer, index + first, where)
    difference = a - transform.normalise(real_pixels[where]).flatten(1)
    return difference.square().mean(dim=1).sqrt(), where


def psnr(images: Tensor, others: Tensor, transform: Transform) -> Tensor:
    """Peak signal-to-noise ratio in dB of normalised images against others, pixels in [0, 1]; identical ones give 100.

    The three channels have different standard deviations, so this is not a function of the RMS alone.
    """
    std = torch.tensor(transform.std, device=images.device).reshape(1, -1, 1, 1)
    mse = ((images - others) * std).square().flatten(1).mean(dim=1)
    return -10.0 * mse.clamp(min=1e-10).log10()


def summarise(rms: Tensor, decibel: Tensor) -> dict[str, Any]:
    """The figures that stand beside every accuracy. Empty input gives zero images and no distances."""
    if len(rms) == 0:
        return {"num_images": 0}
    return {
        "num_images": len(rms),
        "nearest_rms_mean": float(rms.mean()),
        "nearest_rms_median": float(rms.median()),
        "nearest_rms_min": float(rms.min()),
        "nearest_psnr_median_db": float(decibel.median()),
        "near_copies": float((decibel > NEAR_COPY_DB).float().mean()),
        "exact_copies": int((rms < EXACT_RMS).sum()),
    }


def evenly(count: int, most: int) -> Tensor:
    """At most so many positions below ``count``, spread over all of it.

    >>> evenly(10, 4).tolist()
    [0, 3, 6, 9]
    """
    return torch.linspace(0, count - 1, min(count, most)).round().long() if count else torch.zeros(0, dtype=torch.long)


def summarise_traced(images: Tensor, seen: Tensor, unseen: Tensor, transform: Transform) -> dict[str, Any]:
    """How many of these normalised images can be traced to one of the ``seen`` pixels, and how many unseen ones by chance.

    Half of the unseen images at most stand in for uploads; the others are what a source must stand out from.
    """
    chance = evenly(len(unseen), min(len(images), len(unseen) // 2))
    if not len(chance):
        return {}
    others = torch.ones(len(unseen), dtype=torch.bool)
    others[chance] = False
    had, never = transform.normalise(seen), transform.normalise(unseen[others.to(unseen.device)])
    found = margins(torch.cat([images, transform.normalise(unseen[chance.to(unseen.device)])]), had, never).cpu()
    sent, control = found[: len(images)], found[len(images) :]
    return {
        "num_traced": len(images),
        "traced": float((sent > CUT).float().mean()),
        "traced_by_chance": float((control > CUT).float().mean()),
        "nearest_seen": float((sent > 0).float().mean()),
        "nearest_seen_by_chance": float((control > 0).float().mean()),
    }


def summarise_starts(rms: Tensor, decibel: Tensor) -> dict[str, Any]:
    """The same against each surrogate's own start image (real or not): how far condensation moved it."""
    return {
        "start_rms_mean": float(rms.mean()),
        "start_rms_median": float(rms.median()),
        "start_rms_min": float(rms.min()),
        "start_psnr_median_db": float(decibel.median()),
        "unmoved": int((rms < EXACT_RMS).sum()),
    }
