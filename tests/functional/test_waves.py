"""Pictures as waves: directions, scales and contrast are where they should be, whatever the picture's size."""

import math

import pytest
import torch

from rescene.functional.pictures import DIRECTIONS, SCALES, wave_picture


def grating(direction, frequency=0.375, contrast=0.4, size=32):
    """A grey wave that runs in this direction (in steps of pi / 8)."""
    at, angle = torch.arange(size, dtype=torch.float32), math.pi * direction / DIRECTIONS
    phase = at.unsqueeze(0) * math.cos(angle) + at.unsqueeze(1) * math.sin(angle)
    return (0.5 + contrast * torch.cos(2 * math.pi * frequency * phase)).expand(1, 3, size, size)


def strengths(x):
    """[scale, direction] inside the picture, away from its mirrored edges."""
    return wave_picture(x)[0, 3:, 1:3, 1:3].mean(dim=(1, 2)).reshape(SCALES, DIRECTIONS)


@pytest.mark.parametrize("scale", range(SCALES))
@pytest.mark.parametrize("direction", range(DIRECTIONS))
def test_a_grating_is_strongest_where_its_scale_and_direction_are(scale, direction):
    found = strengths(grating(direction, 0.375 / 2**scale))
    assert int(found.argmax()) == scale * DIRECTIONS + direction


def test_strength_grows_with_the_root_of_the_contrast():
    weak, strong = (strengths(grating(2, contrast=c))[0, 2] for c in (0.1, 0.4))
    assert float(strong / weak) == pytest.approx(2.0, rel=1e-3)


def test_light_and_colour_are_those_of_each_part():
    x = torch.zeros(1, 3, 16, 16)
    x[0, 0, :4, 4:8] = 1.0  # one red part of 4 x 4
    seen = wave_picture(x)[0, :3]
    assert torch.allclose(seen[:, 0, 1], torch.tensor([0.299, -0.169, 0.5]), atol=1e-6)
    seen[:, 0, 1] = 0
    assert not seen.any()


@pytest.mark.parametrize("value", [0.0, 0.1, 0.7, 1.0])
def test_a_flat_picture_has_no_wave_at_all(value):
    """Not even the rounding of the convolution, which would differ between machines."""
    assert not wave_picture(torch.full((2, 3, 32, 32), value))[:, 3:].any()


@pytest.mark.parametrize("size", [8, 15, 28, 30, 32, 64])
def test_every_size_gives_the_same_parts(size):
    x = torch.rand(3, 3, size, size, generator=torch.Generator().manual_seed(0))
    seen = wave_picture(x)
    assert seen.shape == (3, 3 + SCALES * DIRECTIONS, 4, 4) and bool(seen.isfinite().all())
    assert torch.allclose(wave_picture(x[1:2]), seen[1:2], atol=1e-5), "a picture does not depend on its neighbours"
    assert torch.allclose(seen[:, 0].mean(dim=(1, 2)), _light(x), atol=0.02)


def _light(x):
    return torch.einsum("c,nchw->n", torch.tensor([0.299, 0.587, 0.114]), x) / x.shape[-1] ** 2


def test_no_picture_gives_no_picture():
    assert wave_picture(torch.zeros(0, 3, 32, 32)).shape == (0, 3 + SCALES * DIRECTIONS, 4, 4)
