"""What stands between a site's images and its upload: a mechanism that knows its sensitivity, and the site it acts for."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from rescene.errors import ConfigError, ResceneWarning
from rescene.functional.release import release_bound
from rescene.privacy.accounting import Composition
from rescene.privacy.ledger import Charge, Declined, Ledger, Touched
from rescene.privacy.noise import Noise

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
    # no part of the question (digest): whatever is sent of a release, and whatever the centre, the first answer stands
    sends_sums: bool = field(default=False, repr=False)  # release: instead of surrogates
    centred: bool = field(default=False, repr=False)  # release: around what earlier releases tell of a class
    pooled: bool = field(default=False, repr=False)  # release: the server adds up the sites' sums before it uses them
    covariance_colour: bool = field(
        default=False, repr=False
    )  # release, start coloured: joins the question where it is on

    @property
    def formal(self) -> bool:
        """Whether it promises an epsilon."""
        return self.kind in FORMAL

    @property
    def sensitivity(self) -> float:
        """Largest change of the noised quantity when one record comes or goes."""
        return release_bound(self.clip, self.kappa) if self.kind == "release" else self.clip

    @property
    def deviation(self) -> float:
        """Standard deviation of the noise on each coordinate."""
        return self.sigma * self.sensitivity

    @property
    def least_count(self) -> float:
        """Noised count below which a class is suppressed."""
        return self.threshold * self.deviation / self.kappa


@dataclass(frozen=True, eq=False)
class Site:
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
    """A fingerprint of a model and whatever else defines the question a server asks."""
    found = hashlib.sha256(repr(more).encode())
    for name, value in state:
        found.update(name.encode())
        found.update(value.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def refuse_batch_statistics(net: nn.Module) -> None:
    """BatchNorm in train mode mixes the images of a batch: no record has an embedding of its own, so no clip bounds it."""
    for name, module in net.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
            raise ConfigError(
                "E175",
                "BatchNorm in train mode cannot be used under a privacy mechanism",
                where=name,
                why="an image's embedding would depend on the other images of its batch, so clipping bounds nobody's part",
                fix="net.eval() with the server's statistics, or model.norm=group",
            )
