"""The lens `leaves`: a frozen network and patches, both made from procedural pictures, and what they say about a picture.

    maps         the outputs of the network's four stages, and the strengths of 2K patches (:mod:`rescene.lens.patches`)
    modes        a map's averages over g x g parts of the picture, as cosine waves over the parts: the first is the sum
    directions   of each mode the leading directions among its channels, as procedural pictures vary
    scales       the picture at 32 pixels; the network also sees larger pictures at 64
    all of it    the mean over the picture and its mirror image, in deviations from the mean of procedural pictures

Features are in order of rank: the first half of them has the first half of every mode's directions. Nothing in here saw a
photograph. The numbers are the same on every machine up to rounding in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rescene.lens.network import WIDTHS, LensNet, fold
from rescene.lens.patches import SIDE, patch_strengths

MEAN, STD = 0.47, 0.25  # of procedural pictures; the network's input is normalised with them
SMALL, LARGE = 32, 64  # sides in pixels at which a picture is looked at
NUM_PATCHES = 1280
PATCHES = "patches"
KEPT = {  # directions kept of each mode: across the picture changes fastest, down it slowest
    PATCHES: (608, 304, 320, 128),
    "stage1": (48, 0, 32, 32),
    "stage2": (96, 32, 64, 96, 0, 0, 64, 0, 32),
    "stage3": (192, 64, 96, 160, 32, 0, 128, 0, 0),
    "stage4": (192, 64, 32, 0),
}


class LeavesLens(nn.Module):
    """pixels uint8 [n, 3, s, s] -> standardised features [n, d]: d = 2,816 for pictures of 32 pixels, more for larger ones."""

    filters: Tensor
    offsets: Tensor
    mean: Tensor
    deviation: Tensor

    def __init__(
        self,
        widths: Sequence[int] = WIDTHS,
        num_patches: int = NUM_PATCHES,
        kept: Mapping[str, Sequence[int]] = KEPT,
    ) -> None:
        super().__init__()
        self.widths, self.kept = tuple(widths), {name: tuple(counts) for name, counts in kept.items()}
        self.net = LensNet(widths).eval()
        fold(self.net)
        self.register_buffer("filters", torch.zeros(num_patches, 3, SIDE, SIDE))
        self.register_buffer("offsets", torch.zeros(num_patches))
        channels = {PATCHES: 2 * num_patches, **dict(zip(stage_names(widths), widths, strict=True))}
        self.directions = nn.ModuleDict(
            {name: Directions(channels[name], counts, name == PATCHES) for name, counts in self.kept.items()}
        )
        self.register_buffer("mean", torch.zeros(self.num_features(LARGE)))
        self.register_buffer("deviation", torch.ones(self.num_features(LARGE)))
        self.requires_grad_(False).eval()

    def num_features(self, size: int) -> int:
        """Features of a picture with this side in pixels."""
        return sum(self._counts(size))

    def forward(self, pixels: Tensor) -> Tensor:
        z, size = self.raw(pixels), pixels.shape[-1]
        d = z.shape[1]
        z = (z - self.mean[:d]) / self.deviation[:d]
        return z[:, by_rank(tuple(self._counts(size)))]

    def raw(self, pixels: Tensor) -> Tensor:
        """Features before they are standardised and put in order, [n, d]; those at 64 pixels come last."""
        x = pixels.float() / 255
        return 0.5 * (self._one_side(x) + self._one_side(x.flip(3)))

    def _one_side(self, x: Tensor) -> Tensor:
        return torch.cat([self.directions[name](modes) for name, modes in self.modes(x)], dim=1)

    def modes(self, x: Tensor) -> list[tuple[str, Tensor]]:
        """(part of the lens, [n, g g, channels]) for pixels in [0, 1]; the network's at 64 pixels come last."""
        small = resized(x, SMALL)
        found = [(PATCHES, waves_over(self._patch_parts(small)))] + self._network_modes(small)
        return found + (self._network_modes(resized(x, LARGE)) if x.shape[-1] > SMALL else [])

    def _patch_parts(self, x: Tensor) -> Tensor:
        return patch_strengths(x, self.filters, self.offsets, side_of(self.kept[PATCHES]))

    def _network_modes(self, x: Tensor) -> list[tuple[str, Tensor]]:
        maps = zip(stage_names(self.widths), self.net((x - MEAN) / STD), strict=True)
        return [(name, waves_over(parts_of(m, side_of(self.kept[name])))) for name, m in maps if name in self.kept]

    def _counts(self, size: int) -> list[int]:
        """Directions kept of every mode, in the order of :meth:`raw`."""
        network = [count for name, counts in self.kept.items() if name != PATCHES for count in counts]
        return [*self.kept[PATCHES], *network, *(network if size > SMALL else [])]


class Directions(nn.Module):
    """Of each mode the strength along its directions: [n, modes, channels] -> [n, sum of counts].

    Every mode has directions of its own, or all of them take their part of one list. Stored as int8 with a scale for each.
    """

    basis: Tensor
    scale: Tensor

    def __init__(self, channels: int, counts: Sequence[int], shared: bool) -> None:
        super().__init__()
        starts = [0] * len(counts) if shared else [sum(counts[:q]) for q in range(len(counts))]
        self.shared, self.columns = shared, [slice(s, s + k) for s, k in zip(starts, counts, strict=True)]
        total = max(column.stop for column in self.columns)
        self.register_buffer("basis", torch.zeros(channels, total, dtype=torch.int8))
        self.register_buffer("scale", torch.ones(total))

    def forward(self, modes: Tensor) -> Tensor:
        basis = self.basis.to(modes.dtype) * self.scale
        return torch.cat([modes[:, q] @ basis[:, column] for q, column in enumerate(self.columns)], dim=1)

    def fit(self, modes: Tensor) -> None:
        """Take the leading directions of these modes."""
        if self.shared:
            basis = leading_directions(cells_of(modes).flatten(0, 1), len(self.scale))
        else:
            each = zip(modes.unbind(1), self.columns, strict=True)
            basis = torch.cat([leading_directions(m, column.stop - column.start) for m, column in each], dim=1)
        self.scale.copy_(basis.abs().amax(dim=0) / 127)
        self.basis.copy_((basis / self.scale).round())


def leading_directions(rows: Tensor, num: int) -> Tensor:
    """Leading eigenvectors [c, num] of the covariance of rows [n, c]."""
    total, square = rows.new_zeros(rows.shape[1]).double(), rows.new_zeros(rows.shape[1], rows.shape[1]).double()
    for part in rows.split(20_000):
        part = part.double()
        total, square = total + part.sum(dim=0), square + part.T @ part
    mean = total / len(rows)
    vectors: Tensor = torch.linalg.eigh(square / len(rows) - mean.outer(mean)).eigenvectors
    return vectors.flip(1)[:, :num].float()


def stage_names(widths: Sequence[int]) -> list[str]:
    """``stage1``, ``stage2``, ...: one name for each width."""
    return [f"stage{i + 1}" for i in range(len(widths))]


def side_of(counts: Sequence[int]) -> int:
    """Parts along a side of the picture, where each of g x g modes has its count."""
    return math.isqrt(len(counts))


def parts_of(x: Tensor, side: int) -> Tensor:
    """Averages over side x side parts, which share a row or column where they must: [n, c, s, s] -> [n, parts, c]."""
    return F.adaptive_avg_pool2d(x, side).flatten(2).transpose(1, 2)


def waves_over(parts: Tensor) -> Tensor:
    """Averages over parts of the picture [n, parts, c] as cosine waves over them, [n, modes, c]."""
    return torch.einsum("npc,qp->nqc", parts, cosines(math.isqrt(parts.shape[1])).to(parts))


def cells_of(modes: Tensor) -> Tensor:
    """Inverse of :func:`waves_over`."""
    return torch.einsum("nqc,qp->npc", modes, cosines(math.isqrt(modes.shape[1])).to(modes))


def cosines(side: int) -> Tensor:
    """Cosine waves over side x side parts, orthonormal: [modes, parts]."""
    k = torch.arange(side, dtype=torch.float64)
    one = torch.cos(math.pi * (k + 0.5) * k[:, None] / side)
    one = one / one.norm(dim=1, keepdim=True)
    return torch.kron(one, one)


@lru_cache
def by_rank(counts: tuple[int, ...]) -> list[int]:
    """Positions in groups of so many, ordered by their rank within the group: the middle of every group comes in the middle.

    >>> by_rank((4, 2))
    [0, 4, 1, 2, 5, 3]
    """
    ranks = [Fraction(2 * i + 1, count) for count in counts for i in range(count)]
    return sorted(range(len(ranks)), key=ranks.__getitem__)


def resized(x: Tensor, size: int) -> Tensor:
    """Pictures with this side, without aliasing; the same tensor where they have it."""
    if x.shape[-1] == size:
        return x
    return F.interpolate(x, size=(size, size), mode="bilinear", antialias=True, align_corners=False)
