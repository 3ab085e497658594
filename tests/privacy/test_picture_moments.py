"""Moments of pictures and pictures from moments: lengths, exact recovery without noise, and what noise may not invent."""

import math

import pytest
import torch

from rescene.privacy.release import drawn_pictures, picture_law, picture_moments, without_noise

G = 4  # pictures of the size of both grids: nothing is smoothed, so moments come back exactly


def pictures(n=400, channels=1):
    g = torch.Generator().manual_seed(0)
    few = torch.randn(3, channels * G * G, generator=g)
    return (0.5 + torch.randn(n, 3, generator=g) @ few).reshape(n, channels, G, G).expand(-1, 3, -1, -1)


@pytest.mark.parametrize("colour", [False, True])
def test_lengths_are_those_of_the_pictures(colour):
    x = pictures(5, 3 if colour else 1)
    psi = picture_moments(x, G, G, 2.0, colour)
    rms = x.flatten(1).square().mean(dim=1)
    assert torch.allclose(psi[:, : 3 * G * G].square().sum(dim=1), rms, rtol=1e-4)
    assert torch.allclose(psi[:, 3 * G * G :].square().sum(dim=1), (2.0 * rms).square(), rtol=1e-4)


@pytest.mark.parametrize("colour", [False, True])
def test_without_noise_the_drawn_pictures_have_the_real_moments(colour):
    channels = 3 if colour else 1
    x = pictures(channels=channels)
    mean = picture_moments(x, G, G, 0.5, colour).mean(dim=0).double()
    white = torch.randn(20000, channels * G * G, generator=torch.Generator().manual_seed(1))
    drawn = drawn_pictures(picture_law(mean, 1e-9, x.shape[1:], G, G, 0.5, colour), white)
    assert drawn.shape == (20000, 3, G, G)
    real, made = x[:, :channels].flatten(1), drawn[:, :channels].flatten(1).float()
    assert torch.allclose(made.mean(dim=0), real.mean(dim=0), atol=0.06)
    scale = float(real.T.cov(correction=0).abs().max())
    assert torch.allclose(made.T.cov(), real.T.cov(correction=0), atol=0.05 * scale)


def test_noise_alone_makes_no_variation():
    """Second moments of one constant picture plus noise: hardly a direction stands out, so all draws are alike."""
    mean = picture_moments(torch.ones(1, 3, 16, 16), 8, 8, 1.0)[0]
    g, deviation = torch.Generator().manual_seed(0), 0.02
    noised = mean + deviation * torch.randn(len(mean), generator=g)
    laws = [picture_law(noised, told, (3, 16, 16), 8, 8, 1.0) for told in (deviation, 0.0)]
    kept, free = (drawn_pictures(law, torch.randn(50, 64, generator=g)).std(dim=0).square().mean() for law in laws)
    assert kept < 0.2 * free


def test_directions_that_drown_in_noise_share_what_they_have_together():
    """Where nothing is smoothed away the pictures vary as much as the real ones, if not in the same directions."""
    g, deviation = torch.Generator().manual_seed(0), 0.003  # half of the directions, a fifth of the variance drown
    x = torch.randn(2000, 3, G, G, generator=g) * torch.linspace(0.3, 2, 3 * G * G).reshape(3, G, G)
    mean = picture_moments(x, G, G, 1.0, True).mean(dim=0)
    noised = mean + deviation * torch.randn(len(mean), generator=g)
    white = torch.randn(5000, 3 * G * G, generator=g)
    drawn = drawn_pictures(picture_law(noised, deviation, x.shape[1:], G, G, 1.0, True), white)
    assert float(drawn.var(dim=0).mean()) == pytest.approx(float(x.var(dim=0).mean()), rel=0.05)


def test_the_filter_shrinks_each_wave_by_its_power():
    side, deviation = 8, 0.7
    cell = torch.arange(side) + 0.5
    for u, v in ((0, 0), (1, 0), (2, 3)):
        wave = torch.cos(math.pi * u * cell / side).outer(torch.cos(math.pi * v * cell / side))
        power = side**2 / (1 + u**2 + v**2) ** 2
        assert torch.allclose(without_noise(wave, deviation), wave * power / (power + deviation**2), atol=1e-5)
    picture = torch.randn(2, 3, side, side)
    assert torch.allclose(without_noise(picture, 0.0), picture, atol=1e-5)
