"""Procedural pictures: dead leaves. No photograph is involved, so what is learned from them costs no privacy.

A picture is a background of coloured noise, covered by 3 to 28 leaves, the later ones over the earlier ones::

    background  1/f^a noise around a colour of the picture's palette
    leaf        a shape (superellipse, wavy outline, ring or stroke) with a place, an angle, an aspect and a bend;
                a colour of the palette, a linear and a round shade, a grating or a noise texture, a rim, a shadow
    camera      a light that falls off to one side, contrast and a little blur

"Dead leaves" are a classical model of natural images (Matheron 1968; Lee, Mumford and Huang 2001): occlusion by objects of all
sizes gives the edges and the power spectrum that photographs have. Baradad et al. (2021) train networks on such pictures.

All numbers come from one generator, so a seed gives the same pictures on the same kind of device and torch release.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

VERSION = 1  # of the pictures: changes with anything that changes their law
MOST_LEAVES = 28
EXPONENTS = (1.0, 2.0, 2.0, 4.0, 10.0)  # of superellipses: diamond, ellipse (twice as often), two rounded rectangles
PALETTE = 5  # colours that the leaves of one picture share


def draw_leaves(num: int, generator: torch.Generator, size: int = 64) -> Tensor:
    """``num`` pictures as uint8 [num, 3, size, size] on the generator's device.

    >>> draw_leaves(2, torch.Generator().manual_seed(0), size=16).shape
    torch.Size([2, 3, 16, 16])
    """
    r = _Random(num, generator)
    palette = r.colours(PALETTE)  # [num, PALETTE, 3]
    noise = r.noise_fields(size)  # [num, 3, size, size], one standard deviation
    x = palette[:, 0, :, None, None] + r.uniform(0.02, 0.16)[:, None, None, None] * noise
    y, u = torch.meshgrid(*2 * (torch.linspace(-1, 1, size, device=generator.device),), indexing="ij")
    # of symmetric pictures
    axis = torch.where(r.chance(0.25), r.uniform(-0.4, 0.4), torch.full_like(r.uniform(), -4.0))
    counts = (3 + (MOST_LEAVES - 2) * r.uniform().pow(1.5)).long().sort(descending=True).values
    for i in range(MOST_LEAVES):
        left = int((counts > i).sum())  # pictures with the most leaves come first
        if left:
            leaf = _Leaf(_Random(left, generator), palette[:left], noise.roll(i + 1, dims=0)[:left])
            x[:left] = leaf.over(x[:left], _mirrored(u, axis[:left]), y.expand(left, -1, -1), size)
    x = _camera(x, u, y, r)[torch.randperm(num, generator=generator, device=generator.device)]
    return (x.clamp(0, 1) * 255).round().to(torch.uint8)


def _mirrored(u: Tensor, axis: Tensor) -> Tensor:
    """Horizontal places as leaves see them: behind a vertical axis, its mirror image. [n, size, size]"""
    axis = axis[:, None, None]
    return axis + (u - axis).abs()


def _camera(x: Tensor, u: Tensor, y: Tensor, r: _Random) -> Tensor:
    angle, strength = r.uniform(0, 2 * math.pi), 0.25 * r.normal().abs() * r.chance(0.5)
    light = 1 + strength[:, None, None] * (angle.cos()[:, None, None] * u + angle.sin()[:, None, None] * y)
    gain = torch.exp(0.15 * r.normal())[:, None, None, None]
    x = 0.47 + gain * (x * light.unsqueeze(1) - 0.47)
    blurred = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    blur = (r.uniform() * r.chance(0.35))[:, None, None, None]
    return x + blur * (blurred - x)


class _Leaf:
    """The i-th leaf of every picture: all parameters are tensors [n], drawn in the order in which they stand here."""

    def __init__(self, r: _Random, palette: Tensor, noise: Tensor) -> None:
        self.noise = noise
        self.place = (r.uniform(-1.1, 1.1), r.uniform(-1.1, 1.1))
        self.angle = r.uniform(0, 2 * math.pi)
        small = 0.08 * (1 - r.uniform()).clamp_min(1e-6).pow(-1 / 1.2)  # density r^-2.2: many small, few large
        self.radius = torch.where(r.chance(0.6), small.clamp_max(0.9), r.uniform(0.2, 0.8))
        self.aspect = torch.exp(0.6 * r.normal())
        self.bend = 0.5 * r.normal()
        self.exponent = torch.tensor(EXPONENTS, device=r.device)[r.integer(len(EXPONENTS))]
        self.softness = 0.02 * torch.exp(0.7 * r.normal())
        kind = r.uniform()  # 55 % superellipses, 25 % wavy outlines, 12 % rings, 8 % strokes
        self.is_wavy, self.is_ring, is_stroke = (
            (kind > 0.55) & (kind < 0.8),
            (kind >= 0.8) & (kind < 0.92),
            kind >= 0.92,
        )
        self.aspect = torch.where(is_stroke, self.aspect * r.uniform(4, 12), self.aspect)
        self.ring = r.uniform(0.4, 0.85)
        self.waves = [(k, r.uniform(0, 2 * math.pi), 0.5 * r.normal() / k) for k in (2, 3, 5, 8)]
        chosen = palette.gather(1, r.integer(PALETTE)[:, None, None].expand(-1, 1, 3)).squeeze(1)
        self.colour = torch.where(r.chance(0.7)[:, None], chosen + 0.05 * r.normal(3), r.colours(1).squeeze(1))
        self.shade = (0.12 * r.normal(), 0.12 * r.normal())
        self.roundness = 0.35 * r.uniform() * r.chance(0.4)
        texture = r.uniform()
        self.grating = r.uniform(0.05, 0.25) * (texture < 0.33)
        self.grain = r.uniform(0.03, 0.15) * (texture > 0.75)
        self.cycles, self.phase, self.turn = r.uniform(1, 12), r.uniform(0, 2 * math.pi), r.uniform(0, math.pi)
        self.is_sharp = r.chance(0.4)  # bars instead of waves
        self.tint = 0.5 * r.normal(3)
        self.rim = 0.3 * r.normal() * r.chance(0.2)
        self.shadow, self.fall = 0.5 * r.uniform() * r.chance(0.35), (r.uniform(-0.2, 0.2), r.uniform(0, 0.2))
        self.opacity = 1 - 0.5 * r.uniform() * r.chance(0.1)

    def over(self, x: Tensor, u: Tensor, y: Tensor, size: int) -> Tensor:
        """The pictures with this leaf on top. x [n, 3, size, size]; u, y [n, size, size]."""
        a, b, rho = self._inside(u, y, (0.0, 0.0))
        edge = (self.softness + 0.5 / size)[:, None, None] / self.radius[:, None, None]  # at least half a pixel
        mask = torch.sigmoid((1 - rho) / edge)
        shifted = self._inside(u, y, self.fall)[2]
        shadow = torch.sigmoid((1 - shifted) / (4 * edge)) * self.shadow[:, None, None]
        x = x * (1 - shadow * (1 - mask)).unsqueeze(1)
        alpha = (mask * self.opacity[:, None, None]).unsqueeze(1)
        return x + alpha * (self._surface(a, b, rho, mask) - x)

    def _inside(
        self, u: Tensor, y: Tensor, shift: tuple[Tensor | float, Tensor | float]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The leaf's own coordinates, and the gauge of its shape: below 1 inside, above 1 outside."""
        cos, sin = self.angle.cos()[:, None, None], self.angle.sin()[:, None, None]
        du = u - (self.place[0] + shift[0] * self.radius)[:, None, None]
        dy = y - (self.place[1] + shift[1] * self.radius)[:, None, None]
        stretch = (self.radius * self.aspect.sqrt())[:, None, None]
        squeeze = (self.radius / self.aspect.sqrt())[:, None, None]
        a, b = (cos * du + sin * dy) / stretch, (cos * dy - sin * du) / squeeze
        b = b + self.bend[:, None, None] * a.clamp(-2, 2).square()
        p = self.exponent[:, None, None]
        gauge = ((a.abs() + 1e-6).clamp_max(8) ** p + (b.abs() + 1e-6).clamp_max(8) ** p) ** (1 / p)
        length, theta = (a.square() + b.square() + 1e-8).sqrt(), torch.atan2(b, a)
        waves = torch.zeros_like(theta)
        for k, f, s in self.waves:
            waves = waves + s[:, None, None] * torch.cos(k * theta + f[:, None, None])
        outline = 1 + waves
        gauge = torch.where(self.is_wavy[:, None, None], length / outline.clamp_min(0.2), gauge)
        middle = 0.5 * (1 + self.ring)[:, None, None]
        ring = (gauge - middle).abs() / (1 - middle)
        return a, b, torch.where(self.is_ring[:, None, None], ring, gauge)

    def _surface(self, a: Tensor, b: Tensor, rho: Tensor, mask: Tensor) -> Tensor:
        """The leaf's colour at each pixel, [n, 3, size, size]."""
        light = self.shade[0][:, None, None] * a.clamp(-2, 2) + self.shade[1][:, None, None] * b.clamp(-2, 2)
        light = light - self.roundness[:, None, None] * rho.clamp_max(1.5).square()
        light = light + self.rim[:, None, None] * 4 * mask * (1 - mask)
        along = self.turn.cos()[:, None, None] * a + self.turn.sin()[:, None, None] * b
        wave = torch.sin(math.pi * self.cycles[:, None, None] * along + self.phase[:, None, None])
        wave = self.grating[:, None, None] * torch.where(self.is_sharp[:, None, None], (6 * wave).tanh(), wave)
        colour = self.colour[:, :, None, None] + light.unsqueeze(1)
        colour = colour + wave.unsqueeze(1) * (1 + self.tint[:, :, None, None])
        return colour + self.grain[:, None, None, None] * self.noise


class _Random:
    """Draws of one value a picture from one stream."""

    def __init__(self, num: int, generator: torch.Generator) -> None:
        self.num, self.generator, self.device = num, generator, generator.device

    def uniform(self, low: float = 0.0, high: float = 1.0) -> Tensor:
        return low + (high - low) * torch.rand(self.num, generator=self.generator, device=self.device)

    def normal(self, *more: int) -> Tensor:
        return torch.randn(self.num, *more, generator=self.generator, device=self.device)

    def chance(self, probability: float) -> Tensor:
        return self.uniform() < probability

    def integer(self, below: int) -> Tensor:
        return torch.randint(below, (self.num,), generator=self.generator, device=self.device)

    def colours(self, count: int) -> Tensor:
        """Colours [num, count, 3]: lightness .47 +- .28, chroma up to .22 away from grey."""
        lightness = (0.47 + 0.28 * self.normal(count, 1)).clamp(0.03, 0.97)
        chroma = self.normal(count, 3)
        chroma = F.normalize(chroma - chroma.mean(dim=2, keepdim=True), dim=2)
        strength = 0.22 * torch.rand(self.num, count, 1, generator=self.generator, device=self.device)
        return lightness + math.sqrt(3) * strength * chroma

    def noise_fields(self, size: int) -> Tensor:
        """Noise with a power spectrum of 1/f^a, a from .5 to 2.2 by picture: [num, 3, size, size], deviation 1, mean 0."""
        fy, fx = torch.fft.fftfreq(size, device=self.device), torch.fft.rfftfreq(size, device=self.device)
        f = (fy[:, None].square() + fx.square()).sqrt().clamp_min(1 / size)
        field: Tensor = torch.fft.rfft2(self.normal(3, size, size)) * f ** (
            -self.uniform(0.5, 2.2)[:, None, None, None]
        )
        field[:, :, 0, 0] = 0
        field = torch.fft.irfft2(field, s=(size, size))
        field = field / field.std(dim=(1, 2, 3), keepdim=True).clamp_min(1e-6)
        grey = field.mean(dim=1, keepdim=True)
        colour: Tensor = self.uniform(0, 0.8)[:, None, None, None] * (field - grey)
        return grey * math.sqrt(3) + colour  # most of it light
