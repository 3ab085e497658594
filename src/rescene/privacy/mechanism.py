"""What stands between a site's images and its upload: clipped sums, a mechanism that knows their sensitivity, the site it acts for.

What is noised once and then used freely is one clipped sum per class, with a count in its last coordinate:

    psi(x)  embedding of a record        C      bound on its part        kappa  what a record adds to the count coordinate
    u(x) = (clip_C(psi(x) - a_c), kappa) ||u|| <= D = sqrt(C^2 + kappa^2): adding or removing a record moves one sum by that
    a_c     centre of the class, 0 or anything that was public before the noise is drawn: the bound holds for every a_c

Sums are whole numbers of grid steps, each record's part rounded by itself, so no order of adding changes them.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor, nn

from rescene.core.errors import ConfigError, ResceneWarning
from rescene.privacy.accounting import Composition, check_grid, least_deviation
from rescene.privacy.ledger import Charge, Declined, Ledger, Touched
from rescene.privacy.noise import Noise, discrete_gaussian

ARITHMETIC = 2.0**-10  # room for float32: images of one batch may change each other's last digits
FORMAL = ("release", "per-example", "dp-sgd")  # these promise an epsilon; "paper-experiment" promises nothing
TAIL = 9.0  # deviations; noise exceeds them once in 10^18 numbers


def clip_rows(rows: Tensor, max_norm: float) -> Tensor:
    """Each row scaled to norm at most ``max_norm``, in float64; a row that is not finite becomes 0, so the bound holds for any input.

    >>> rows = clip_rows(torch.tensor([[3., 4.], [0.3, 0.4], [torch.inf, 0.]]), 1.0)
    >>> [round(norm, 6) for norm in rows.norm(dim=1).tolist()]
    [1.0, 0.5, 0.0]
    """
    rows = rows.double()
    largest = rows.abs().amax(dim=1, keepdim=True) if rows.shape[1] else rows.new_zeros(len(rows), 1)
    finite = torch.isfinite(largest)
    rows = torch.where(finite, rows, 0.0)
    unit = torch.where(finite & (largest > 0), largest, 1.0)
    norms = unit * (rows / unit).square().sum(dim=1, keepdim=True).sqrt()  # squares of huge entries would overflow
    return rows * (max_norm / norms.clamp(min=max_norm))


def class_sums(
    psi: Tensor, groups: Tensor, num_groups: int, clip: float, kappa: float, step: float, centre: Tensor | None = None
) -> Tensor:
    """Sum of u(x) over each group in whole steps: psi [n, d], groups [n], centre [num_groups, d] -> int64 [num_groups, d + 1].

    An empty group has sum 0.
    """
    psi = psi if centre is None else psi.double() - centre.double()[groups]
    u = torch.cat([clip_rows(psi, clip), torch.full((len(psi), 1), kappa, dtype=torch.float64, device=psi.device)], 1)
    units = in_steps(u, step)
    return units.new_zeros(num_groups, units.shape[1]).index_add(0, groups, units)


def in_steps(rows: Tensor, step: float) -> Tensor:
    """Rounded to whole steps, int64.

    >>> in_steps(torch.tensor([0.3, -1.0]), 0.25).tolist()
    [1, -4]
    """
    return (rows.double() / step).round().long()


def moved_back(sums: Tensor, centre: Tensor, kappa: float) -> Tensor:
    """Noised sums around no centre, from those around one: a_c once for every record that the noised count tells of."""
    counts = sums[:, -1:] / kappa
    return torch.cat([sums[:, :-1] + counts * centre.to(sums), sums[:, -1:]], 1)


def honest_sums(
    sums: Tensor, clip: float, kappa: float, deviation: float, least: float, centre: Tensor | None = None
) -> bool:
    """Whether a site that follows the protocol could have sent these noised sums [g, d + 1] as not suppressed.

    Noise is taken to be at most ``TAIL`` deviations. So the true count is at most the noised one plus so many deviations,
    and no coordinate of the sum exceeds what so many clipped records and the noise add up to. The centre may be that of an
    earlier round, so it counts twice.
    """
    sums = sums.double()
    tail = TAIL * deviation
    reach = clip + (0.0 if centre is None else 2 * float(centre.abs().max()))
    most = (sums[:, -1:].abs() + tail) / kappa * reach + tail
    return bool(noised_means(sums, kappa, least)[1].all()) and bool((sums[:, :-1].abs() <= most).all())


def noised_means(sums: Tensor, kappa: float, least: float) -> tuple[Tensor, Tensor]:
    """From noised sums to means: ([g, d], which groups have a noised count of at least ``least`` [g]).

    Post-processing: it looks at nothing but the noised sums. Rows of groups below the threshold carry no meaning.
    """
    counts = sums[:, -1] / kappa
    return sums[:, :-1] / counts.clamp(min=1.0).unsqueeze(1), (counts >= least) & (counts >= 1.0)


@dataclass(frozen=True)
class Mechanism:
    """Settings of one mechanism. Everything here is public; nothing may depend on a site's images."""

    kind: Literal["release", "per-example", "paper-experiment", "dp-sgd"]
    sigma: float  # noise multiplier
    clip: float  # C: bound on a record's embedding (release) or gradient (others; per class in the paper's experiment)
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
    covariance_colour: bool = field(default=False, repr=False)  # start coloured: joins the question where it is on
    honest_sites: int | None = field(default=None, repr=False)  # H: a secure sum needs noise of so many sites
    late_alone: bool = field(default=False, repr=False)  # a site that missed a sum adds the whole noise by itself

    @property
    def formal(self) -> bool:
        """Whether it promises an epsilon."""
        return self.kind in FORMAL

    @property
    def sensitivity(self) -> float:
        """Largest change of the noised quantity when one record comes or goes."""
        return math.hypot(self.clip, self.kappa) if self.kind == "release" else self.clip

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


def noised_counts(counts: Tensor, sigma: float, noise: Noise) -> Tensor:
    """Counts of images [kinds, classes] behind discrete Gaussian noise, rounded to whole images again; they may be negative.

    The grid is so fine that the accountant's cost of a grid (``check_grid``) covers the noise.
    """
    deviation = count_deviation(sigma, len(counts))
    grid = math.ceil(least_deviation(counts.numel()) / deviation)  # steps to one image
    check_grid(grid * deviation, counts.numel())
    drawn = discrete_gaussian(counts.numel(), grid * deviation, noise).reshape(counts.shape)
    return (counts * grid + drawn + grid // 2).div(grid, rounding_mode="floor")


def count_deviation(sigma: float, num_kinds: int) -> float:
    """Deviation of the noise, in images. An image adds at most 1 to one count of each kind: the sensitivity is sqrt(num_kinds).

    >>> count_deviation(2.0, 4)
    4.0
    """
    return sigma * math.sqrt(num_kinds)
