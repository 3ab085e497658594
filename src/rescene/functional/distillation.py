"""Old models as teachers: distillation, and the compensation of gradients that goes with it.

Knowledge distillation (Hinton et al., 2015), as learning without forgetting uses it (Li and Hoiem, TPAMI 2018).

z   student logits, of which the first C are compared      u   teacher logits over its C classes
T   temperature                                            p_T(v) = softmax(v / T)
KD = -(1/n) sum_n sum_{c < C} p_T(u)_c log p_T(z)_c        d KD / d z_nc = (p_T(z)_nc - p_T(u)_nc) / (n T)

Gradient compensation and relation distillation (GLFC: Dong et al., CVPR 2022).

z   logits [n, C], p = sigmoid(z)                    u   logits of the old model [n, C_old], C_old <= C
y   labels, also as one-hot rows                     old which samples belong to what was learned before
g_n = |p_{n,y_n} - 1|                                how far sample n still is from its label
w_n = g_n / mean of g over n's group in the batch    groups: old and new, so each group has mean weight 1
L_GC = mean_{n,c} w_n BCE(z_nc, y_nc)                hard samples of either group weigh more, neither group drowns
L_RD = mean_{n,c} BCE(z_nc, t_nc)                    t = sigmoid(u) on the old outputs, one-hot on the rest
H    = -mean_n sum_c q_nc log q_nc, q = softmax(z)   a jump of it tells a client that its data changed
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rescene.functional.matching import group_means


def distillation_loss(
    student_logits: Tensor, teacher_logits: Tensor, temperature: float, t2: bool = False, reduction: str = "sum"
) -> Tensor:
    """Cross-entropy of the student's softened outputs against the teacher's: one number, the mean over the batch.

    student_logits [n, >= C], teacher_logits [n, C]. A head only grows, so the teacher's classes are the student's first
    outputs; further ones take no part and get no gradient, nor does the teacher. The least value, reached when both agree
    up to a constant per image, is the entropy of the teacher's outputs and not 0. ``t2`` multiplies by T^2, which keeps
    the size of the gradient about the same at every temperature; without it the gradient shrinks as 1/T.
    ``reduction`` adds up the teacher's classes (``sum``) or averages over them (``mean``).

    >>> import torch
    >>> round(distillation_loss(torch.zeros(1, 4), torch.zeros(1, 2), 2.0).item(), 4)  # ln 2: both are uniform over two
    0.6931
    """
    num_old = teacher_logits.shape[1]
    targets = (teacher_logits.detach() / temperature).softmax(dim=1)
    loss = F.cross_entropy(student_logits[:, :num_old] / temperature, targets)
    if reduction == "mean":
        loss = loss / num_old
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


def compensation_weights(logits: Tensor, labels: Tensor, old: Tensor) -> Tensor:
    """w_n, without gradient: logits [n, C], labels [n], old BoolTensor [n] -> [n].

    The weights of each group have mean 1. A group whose samples are all fitted perfectly (g = 0) keeps weight 1.

    >>> z = torch.tensor([[0.0, 0.0], [0.0, 0.0], [9.0, 0.0]])
    >>> compensation_weights(z, torch.tensor([0, 1, 1]), torch.tensor([True, False, False])).tolist()
    [1.0, 1.0, 1.0]
    """
    true = logits.detach().gather(1, labels.unsqueeze(1))
    gap = torch.sigmoid(-true)  # 1 - p without cancellation
    group = old.long()
    mean = group_means(gap, group, 2)[group]
    return torch.where(mean > 0, gap / mean, torch.ones_like(gap)).squeeze(1)


def compensation_loss(logits: Tensor, labels: Tensor, weights: Tensor, reduction: str = "mean") -> Tensor:
    """L_GC: logits [n, C], labels [n], weights [n] -> one number. For ``reduction`` see :func:`relation_loss`."""
    targets = F.one_hot(labels, logits.shape[1]).to(logits)
    return _reduced(weights.unsqueeze(1) * _bce(logits, targets), reduction)


def relation_loss(logits: Tensor, labels: Tensor, old_logits: Tensor, reduction: str = "mean") -> Tensor:
    """L_RD: the old model's opinion on its own outputs, the label on those it does not have -> one number.

    logits [n, C], labels [n], old_logits [n, C_old]. ``reduction`` averages over samples and either averages (``mean``)
    or sums (``sum``) over outputs; the mean makes every single output count less as the head grows.
    """
    targets = F.one_hot(labels, logits.shape[1]).to(logits)
    targets[:, : old_logits.shape[1]] = torch.sigmoid(old_logits.detach())
    return _reduced(_bce(logits, targets), reduction)


def mean_entropy(logits: Tensor) -> float:
    """H in nats, at most ln C: logits [n, C] -> number; 0 without samples.

    >>> round(mean_entropy(torch.zeros(5, 2)), 4)
    0.6931
    """
    if len(logits) == 0:
        return 0.0
    log_q = logits.double().log_softmax(dim=1)
    return float(-(log_q.exp() * log_q).sum(dim=1).mean())


def _bce(logits: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none")


def _reduced(terms: Tensor, reduction: str) -> Tensor:
    return terms.mean() if reduction == "mean" else terms.sum(dim=1).mean()
