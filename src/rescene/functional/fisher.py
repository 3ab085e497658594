"""Elastic weight consolidation (Kirkpatrick et al., PNAS 2017).

theta   trainable parameters, by name      a   anchor, the parameters that the penalty pulls towards
l_n     loss of image n                    F   diagonal of the empirical Fisher information, F_i = (1/n) sum_n (d l_n / d theta_i)^2
penalty = 1/2 sum_i F_i (theta_i - a_i)^2, whose gradient is F (theta - a)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

Parameters = Mapping[str, Tensor]
MeanLoss = Callable[[Parameters, Tensor, Tensor], Tensor]  # (theta, x [n, ...], y [n]) -> mean loss of the batch


def fisher_diagonal(
    loss: MeanLoss, parameters: Parameters, batches: Iterable[tuple[Tensor, Tensor]], *, per_sample: bool = True
) -> dict[str, Tensor]:
    """F of the shapes of ``parameters``, over all batches (x, y); zero where there is no batch.

    Every image's gradient is squared on its own, so that two images with opposite gradients do not cancel; how the images
    are cut into batches bounds the memory (one gradient per image of a batch) and does not change the result. With
    ``per_sample=False`` the gradient of each batch's mean loss is squared and the mean is over batches: about a batch size
    smaller, and no Fisher information, but what public code computes.
    """
    of_batch = grad(loss)
    of_images = vmap(lambda theta, x, y: of_batch(theta, x[None], y[None]), in_dims=(None, 0, 0))
    theta = {name: value.detach() for name, value in parameters.items()}
    sums = {name: torch.zeros_like(value) for name, value in theta.items()}
    count = 0
    for x, y in batches:
        with sdpa_kernel(SDPBackend.MATH):  # vmap would call the fused attention kernels image by image
            gradients = of_images(theta, x, y) if per_sample else of_batch(theta, x, y)
        for name, gradient in gradients.items():
            sums[name] += gradient.square().sum(dim=0) if per_sample else gradient.square()
        count += len(y) if per_sample else 1
    return {name: value / max(count, 1) for name, value in sums.items()}


def quadratic_penalty(parameters: Parameters, fisher: Parameters, anchor: Parameters) -> Tensor:
    """1/2 sum_i F_i (theta_i - a_i)^2, differentiable in ``parameters``; 0 if F is empty.

    Only the entries that F has count: where a parameter (the head), or its anchor, has grown along the first dimension
    since F was taken, the new rows are free. The factor 1/2 makes the gradient F (theta - a).

    >>> one = torch.ones(1)
    >>> quadratic_penalty({"w": torch.tensor([3.0, 9.0])}, {"w": 2 * one}, {"w": one}).item()
    4.0
    """
    if not fisher:
        return torch.zeros(())
    theta, a, f = (_row(values, fisher) for values in (parameters, anchor, fisher))
    return 0.5 * torch.dot(f * (theta - a), theta - a)


def _row(values: Parameters, like: Parameters) -> Tensor:
    """The entries that ``like`` has, all in one row: few operations instead of several for every parameter."""
    return torch.cat([values[name][: len(value)].reshape(-1) for name, value in like.items()])


def blend_fisher(old: Parameters, new: Parameters, old_weight: float, new_weight: float) -> dict[str, Tensor]:
    """old_weight * old + new_weight * new, of the shapes of ``new``; entries that only ``new`` has are taken as they are.

    >>> blend_fisher({"w": torch.tensor([4.0])}, {"w": torch.tensor([2.0, 8.0])}, 0.5, 0.25)["w"].tolist()
    [2.5, 8.0]
    """
    blended = {name: value.clone() for name, value in new.items()}
    for name, value in old.items():
        blended[name][: len(value)] = old_weight * value + new_weight * new[name][: len(value)]
    return blended
