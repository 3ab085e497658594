"""Noise against epsilon, as rows: which epsilon a noise multiplier gives, and which noise multiplier an epsilon needs."""

from __future__ import annotations

from rescene.privacy.accounting import Composition, epsilon_of, replaced_epsilon, sigma_for
from rescene.privacy.mechanism import Mechanism

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
