"""The discriminant from sums: against its definition on the images, and its ridge against leave-nothing-out brute force."""

import math

import pytest
import torch
import torch.nn.functional as F

from rescene.functional.discriminant import (
    MOST_FREEDOM,
    RIDGES,
    cross_validated_ridge,
    cross_validation_errors,
    discriminant_head,
    scatter_within,
)

C, D = 5, 12


def images(n=60, seed=0):
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(C, D, generator=generator).double()
    y = torch.randint(C, (n,), generator=generator)
    return means[y] + 1.5 * torch.randn(n, D, generator=generator).double(), y


def sums_of(z, y):
    onehot = F.one_hot(y, C).double()
    return onehot.sum(dim=0), onehot.T @ z, z.T @ z


def test_the_covariance_within_classes_is_that_of_the_images():
    z, y = images()
    counts, sums, second = sums_of(z, y)
    centred = z - (sums / counts[:, None])[y]
    assert torch.allclose(scatter_within(counts, sums, second), centred.T @ centred / len(z))


@pytest.mark.parametrize("n", [8, 13, 20, 60, 400])  # from fewer images than features on
def test_the_ridge_is_the_one_that_generalised_cross_validation_picks_on_the_images(n):
    z, y = images(n)
    t = F.one_hot(y, C).double()
    x = torch.cat([z - z.mean(dim=0), torch.ones(n, 1).double()], dim=1)  # the intercept has no penalty
    errors = dict.fromkeys(RIDGES, math.inf)
    for ridge in RIDGES:
        penalty = ridge * (x.T @ x).diagonal()[:D].mean() * torch.ones(D + 1).double()
        penalty[D] = 0
        hat = x @ torch.linalg.solve(x.T @ x + penalty.diag(), x.T)
        if hat.trace() / n <= MOST_FREEDOM:
            errors[ridge] = float((t - hat @ t).square().sum() / n / (1 - hat.trace() / n) ** 2)
    assert cross_validation_errors(*sums_of(z, y)) == pytest.approx(errors, rel=1e-4)
    assert cross_validated_ridge(*sums_of(z, y)) == min(errors, key=errors.get)


def test_copies_among_few_images_do_not_make_the_least_ridge_win():
    z, y = images(60)
    z = torch.cat([z, torch.randn(60, 100, generator=torch.Generator().manual_seed(1)).double()], dim=1)
    z[58:], y[58:] = z[:2], y[:2]  # two copies among sixty images with 112 features
    assert cross_validated_ridge(*sums_of(z, y)) > 0.01


def test_a_floor_above_every_eigenvalue_leaves_the_nearest_mean():
    z, y = images()
    counts, sums, second = sums_of(z, y)
    weight, bias = discriminant_head(counts, sums, second, ridge=0.0, floor=1e6)
    nearest = torch.cdist(z, sums / counts[:, None]).argmin(dim=1)
    assert torch.equal((z @ weight.T + bias).argmax(dim=1), nearest)


def test_a_floor_below_every_eigenvalue_changes_nothing():
    counts, sums, second = sums_of(*images())
    plain = discriminant_head(counts, sums, second, ridge=0.01)
    floored = discriminant_head(counts, sums, second, ridge=0.01, floor=1e-9)
    assert all(torch.allclose(a, b) for a, b in zip(plain, floored, strict=True))


def test_noise_that_makes_the_covariance_indefinite_is_raised_to_the_floor():
    counts, sums, second = sums_of(*images())
    noisy = second - 500 * torch.eye(D).double()
    weight, bias = discriminant_head(counts, sums, noisy, ridge=0.0, floor=0.5)
    assert weight.isfinite().all() and bias.isfinite().all() and float(bias.max()) <= 0


def test_known_noise_on_the_sums_is_taken_off_the_biases():
    """On average over the noise, a bias is what it is without; otherwise small classes would lose."""
    generator = torch.Generator().manual_seed(0)
    d, counts, variance = 8, torch.tensor([5.0, 40.0], dtype=torch.float64), torch.tensor([3.0, 3.0])
    sums = counts[:, None] * torch.randn(2, d, generator=generator, dtype=torch.float64)
    second = (sums / counts.sqrt()[:, None]).T @ (sums / counts.sqrt()[:, None]) + 45 * torch.eye(d)  # W = I
    floor = 1e3  # above W, so that the noise on the sums leaves the system to be solved as it is
    wanted = discriminant_head(counts, sums, second, 0.0, floor)[1]
    draws = [sums + 3**0.5 * torch.randn(2, d, generator=generator, dtype=torch.float64) for _ in range(3000)]
    plain, mended = (
        torch.stack([discriminant_head(counts, one, second, 0.0, floor, noise)[1] for one in draws]).mean(dim=0)
        for noise in (None, variance)
    )
    gain = variance / counts.square() * d / floor / 2
    assert torch.allclose(plain, wanted - gain, atol=0.1 * float(gain[0]))
    assert torch.allclose(mended, wanted, atol=0.1 * float(gain[0]))
