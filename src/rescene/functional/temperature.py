"""Task-aware temperature scaling (FedCBDR, Eq. 7).

z~ = concat(z_old / tau_old, z_new / tau_new)      outputs of earlier classes and of this task's, each with a temperature
L  = w_old mean_{old images} CE(z~, y) + w_new mean_{new images} CE(z~, y)

tau_old < 1 < tau_new sharpens old outputs and flattens new ones, so that old images, which are few, leave a mark. At test
time the plain outputs are compared.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
