"""What repeated noisy releases add up to: epsilon for a noise multiplier, and the noise multiplier for an epsilon.

    sigma  noise multiplier: deviation of the Gaussian noise / sensitivity of what it is added to
    q      probability that a record enters a step (Poisson sampling); 1: every record enters
    T      releases that a record enters, over the whole run

Neighbours: two data sets of one site that differ by one record added or removed. A record has one label and belongs to one
task and one site, so classes, tasks and sites compose in parallel; only the steps and participations of its own site in its
own task add up. Where a method keeps records and trains on them again, the participations of all later tasks add up too. The
server chooses who takes part, so being left out of a round amplifies nothing.

With q = 1 the sum is a Gaussian mechanism again and has a closed form (Balle & Wang 2018, Theorem 8). With q < 1 the privacy
loss distribution is composed numerically by dp-accounting, rounded towards more loss.

Noise is discrete, and the accountant counts it as continuous. Let P be the discrete Gaussian of deviation s steps on D numbers,
and Q the continuous one rounded to whole numbers, which is as private as the continuous one. On every number k

    exp(-1 / (24 s^2)) <= Q(k) / P(k) <= (1 + 2^-99) exp(k^2 / (24 s^4))        by Jensen's inequality, and sinh(y) <= y exp(y^2 / 6)

So P <= e^(D / 24 s^2) Q everywhere, and Q <= e^(D / 12 s^2) P where the squares k^2 / s^2 add up to at most 2 D. They do not with
a probability below 2^-200 (D is counted as 1024 at least). Together: if Q keeps a record within (epsilon, delta), P keeps it
within (epsilon + D / 8 s^2, e^(D / 24 s^2) delta), up to e^epsilon 2^-200. Every grid is so fine that D / 8 s^2 <= ``GRID_COST``
for one release (:func:`check_grid`), and this is added for each. The sampler's own error counts (1 + e^epsilon) times for each
number: below a millionth of delta for an epsilon up to 60, and a larger one promises nothing anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch

from rescene.core.errors import ConfigError, RunError

NEIGHBOURS = "one record of one site added or removed"
_GRID = 1e-3  # discretisation of the privacy loss; a tenth of it changes epsilon by less than 1e-3 (tests)
_MAX_EPSILON = 1e5
GRID_COST = 1e-7  # in epsilon, for one release: noise is discrete, and counted as continuous
_SAMPLER_COST = 1e-6  # of delta
_SIGMA_TOLERANCE = 1e-6  # relative


@dataclass(frozen=True)
class Composition:
    """How often the most-used record is used in the whole run."""

    steps: int  # noisy steps of one participation
    participations: int  # of its site in a task
    rate: float = 1.0  # q
    tasks: int = 1  # in which it is used: more than its own where methods replay it

    def __post_init__(self) -> None:
        if min(self.steps, self.participations, self.tasks) < 1 or not 0 < self.rate <= 1:
            raise ConfigError(
                "E170",
                f"cannot account for {self.steps} steps, {self.participations} participations, {self.tasks} tasks "
                f"at rate {self.rate:g}",
                why="the counts must be at least 1 and the rate above 0 and at most 1",
            )

    @property
    def releases(self) -> int:
        """Releases of one image in the whole run."""
        return self.steps * self.participations * self.tasks

    def words(self) -> str:
        """The composition as a sentence for people."""
        step = "release" if self.steps == 1 else "releases"
        rate = "with every record" if self.rate == 1 else f"each with a record's chance of {self.rate:g}"
        times = "participation" if self.participations == 1 else "participations"
        replayed = f" x {self.tasks} tasks" if self.tasks > 1 else ""
        rest = "nothing else adds up, as long as no image lies in two tasks, sites or classes"
        if self.tasks > 1:
            rest = "the most-used one is of the first task and kept in its site's memory to the end; no image may lie at two sites"
        return (
            f"{self.steps} noisy {step} per participation ({rate}) x at most {self.participations} {times} of a site "
            f"in a task{replayed} = {self.releases} per record; {rest}"
        )


@lru_cache
def epsilon_of(sigma: float, composition: Composition, delta: float) -> float:
    """Epsilon at ``delta`` after everything a record enters; infinite without noise."""
    return total_epsilon([(sigma, composition)], delta)


def total_epsilon(parts: Sequence[tuple[float, Composition]], delta: float) -> float:
    """The same for several compositions one after another, each with its own noise multiplier."""
    check_target(delta=delta)
    for sigma, _ in parts:
        if not (math.isfinite(sigma) and sigma >= 0):
            raise ConfigError("E171", f"noise multiplier {sigma:g} is not possible", fix="a number above 0")
    if any(sigma == 0 for sigma, _ in parts):
        return math.inf
    grid = GRID_COST * sum(composition.releases for _, composition in parts)
    return grid + _curve(tuple(parts))(delta * math.exp(-_SAMPLER_COST - grid))


@lru_cache
def replaced_epsilon(sigma: float, composition: Composition, delta: float, factor: float) -> float:
    """The same for neighbours one of whose records is replaced by another.

    ``factor``: how much more that changes than to add or remove a record. If every record enters each release, this is noise of
    so much smaller a multiplier. With sampling it is also bounded by removing a record and adding the other: twice epsilon at a
    smaller delta, where delta = (1 + e^epsilon) smaller delta.
    """
    plain = total_epsilon([(sigma / factor, replace(composition, rate=1.0))], delta)
    if composition.rate == 1 or not sigma:
        return plain
    grid = GRID_COST * composition.releases
    curve, left = _curve(((sigma, composition),)), math.log(delta) - _SAMPLER_COST - grid

    def excess(fall: float) -> float:  # fall: logarithm of how much smaller a delta
        epsilon = curve(math.exp(left - fall))
        return epsilon + math.log1p(math.exp(-epsilon)) - fall

    most = left + 32  # below a delta of e^-32 the numerical curve ends
    return plain if excess(most) > 0 else min(plain, grid + 2 * curve(math.exp(left - _root(excess, 0.0, most, 1e-6))))


def least_deviation(num_numbers: int) -> float:
    """The smallest deviation, in steps of the grid, at which discrete noise on so many numbers costs at most GRID_COST more."""
    return math.sqrt(max(num_numbers, 1024) / (8 * GRID_COST))


def check_grid(deviation: float, num_numbers: int) -> None:
    """Refuse a grid on which discrete noise of this deviation (in steps) cannot be counted as continuous."""
    cost = max(num_numbers, 1024) / (8 * deviation**2)
    if not (cost <= GRID_COST and num_numbers <= 2**32):
        raise RunError(
            "E431",
            f"the grid is too coarse: {num_numbers:,} numbers with discrete noise of {deviation:.4g} steps each",
            why=f"they would cost {cost:.1g} in epsilon beside what is accounted for; {GRID_COST:g} is allowed",
            fix=f"a deviation of at least {least_deviation(num_numbers):.3g} steps: "
            "a larger noise multiplier or a finer grid",
        )


@lru_cache
def sigma_for(epsilon: float, composition: Composition, delta: float) -> float:
    """The smallest noise multiplier (within a millionth, rounded up) that keeps a record within ``epsilon``."""
    check_target(epsilon, delta)

    def excess(log_sigma: float) -> float:
        return epsilon_of(math.exp(log_sigma), composition, delta) - epsilon

    if composition.rate == 1:
        low, high = math.log(1e-4), math.log(1e8)
    else:  # sampling can only help, and the closed form is cheap
        high = math.log(sigma_for(epsilon, replace(composition, rate=1.0), delta))
        low = high
        while excess(low) <= 0:
            high, low = low, low - math.log(2)
    return math.exp(_root(excess, low, high, _SIGMA_TOLERANCE))


def gaussian_epsilon(sigma: float, releases: float, delta: float) -> float:
    """Closed form for q = 1: T releases are one with multiplier sigma / sqrt(T).

    >>> round(gaussian_epsilon(5, 25, 1e-5), 1)
    4.4
    """
    mu = math.sqrt(releases) / sigma

    def log_excess(epsilon: float) -> float:
        return _log_gaussian_delta(mu, epsilon) - math.log(delta)

    if log_excess(0.0) <= 0:
        return 0.0
    if log_excess(_MAX_EPSILON) > 0:
        return math.inf
    return _root(log_excess, 0.0, _MAX_EPSILON, 1e-9)


def check_target(epsilon: float | None = None, delta: float | None = None, num_records: int | None = None) -> None:
    """Refuse targets that promise nothing."""
    if epsilon is not None and not (math.isfinite(epsilon) and epsilon > 0):
        raise ConfigError(
            "E172", f"epsilon = {epsilon:g} is not possible", why="it must be above 0 and finite", fix="for instance 8"
        )
    if delta is not None and not 0 < delta < 1:
        raise ConfigError(
            "E173", f"delta = {delta:g} is not possible", why="it must lie between 0 and 1", fix="for instance 1e-5"
        )
    if delta is not None and num_records and delta >= 1 / num_records:
        raise ConfigError(
            "E173",
            f"delta = {delta:g} promises nothing for {num_records} records",
            why=f"publishing one record at random would satisfy it; delta must stay below 1/n = {1 / num_records:.2g}",
            fix=f"privacy.delta={0.1 / num_records:.0e}",
        )


def _log_gaussian_delta(mu: float, epsilon: float) -> float:
    """log of Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu), without leaving the logarithm."""
    points = torch.tensor([mu / 2 - epsilon / mu, -mu / 2 - epsilon / mu], dtype=torch.float64)
    first, second = torch.special.log_ndtr(points).tolist()
    ratio = epsilon + second - first
    return first + math.log1p(-math.exp(ratio)) if ratio < 0 else -math.inf


@lru_cache(maxsize=8)
def _curve(parts: tuple[tuple[float, Composition], ...]) -> Callable[[float], float]:
    """Epsilon of continuous noise as a function of delta."""
    if all(composition.rate == 1 for _, composition in parts):
        return partial(gaussian_epsilon, 1.0, sum(c.releases / sigma**2 for sigma, c in parts))
    return _pld_curve(parts, _GRID)


def _pld_curve(parts: Sequence[tuple[float, Composition]], grid: float) -> Callable[[float], float]:
    try:
        import dp_accounting
        from dp_accounting import pld
    except ImportError as error:
        raise ConfigError(
            "E174",
            "accounting for sampled records needs dp-accounting",
            why=str(error),
            fix="pip install 'rescene[privacy]', or privacy.sampling_rate=1 (closed form)",
        ) from None
    accountant = pld.PLDAccountant(
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, value_discretization_interval=grid
    )
    for sigma, composition in parts:
        event = dp_accounting.GaussianDpEvent(sigma)
        if composition.rate < 1:
            event = dp_accounting.PoissonSampledDpEvent(composition.rate, event)
        accountant.compose(event, composition.releases)
    return lambda delta: float(accountant.get_epsilon(delta))


def bisected(goes_on: Callable[[float], bool], low: float, high: float, tolerance: float) -> tuple[float, float]:
    """The last number at which it goes on and the first at which it does not, as near to each other as this."""
    while high - low > tolerance:
        middle = (low + high) / 2
        low, high = (middle, high) if goes_on(middle) else (low, middle)
    return low, high


def _root(falling: Callable[[float], float], low: float, high: float, tolerance: float) -> float:
    """Where a falling function crosses zero; the end at which it is not above zero."""
    return bisected(lambda x: falling(x) > 0, low, high, tolerance)[1]
