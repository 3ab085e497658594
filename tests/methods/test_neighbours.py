"""AFL and FedCGS: heads from the sums of moments that are what the papers' own procedures end at."""

import pytest
import torch

from rescene.functional.discriminant import regularised_solve
from rescene.methods.afl import AFL, ridge_head
from rescene.methods.fedcgs import FedCGS, gaussian_head
from rescene.methods.moments import Moments
from rescene.testing.conformance import drive, federation_of, make_world

D, C = 7, 3


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(C, (90,), generator=generator)
    means = 2 * torch.randn(C, D, generator=generator, dtype=torch.float64)
    return means[y] + torch.randn(90, D, generator=generator, dtype=torch.float64), y


def sums_of(z, y):
    onehot = torch.nn.functional.one_hot(y, C).double()
    return onehot.sum(dim=0), onehot.T @ z, z.T @ z


def variance_of(z):
    return float(z.var(dim=0, correction=0).mean())


def test_afl_is_ridge_regression_on_all_images(images):
    z, y = images
    weight, bias = ridge_head(*sums_of(z, y), ridge=0.3)
    penalty = 0.3 * variance_of(z) * len(z)
    onehot = torch.nn.functional.one_hot(y, C).double()
    rows = torch.cat([z, penalty**0.5 * torch.eye(D, dtype=torch.float64)])
    wanted = torch.linalg.lstsq(rows, torch.cat([onehot, torch.zeros(D, C, dtype=torch.float64)])).solution
    assert torch.allclose(weight, wanted.T, atol=1e-9) and bias.tolist() == [0, 0, 0]


def test_acils_recursion_ends_at_the_same_head(images):
    """Zhuang et al.: the inverse and the weights are updated with each batch, by Woodbury's identity."""
    z, y = images
    onehot = torch.nn.functional.one_hot(y, C).double()
    penalty = 0.3 * variance_of(z) * len(z)
    inverse, weight = torch.eye(D, dtype=torch.float64) / penalty, torch.zeros(D, C, dtype=torch.float64)
    for x, t in zip(z.split(20), onehot.split(20), strict=True):
        gain = inverse @ x.T @ torch.linalg.inv(torch.eye(len(x), dtype=torch.float64) + x @ inverse @ x.T)
        inverse = inverse - gain @ x @ inverse
        weight = weight + inverse @ x.T @ (t - x @ weight)
    assert torch.allclose(ridge_head(*sums_of(z, y), ridge=0.3)[0], weight.T, atol=1e-9)


def test_the_papers_law_of_aggregation_ends_at_the_same_head(images):
    """He et al.: sites send solutions with a ridge each, the server joins them pairwise and takes the ridges out again."""
    z, y = images
    onehot, gamma = torch.nn.functional.one_hot(y, C).double(), 1.0
    eye = torch.eye(D, dtype=torch.float64)
    grams = [x.T @ x + gamma * eye for x in z.split(30)]
    heads = [torch.linalg.solve(g, x.T @ t) for g, x, t in zip(grams, z.split(30), onehot.split(30), strict=True)]
    whole, weight = grams[0], heads[0]
    for gram, head in zip(grams[1:], heads[1:], strict=True):
        weight = torch.linalg.solve(whole + gram, whole @ weight + gram @ head)
        whole = whole + gram
    weight = torch.linalg.solve(whole - len(grams) * gamma * eye, whole @ weight)
    assert torch.allclose(ridge_head(*sums_of(z, y), ridge=0.0)[0], weight.T, atol=1e-9)


def test_fedcgs_is_a_gaussian_per_class_with_the_covariance_of_all(images):
    z, y = images
    weight, bias = gaussian_head(*sums_of(z, y), ridge=0.0)
    means = torch.stack([z[y == c].mean(dim=0) for c in range(C)])
    gaussians = [torch.distributions.MultivariateNormal(m, z.T.cov()) for m in means]
    prior = torch.bincount(y).double().log() - torch.tensor(90.0, dtype=torch.float64).log()
    wanted = torch.stack([g.log_prob(z) for g in gaussians], dim=1) + prior
    found = z @ weight.T + bias
    assert torch.allclose(found.log_softmax(dim=1), wanted.log_softmax(dim=1), atol=1e-9)


@pytest.mark.parametrize("head", [ridge_head, gaussian_head])
def test_few_images_absent_classes_and_noise_are_no_trouble(head):
    z, y = torch.randn(4, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.zeros(4).long()
    counts, sums, second = sums_of(z, y)
    for ridge, floor in ((0.0, 0.0), (0.1, 0.0), (0.0, 0.5)):
        weight, bias = head(counts, sums, second, ridge, floor)
        assert weight.isfinite().all() and (z @ weight.T + bias).argmax(dim=1).tolist() == [0] * 4
    # as noise may leave them
    below = head(counts - torch.tensor([0, 2.5, 0.5]), sums, second - 3 * torch.eye(D), 0.0, 0.5)
    assert all(part.isfinite().all() for part in below)


def test_a_singular_matrix_has_its_pseudo_inverse():
    a = torch.diag(torch.tensor([2.0, 0.0], dtype=torch.float64))
    assert regularised_solve(a, torch.ones(2, 1, dtype=torch.float64), 0.0).tolist() == [[0.5], [0.0]]


@pytest.mark.parametrize("method", [AFL, FedCGS])
def test_they_send_what_moments_sends(method):
    world = make_world()
    own, moments = (drive(made, world, federation_of(made, world)) for made in (method(), Moments()))
    for a, b in zip(own.parts, moments.parts, strict=True):
        assert a.client == b.client and torch.equal(a.second, b.second) and torch.equal(a.sums, b.sums)
    assert not torch.equal(own.model["head.weight"], moments.model["head.weight"])


def test_fedcgs_survives_float32_where_features_are_far_from_zero():
    """Fewer images than features: the part that all classes share would swallow the digits that tell them apart."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(20) % 2
    z = 4 + torch.randn(20, 60, generator=generator, dtype=torch.float64) + 3 * y[:, None] * (torch.arange(60) < 9)
    onehot = torch.nn.functional.one_hot(y, 2).double()
    weight, bias = gaussian_head(onehot.sum(dim=0), onehot.T @ z, z.T @ z, ridge=1e-9)
    assert ((z.float() @ weight.float().T + bias.float()).argmax(dim=1) == y).all()
