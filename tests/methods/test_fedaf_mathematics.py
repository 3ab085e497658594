"""The mathematics of FedAF by hand: sliced distance, mixing, averages over owners, knowledge matching."""

import math

import pytest
import torch
import torch.nn.functional as F

from rescene.core.rng import seeded_generator
from rescene.functional.matching import knowledge_matching, mixed, owners_average, sliced_distance


@pytest.mark.parametrize("size, constant", [(1, 1.0), (2, 2 / math.pi), (3, 1 / 2), (4, 4 / (3 * math.pi))])
def test_sliced_distance_is_the_mean_over_directions(size, constant):
    # E|cos| over the sphere in R^C: 1, 2/pi, 1/2, 4/(3 pi) for C = 1..4
    generator = torch.Generator().manual_seed(size)
    u, v = torch.randn(2, 5, size, generator=generator, dtype=torch.float64)
    expected = constant * (u - v).square().sum(dim=1).sqrt()
    assert torch.allclose(sliced_distance(u, v), expected, atol=1e-12)
    w = F.normalize(torch.randn(200_000, size, generator=generator, dtype=torch.float64), dim=1)
    assert torch.allclose(((u - v) @ w.T).abs().mean(dim=1), expected, rtol=0.01)


def test_sliced_distance_has_a_unit_gradient_and_none_where_the_vectors_agree():
    u = torch.tensor([[3.0, 4.0], [1.0, 1.0]], requires_grad=True)
    sliced_distance(u, torch.tensor([[0.0, 0.0], [1.0, 1.0]])).sum().backward()
    assert torch.allclose(u.grad, torch.tensor([[0.6, 0.8], [0.0, 0.0]]) * 2 / math.pi)


def test_mixing_adds_noise_at_the_scale_of_each_tensor():
    theta = [torch.tensor([1.0, 3.0]), torch.tensor([5.0, 5.0, 5.0]), torch.tensor([2.0])]  # std 1, 0, 0
    moved = mixed(theta, 0.9, seeded_generator(7))
    eps = torch.randn(2, generator=seeded_generator(7))
    assert torch.allclose(moved[0], torch.tensor([0.9, 2.7]) + 0.1 * eps)
    assert torch.allclose(moved[1], torch.full((3,), 4.5)) and torch.allclose(moved[2], torch.tensor([1.8]))
    assert all(torch.equal(a, b) for a, b in zip(mixed(theta, 1.0, seeded_generator(7)), theta, strict=True))
    assert torch.equal(theta[0], torch.tensor([1.0, 3.0]))


def test_only_owners_of_a_class_speak_for_it():
    # client A: class 0 (1, 2) from 3 images; client B: class 0 (5, 6) from 1 and class 2 (7, 7) from 4
    rows = torch.tensor([[1.0, 2.0], [5.0, 6.0], [7.0, 7.0]])
    owned, means = owners_average(torch.tensor([0, 0, 2]), rows, torch.tensor([3, 1, 4]))
    assert owned.tolist() == [0, 2]
    assert means.tolist() == [[2.0, 3.0], [7.0, 7.0]]  # (3 * 1 + 5) / 4, (3 * 2 + 6) / 4


def test_knowledge_matching_is_half_of_both_divergences():
    r, t = torch.tensor([[0.5, 0.5], [0.2, 0.8]]), torch.tensor([[0.9, 0.1], [0.2, 0.8]])
    forward = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    backward = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    assert torch.allclose(knowledge_matching(r, t), torch.tensor([(forward + backward) / 2, 0.0]))
    assert torch.equal(knowledge_matching(r, t), knowledge_matching(t, r))
    assert torch.isfinite(knowledge_matching(r, torch.zeros(2, 2))).all()
