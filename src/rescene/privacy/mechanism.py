"""What stands between a site's images and its upload: a mechanism that knows its sensitivity, and the site it acts for.

Noise against epsilon stands here as rows too: which epsilon a noise multiplier gives, and which noise multiplier an epsilon needs.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from torch import Tensor, nn

from rescene.core.errors import ConfigError, ResceneWarning
from rescene.privacy.accounting import Composition, check_grid, epsilon_of, replaced_epsilon, sigma_for
from rescene.privacy.class_sums import clip_rows, release_bound
from rescene.privacy.ledger import Charge, Declined, Ledger, Touched
from rescene.privacy.noise import Noise, discrete_gaussian

ARITHMETIC = 2.0**-10  # room for float32: images of one batch may change each other's last digits
FORMAL = ("release", "per-example", "dp-sgd")  # these promise an epsilon; "paper-experiment" promises nothing


@dataclass(frozen=True)
class Mechanism:
    """Settings of one mechanism. Everything here is public; nothing may depend on a site's images."""

    kind: Literal["release", "per-example", "paper-experiment", "dp-sgd"]
    sigma: float  # noise multiplier
    clip: (
        float  # C: bound on a record's embedding (release) or gradient (per-example, dp-sgd; per class in the paper's)
    )
    composition: Composition  # of one participation
    delta: float = 1e-5
    kappa: float = 1.0  # release: what a record adds to the count coordinate
    num_nets: int = 1  # release: perturbed networks under which records are embedded
    threshold: float = 3.0  # release: deviations of the noised count below which a class is not uploaded
    typical_count: float = 1.0  # public guess of a site's images per class, in the place of the true number
    mean_grid: int = 8  # release, start coloured: side of the mean picture
    covariance_grid: int = 4  # and of the picture whose covariance is released
    covariance_weight: float = 1.0
    reuses: bool = False  # dp-sgd: the method trains again on records of earlier tasks
    # These are not hashed into the question (digest): a change of them does not entitle the server to a second release.
    sends_sums: bool = field(default=False, repr=False)  # release: instead of surrogates
    centred: bool = field(default=False, repr=False)  # release: around what earlier releases tell of a class
    pooled: bool = field(default=False, repr=False)  # release: the server adds up the sites' sums before it uses them
    covariance_colour: bool = field(
        default=False, repr=False
    )  # release, start coloured: joins the question where it is on
    honest_sites: int | None = field(default=None, repr=False)  # H: a secure sum needs noise of so many sites
    late_alone: bool = field(default=False, repr=False)  # a site that missed a sum adds the whole noise by itself

    @property
    def formal(self) -> bool:
        """Whether it promises an epsilon."""
        return self.kind in FORMAL

    @property
    def sensitivity(self) -> float:
        """Largest change of the noised quantity when one record comes or goes."""
        return release_bound(self.clip, self.kappa) if self.kind == "release" else self.clip

    @property
    def share(self) -> float:
        """The part of the noise's deviation that one site adds: 1, or 1 / sqrt(H) under a secure sum of H honest sites."""
        return 1.0 if self.honest_sites is None else self.honest_sites**-0.5

    @property
    def deviation(self) -> float:
        """Standard deviation of a site's noise on each coordinate."""
        return self.sigma * self.sensitivity * self.share

    @property
    def replaced(self) -> float:
        """Largest change of the noised quantity when one record takes another's place.

        With another label it leaves one class and enters another: at most sqrt(2) times the sensitivity. What classes share
        are second moments, and two of these never point in opposite directions. With the same label its count stays, and its
        clipped part may turn round: 2 C. A gradient has no class of its own: 2 C again.
        """
        return max(math.sqrt(2) * self.sensitivity, 2 * self.clip)

    @property
    def step(self) -> float:
        """Of the grid on which sums are noised: 2^-30 of the noise or of a record's part, as a power of two.

        So a million coordinates of a record, each rounded, add a millionth to its part. A 64-bit number that overflows wraps
        around. That is post-processing of the noised number: it costs accuracy, not privacy.
        """
        fine = min(self.sensitivity, self.deviation) * 2.0**-30
        return float(2.0 ** math.floor(math.log2(max(fine, self.sensitivity * 2.0**-56))))

    def steps(self, num_coordinates: int) -> float:
        """Standard deviation of a site's noise in steps, if a record enters so many coordinates.

        Rounding moves two neighbouring sums apart by at most a step on each coordinate. The noise grows with that, so epsilon stays.
        """
        return self.sigma * self.share * (self.sensitivity * (1 + ARITHMETIC) / self.step + math.sqrt(num_coordinates))

    def noised(self, units: Tensor, noise: Noise) -> Tensor:
        """Sums in whole steps [..., d] of which a record enters one row, with discrete noise: float64 on the CPU.

        Noise is whole too, so what comes out is a function of whole numbers that every data set can give.
        """
        units = units.cpu()
        if not self.sigma:  # an audit's broken site
            return units.double() * self.step
        deviation = self.steps(units.shape[-1])
        check_grid(deviation, units.numel())
        return (units + discrete_gaussian(units.numel(), deviation, noise).reshape(units.shape)).double() * self.step

    @property
    def least_count(self) -> float:
        """Noised count below which a class is suppressed."""
        return self.threshold * self.deviation / self.kappa


@dataclass(frozen=True, eq=False)
class SitePrivacy:
    """A client at one place in time, as its mechanism sees it. Without a ledger (tests) every call draws afresh."""

    mechanism: Mechanism
    noise: Noise
    run: str = ""
    task: int = 0
    round: int = 0
    max_participations: int | None = None
    ledger: Ledger | None = None
    images: Callable[[], Touched] | None = None  # those that its release touches; None: any image of the site
    why: str = ""  # what the server asked for

    def alone(self) -> SitePrivacy:
        """The same site outside of a secure sum, where it adds the whole noise by itself.

        Such a release has a place of its own in the task. A site that made one for the sum has spent its participation on that
        and declines.
        """
        return replace(self, mechanism=replace(self.mechanism, honest_sites=None), round=self.round + 1)

    def noised_rows(self, rows: Tensor) -> Tensor:
        """Rows [n, d] clipped to C with noise on every number, for the paper's experiment. It certifies nothing."""
        return clip_rows(rows, self.mechanism.clip) + self.mechanism.deviation * self.noise.normal(*rows.shape).to(
            rows.device
        )

    def release(self, question: str, draw: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """What ``draw`` gives, once: the same place in the same run gets the very same numbers again.

        Raises Declined when the budget is spent. ``question`` identifies what the server asked (:func:`digest`).
        """
        if self.ledger is None:
            return draw()
        m = self.mechanism
        steps, rate = m.composition.steps, m.composition.rate
        charge = Charge(self.run, self.task, self.round, m.kind, m.sigma, steps, rate, m.reuses, why=self.why)
        touched = None if m.reuses or self.images is None else self.images()  # the memory may hold any earlier image
        return self.ledger.once(charge, question, m.delta, self.max_participations, draw, touched)

    def answer(self, question: str, draw: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor] | None:
        """As :meth:`release`; None, and a warning, when the site declines."""
        try:
            return self.release(question, draw)
        except Declined as refusal:
            warnings.warn(ResceneWarning("W310", refusal.what), stacklevel=2)
            return None


def digest(state: Iterable[tuple[str, Tensor]], *more: object) -> str:
    """A fingerprint of a model and whatever else defines the question a server asks.

    A release with a share of the noise answers no question for the whole noise: it must not leave outside a secure sum.
    """
    shared = [part.honest_sites for part in more if isinstance(part, Mechanism) and part.honest_sites is not None]
    found = hashlib.sha256(repr((*more, *shared)).encode())
    for name, value in state:
        found.update(name.encode())
        found.update(value.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def refuse_batch_statistics(net: nn.Module, asked: bool = False) -> None:
    """BatchNorm in train mode mixes the images of a batch: no record has an embedding of its own, so no clip bounds it.

    ``asked``: whether a setting asks for train mode.
    """
    for name, module in net.named_modules():
        in_train_mode = asked or module.training or getattr(module, "running_mean", None) is None
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and in_train_mode:
            raise ConfigError(
                "E175",
                "BatchNorm in train mode cannot be used under a privacy mechanism",
                where=name,
                why="an image's embedding would depend on the other images of its batch, so clipping bounds nobody's part",
                fix="net.eval() with the server's statistics (method.norm_statistics=server), or model.norm=group",
            )


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
