"""Exemplars and their classifier (iCaRL: Rebuffi et al., CVPR 2017).

z    logits [n, C], g = sigmoid(z)                    u    logits of the old network [n, C_old], q = sigmoid(u)
y    labels                                           K    images that a site can remember
t    sets of exemplars (a class of a task is one)     m    exemplars of each set, K / t
phi  features of unit length                          P_y  exemplars of class y
t_ic = q_ic  on the old outputs of image i if it hears the old network, else [c = y_i]
L    = mean_i sum_c w_ic BCE(g_ic, t_ic)              w = lambda where t is q, else 1 (Algorithm 3 has lambda = 1)
mu_y = mean of phi over P_y, scaled to unit length    y* = argmin_y ||phi(x) - mu_y|| = argmax_y <mu_y, phi(x)>
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NOT_HELD = -1e4  # score of a class without an exemplar: below that of every class that has one


def distilled_binary_loss(
    logits: Tensor,
    labels: Tensor,
    old_logits: Tensor | None,
    hears: Tensor,
    weight: float = 1.0,
    reduction: str = "sum",
) -> Tensor:
    """L: logits [n, C], labels [n], old_logits [n, C_old] or None, hears BoolTensor [n] -> one number.

    ``hears`` says which images take the old network's answers in the place of their label. ``reduction`` averages over images and
    sums (``sum``) or averages (``mean``) over outputs.

    >>> one = torch.zeros(1, 2), torch.tensor([1]), torch.zeros(1, 1), torch.tensor([True])
    >>> round(distilled_binary_loss(*one).item(), 4)  # 2 ln 2: all is uncertain, targets one half and one
    1.3863
    """
    outputs = torch.arange(logits.shape[1], device=logits.device)
    targets = (labels.unsqueeze(1) == outputs).to(logits)
    weights = torch.ones_like(logits)
    if old_logits is not None:
        num_new = logits.shape[1] - old_logits.shape[1]
        heard = hears.unsqueeze(1) & (outputs < old_logits.shape[1])
        targets = torch.where(heard, F.pad(torch.sigmoid(old_logits.detach()), (0, num_new)), targets)
        weights = torch.where(heard, weight, weights)
    terms = weights * F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return terms.mean() if reduction == "mean" else terms.sum(dim=1).mean()


def exemplars_per_set(memory: int, num_sets: int) -> int:
    """m, the whole part of K / t; 0 without sets.

    >>> exemplars_per_set(2000, 30)
    66
    """
    return memory // num_sets if num_sets else 0


def first_of_each(sets: Tensor, m: int) -> Tensor:
    """Which members are among the first m of their set: numbers of the sets [n] -> BoolTensor [n] (Algorithm 5).

    >>> first_of_each(torch.tensor([7, 7, 3, 7, 3]), 2).tolist()
    [True, True, True, False, True]
    """
    same = sets.unsqueeze(1) == sets.unique()
    places: Tensor = same.cumsum(dim=0)[same]
    return places <= m


def class_sums(features: Tensor, labels: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of unit-length features and numbers of images: [n, d], [n], classes [c] -> ([c, d], int64 [c])."""
    own = labels.unsqueeze(0) == classes.unsqueeze(1)  # [c, n]
    return own.to(features) @ F.normalize(features, dim=1), own.sum(dim=1)


def nearest_mean_head(sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The classifier by the nearest mean as a linear head: sums [C, d], counts [C] -> weights [C, d], biases [C].

    phi(x) and mu_y have unit length, so the nearest mean is the one of the largest product, and the length of the features
    changes no order: the head may read them as they are.

    >>> nearest_mean_head(torch.tensor([[3.0, 4.0], [0.0, 0.0]]), torch.tensor([9, 0]))
    (tensor([[0.6000, 0.8000],
            [0.0000, 0.0000]]), tensor([     0., -10000.]))
    """
    weights = F.normalize(sums, dim=1)
    return weights, torch.where(counts > 0, torch.zeros_like(weights[:, 0]), NOT_HELD)
