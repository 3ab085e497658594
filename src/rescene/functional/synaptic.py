"""Synaptic intelligence (Zenke et al., ICML 2017) measured on a personalised surrogate model (FedSSI, Li et al., ICML 2025).

v       weights of the surrogate model, by name            w     global model that it is pulled to
g       gradient of the site's loss at v                   eta   learning rate
lambda  share of the site's own images in v, in (0, 1]     q(lambda) = (1 - lambda) / (2 lambda)
s_i     contribution of weight i: how much its movement lowered the loss, the sum of -g_i dv_i over all steps
Delta_i how far the weight came from its start             xi    damping, bounds Omega where a weight hardly moved
Omega_i = sum over finished tasks of s_i / (Delta_i^2 + xi)
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

Parameters = Mapping[str, Tensor]


def surrogate_step(v: Tensor, g: Tensor, w: Tensor, eta: float, q: float) -> Tensor:
    """dv = -eta (g + q (v - w)), where a step goes at most the whole way to w (eta q is taken as 1 where it is more).

    >>> import torch
    >>> surrogate_step(torch.tensor(3.0), torch.tensor(2.0), torch.tensor(1.0), eta=0.1, q=0.5).item()
    -0.30000001192092896
    """
    return -eta * g - min(eta * q, 1.0) * (v - w)


def synaptic_importance(s: Parameters, moved: Parameters, damping: float) -> dict[str, Tensor]:
    """max(0, s) / (Delta^2 + xi): a weight whose movement raised the loss is free.

    >>> import torch
    >>> s, moved = {"a": torch.tensor([4.0, -4.0])}, {"a": torch.tensor([1.0, 1.0])}
    >>> synaptic_importance(s, moved, damping=1.0)["a"].tolist()
    [2.0, 0.0]
    """
    return {name: value.clamp(min=0) / (moved[name].square() + damping) for name, value in s.items()}


def accumulated(old: Parameters, new: Parameters) -> dict[str, Tensor]:
    """Omega of finished tasks plus that of one more, in the shapes of ``new``: rows of new classes are taken as they are.

    >>> import torch
    >>> accumulated({"head": torch.tensor([1.0])}, {"head": torch.tensor([2.0, 5.0])})["head"].tolist()
    [3.0, 5.0]
    """
    total = {name: value.clone() for name, value in new.items()}
    for name, value in old.items():
        total[name][: len(value)] += value
    return total
