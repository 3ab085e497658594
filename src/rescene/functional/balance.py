"""Few images against many: of the classes in the server's pool, and of old and new classes at a client.

Class imbalance of the server's pool (Sec. 3.4).

n_c   images of class c in the pool        q_c = n_c^alpha / sum n^alpha     sampling probability of a class
pi_c = n_c / sum n   prior                 tau  strength of the logit adjustment CE(f(x) + tau log pi, y)

Task-aware temperature scaling (FedCBDR, Eq. 7).

z~ = concat(z_old / tau_old, z_new / tau_new)      outputs of earlier classes and of this task's, each with a temperature
L  = w_old mean_{old images} CE(z~, y) + w_new mean_{new images} CE(z~, y)

tau_old < 1 < tau_new sharpens old outputs and flattens new ones, so that old images, which are few, leave a mark. At test
time the plain outputs are compared.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EXCLUDED = -1e9  # finite, so that no NaN can arise; its softmax is exactly 0


def sampling_probabilities(counts: Tensor, alpha: float) -> Tensor:
    """q_c of every class; 0 for an empty class at every alpha (0^0 is not 1 here).

    >>> sampling_probabilities(torch.tensor([1, 4, 0]), 0.5).tolist()
    [0.3333333432674408, 0.6666666865348816, 0.0]
    """
    counts = counts.float()
    weights = torch.where(counts > 0, counts.clamp(min=1e-30).pow(alpha), torch.zeros_like(counts))
    return weights / weights.sum().clamp(min=1e-30)


def log_prior(counts: Tensor) -> Tensor:
    """log pi_c; for an empty class a large negative number, which the caller leaves out of the softmax."""
    counts = counts.float()
    return (counts / counts.sum().clamp(min=1e-30)).clamp(min=1e-30).log()


def logit_adjusted_cross_entropy(
    logits: Tensor, labels: Tensor, counts: Tensor, tau: float, masked: Tensor | None = None
) -> Tensor:
    """CE(f(x) + tau log pi, y), mean over the batch.

    logits [n, C], labels [n], counts [C], masked: BoolTensor [C] of classes left out of the softmax. With tau > 0 a class
    of count 0 is left out too, because log 0 says nothing about it: its logit gets no gradient. tau = 0 without a mask is
    plain cross-entropy over all logits, empty classes included.
    """
    if tau > 0:
        logits = logits + tau * log_prior(counts).to(logits)
        empty = (counts == 0).to(logits.device)
        masked = empty if masked is None else masked | empty
    if masked is not None:
        logits = logits.masked_fill(masked, EXCLUDED)
    return F.cross_entropy(logits, labels)


def task_aware_logits(logits: Tensor, num_old: int, tau_old: float, tau_new: float) -> Tensor:
    """z~: the first ``num_old`` columns over tau_old, the others over tau_new. [n, C] -> [n, C].

    >>> task_aware_logits(torch.tensor([[1.0, 1.0, 1.0]]), 2, 0.5, 2.0).tolist()
    [[2.0, 2.0, 0.5]]
    """
    temperatures = logits.new_full((logits.shape[1],), tau_new)
    temperatures[:num_old] = tau_old
    return logits / temperatures


def grouped_cross_entropy(
    logits: Tensor, labels: Tensor, old: Tensor, w_old: float, w_new: float, weights: Tensor | None = None
) -> Tensor:
    """Weighted sum of the two groups' mean cross-entropies; a group without images contributes nothing.

    logits [n, C], labels [n], old BoolTensor [n], weights [n] multiply single images (None: all 1). n is at least 1.
    """
    losses = F.cross_entropy(logits, labels, reduction="none")
    if weights is not None:
        losses = losses * weights.to(losses)
    share = old.to(losses)
    num_old = share.sum()
    factors = torch.where(old, w_old / num_old.clamp(min=1), w_new / (len(old) - num_old).clamp(min=1))
    return (factors * losses).sum()


def image_temperature_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    old: Tensor,
    tau: tuple[float, float],
    w: tuple[float, float],
    weights: Tensor | None = None,
) -> Tensor:
    """Mean over the batch of w CE(f / tau, y), where each image has the temperature and the weight of its group (old, new).

    logits [n, C], labels [n], old BoolTensor [n], weights [n] multiply single images (None: all 1). n is at least 1.
    """
    share = old.to(logits)
    temperatures, factors = (pair[1] + (pair[0] - pair[1]) * share for pair in (tau, w))
    losses = F.cross_entropy(logits / temperatures.unsqueeze(1), labels, reduction="none")
    if weights is not None:
        losses = losses * weights.to(losses)
    return (factors * losses).mean()
