"""Averages of the sites' models, and what keeps the sites together.

Federated averaging: theta <- sum_k (w_k / sum w) theta_k (McMahan et al., 2017).

Against client drift: sites that train for long on their own images move apart, and their average is no good step.

w, y_i   weights of a site while it trains, by name        x, w^t   weights that the server sent
c_i      control variate of site i: its mean gradient      c        the server's: the mean of all c_i
K        local steps                                       eta_l    local learning rate
beta     momentum: v <- beta v + g, w <- w - eta_l v, where v begins at 0 in every round

FedProx (Li et al., MLSys 2020): a site minimises its loss + mu/2 ||w - w^t||^2.
SCAFFOLD (Karimireddy et al., ICML 2020): a site steps along g_i(y_i) - c_i + c, the gradient of its loss + <c - c_i, y_i>.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def weighted_average(states: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """Entry-wise weighted mean of state dicts, summed in float64 in the given order.

    Floating-point entries (running statistics of BatchNorm included) are averaged; integer entries such as
    ``num_batches_tracked`` take the maximum, since their mean would not be an integer. One state is returned bit for bit.

    >>> weighted_average([{"a": torch.tensor([0.0])}, {"a": torch.tensor([4.0])}], [3, 1])["a"].item()
    1.0
    """
    total = float(sum(weights))
    if not states or total <= 0:
        raise ValueError("an average needs at least one state with positive weight")
    if len(states) == 1:
        return dict(states[0])
    average: dict[str, Tensor] = {}
    for key, first in states[0].items():
        entries = [state[key] for state in states]
        if first.is_floating_point():
            summed = torch.zeros_like(first, dtype=torch.float64)
            for entry, weight in zip(entries, weights, strict=True):
                summed += entry.double() * (weight / total)
            average[key] = summed.to(first.dtype)
        else:
            average[key] = torch.stack(entries).amax(dim=0)
    return average


Parameters = Mapping[str, Tensor]


def proximal_term(w: Parameters, start: Parameters, mu: float) -> Tensor:
    """mu/2 ||w - w^t||^2 over the entries of ``w``, differentiable in them; its gradient is mu (w - w^t).

    >>> proximal_term({"a": torch.tensor([3.0, 1.0])}, {"a": torch.tensor([1.0, 1.0])}, mu=0.5).item()
    1.0
    """
    moved = _row(w) - _row({name: start[name] for name in w})
    return 0.5 * mu * torch.dot(moved, moved)


def linear_term(y: Parameters, slope: Parameters) -> Tensor:
    """<slope, y>, differentiable in ``y``: adds ``slope`` to the gradient of every step.

    >>> linear_term({"a": torch.tensor([3.0, 1.0])}, {"a": torch.tensor([1.0, 2.0])}).item()
    5.0
    """
    return torch.dot(_row(y), _row({name: slope[name] for name in y}))


def effective_steps(num_steps: int, momentum: float) -> float:
    """How many plain steps of eta_l g the K steps with momentum are worth for a constant gradient g.

    Gradient j of K is still at work in the K - j steps after its own: it moves the weights by eta_l (1 + beta + ... + beta^(K-j)).
    The sum over all j is (K - beta (1 - beta^K) / (1 - beta)) / (1 - beta). Without momentum it is K.

    >>> effective_steps(5, 0.0), effective_steps(2, 0.5)
    (5.0, 2.5)
    """
    late = momentum * (1 - momentum**num_steps) / (1 - momentum)
    return (num_steps - late) / (1 - momentum)


def control_variate(
    x: Parameters, y: Parameters, own: Parameters, server: Parameters, reach: float
) -> dict[str, Tensor]:
    """Option II: c_i+ = c_i - c + (x - y_i) / reach, where reach = K eta_l for plain SGD (Alg. 1, line 12).

    >>> one = {"a": torch.tensor([1.0])}
    >>> control_variate({"a": torch.tensor([3.0])}, one, {"a": torch.tensor([0.5])}, one, reach=4.0)["a"].item()
    0.0
    """
    return {name: own[name] - server[name] + (x[name] - y[name]) / reach for name in own}


def grown_rows(values: Parameters, like: Parameters) -> dict[str, Tensor]:
    """The values in the shapes of ``like``: rows that ``like`` has more of (of new classes) are 0, as is what is missing.

    >>> grown_rows({"head": torch.ones(1)}, {"head": torch.ones(3), "bias": torch.ones(1)})
    {'head': tensor([1., 0., 0.]), 'bias': tensor([0.])}
    """
    grown = {name: torch.zeros_like(value) for name, value in like.items()}
    for name, value in values.items():
        grown[name][: len(value)] = value
    return grown


def changed_likewise(today: Parameters, before: Parameters, after: Parameters, weight: float) -> dict[str, Tensor]:
    """today + weight (after - before): a change that was made to older weights, made to those of today.

    Rows of classes that are new since then stay as they are, and so do entries that are no real numbers.

    >>> one, three, nine = (torch.tensor([value]) for value in (1.0, 3.0, 9.0))
    >>> changed_likewise({"a": torch.cat([nine, nine])}, {"a": one}, {"a": three}, weight=0.5)
    {'a': tensor([10.,  9.])}
    """
    change = {name: after[name] - before[name] for name, value in today.items() if value.is_floating_point()}
    grown = grown_rows(change, {name: today[name] for name in change})
    return {name: value + weight * grown[name] if name in grown else value for name, value in today.items()}


def _row(values: Parameters) -> Tensor:
    """All entries in one row: few operations instead of several for every parameter."""
    return torch.cat([value.reshape(-1) for value in values.values()])
