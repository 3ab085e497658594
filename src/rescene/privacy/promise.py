"""What a run promises: its mechanism, how its releases add up, and the epsilon of that."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rescene.privacy.accounting import Composition, check_target, epsilon_of, replaced_epsilon, sigma_for
from rescene.privacy.ledger_file import Floor
from rescene.privacy.mechanism import FORMAL, Mechanism
from rescene.privacy.statement import OUTSIDE, guarantee, released_before, trust


@dataclass(frozen=True)
class Promise:
    """What a recipe's mechanism guarantees for one record over the whole run. Empirical mechanisms have no epsilon."""

    mechanism: Mechanism
    composition: Composition  # of this run's own releases
    delta: float
    test_mode: bool
    earlier_sums: int = 0  # of the same images, which were released before a site withdrew

    @property
    def whole(self) -> Composition:
        """This run's releases and those of the earlier sums."""
        return replace(self.composition, participations=self.composition.participations * (1 + self.earlier_sums))

    @property
    def formal(self) -> bool:
        """Whether the run has a differential privacy guarantee."""
        return self.mechanism.kind in FORMAL and not self.test_mode

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
        if self.mechanism.kind not in FORMAL:
            return f"Not private: the paper's experiment (sigma = {sigma:g}) is empirical and certifies nothing."
        if self.test_mode:
            return "Not private: test mode, the noise comes from the run's seed, which the server knows."
        found, replaced = self.epsilon(), self.epsilon_replaced()
        assert found is not None and replaced is not None  # it is formal
        return f"{guarantee(found, replaced, self.delta)} Noise multiplier {sigma:.4g}."

    def statement(self) -> str:
        """All that is said of it."""
        return f"{self.words()} {self.reasons()}" if self.formal else self.words()

    def reasons(self) -> str:
        """What the guarantee assumes, what it leaves out, and how its releases add up."""
        m = self.mechanism
        before = f"{released_before(self.earlier_sums)} " if self.earlier_sums else ""
        return f"{trust(m.honest_sites, m.late_alone)} {before}{OUTSIDE} Composition: {self.whole.words()}."


def check_records(promise: Promise | None, num_records: int) -> None:
    """delta must say something about a data set of this size."""
    if promise is not None and promise.mechanism.kind in FORMAL:
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
