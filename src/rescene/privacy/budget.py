"""What charges add up to for the most-used image, and what a site allows at most.

An image's total counts every charge that touches it, whatever run, task or round the server called it. A charge that does not
say which images it touches counts for all of them. A floor with ``one_budget`` counts every charge for all of them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from rescene.core.errors import ResceneError
from rescene.privacy.accounting import Composition, total_epsilon
from rescene.privacy.ledger_file import EVALUATION, Charge

EXPONENT = re.compile(r"[0-9.]+[eE][-+]?[0-9]+")
DELTA = 1e-5  # where neither a charge nor a floor says one
Listed = Mapping[str | None, frozenset[str] | None]  # name of a charge's list -> its images; None: every image


class Declined(ResceneError):
    """The site does not take part this time (E413): its budget is spent or its floor is above what was asked."""


class Floor(BaseModel):
    """What the site allows at most, whatever the server says. null: no limit of its own.

    A site with a floor sends nothing without a mechanism, and nothing above these limits.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    epsilon_max: float | None = Field(None, gt=0, description="over all runs, for every image")
    min_sigma: float | None = Field(None, gt=0, description="least noise multiplier")
    max_participations: int | None = Field(None, ge=1, description="in one task")
    delta_max: float = Field(DELTA, gt=0, lt=1, description="largest delta at which epsilon is reckoned")
    evaluation_sigma: float | None = Field(
        None,
        gt=0,
        description="noise multiplier at which the site tells counts of its hold-out, each time charged to those images "
        "within epsilon_max; null: it declines to evaluate",
    )
    one_budget: bool | None = Field(
        None,
        description="true: every release counts for every image of the site, so whether it declines depends on no image; "
        "null: for the images that it touches",
    )

    @field_validator("*", mode="before")
    @classmethod
    def _exponents(cls, value: Any) -> Any:
        """YAML reads 1e-5 as text. Other text, such as a number in quotes, is refused."""
        return float(value) if isinstance(value, str) and EXPONENT.fullmatch(value) else value

    def words(self) -> str:
        """The limits in words, for messages."""
        limits = self.model_dump(exclude_none=True, exclude={"one_budget"})
        words = [f"{name} {value:g}" for name, value in limits.items()]
        return ", ".join([*words, "one budget for all images"] if self.one_budget else words)


def check_budget(
    charge: Charge, earlier: list[Charge], floor: Floor | None, delta: float, most: int | None, listed: Listed
) -> None:
    """Whether the charge may be added; else Declined. Its words depend on the question and the floor, not on images.

    *That* it declines tells whether these images are among those of earlier charges, unless the floor has one budget for all.
    """
    floor = floor or Floor(delta_max=delta)
    if charge.mechanism != EVALUATION:
        same = [c for c in earlier if (c.run, c.task) == (charge.run, charge.task) and c.mechanism != EVALUATION]
        limits = [limit for limit in (most, floor.max_participations) if limit is not None]
        if limits and len(same) >= min(limits):
            raise declined(charge, f"{len(same)} participations in this task are all it allows")
    if floor.min_sigma is not None and charge.sigma < floor.min_sigma:
        raise declined(charge, f"noise multiplier {charge.sigma:g} is below its floor {floor.min_sigma:g}")
    if delta > floor.delta_max:
        raise declined(charge, f"delta {delta:g} is above its limit {floor.delta_max:g}")
    if floor.epsilon_max is None:
        return
    if charge.mechanism == "paper-experiment":
        raise declined(charge, "the paper's experiment promises no epsilon, and this site has a limit on it")
    if largest_total([*earlier, charge], counted(listed, floor), delta, touched_by=charge) > floor.epsilon_max:
        raise declined(charge, f"epsilon would be above its limit {floor.epsilon_max:g}")


def declined(charge: Charge, why: str) -> Declined:
    """The error by which a site refuses a charge (E413)."""
    round = f", round {charge.round + 1}" if charge.round >= 0 else ""  # people count from 1
    return Declined("E413", f"site declines: {why}", where=f"task {charge.task + 1}{round}")


def counted(listed: Listed, floor: Floor | None) -> Listed:
    """The images for which each charge counts: those it touches, or with one budget every image."""
    return dict.fromkeys(listed) if floor is not None and floor.one_budget else listed


def largest_total(charges: Iterable[Charge], listed: Listed, delta: float, touched_by: Charge | None = None) -> float:
    """Epsilon of the image that these charges touch most; ``touched_by``: among the images of this charge."""
    by_list: dict[str | None, Counter[tuple[float, float]]] = defaultdict(Counter)
    for charge in charges:
        by_list[charge.images][charge.sigma, charge.rate] += charge.steps
    histories: dict[str, list[str | None]] = defaultdict(list)
    for name in by_list:
        for image in listed[name] or ():
            histories[image].append(name)
    own = None if touched_by is None else listed[touched_by.images]
    looked_at = histories if own is None else {image: histories[image] for image in own}
    distinct = {tuple(history) for history in looked_at.values()}
    if touched_by is not None and own is not None:
        distinct.add((touched_by.images,))  # an image that is in no other list, whether there is one or not
    everywhere = [name for name in by_list if listed[name] is None]
    totals = [sum((by_list[name] for name in (*everywhere, *history)), Counter()) for history in distinct or {()}]
    return max(_epsilon(tuple(sorted(total.items())), delta) for total in totals)


@lru_cache(maxsize=4096)
def _epsilon(steps: tuple[tuple[tuple[float, float], int], ...], delta: float) -> float:
    return total_epsilon([(sigma, Composition(n, 1, rate)) for (sigma, rate), n in steps], delta) if steps else 0.0
