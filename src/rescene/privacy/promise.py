"""What a run promises: its mechanism, how its releases add up, the epsilon of that, and what an epsilon means in words.

The run, its report and model card, `rescene privacy` and a site's check all take the words from here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rescene.privacy.accounting import Composition, check_target, epsilon_of, replaced_epsilon, sigma_for
from rescene.privacy.ledger_file import Floor
from rescene.privacy.mechanism import Mechanism

OUTSIDE = "Not covered: settings and clips that were chosen by looking at private images, class names, sizes of sites, timing."
NO_COUNTS = "behind a guarantee sites answer no evaluation, because exact counts would tell of single images"
HOW_TO_MEASURE = (
    "name test images of the server before the first run (`test: FOLDER` in plan.yaml, one folder per class), "
    "or let each site put noise on its counts (`privacy: {epsilon_max: 8, evaluation_sigma: 2}` in site.yaml): "
    "with 3 sites, 4 classes and 300 held-out images in all the accuracy is then off by about 5 points, with half the images by 10"
)


def guarantee(epsilon: float, replaced: float, delta: float) -> str:
    """The guarantee: in plain words, then for an image added or removed and for an image replaced."""
    return (
        f"What a site sends looks nearly the same with and without any one image. Epsilon says how nearly: {epsilon:.2f} is "
        f"{strength(epsilon)}. "
        f"({epsilon:.2f}, {delta:g})-differentially private for each image over the whole run, all tasks, if the image is added "
        f"or removed, and ({replaced:.2f}, {delta:g}) if another takes its place."
    )


def strength(epsilon: float) -> str:
    """How much an epsilon protects, in words.

    >>> strength(1.0), strength(8.0), strength(50.0)
    ('strong', 'moderate, and often used in practice', 'hardly any protection')
    """
    steps = ((1.0, "strong"), (10.0, "moderate, and often used in practice"), (20.0, "weak"))
    return next((words for most, words in steps if epsilon <= most + 1e-6), "hardly any protection")


def trust(honest_sites: int | None, late_alone: bool = False, colluders: int | None = None) -> str:
    """Who must be trusted for it."""
    if honest_sites is None:
        return (
            "Trust: each site adds the whole noise by itself, so it needs to trust neither the server nor other sites."
        )
    return (
        f"Trust: the server learns only sums over sites, and each site adds a part of the noise; at least {honest_sites} honest "
        "sites must be in every sum."
        + ("" if colluders is None else f" {_survives(colluders)}")
        + (" A site that missed a sum adds the whole noise by itself." if late_alone else "")
    )


def _survives(colluders: int) -> str:
    """How many sites may be dishonest.

    >>> _survives(0)
    'It holds only while no site tells the server its secrets or leaves out its noise.'
    """
    if colluders > 1:
        return f"It holds while at most {colluders} sites tell the server their secrets or leave out their noise."
    return f"It holds {'while at most one' if colluders else 'only while no'} site tells the server its secrets or leaves out its noise."


def released_before(earlier_sums: int) -> str:
    """What stays released although a site withdrew."""
    times = "Once" if earlier_sums == 1 else f"{earlier_sums} times"
    return (
        f"{times} a site withdrew and sums over the other sites were taken anew. The sums from before stay released, and epsilon "
        "counts them too."
    )


def limit(epsilon: float | None, delta: float) -> str:
    """A site's own limit, over all runs."""
    if epsilon is None:
        return "no largest epsilon: privacy.epsilon_max is not set"
    once = Composition(1, 1)
    replaced = replaced_epsilon(sigma_for(epsilon, once, delta), once, delta, 2.0)
    return (
        f"epsilon {epsilon:g} at delta {delta:g} for each image over all runs and tasks, if it is added or removed; "
        f"about {replaced:.0f} if another takes its place. {OUTSIDE}"
    )


@dataclass(frozen=True)
class Promise:
    """What a recipe's mechanism guarantees for one record over the whole run. Empirical mechanisms have no epsilon."""

    mechanism: Mechanism
    composition: Composition  # of this run's own releases
    delta: float
    test_mode: bool
    earlier_sums: int = 0  # of the same images, which were released before a site withdrew
    colluders: int | None = None  # sites at most that may be dishonest under a secure sum

    @property
    def whole(self) -> Composition:
        """This run's releases and those of the earlier sums."""
        return replace(self.composition, participations=self.composition.participations * (1 + self.earlier_sums))

    @property
    def formal(self) -> bool:
        """Whether the run has a differential privacy guarantee."""
        return self.mechanism.formal and not self.test_mode

    def epsilon(self) -> float | None:
        """Epsilon of the whole run if an image is added or removed; None without a guarantee."""
        return epsilon_of(self.mechanism.sigma, self.whole, self.delta) if self.formal else None

    def epsilon_replaced(self) -> float | None:
        """The same where a record is replaced by another."""
        m = self.mechanism
        factor = m.replaced / m.sensitivity
        return replaced_epsilon(m.sigma, self.whole, self.delta, factor) if self.formal else None

    def epsilon_per_round(self) -> float | None:
        """Of one participation, which is one upload."""
        each = self.mechanism.composition
        return epsilon_of(self.mechanism.sigma, each, self.delta) if self.formal else None

    def words(self) -> str:
        """The guarantee in a sentence, or why there is none."""
        sigma = self.mechanism.sigma
        if not self.mechanism.formal:
            return f"Not private: the paper's experiment (sigma = {sigma:g}) is empirical and certifies nothing."
        if self.test_mode:
            return "Not private: test mode, the noise comes from the run's seed, which the server knows."
        found, replaced = self.epsilon(), self.epsilon_replaced()
        assert found is not None and replaced is not None  # it is formal
        return f"{guarantee(found, replaced, self.delta)} Noise multiplier {sigma:.4g}."

    def statement(self) -> str:
        """All that is said of it."""
        return f"{self.words()} {self.reasons()}" if self.formal else self.words()

    @property
    def trust(self) -> str:
        """Who must be trusted for it."""
        return trust(self.mechanism.honest_sites, self.mechanism.late_alone, self.colluders)

    def reasons(self) -> str:
        """What the guarantee assumes, what it leaves out, and how its releases add up."""
        before = f"{released_before(self.earlier_sums)} " if self.earlier_sums else ""
        return f"{self.trust} {before}{OUTSIDE} Composition: {self.whole.words()}."


def check_records(promise: Promise | None, num_records: int) -> None:
    """delta must say something about a data set of this size."""
    if promise is not None and promise.mechanism.formal:
        check_target(delta=promise.delta, num_records=num_records)


def multiplier_of(sigma: float | None, epsilon: float | None, whole: Composition, delta: float) -> float:
    """The noise multiplier of a run that asks for ``sigma`` or, where that is None, for this epsilon in the whole run."""
    if sigma is not None:
        return sigma
    if epsilon is None:
        raise ValueError("neither a noise multiplier nor an epsilon is given")
    return sigma_for(epsilon, whole, delta)


def floor_of(promise: Promise | None) -> Floor | None:
    """The limits that a first run sets where nobody has set any: its epsilon, rounded up; None if it promises nothing."""
    epsilon = None if promise is None else promise.epsilon()
    if promise is None or epsilon is None or not math.isfinite(epsilon):
        return None
    return Floor(epsilon_max=math.ceil(1e6 * epsilon + 1) / 1e6, delta_max=promise.delta)


SIGMAS, EPSILONS = (0.5, 1.0, 3.0, 5.0), (1.0, 2.0, 4.0, 8.0)


def trade_off_rows(
    mechanism: Mechanism,
    whole_run: Composition,
    delta: float,
    epsilon: float | None = None,
    sigma: float | None = None,
) -> list[dict[str, str | float]]:
    """A row for the given ``sigma`` or ``epsilon``; without either, rows for usual values of both.

    ``sigma`` has no unit: it is the deviation of the noise divided by the sensitivity. Each row has the epsilon of one
    participation, of the whole run, and of the whole run where an image is replaced instead of removed.
    """
    factor = mechanism.replaced / mechanism.sensitivity
    pairs = [("given sigma", s) for s in ((sigma,) if sigma is not None else SIGMAS) if epsilon is None]
    wanted = (epsilon,) if epsilon is not None else EPSILONS
    pairs += [("given epsilon", sigma_for(e, whole_run, delta)) for e in wanted if sigma is None]
    return [
        {
            "direction": direction,
            "sigma": s,
            "epsilon, one participation": epsilon_of(s, mechanism.composition, delta),
            "epsilon, whole run": epsilon_of(s, whole_run, delta),
            "epsilon, image replaced": replaced_epsilon(s, whole_run, delta, factor),
        }
        for direction, s in pairs
    ]
