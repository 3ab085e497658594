"""Knowledge distillation (Hinton et al., 2015), as learning without forgetting uses it (Li and Hoiem, TPAMI 2018).

z   student logits, of which the first C are compared      u   teacher logits over its C classes
T   temperature                                            p_T(v) = softmax(v / T)
KD = -(1/n) sum_n sum_{c < C} p_T(u)_c log p_T(z)_c        d KD / d z_nc = (p_T(z)_nc - p_T(u)_nc) / (n T)
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def distillation_loss(student_logits: Tensor, teacher_logits: Tensor, temperature: float, t2: bool = False) -> Tensor:
    """Cross-entropy of the student's softened outputs against the teacher's: one number, the mean over the batch.

    student_logits [n, >= C], teacher_logits [n, C]. A head only grows, so the teacher's classes are the student's first
    outputs; further ones take no part and get no gradient, nor does the teacher. The least value, reached when both agree
    up to a constant per image, is the entropy of the teacher's outputs and not 0. ``t2`` multiplies by T^2, which keeps
    the size of the gradient about the same at every temperature; without it the gradient shrinks as 1/T.

    >>> import torch
    >>> round(distillation_loss(torch.zeros(1, 4), torch.zeros(1, 2), 2.0).item(), 4)  # ln 2: both are uniform over two
    0.6931
    """
    num_old = teacher_logits.shape[1]
    targets = (teacher_logits.detach() / temperature).softmax(dim=1)
    loss = F.cross_entropy(student_logits[:, :num_old] / temperature, targets)
    return loss * temperature**2 if t2 else loss


def feature_distillation_loss(features: Tensor, old_features: Tensor, old_weight: Tensor) -> Tensor:
    """MFCL's L_KD: (1/n) sum_n ||W (f_n - u_n)||^2 / C with f, u [n, d] of student and teacher, W [C, d] the teacher's head.

    Features may change where the old head does not look. Biases would cancel.

    >>> import torch
    >>> feature_distillation_loss(torch.tensor([[3.0, 7.0]]), torch.zeros(1, 2), torch.tensor([[1.0, 0.0]])).item()
    9.0
    """
    moved = F.linear(features - old_features.detach(), old_weight.detach())
    return moved.square().mean()
