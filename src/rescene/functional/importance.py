"""Importance of remembered images (Re-Fed, Sec. 3).

v, w      personalised informative model, global model      lambda   share of the local data in v, in (0, 1]
q(lambda) = (1 - lambda) / (2 lambda)                       v <- v - eta (grad CE(v) + q(lambda) (v - w))
I(x) = sum_p (1/p) ||grad_v l(f_v(x), y)||_2                p = 1, 2, ...: early epochs count most
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, vmap

Parameters = dict[str, Tensor]
GRADIENT_BYTES = 2**29  # memory for one chunk of per-image gradients


def proximal_coefficient(locality: float) -> float:
    """q(lambda).

    >>> proximal_coefficient(0.5), proximal_coefficient(1.0)
    (0.5, 0.0)
    """
    return (1 - locality) / (2 * locality)


def proximal_penalty(parameters: Iterable[Tensor], anchors: Iterable[Tensor], coefficient: float) -> Tensor:
    """(q / 2) ||v - w||^2, whose gradient is the q (v - w) of the update rule; without the half it would be twice that."""
    v, w = (torch.cat([value.reshape(-1) for value in values]) for values in (parameters, anchors))
    return 0.5 * coefficient * (v - w).square().sum()


def gradient_norms(
    predict: Callable[[Parameters, Tensor], Tensor], parameters: Parameters, x: Tensor, y: Tensor
) -> Tensor:
    """||grad_v CE(f_v(x_i), y_i)||_2 of every image on its own, over all parameters together.

    predict(parameters, [1, ...]) -> logits [1, C]; x [n, ...], y [n] -> [n]. ``predict`` must treat images separately:
    with the batch statistics of BatchNorm the gradient of one image does not exist. All images of a chunk are
    differentiated in one pass; a chunk holds as many gradients as fit into GRADIENT_BYTES.
    """

    def loss(parameters: Parameters, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(predict(parameters, x.unsqueeze(0)), y.unsqueeze(0))

    def norm(x: Tensor, y: Tensor) -> Tensor:
        gradients: Parameters = grad(loss)(parameters, x, y)
        return torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt()

    if len(x) == 0:
        return x.new_zeros(0)
    size = sum(p.numel() * p.element_size() for p in parameters.values())
    norms: Tensor = vmap(norm, chunk_size=max(1, min(len(x), GRADIENT_BYTES // size)))(x, y)
    return norms


def last_layer_gradient_norms(features: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
    """The part of that norm which belongs to the linear head, in closed form: ||softmax(z) - y|| sqrt(||phi||^2 + 1).

    features [n, d], logits [n, C], labels [n] -> [n]. The gradient of the head's weight is the outer product of
    softmax(z) - y and phi, that of its bias the first factor alone. It costs a forward pass and bounds the full norm from
    below, so that it may rank images differently.
    """
    error = logits.softmax(dim=1) - F.one_hot(labels, logits.shape[1]).to(logits)
    norms: Tensor = torch.linalg.vector_norm(error, dim=1)
    return norms * (features.square().sum(dim=1) + 1).sqrt()


def most_important(scores: Tensor, room: int) -> Tensor:
    """Positions of the ``room`` highest scores in ascending order; ties go to the lowest position. Classes play no part.

    >>> most_important(torch.tensor([1.0, 3.0, 2.0, 3.0]), 2).tolist()
    [1, 3]
    """
    return scores.argsort(descending=True, stable=True)[:room].sort().values
