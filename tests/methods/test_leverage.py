"""Leverage scores, weighted draws without replacement and task-aware temperatures: known answers."""

import math

import pytest
import torch
import torch.nn.functional as F

from rescene.functional.balance import grouped_cross_entropy, image_temperature_cross_entropy, task_aware_logits
from rescene.functional.exemplars import (
    class_cut,
    draw_keys,
    form_leverage,
    gram_inverse,
    importance_weights,
    independent_draws,
    left_vectors,
    random_orthogonal,
    row_leverage,
)


def matrix(n, d, seed=0):
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def both_forms(x):
    return row_leverage(left_vectors(x)), form_leverage(x, gram_inverse(x.T @ x))


def test_leverage_by_hand():
    # the first two rows share one direction and split its unit of leverage; the third has its own
    for scores in both_forms(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)):
        torch.testing.assert_close(scores, torch.tensor([0.5, 0.5, 1.0], dtype=torch.float64))


@pytest.mark.parametrize("shape", [(30, 5), (4, 9), (1, 3)])
def test_leverage_is_the_diagonal_of_the_hat_matrix(shape):
    x = matrix(*shape)
    hat = x @ torch.linalg.pinv(x.T @ x) @ x.T
    for scores in both_forms(x):
        torch.testing.assert_close(scores, hat.diagonal(), rtol=0, atol=1e-10)
        assert scores.sum().item() == pytest.approx(min(shape), abs=1e-10)  # the rank
        assert (scores >= 0).all() and (scores <= 1 + 1e-12).all()


def test_leverage_of_a_rank_deficient_matrix_sums_to_its_rank():
    x = matrix(20, 3) @ matrix(3, 8, seed=1)  # rank 3 in 8 dimensions
    float32 = x.float().double()  # rounding of the features must not count as five more directions
    for case in (x, float32):
        for scores in both_forms(case):
            assert scores.sum().item() == pytest.approx(3, abs=1e-6)


def test_leverage_without_rows_or_without_signal_is_zero():
    for x in (torch.zeros(0, 4, dtype=torch.float64), torch.zeros(6, 4, dtype=torch.float64)):
        for scores in both_forms(x):
            assert scores.shape == (len(x),) and scores.sum() == 0


def test_random_rotations_are_orthogonal_and_have_no_preferred_sign():
    drawn = [random_orthogonal(3, torch.Generator().manual_seed(seed)) for seed in range(400)]
    for q in drawn[:5]:
        torch.testing.assert_close(q.T @ q, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-12)
    positive = sum(float(q[0, 0] > 0) for q in drawn) / len(drawn)
    assert 0.4 < positive < 0.6  # 4 standard deviations of a fair coin; plain QR gives 0 or 1
    assert random_orthogonal(0, torch.Generator()).shape == (0, 0)


def test_the_largest_keys_are_draws_without_replacement_with_p_as_leverage():
    scores, n = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64), 20000
    keys = draw_keys(scores.repeat(n), torch.Generator().manual_seed(0)).reshape(n, 3)
    order = keys.argsort(dim=1, descending=True)
    first = torch.bincount(order[:, 0], minlength=3) / n
    torch.testing.assert_close(first.double(), scores, rtol=0, atol=0.015)  # sd at most 0.0035
    # P(first i, then j) = p_i p_j / (1 - p_i)
    pairs = torch.bincount(order[:, 0] * 3 + order[:, 1], minlength=9).reshape(3, 3) / n
    expected = scores[:, None] * scores[None] / (1 - scores[:, None]) * (1 - torch.eye(3))
    torch.testing.assert_close(pairs.double(), expected, rtol=0, atol=0.015)


def test_an_image_without_leverage_is_drawn_only_when_nothing_else_is_left():
    scores = torch.tensor([0.0, 1e-4, 1.0, 1e-5])
    for seed in range(50):
        order = draw_keys(scores, torch.Generator().manual_seed(seed)).argsort(descending=True)
        assert order[-1] == 0
    flat = [draw_keys(torch.zeros(2), torch.Generator().manual_seed(s)).argmax().item() for s in range(50)]
    assert 10 < sum(flat) < 40  # no leverage at all: any image will do


def test_the_cut_leaves_exactly_the_budget():
    keys = torch.tensor([3.0, 1.0, 2.0, 5.0, 4.0], dtype=torch.float64)
    labels = torch.tensor([0, 0, 0, 2, 2])
    cut = class_cut(keys, torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5]), labels, 2, 4)
    assert cut.threshold.tolist() == [2.0, math.inf, 4.0, math.inf]
    assert (keys >= cut.threshold[labels]).tolist() == [True, False, True, True, True]
    assert cut.num_candidates.tolist() == [3, 0, 2, 0]
    torch.testing.assert_close(cut.mass, torch.tensor([0.6, 0, 0.9, 0], dtype=torch.float64))


def test_importance_weights_by_hand():
    scores, labels = torch.tensor([0.1, 0.4, 0.7, 0.5]), torch.tensor([0, 0, 0, 1])
    cut = class_cut(torch.arange(4.0).double(), scores, labels, 2, 2)
    # class 0: mass 1.2 over three candidates, p = 1/12, 4/12, 7/12 -> sqrt(1 / (3 p)); class 1 is taken whole
    expected = torch.tensor([2.0, 1.0, math.sqrt(4 / 7), 1.0], dtype=torch.float64)
    torch.testing.assert_close(importance_weights(scores, labels, 2, cut), expected, rtol=1e-6, atol=0)


def test_task_aware_loss_by_hand():
    logits = torch.tensor([[0.8, 0.0, 1.2], [0.0, 0.8, 0.0]])
    tempered = task_aware_logits(logits, 2, 0.8, 1.2)
    torch.testing.assert_close(tempered, torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, 0.0]]))
    # new image, label 2: log(e + 1 + e) - 1; old image, label 1: log(1 + e + 1) - 1
    new, old = math.log(2 * math.e + 1) - 1, math.log(2 + math.e) - 1
    loss = grouped_cross_entropy(tempered, torch.tensor([2, 1]), torch.tensor([False, True]), 1.2, 0.8)
    assert loss.item() == pytest.approx(1.2 * old + 0.8 * new, rel=1e-6)
    weighted = grouped_cross_entropy(
        tempered, torch.tensor([2, 1]), torch.tensor([False, True]), 1.2, 0.8, torch.tensor([1.0, 3.0])
    )
    assert weighted.item() == pytest.approx(3 * 1.2 * old + 0.8 * new, rel=1e-6)


def test_temperatures_of_images_by_hand():
    """Each image's outputs over its group's temperature; one mean over both images."""
    logits, labels, old = torch.tensor([[0.8, 0.0], [0.0, 1.2]]), torch.tensor([0, 1]), torch.tensor([True, False])
    right = math.log(math.e + 1) - 1  # of both: outputs 1 and 0
    loss = image_temperature_cross_entropy(logits, labels, old, (0.8, 1.2), (1.2, 0.8))
    assert loss.item() == pytest.approx((1.2 * right + 0.8 * right) / 2, rel=1e-6)
    weighted = image_temperature_cross_entropy(logits, labels, old, (0.8, 1.2), (1.2, 0.8), torch.tensor([3.0, 1.0]))
    assert weighted.item() == pytest.approx((3 * 1.2 * right + 0.8 * right) / 2, rel=1e-6)
    plain = image_temperature_cross_entropy(logits, labels, old, (1.0, 1.0), (1.0, 1.0))
    torch.testing.assert_close(plain, F.cross_entropy(logits, labels))


def test_with_all_ones_it_is_the_sum_of_the_groups_cross_entropies():
    logits, labels = torch.randn(7, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 2, 3, 3, 2])
    old = labels < 2
    value = grouped_cross_entropy(task_aware_logits(logits, 2, 1.0, 1.0), labels, old, 1.0, 1.0)
    torch.testing.assert_close(
        value, F.cross_entropy(logits[old], labels[old]) + F.cross_entropy(logits[~old], labels[~old])
    )


@pytest.mark.parametrize("group", [True, False])
def test_an_empty_group_contributes_nothing(group):
    logits, labels = torch.randn(3, 2, requires_grad=True), torch.tensor([0, 1, 1])
    value = grouped_cross_entropy(logits, labels, torch.full((3,), group), 1.2, 0.8)
    torch.testing.assert_close(value, (1.2 if group else 0.8) * F.cross_entropy(logits, labels))
    value.backward()
    assert torch.isfinite(logits.grad).all()


def test_independent_draws_find_an_image_as_often_as_the_law_says():
    scores, generator = torch.tensor([1.0, 2.0, 5.0]), torch.Generator().manual_seed(0)
    found = torch.stack([independent_draws(scores, 3, generator) for _ in range(4000)]).double().mean(dim=0)
    expected = 1 - (1 - scores.double() / 8) ** 3
    torch.testing.assert_close(found, expected, rtol=0, atol=4 * 0.5 / 4000**0.5)
