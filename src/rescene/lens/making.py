"""Make the lens `leaves` from nothing but a seed: train the network, draw the patches, measure the directions to keep."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rescene.lens.contrast import Contrast, picture_pool, train_network
from rescene.lens.features import LARGE, MODES, NUM_PATCHES, SMALL, THRESHOLD, LeavesLens
from rescene.lens.network import LensNet, fold
from rescene.lens.patches import sampled_dictionary
from rescene.record import record
from rescene.rng import Rng


@record
class Measuring:
    """How many procedural pictures the patches, the directions and the deviations come from."""

    num_pictures: int = 24_000
    num_patches: int = NUM_PATCHES
    modes: tuple[int, ...] = MODES


SMALL_MEASURING = Measuring(num_pictures=1_000, num_patches=64, modes=(32, 16, 16, 8))


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
    lens = LeavesLens(net.widths, measuring.num_patches, measuring.modes)
    fold(net)
    lens.net.load_state_dict({key: value.half().float() for key, value in net.state_dict().items()})  # as it is stored
    lens.to(device)
    large = picture_pool(measuring.num_pictures, rng.at("measuring").generator(device))
    small = F.avg_pool2d(large.float() / 255, LARGE // SMALL)
    generator = rng.at("patches").generator(device)
    patches = sampled_dictionary(small, measuring.num_patches, THRESHOLD, generator)
    lens.filters.copy_(patches.filters.half())
    lens.offsets.copy_(patches.offsets)
    basis = leading_directions([lens.patch_strengths(part) for part in small.split(500)], max(measuring.modes))
    scale = basis.abs().amax(dim=0) / 127
    lens.basis.copy_((basis / scale).round())
    lens.basis_scale.copy_(scale)
    raw = torch.cat([lens.raw(part) for part in large.split(500)])  # at 64 pixels, seen at 32 too
    lens.mean.copy_(raw.mean(dim=0))
    lens.deviation.copy_(raw.std(dim=0).clamp_min(1e-3))
    return lens


def leading_directions(strengths: list[Tensor], num: int) -> Tensor:
    """Leading eigenvectors [2K, num] of the covariance of patch strengths [n, 2K, 4], all parts of pictures together."""
    size, device = strengths[0].shape[1], strengths[0].device
    total, square = torch.zeros(size, device=device).double(), torch.zeros(size, size, device=device).double()
    for part in strengths:
        rows = part.transpose(1, 2).reshape(-1, size).double()
        total, square = total + rows.sum(dim=0), square + rows.T @ rows
    count = sum(4 * len(part) for part in strengths)
    mean = total / count
    vectors: Tensor = torch.linalg.eigh(square / count - mean.outer(mean)).eigenvectors
    return vectors.flip(1)[:, :num].float()
