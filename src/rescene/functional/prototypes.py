"""A learned prototype for each class, and the nearest one as the answer (PILoRA: Guo et al., ECCV 2024).

f    features of an image [d]                          m_c  prototype of class c [d]
d_c  = sqrt(||f - m_c||^2 / d)                         p_c  = exp(-d_c) / sum_j exp(-d_j)
L    = mean_i ( -log p_{y_i} + lambda d_{y_i} )        distance-based cross-entropy, and what pulls features to their prototype
u_j  mean feature of the class at site j               D_k  = sum_j ||m_k - u_j||, of the prototype that site k learned
w    = softmax(s / tau), s = (1 / D - min 1 / D) / (max 1 / D - min 1 / D)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST = 1e-12  # of a squared distance: the square root has no slope at 0


def prototype_distances(features: Tensor, prototypes: Tensor) -> Tensor:
    """d: features [n, d], prototypes [C, d] -> [n, C].

    >>> prototype_distances(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)).square()
    tensor([[12.5000]])
    """
    squares = features.square().sum(dim=1, keepdim=True) + prototypes.square().sum(dim=1)
    squared = squares - 2 * features @ prototypes.T
    return (squared / features.shape[1]).clamp(min=LEAST).sqrt()


def prototype_loss(distances: Tensor, labels: Tensor, weight: float) -> Tensor:
    """L for distances [n, C] and labels [n]; ``weight`` is lambda."""
    own = distances.gather(1, labels.unsqueeze(1))
    return F.cross_entropy(-distances, labels) + weight * own.mean()


def prototype_weights(prototypes: Tensor, means: Tensor, temperature: float) -> Tensor:
    """w: prototypes [K, d] of one class and its mean features [J, d] -> [K], which add up to 1.

    Equal where no site has an image of the class, and where all prototypes are as far away.

    >>> prototype_weights(torch.tensor([[1.0], [2.0]]), torch.zeros(1, 1), 1.0).tolist() == [
    ...     *torch.tensor([1.0, 0.0]).softmax(dim=0).tolist()
    ... ]
    True
    """
    if len(means) == 0:
        return prototypes.new_full((len(prototypes),), 1 / len(prototypes))
    # not torch.cdist, whose fast way loses digits of small distances
    far = (prototypes.unsqueeze(1) - means).norm(dim=2).sum(dim=1)
    near = 1 / far.clamp(min=LEAST)
    span = near.max() - near.min()
    score = (near - near.min()) / span if float(span) > 0 else torch.zeros_like(near)
    return (score / temperature).softmax(dim=0)


def nearest_prototype_head(prototypes: Tensor) -> tuple[Tensor, Tensor]:
    """(weight [C, d], bias [C]) of a linear head whose largest output is the nearest prototype.

    Its outputs are -||f - m_c||^2 / d but for ||f||^2 / d, which all classes share.
    """
    d = prototypes.shape[1]
    return 2 * prototypes / d, -prototypes.square().sum(dim=1) / d
