"""Starts without a real image: drawn from noise alone, or from noise and two moments."""

import torch

from rescene.core.rng import seeded_generator
from rescene.functional.pictures import coloured_noise, dead_leaves, soften


def test_dead_leaves_are_pictures_that_only_the_seed_decides():
    a, b, c = (dead_leaves(3, 16, seeded_generator(seed)) for seed in (1, 1, 2))
    assert a.shape == (3, 3, 16, 16) and torch.equal(a, b) and not torch.equal(a, c)
    assert float(a.min()) >= 0 and float(a.max()) <= 1
    flat = (a[..., 1:] == a[..., :-1]).all(dim=1).float().mean()
    assert 0.5 < float(flat) < 1  # discs: most neighbours have the same colour, not all


def test_grey_leaves_have_no_colour():
    grey = dead_leaves(2, 16, seeded_generator(0), grey=True)
    assert torch.equal(grey[:, 0], grey[:, 2])
    coloured = dead_leaves(2, 16, seeded_generator(0))
    assert not torch.equal(coloured[:, 0], coloured[:, 2])


def test_coloured_noise_has_the_mean_and_the_covariance_it_was_given():
    real = torch.tensor([[3.0, 0.0], [1.0, 0.0], [2.0, 1.0], [2.0, -1.0]])  # mean (2, 0), covariance diag(1/2, 1/2)
    drawn = coloured_noise(real, 20_000, seeded_generator(0))
    assert torch.allclose(drawn.mean(dim=0), torch.tensor([2.0, 0.0]), atol=0.02)
    assert torch.allclose(torch.cov(drawn.T), torch.eye(2) / 2, atol=0.02)


def test_coloured_noise_depends_on_the_two_moments_only():
    """Both sets have mean 0 and covariance diag(1, 1), yet share no point."""
    square = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
    diamond = torch.tensor([[2.0, 0.0], [-2.0, 0.0], [0.0, 2.0], [0.0, -2.0]]) / 2**0.5
    a, b = (coloured_noise(real, 5, seeded_generator(4)) for real in (square, diamond))
    assert torch.allclose(a, b, atol=1e-5)


def test_neighbours_keep_two_clouds_apart():
    """Points near -5 and near +5: the moments of all fill the gap, those of the nearest ten do not."""
    noise = 0.1 * torch.randn(20, 2, generator=seeded_generator(0))
    real = torch.cat([noise[:10] - 5, noise[10:] + 5])
    whole, local = (coloured_noise(real, 50, seeded_generator(1), k) for k in (None, 10))
    assert bool((whole.abs() < 3).any()) and bool((local.abs() > 3).all())


def test_softening_changes_pictures_by_its_strength_and_keeps_their_shape():
    x = torch.randn(8, 3, 8, 8, generator=seeded_generator(0))
    weak, strong = (soften(x, s, seeded_generator(1)) for s in (0.1, 0.5))
    assert weak.shape == x.shape
    flat = torch.ones(8, 3, 8, 8)  # blur leaves it alone: what differs is contrast and noise
    distances = [float((soften(flat, s, seeded_generator(1)) - flat).square().mean()) for s in (0.1, 0.5)]
    assert 0 < distances[0] < distances[1]
    assert not torch.equal(weak, strong)
