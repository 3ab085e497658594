"""Make the lens `leaves` from nothing but a seed: train the network, draw the patches, measure the directions to keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field

import torch
import torch.nn.functional as F

from rescene.core.record import record
from rescene.core.rng import Rng
from rescene.lens.contrast import Contrast, picture_pool, train_network
from rescene.lens.features import KEPT, LARGE, NUM_PATCHES, PATCHES, SMALL, LeavesLens
from rescene.lens.network import LensNet, fold
from rescene.lens.patches import sampled_dictionary


@record
class Measuring:
    """How many procedural pictures the patches, the directions and the deviations come from, and how many of them are kept."""

    num_pictures: int = 24_000
    num_patches: int = NUM_PATCHES
    kept: dict[str, tuple[int, ...]] = field(default_factory=lambda: dict(KEPT))


SMALL_MEASURING = Measuring(
    num_pictures=1_000,
    num_patches=64,
    kept={PATCHES: (32, 16, 16, 8), "stage2": (16, 4, 8, 0), "stage3": (32, 8, 16, 0), "stage4": (32,)},
)


def make_lens(
    contrast: Contrast,
    measuring: Measuring,
    seed: int,
    device: torch.device,
    tell: Callable[[int, float], None] = lambda step, loss: None,
) -> LeavesLens:
    """The whole lens from a seed."""
    return assembled(train_network(contrast, seed, device, tell), measuring, seed, device)


@torch.no_grad()
def assembled(net: LensNet, measuring: Measuring, seed: int, device: torch.device) -> LeavesLens:
    """A lens around a trained network: its patches, basis, mean and deviation come from fresh procedural pictures."""
    rng = Rng(seed).at("lens")
    lens = LeavesLens(net.widths, measuring.num_patches, measuring.kept)
    fold(net)
    lens.net.load_state_dict({key: value.half().float() for key, value in net.state_dict().items()})  # as it is stored
    lens.to(device)
    large = picture_pool(measuring.num_pictures, rng.at("measuring").generator(device))
    small = F.avg_pool2d(large.float() / 255, LARGE // SMALL)
    filters, offsets = sampled_dictionary(small, measuring.num_patches, rng.at("patches").generator(device))
    lens.filters.copy_(filters.half())
    lens.offsets.copy_(offsets)
    seen = [dict(lens.modes(part)) for part in small.split(500)]
    for name, directions in lens.directions.items():
        directions.fit(torch.cat([modes[name] for modes in seen]))  # type: ignore[operator]
    raw = torch.cat([lens.raw(part) for part in large.split(500)])  # at 64 pixels, seen at 32 too
    lens.mean.copy_(raw.mean(dim=0))
    lens.deviation.copy_(raw.std(dim=0).clamp_min(1e-3))
    return lens
