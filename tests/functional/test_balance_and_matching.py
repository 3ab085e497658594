"""Sampling, logit adjustment, matching, clipping, perturbation and averaging, with values derived by hand."""

import math

import pytest
import torch
import torch.nn.functional as F

from rescene.functional import (
    clip_groups,
    group_means,
    logit_adjusted_cross_entropy,
    matching_loss,
    perturbed,
    sampling_probabilities,
    weighted_average,
)


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [(1.0, [0.1, 0.9, 0.0]), (0.5, [0.25, 0.75, 0.0]), (0.0, [0.5, 0.5, 0.0])],  # sqrt(1):sqrt(9) = 1:3
)
def test_sampling_probabilities(alpha, expected):
    assert torch.allclose(sampling_probabilities(torch.tensor([1, 9, 0]), alpha), torch.tensor(expected))


def test_sampling_from_an_empty_pool_is_all_zero():
    assert sampling_probabilities(torch.tensor([0, 0]), 0.0).tolist() == [0.0, 0.0]


def test_adjustment_by_hand():
    # logits 0, counts 1 and 3: adjusted by log(1/4), log(3/4), the softmax is exactly the prior
    value = logit_adjusted_cross_entropy(torch.zeros(1, 2), torch.tensor([0]), torch.tensor([1, 3]), 1.0)
    assert value.item() == pytest.approx(math.log(4))


def test_no_adjustment_is_plain_cross_entropy_even_with_empty_classes():
    logits, labels = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 0, 1, 2])
    plain = F.cross_entropy(logits, labels)
    assert torch.equal(logit_adjusted_cross_entropy(logits, labels, torch.tensor([2, 2, 2, 0]), 0.0), plain)


def test_an_empty_class_is_excluded_when_adjusting_and_gets_no_gradient():
    logits = torch.tensor([[0.3, -0.2, 5.0]], requires_grad=True)
    value = logit_adjusted_cross_entropy(logits, torch.tensor([0]), torch.tensor([4, 4, 0]), 1.0)
    value.backward()
    # with equal counts of the other two the adjustment is a constant: plain CE over the first two logits
    assert value.item() == pytest.approx(
        F.cross_entropy(torch.tensor([[0.3, -0.2]]), torch.tensor([0])).item(), abs=1e-6
    )
    assert logits.grad[0, 2] == 0 and torch.isfinite(logits.grad).all()


def test_a_mask_excludes_without_adjustment():
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    value = logit_adjusted_cross_entropy(
        logits, torch.tensor([0]), torch.tensor([1, 1, 1]), 0.0, torch.tensor([False, False, True])
    )
    assert value.item() == pytest.approx(F.cross_entropy(logits[:, :2], torch.tensor([0])).item(), abs=1e-6)


def test_balanced_counts_make_the_adjustment_vanish():
    logits, labels = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0, 1])
    adjusted = logit_adjusted_cross_entropy(logits, labels, torch.tensor([7, 7, 7]), 1.0)
    assert adjusted.item() == pytest.approx(F.cross_entropy(logits, labels).item(), abs=1e-6)


def test_a_label_of_an_empty_class_gives_no_nan():
    value = logit_adjusted_cross_entropy(torch.zeros(1, 2), torch.tensor([1]), torch.tensor([5, 0]), 1.0)
    assert torch.isfinite(value)


def test_group_means_with_an_empty_group():
    means = group_means(torch.tensor([[1.0, 2.0], [3.0, 4.0], [10.0, 10.0]]), torch.tensor([0, 0, 2]), 3)
    assert means.tolist() == [[2.0, 3.0], [0.0, 0.0], [10.0, 10.0]]


def test_matching_loss_by_hand():
    a, b = torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[0.0, 0.0], [0.0, 3.0]])
    assert matching_loss(a, b).tolist() == [5.0, 9.0]
    assert matching_loss(a, b, "mean").tolist() == [2.5, 4.5]


def test_clipping_scales_each_group_by_its_own_norm():
    gradient = torch.tensor([[3.0, 0.0], [0.0, 4.0], [0.3, 0.4], [0.0, 0.0]])  # norms 5 (rows 0, 1), .5, 0
    clipped = clip_groups(gradient, torch.tensor([0, 0, 1, 2]), 3, 1.0)
    assert torch.allclose(clipped, torch.tensor([[0.6, 0.0], [0.0, 0.8], [0.3, 0.4], [0.0, 0.0]]))
    assert torch.equal(clip_groups(gradient, torch.tensor([0, 0, 1, 2]), 3, math.inf), gradient)


def test_polyaks_bound_takes_a_quadratic_loss_half_way_and_a_small_gradient_as_it_is():
    x, groups = torch.tensor([[2.0], [2.0], [0.0]]), torch.arange(3)
    steepness = torch.tensor([[100.0], [0.1], [1.0]])
    loss, gradient = (steepness * x.square()).squeeze(1), 2 * steepness * x  # a step of rate 1 would overshoot 99-fold
    moved = x - clip_groups(gradient, groups, 3, None, reach=loss)
    assert torch.allclose(moved, torch.tensor([[1.0], [1.6], [0.0]]))
    shorter = x - clip_groups(gradient, groups, 3, 0.25, reach=loss)  # the tighter of the two bounds counts
    assert torch.allclose(shorter, torch.tensor([[1.75], [1.75], [0.0]]))


def test_perturbation_lands_on_the_sphere_of_a_large_network():
    params = [torch.randn(100, 30), torch.randn(200)]
    moved = perturbed(params, 5.0, torch.Generator().manual_seed(0))
    distance = math.sqrt(sum(float((m - p).square().sum()) for m, p in zip(moved, params, strict=True)))
    assert distance == pytest.approx(5.0, abs=1e-3)


def test_perturbation_of_a_tiny_network_may_stay_inside_the_ball():
    params = [torch.zeros(3)]
    noise = torch.randn(3, generator=torch.Generator().manual_seed(4))
    (moved,) = perturbed(params, 100.0, torch.Generator().manual_seed(4))
    assert torch.equal(moved, noise) and torch.equal(params[0], torch.zeros(3))


def test_perturbation_by_radius_zero_is_the_identity():
    params = [torch.randn(50)]
    assert torch.equal(perturbed(params, 0.0, torch.Generator().manual_seed(0))[0], params[0])


def test_average_by_hand_and_integer_entries_stay_integers():
    states = [
        {"w": torch.tensor([1.0, 0.0]), "n": torch.tensor(3)},
        {"w": torch.tensor([4.0, 8.0]), "n": torch.tensor(7)},
    ]
    average = weighted_average(states, [1, 3])
    assert average["w"].tolist() == [3.25, 6.0]
    assert average["n"].item() == 7 and average["n"].dtype == torch.long


def test_average_of_one_state_is_that_state_bit_for_bit():
    state = {"w": torch.randn(10)}
    assert torch.equal(weighted_average([state], [0.3])["w"], state["w"])


def test_average_needs_weight():
    with pytest.raises(ValueError):
        weighted_average([{"w": torch.zeros(1)}], [0])
