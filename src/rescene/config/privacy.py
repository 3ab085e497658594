"""The recipe's privacy section: which mechanism stands between images and uploads, and what it adds up to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rescene.privacy.accounting import NEIGHBOURS, Composition, check_target, epsilon_of, sigma_for
from rescene.privacy.mechanism import FORMAL, Mechanism


class PrivacySection(BaseModel):
    """Public settings; a site's own limits are not here but beside its ledger, where no server reaches them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    mechanism: Literal["none", "release", "per-example", "paper-experiment", "dp-sgd"] = Field(
        "none",
        description="none: no guarantee; release: one noised sum per class and participation; per-example: the paper's "
        "proposition; paper-experiment: the paper's runs, which certify nothing; dp-sgd: for methods that send weights",
    )
    noise_multiplier: float | None = Field(None, ge=0, description="sigma: deviation of the noise / sensitivity")
    epsilon: float | None = Field(None, gt=0, description="target for the whole run, in the place of noise_multiplier")
    delta: float = Field(1e-5, gt=0, lt=1, description="must stay below 1 / training images")
    clip: float = Field(
        5.0, gt=0, description="C: bound on a record's embedding (release) or gradient (per-example, dp-sgd)"
    )
    max_participations: int | None = Field(
        None, ge=1, description="a site takes part at most this often in a task, then declines; null: every round"
    )
    count_weight: float = Field(
        0.33, gt=0, description="release: kappa / C; a third costs 5 % more noise for a count within 3.2 sigma images"
    )
    num_nets: int = Field(5, ge=1, description="release: perturbed networks under which a record is embedded")
    threshold: float = Field(
        3.0, ge=0, description="release: classes with a noised count below this many deviations stay home"
    )
    mean_grid: int = Field(8, ge=1, description="release, start coloured: cells along a side of the mean picture")
    covariance_grid: int = Field(4, ge=1, le=8, description="release, start coloured: the same for its covariance")
    covariance_weight: float = Field(1.0, gt=0, description="release, start coloured: size of the second moments")
    covariance_colour: bool | None = Field(
        None, description="release, start coloured: covariance of all channels instead of the grey picture; null: false"
    )
    send: Literal["surrogates", "sums"] | None = Field(
        None,
        description="release: what leaves a site; sums: the noised sums, condensed on the server; null: surrogates",
    )
    centre: Literal["none", "released"] | None = Field(
        None,
        description="release: clip around 0, or around a class's mean in earlier releases, broadcast by the server; null: none",
    )
    pool: bool | None = Field(
        None,
        description="release, send sums, start coloured: surrogates are drawn from the sum of all sites' sums; null: false",
    )
    honest_sites: int | None = Field(
        None,
        ge=2,
        description="release: H; the server learns only sums over sites, and each site adds noise of deviation sigma / sqrt(H): "
        "H honest sites must be in every sum; null: each site adds the whole noise and trusts no other site",
    )
    sampling_rate: float = Field(1.0, gt=0, le=1, description="per-example, dp-sgd: a record's chance to enter a step")
    typical_count: float = Field(
        100.0,
        gt=0,
        description="per-example, dp-sgd: public guess of a site's images per class; the true number is private",
    )
    noise: Literal["os", "seeded"] = Field(
        "os", description="os: the operating system's entropy; seeded: test mode, protects nobody"
    )

    @model_validator(mode="after")
    def _one_way_to_say_how_much(self) -> PrivacySection:
        if self.send == "sums" and self.mechanism != "release":
            raise ValueError(
                f"send: under mechanism {self.mechanism} there are no noised sums to send; "
                "privacy.mechanism=release, or privacy.send=surrogates"
            )
        if self.centre == "released" and self.send != "sums":
            raise ValueError("centre: only sums can be taken around a centre from the server; privacy.send=sums")
        if self.pool and self.send != "sums":
            raise ValueError("pool: only sums can be added up on the server; privacy.send=sums")
        if self.honest_sites is not None and self.mechanism != "release":
            raise ValueError(
                f"honest_sites: under mechanism {self.mechanism} there are no noised sums to add up; "
                "privacy.mechanism=release, or privacy.honest_sites=null"
            )
        if self.mechanism == "none":
            return self
        if self.mechanism == "paper-experiment":
            if self.epsilon is not None:
                raise ValueError(
                    "epsilon: the paper's experiment certifies none; give noise_multiplier, or use release"
                )
            if self.noise_multiplier is None:
                raise ValueError("noise_multiplier is missing; the paper uses 0, 1, 3 and 5")
        elif (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("give either noise_multiplier (sigma) or epsilon, for instance privacy.epsilon=8")
        elif self.noise_multiplier == 0:
            raise ValueError("noise_multiplier 0 adds no noise, so nothing is private; mechanism none says so plainly")
        return self


@dataclass(frozen=True)
class Promise:
    """What a recipe's mechanism guarantees for one record over the whole run. Empirical mechanisms have no epsilon."""

    mechanism: Mechanism
    composition: Composition
    delta: float
    test_mode: bool

    @property
    def formal(self) -> bool:
        return self.mechanism.kind in FORMAL and not self.test_mode

    def epsilon(self) -> float | None:
        return epsilon_of(self.mechanism.sigma, self.composition, self.delta) if self.formal else None

    def epsilon_per_round(self) -> float | None:
        """Of one participation, which is one upload."""
        each = self.mechanism.composition
        return epsilon_of(self.mechanism.sigma, each, self.delta) if self.formal else None

    def words(self) -> str:
        sigma = self.mechanism.sigma
        if self.mechanism.kind not in FORMAL:
            return f"Not private: the paper's experiment (sigma = {sigma:g}) is empirical and certifies nothing."
        if self.test_mode:
            return "Not private: test mode, the noise comes from the run's seed, which the server knows."
        return (
            f"({self.epsilon():.2f}, {self.delta:g})-differentially private for each record over the whole run, "
            f"with noise multiplier {sigma:.4g}."
        )

    def reasons(self) -> str:
        return f"Neighbours: {NEIGHBOURS}. Composition: {self.composition.words()}."


def promise_of(
    privacy: PrivacySection, num_rounds: int, num_steps: int, image_clip: float | None = None, num_tasks: int = 1
) -> Promise | None:
    """The mechanism with its noise multiplier worked out, and its composition; None without a mechanism.

    A record is used by the ``num_rounds`` rounds of a task at most, fewer if participations are capped, and in
    ``num_tasks`` tasks: 1, unless the method trains on it again.
    """
    kind = privacy.mechanism
    if kind == "none":
        return None
    sampled = kind in ("per-example", "dp-sgd")
    each = Composition(num_steps, 1, privacy.sampling_rate) if sampled else Composition(1, 1)
    participations = min(privacy.max_participations or num_rounds, num_rounds)
    whole = Composition(each.steps, participations, each.rate, num_tasks)
    sigma = privacy.noise_multiplier
    if sigma is None:
        assert privacy.epsilon is not None  # the section is validated
        sigma = sigma_for(privacy.epsilon, whole, privacy.delta)
    clip = privacy.clip if kind in FORMAL else float(image_clip or privacy.clip)
    mechanism = Mechanism(
        kind, sigma, clip, each, privacy.delta, privacy.count_weight * clip, privacy.num_nets, privacy.threshold,
        privacy.typical_count, privacy.mean_grid, privacy.covariance_grid, privacy.covariance_weight, num_tasks > 1,
        privacy.send == "sums", privacy.centre == "released", bool(privacy.pool), bool(privacy.covariance_colour),
        privacy.honest_sites,
    )  # fmt: skip
    return Promise(mechanism, whole, privacy.delta, privacy.noise == "seeded")


def check_records(promise: Promise | None, num_records: int) -> None:
    """delta must say something about a data set of this size."""
    if promise is not None and promise.mechanism.kind in FORMAL:
        check_target(delta=promise.delta, num_records=num_records)
