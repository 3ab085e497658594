"""How much privacy an attacker has refuted: from right and wrong guesses to a lower bound on epsilon.

Steinke, Nasr and Jagielski, "Privacy auditing with one (1) training run" (2023). Each of m canaries is in the data or not, by a
coin of its own. The attacker sees the mechanism's output, guesses r of the coins and abstains from the rest; v are right.

    W ~ Binomial(r, q), q = e^eps / (1 + e^eps)                 what randomised response would get right (Theorem 5.2)
    P[V >= v] <= P[W >= v] + 2 m delta max_i P[v > W >= v - i] / i     for every (eps, delta)-private mechanism

An eps for which that probability is small is refuted, and with it every smaller one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from rescene.privacy.accounting import bisected

GUESSES = ((1, True), (2, True), (4, True), (10, True), (2, False), (4, False), (10, False))
"""(m / r, guess both ways or only who was in): the surest r guesses. All are tried, and paid for."""
RISK = 0.05  # of a bound that is too high, unless another one is given


@dataclass(frozen=True)
class Bound:
    """The best that one ranking of canaries shows."""

    epsilon: float  # lower bound
    num_guesses: int  # r
    num_right: int  # v


def p_value(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """Largest probability of v or more right guesses of r under (epsilon, delta)-differential privacy.

    >>> round(p_value(10, 10, 10, 0.0, 0.0) * 2**10, 9)
    1.0
    """
    if not 0 <= v <= r <= m:
        raise ValueError(f"{v} right guesses of {r} about {m} canaries cannot be")
    k, choose = _log_binomials(r)
    log_rest = -epsilon - math.log1p(math.exp(-epsilon))  # log(1 - q), and log q is epsilon more
    pmf = (choose + k * epsilon + r * log_rest).exp()
    bound = float(pmf[v:].sum())
    if delta and v:
        bound += 2 * m * delta * float((pmf[:v].flip(0).cumsum(0) / torch.arange(1, v + 1)).max())
    return min(1.0, bound)


@lru_cache(maxsize=64)
def _log_binomials(r: int) -> tuple[Tensor, Tensor]:
    """0..r, and the logarithm of r over each."""
    k = torch.arange(r + 1, dtype=torch.float64)
    return k, math.lgamma(r + 1) - torch.lgamma(k + 1) - torch.lgamma(r - k + 1)


def epsilon_lower_bound(m: int, r: int, v: int, delta: float, risk: float) -> float:
    """The largest epsilon that v right guesses of r refute; wrong with probability ``risk`` at most. 0 refutes nothing."""
    low, high = 0.0, 1.0
    while p_value(m, r, v, high, delta) < risk:
        low, high = high, 2 * high
    return bisected(lambda epsilon: p_value(m, r, v, epsilon, delta) < risk, low, high, 1e-5)[0]


def bounds(attacks: Mapping[str, tuple[Tensor, Tensor]], delta: float) -> dict[str, Bound]:
    """For each attack, its scores [m] and the coins [m] -> its bound. All hold together, but for the chance ``RISK``.

    A score above 0 says "in", below 0 "out", the further the surer; 0 abstains. The risk is divided among all attacks and all
    numbers of guesses, so trying many of them is no way to be lucky.
    """
    each = RISK / (len(attacks) * len(GUESSES))
    found = {}
    for name, (scores, included) in attacks.items():
        m, tried = len(included), []
        for share, both in GUESSES:
            sure = scores.abs() if both else scores.clamp(min=0)
            chosen = sure.argsort(descending=True, stable=True)[: m // share]  # ties by position: it knows no coin
            chosen = chosen[sure[chosen] > 0]
            v = int(((scores > 0) == included)[chosen].sum())
            tried.append(Bound(epsilon_lower_bound(m, len(chosen), v, delta, each), len(chosen), v))
        found[name] = max(tried, key=lambda bound: bound.epsilon)
    return found


def most_to_show(m: int, delta: float, num_attacks: int) -> float:
    """The bound that an attacker who is always right would get: what m canaries cannot show beyond."""
    return epsilon_lower_bound(m, m, m, delta, RISK / (num_attacks * len(GUESSES)))


def success_lower_bound(right: int, tries: int, risk: float) -> float:
    """Clopper and Pearson: the chance of success is above this, wrong with probability ``risk`` at most.

    >>> round(success_lower_bound(10, 10, 0.05), 3)
    0.741
    """
    k, choose = _log_binomials(tries)

    def is_refuted(chance: float) -> bool:
        pmf = (choose + k * math.log(chance) + (tries - k) * math.log1p(-chance)).exp()
        return float(pmf[right:].sum()) < risk

    return bisected(is_refuted, 0.0, right / tries if tries else 0.0, 1e-9)[0]


THRESHOLDS = 20


def two_world_bound(inside: Tensor, outside: Tensor, delta: float, risk: float = RISK) -> float:
    """Epsilon at least, from scores in worlds with a record and in worlds without it; higher says "with".

    For every test, right of those with it <= e^eps x wrong of those without it + delta, and the other way round. Both rates are bounded
    by Clopper and Pearson. Thresholds come from the first half of the scores and are judged by the second, so none is chosen by
    what it shows; the risk is divided among them.
    """
    (first_in, last_in), (first_out, last_out) = (part.double().chunk(2) for part in (inside, outside))
    places = torch.cat([first_in, first_out]).quantile(torch.linspace(0, 1, THRESHOLDS + 2, dtype=torch.float64)[1:-1])
    each, best = risk / (4 * THRESHOLDS), 0.0
    for place in places.tolist():
        says = [(part > place) for part in (last_in, last_out)]
        for with_it, without in ((says[0], says[1]), (~says[1], ~says[0])):
            true = success_lower_bound(int(with_it.sum()), len(with_it), each)
            false = 1 - success_lower_bound(int((~without).sum()), len(without), each)
            if true > delta and false > 0:
                best = max(best, math.log((true - delta) / false))
    return best


def most_identified(num_candidates: int, sigma: float) -> float:
    """Largest chance to tell which of so many equally likely records is behind a Gaussian release with this noise multiplier.

    Without the record a guess is right once in ``num_candidates``; the noise lets a test of that size succeed no more often than this
    (Hayes, Mahloujifar, Balle 2023: 1 - T(1 / k) for the trade-off function T of the mechanism).

    >>> round(most_identified(64, 1e9), 4)
    0.0156
    """
    chance = torch.special.ndtri(torch.tensor(1.0 / num_candidates, dtype=torch.float64))
    return float(torch.special.ndtr(chance + 1 / sigma))
