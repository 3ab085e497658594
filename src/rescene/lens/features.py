"""The lens `leaves`: a frozen network and patches, both made from procedural pictures, and what they say about a picture.

    picture        squares of 32 pixels; larger ones are also seen at 64 pixels by the network
    network        stages 2 and 3 in 2 x 2 parts, stage 4 as a whole
    patches        2K strengths in 2 x 2 parts, square roots; each of the four sums and differences over the parts is
                   reduced by one basis, the leading directions of procedural pictures, of which it takes so many as MODES says
    all of it      the mean over the picture and its mirror image, in deviations from the mean of procedural pictures

Nothing in here saw a photograph. The numbers are the same on every machine up to rounding in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.lens.network import WIDTHS, LensNet, fold
from rescene.lens.patches import SIDE, Patches

MEAN, STD = 0.47, 0.25  # of procedural pictures; the network's input is normalised with them
SMALL, LARGE = 32, 64  # sides in pixels at which a picture is looked at
MODES = (640, 320, 320, 192)  # directions kept of the sum, the two differences across and the difference of differences
HADAMARD = ((1, 1, 1, 1), (1, -1, 1, -1), (1, 1, -1, -1), (1, -1, -1, 1))
NUM_PATCHES = 1280
THRESHOLD = 0.5


class LeavesLens(nn.Module):
    """pixels uint8 [n, 3, s, s] -> standardised features [n, d]: d = 2,816 for pictures of 32 pixels, 4,160 for larger ones."""

    filters: Tensor
    offsets: Tensor
    basis: Tensor
    basis_scale: Tensor
    mean: Tensor
    deviation: Tensor

    def __init__(
        self, widths: Sequence[int] = WIDTHS, num_patches: int = NUM_PATCHES, modes: Sequence[int] = MODES
    ) -> None:
        super().__init__()
        self.widths, self.modes = tuple(widths), tuple(modes)
        self.net = LensNet(widths).eval()
        fold(self.net)
        self.register_buffer("filters", torch.zeros(num_patches, 3, SIDE, SIDE))
        self.register_buffer("offsets", torch.zeros(num_patches))
        self.register_buffer("basis", torch.zeros(2 * num_patches, max(modes), dtype=torch.int8))
        self.register_buffer("basis_scale", torch.ones(max(modes)))
        self.register_buffer("mean", torch.zeros(self.num_features(LARGE)))
        self.register_buffer("deviation", torch.ones(self.num_features(LARGE)))
        self.requires_grad_(False).eval()

    def num_features(self, size: int) -> int:
        net = 4 * self.widths[1] + 4 * self.widths[2] + self.widths[3]
        return sum(self.modes) + net * (2 if size > SMALL else 1)

    def forward(self, pixels: Tensor) -> Tensor:
        z = self.raw(pixels)
        d = z.shape[1]
        return (z - self.mean[:d]) / self.deviation[:d]

    def raw(self, pixels: Tensor) -> Tensor:
        """Features before they are standardised, [n, d]; those at 64 pixels come last."""
        x = pixels.float() / 255
        return 0.5 * (self._one_side(x) + self._one_side(x.flip(3)))

    def _one_side(self, x: Tensor) -> Tensor:
        small = resized(x, SMALL)
        parts = [self.patch_features(small), self.network_features(small)]
        if x.shape[-1] > SMALL:
            parts.append(self.network_features(resized(x, LARGE)))
        return torch.cat(parts, dim=1)

    def network_features(self, x: Tensor) -> Tensor:
        _, two, three, four = self.net((x - MEAN) / STD)
        return torch.cat([halves(two).flatten(1), halves(three).flatten(1), four.mean(dim=(2, 3))], dim=1)

    def patch_features(self, x: Tensor) -> Tensor:
        strengths = self.patch_strengths(x)
        modes = torch.einsum("ncp,qp->qnc", strengths, torch.tensor(HADAMARD, device=x.device) / 2)
        basis = self.basis.to(x.dtype) * self.basis_scale
        return torch.cat([mode @ basis[:, :k] for mode, k in zip(modes, self.modes, strict=True)], dim=1)

    def patch_strengths(self, x: Tensor) -> Tensor:
        """[n, 2K, 4]: square roots of the averages over the four parts."""
        maps = Patches(self.filters, self.offsets, THRESHOLD).maps(x)
        return torch.cat([halves(one) for one in maps], dim=1).flatten(2).sqrt()


def halves(x: Tensor) -> Tensor:
    """Averages over 2 x 2 parts: [n, c, s, s] -> [n, c, 2, 2]. An odd middle row or column belongs to both sides."""
    half = (x.shape[-1] + 1) // 2
    return F.avg_pool2d(x, half, stride=x.shape[-1] - half)


def resized(x: Tensor, size: int) -> Tensor:
    """Pictures with this side, without aliasing; the same tensor where they have it."""
    if x.shape[-1] == size:
        return x
    return F.interpolate(x, size=(size, size), mode="bilinear", antialias=True, align_corners=False)
