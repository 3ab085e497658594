"""The recipe's privacy section: which mechanism stands between images and uploads. What it promises: ``privacy.promise``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rescene.core.hyperparameters import Section
from rescene.privacy.accounting import Composition
from rescene.privacy.mechanism import FORMAL, Mechanism
from rescene.privacy.promise import Promise, multiplier_of


class PrivacySection(Section):
    """Public settings; a site's own limits are not here but beside its ledger, where no server reaches them."""

    mechanism: Literal["none", "release", "per-example", "paper-experiment", "dp-sgd"] = Field(
        "none",
        description="none: no guarantee; release: one noised sum per class and participation; per-example: the paper's "
        "proposition; paper-experiment: the paper's runs, which certify nothing; dp-sgd: for methods that send weights",
    )
    noise_multiplier: float | None = Field(
        None, ge=0, description="sigma: standard deviation of the noise, divided by the sensitivity"
    )
    epsilon: float | None = Field(
        None, gt=0, description="epsilon of the whole run; the noise multiplier is computed from it"
    )
    delta: float = Field(
        1e-5, gt=0, lt=1, description="delta of the whole run; must be below 1 / (number of training images)"
    )
    clip: float = Field(
        5.0, gt=0, description="C: bound on a record's embedding (release) or gradient (per-example, dp-sgd)"
    )
    max_participations: int | None = Field(
        None, ge=1, description="how often a site takes part in a task at most, then it declines; null: every round"
    )
    count_weight: float = Field(
        0.33,
        gt=0,
        description="release: weight of an image's count against its embedding (kappa / C); 0.33 costs 5 % more noise",
    )
    num_nets: int = Field(5, ge=1, description="release: perturbed networks under which a record is embedded")
    threshold: float = Field(
        3.0, ge=0, description="release: a class is not sent if its noised count is below this many standard deviations"
    )
    mean_grid: int = Field(8, ge=1, description="release, start coloured: cells along a side of the mean picture")
    covariance_grid: int = Field(
        4,
        ge=1,
        le=8,
        description="release, start coloured: cells along a side of the picture that the covariance is taken of",
    )
    covariance_weight: float = Field(
        1.0, gt=0, description="release, start coloured: weight of the second moments against the means"
    )
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
        description="release: H; the server learns only sums over sites, each site adds noise of standard deviation sigma / sqrt(H), "
        "and every sum must include H honest sites; null: each site adds the whole noise and trusts no other site",
    )
    late: Literal["wait", "alone"] | None = Field(
        None,
        description="honest_sites: a site that missed the sum of a task waits until enough late sites form a sum of their own, "
        "or sends its release alone with the whole noise; null: wait",
    )
    earlier_sums: int | None = Field(
        None,
        ge=1,
        description="honest_sites: how many sums of the same images were opened before a site withdrew; rescene forget writes it, "
        "and epsilon counts them; null: none",
    )
    sampling_rate: float = Field(1.0, gt=0, le=1, description="per-example, dp-sgd: chance that an image is in a step")
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
        for name in ("late", "earlier_sums"):
            if self.honest_sites is None and getattr(self, name) is not None:
                raise ValueError(f"{name}: there is no secure sum; privacy.honest_sites=3, or privacy.{name}=null")
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
    sigma = multiplier_of(privacy.noise_multiplier, privacy.epsilon, whole, privacy.delta)
    clip = privacy.clip if kind in FORMAL else float(image_clip or privacy.clip)
    mechanism = Mechanism(
        kind, sigma, clip, each, privacy.delta, privacy.count_weight * clip, privacy.num_nets, privacy.threshold,
        privacy.typical_count, privacy.mean_grid, privacy.covariance_grid, privacy.covariance_weight, num_tasks > 1,
        privacy.send == "sums", privacy.centre == "released", bool(privacy.pool), bool(privacy.covariance_colour),
        privacy.honest_sites, privacy.late == "alone",
    )  # fmt: skip
    return Promise(mechanism, whole, privacy.delta, privacy.noise == "seeded", privacy.earlier_sums or 0)
