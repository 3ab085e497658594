"""Class imbalance of the server's pool (Sec. 3.4).

n_c   images of class c in the pool        q_c = n_c^alpha / sum n^alpha     sampling probability of a class
pi_c = n_c / sum n   prior                 tau  strength of the logit adjustment CE(f(x) + tau log pi, y)
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
