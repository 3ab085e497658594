"""The quantities of the analysis of temporal herding (Sec. 3.5, App. C), measured instead of assumed. One class of one task.

z_i     unit-normalised task-end feature of candidate i     P, W    all candidates; those of the recent window
m_A     mean of z over the set A                            H, H^P  B candidates herded towards m_W; towards m_P
mu      mean of z over the real images of the class         Delta   largest distance of a candidate to the target
e_r     m_r - mu, the task-end error of round r             n_r     candidates of round r
a_r, u  e_r = a_r u + xi_r, a_r >= 0 and non-increasing     sigma   largest ||xi_r||;  A_P, A_W  means of a_r over P, W
delta_r error of round r under the model it was made with   L_phi   change of a mean feature per change of the model
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rescene.functional.herding import herd

_BLOCK = 256  # picks looked at in one matrix product
_FIT_STEPS = 100


@dataclass(frozen=True)
class Approach:
    """How close a herded buffer comes to its target (Lemma 1)."""

    mean: Tensor  # m_H
    distance: float  # ||m_H - m||
    delta: float  # Delta
    bound: float  # Delta / sqrt(B)
    random: float  # root mean square of ||m_A - m|| over random A of B candidates: what no choice at all gives
    coverage_fails_at: int | None  # first step, 1-based, at which Assumption 1 fails


def approach(z: Tensor, target: Tensor, budget: int) -> Approach:
    """Herd and compare with the lemma. z [n, d], target [d], 1 <= budget <= n.

    With budget = n nothing is left out and m_H = m_P, yet the order of the picks still decides where coverage fails.
    """
    z, target, n = z.double(), target.double(), len(z)
    picks = _greedy_order(z, target, budget)
    mean = z[picks].mean(dim=0)
    delta = float((z - target).norm(dim=1).max())
    left_out = (n - budget) / (n - 1) if n > 1 else 0.0  # drawing without replacement
    spread = float((z - z.mean(dim=0)).square().sum(dim=1).mean())
    offset = float((z.mean(dim=0) - target).square().sum())
    return Approach(
        mean=mean,
        distance=float((mean - target).norm()),
        delta=delta,
        bound=delta / math.sqrt(budget),
        random=math.sqrt(offset + spread / budget * left_out),
        coverage_fails_at=coverage_fails_at(z, target, picks),
    )


def _greedy_order(z: Tensor, target: Tensor, budget: int) -> Tensor:
    """The picks of Eq. 2 in order; ``herd`` does not order them when it keeps everything, so the last one is added."""
    if budget < len(z):
        return herd(z, target, budget)
    first = herd(z, target, budget - 1).long()  # an empty answer has no integer type
    chosen = torch.zeros(len(z), dtype=torch.bool, device=z.device).index_fill(0, first, True)
    return torch.cat([first, (~chosen).nonzero().squeeze(1)])


def coverage_fails_at(z: Tensor, target: Tensor, picks: Tensor) -> int | None:
    """First step l (1-based) at which no candidate left has <r, z_q - m> >= 0, r = (l-1)(m - m_H) (Assumption 1).

    None: directional coverage holds for all picks. Rounding below 1e-12 is not a failure.

    >>> z = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    >>> coverage_fails_at(z, z[0], torch.tensor([0, 1, 2]))
    3
    """
    d = z.double() - target.double()
    step_of = torch.full((len(z),), len(picks), device=z.device)  # when a candidate is picked, 0-based
    step_of[picks] = torch.arange(len(picks), device=z.device)
    reach = torch.zeros(len(z), 1, dtype=d.dtype, device=d.device)  # <r, d_q> before the block
    tolerance = 1e-12 * (1.0 + float(d.square().sum(dim=1).max()))
    for first in range(0, len(picks), _BLOCK):
        columns = d @ d[picks[first : first + _BLOCK]].T
        after = reach - columns.cumsum(dim=1)  # each pick takes its d from r
        steps = torch.arange(first, first + columns.shape[1], device=d.device)
        open_to = (after + columns).masked_fill(step_of[:, None] < steps, -torch.inf)
        failing = (open_to.max(dim=0).values < -tolerance).nonzero()
        if len(failing):
            return first + int(failing[0]) + 1
        reach = after[:, -1:]
    return None


@dataclass(frozen=True)
class CoherentBias:
    """A decomposition e_r = a_r u + xi_r (Assumption 2)."""

    direction: Tensor  # u [d]
    bias: Tensor  # a_r [R]
    deviation: Tensor  # ||xi_r|| [R]

    @property
    def sigma(self) -> float:
        """The largest ||xi_r||."""
        return float(self.deviation.max())


def coherent_bias(errors: Tensor) -> CoherentBias:
    """The least-squares decomposition of e_r [R, d], rounds in order.

    Alternates between the best a_r for u (isotonic regression of <e_r, u>, cut at 0) and the best u for a_r, from both
    ends of the principal axis. Any errors can be decomposed; what matters is how large sigma comes out.
    """
    e = errors.double()
    axis = torch.linalg.svd(e, full_matrices=False).Vh[0]
    fits = [_alternate(e, u) for u in (axis, -axis)]
    return min(fits, key=lambda fit: float(fit.deviation.square().sum()))


def _alternate(e: Tensor, u: Tensor) -> CoherentBias:
    for _ in range(_FIT_STEPS):
        a = non_increasing(e @ u)
        pull = a @ e
        if float(pull.norm()) == 0.0:  # no bias along u at all: u may stay
            break
        u = pull / pull.norm()
    a = non_increasing(e @ u)
    return CoherentBias(u, a, (e - a[:, None] * u).norm(dim=1))


def non_increasing(values: Tensor) -> Tensor:
    """The closest sequence (least squares) that is non-increasing and non-negative: pool adjacent violators.

    >>> non_increasing(torch.tensor([3.0, 1.0, 2.0, -1.0])).tolist()
    [3.0, 1.5, 1.5, 0.0]
    """
    blocks: list[tuple[float, int]] = []  # mean, length
    for value in values.tolist():
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] < blocks[-1][0]:
            (b, k), (a, n) = blocks.pop(), blocks.pop()
            blocks.append(((a * n + b * k) / (n + k), n + k))
    fitted = [max(mean, 0.0) for mean, length in blocks for _ in range(length)]
    return torch.tensor(fitted, dtype=values.dtype, device=values.device)


def round_means(z: Tensor, rounds: Tensor) -> Iterator[tuple[int, int, Tensor]]:
    """(r, n_r, m_r) of every round that has candidates, in order."""
    for r in rounds.unique().tolist():
        own = z[rounds == r]
        yield int(r), len(own), own.double().mean(dim=0)


def herding_facts(z: Tensor, rounds: Tensor, window: Tensor, budget: int, mu: Tensor) -> dict[str, Any]:
    """Everything App. C says about one class at the end of its task, as plain numbers.

    z [n, d] unit features, rounds [n] (1-based), window [n] bool (W), budget B <= n, mu [d]. ``theorem_needs`` and
    ``corollary_needs`` are the right-hand sides that ``removed_bias`` = A_P - A_W must exceed. Whatever decomposition is
    chosen, A_P - A_W - 2 sigma <= ||m_P - mu|| - ||m_W - mu|| = ``largest_margin`` (both triangle inequalities of the
    proof), so where that does not exceed Delta_W / sqrt(B) no u, a_r, sigma can meet the theorem's condition.
    """
    z, mu = z.double(), mu.double()
    m_p, m_w = z.mean(dim=0), z[window].mean(dim=0)
    herded = approach(z, m_w, budget)
    whole = herded if bool(window.all()) else approach(z, m_p, budget)
    numbers, counts, means = zip(*round_means(z, rounds), strict=True)
    errors = torch.stack(means) - mu
    fit, n = coherent_bias(errors), torch.tensor(counts, dtype=z.dtype, device=z.device)
    recent = torch.tensor([bool(window[rounds == r].any()) for r in numbers], device=z.device)
    a_p = float(fit.bias @ n / n.sum())
    a_w = float(fit.bias[recent] @ n[recent] / n[recent].sum())
    to_real = {name: float((m - mu).norm()) for name, m in (("pool", m_p), ("window", m_w))}
    energy = float(errors.square().sum())
    return {
        "num_pool": len(z),
        "num_window": int(window.sum()),
        "num_kept": budget,
        "target_distance": herded.distance,
        "target_bound": herded.bound,
        "target_random": herded.random,
        "delta_window": herded.delta,
        "coverage_fails_at": herded.coverage_fails_at,
        "full_pool_distance": whole.distance,
        "full_pool_bound": whole.bound,
        "delta_pool": whole.delta,
        "full_pool_coverage_fails_at": whole.coverage_fails_at,
        "bias_pool": a_p,
        "bias_window": a_w,
        "removed_bias": a_p - a_w,
        "sigma": fit.sigma,
        "coherence": 1.0 - float(fit.deviation.square().sum()) / energy if energy else 1.0,
        "theorem_needs": 2.0 * fit.sigma + herded.bound,
        "corollary_needs": 2.0 * fit.sigma + herded.bound + whole.bound,
        "largest_margin": to_real["pool"] - to_real["window"],
        "herded_to_real": float((herded.mean - mu).norm()),
        "pool_to_real": to_real["pool"],
        "window_to_real": to_real["window"],
        "full_pool_to_real": float((whole.mean - mu).norm()),
        "rounds": {
            "round": list(numbers),
            "num": list(counts),
            "recent": recent.tolist(),
            "task_end_error": errors.norm(dim=1).tolist(),
            "bias": fit.bias.tolist(),
            "deviation": fit.deviation.tolist(),
        },
    }


@dataclass(frozen=True)
class Staleness:
    """What Proposition 1 says of one round: the error under the task-end model against its bound."""

    matching_error: float  # delta_r
    task_end_error: float
    surrogate_drift: float  # ||m_r(theta^R) - m_r(theta^(r-1))||
    real_drift: float  # ||mu(theta^R) - mu(theta^(r-1))||
    model_distance: float  # ||theta^R - theta^(r-1)||

    @property
    def smoothness(self) -> float:
        """The smallest L_phi that explains the two drifts; 0 if the model did not move."""
        drift = max(self.surrogate_drift, self.real_drift)
        return drift / self.model_distance if self.model_distance else 0.0

    def bound(self, smoothness: float) -> float:
        """delta_r + 2 L_phi ||theta^R - theta^(r-1)||; it says nothing from 2 on, where two mean unit vectors always lie."""
        return self.matching_error + 2.0 * smoothness * self.model_distance


def staleness(m_then: Tensor, mu_then: Tensor, m_end: Tensor, mu_end: Tensor, model_distance: float) -> Staleness:
    """One round from its mean features and those of the real images, under the model it was made with and at task end."""
    return Staleness(
        matching_error=float((m_then - mu_then).norm()),
        task_end_error=float((m_end - mu_end).norm()),
        surrogate_drift=float((m_end - m_then).norm()),
        real_drift=float((mu_end - mu_then).norm()),
        model_distance=model_distance,
    )
