"""The distillation loss: values and gradients worked out by hand."""

import math

import pytest
import torch

from rescene.functional.distillation import distillation_loss

LN3 = math.log(3.0)


def softmax(row):
    """Written out, so that the expected values do not come from the code under test."""
    weights = [math.exp(v) for v in row]
    return [w / sum(weights) for w in weights]


def test_value_by_hand_and_the_direction_of_the_comparison():
    # T = 2: the teacher says (1/4, 3/4), the student (9/10, 1/10); its third output is a new class and does not count
    teacher = torch.tensor([[0.0, 2 * LN3]])
    student = torch.tensor([[4 * LN3, 0.0, 50.0]])
    expected = -(0.25 * math.log(0.9) + 0.75 * math.log(0.1))  # the swapped form would be -(.9 ln .25 + .1 ln .75)
    assert distillation_loss(student, teacher, 2.0).item() == pytest.approx(expected, rel=1e-6)


def test_the_mean_is_over_images():
    teacher, student = torch.tensor([[1.0, -2.0]]), torch.tensor([[0.5, 0.3, 0.0]])
    once = distillation_loss(student, teacher, 2.0)
    assert torch.allclose(distillation_loss(student.repeat(7, 1), teacher.repeat(7, 1), 2.0), once)


@pytest.mark.parametrize(("t2", "reduction"), [(False, "sum"), (True, "sum"), (False, "mean"), (True, "mean")])
def test_gradient_is_the_difference_of_softened_outputs_over_n_and_t(t2, reduction):
    temperature, n = 2.0, 2
    teacher = torch.tensor([[1.0, -1.0, 0.5], [0.0, 3.0, 1.0]], requires_grad=True)
    student = torch.tensor([[0.2, 0.4, -1.0, 7.0], [2.0, 2.0, 0.0, -7.0]], requires_grad=True)
    distillation_loss(student, teacher, temperature, t2, reduction).backward()
    for row in range(n):
        of_student = softmax([v / temperature for v in student[row, :3].tolist()])
        of_teacher = softmax([v / temperature for v in teacher[row].tolist()])
        scale = (
            (temperature**2 if t2 else 1.0) / (n * temperature) / (3 if reduction == "mean" else 1)
        )  # three old classes
        expected = [scale * (s - t) for s, t in zip(of_student, of_teacher, strict=True)]
        assert student.grad[row, :3].tolist() == pytest.approx(expected, abs=1e-6)
    assert student.grad[:, 3].abs().max() == 0  # new classes are left alone
    assert teacher.grad is None


def test_no_gradient_where_student_and_teacher_agree_up_to_a_constant():
    teacher = torch.tensor([[1.0, -1.0, 0.5]], dtype=torch.float64)
    student = torch.cat([teacher + 4.0, torch.tensor([[9.0]])], dim=1).requires_grad_(True)
    loss = distillation_loss(student, teacher, 2.0)
    loss.backward()
    p = softmax([v / 2.0 for v in teacher[0].tolist()])
    assert loss.item() == pytest.approx(-sum(v * math.log(v) for v in p))  # the teacher's entropy, not 0
    assert student.grad.abs().max() < 1e-15


def test_a_student_with_fewer_outputs_than_its_teacher_is_refused():
    with pytest.raises(RuntimeError):
        distillation_loss(torch.zeros(2, 2), torch.zeros(2, 3), 2.0)
