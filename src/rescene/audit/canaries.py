"""The one-run audit: canaries that are among a site's images or not, by a coin each, and an attacker who guesses the coins.

The attacker is the strongest that the guarantee speaks of. It knows every other image, the canary itself, the network and all seeds
but the privacy noise, and sees what the ledger holds (for a release the noised sums, more than the server ever gets).

    replay  work out what the site would release with and without the canary: which is nearer to what was seen?
    look    the distance of the canary to the nearest uploaded picture of its class; needs no knowledge at all
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from rescene.audit.stage import At, Seen, Stage, uploads
from rescene.privacy.epsilon_bounds import bounds

ATTACKS = ("replay", "look")
FEW, MANY = 2, 10  # other images of the class at a canary's site; even, so that half of them is as many with the canary
GIANT = 1e3  # how much brighter than a photograph the worst canary is


@dataclass(frozen=True, eq=False)
class Plan:
    """Which canary lies where: canary i belongs to site i // classes and is of class i % classes."""

    canaries: Tensor  # [m] positions
    labels: list[int]  # [m]
    included: Tensor  # [m] the coins
    companions: list[Tensor]  # by site
    factor: Tensor | None  # by position

    def held(self, included: Tensor) -> list[Tensor]:
        """The images of each site if these canaries are in."""
        own = zip(self.canaries.chunk(len(self.companions)), included.chunk(len(self.companions)), strict=True)
        return [torch.cat([a, c[i]]) for a, (c, i) in zip(self.companions, own, strict=True)]


def plan(stage: Stage, num_canaries: int, giant: bool, companions: int) -> Plan:
    """Canaries are photographs that no site had, or giants; as many as fill whole sites."""
    classes = stage.task.classes
    num_sites = math.ceil(num_canaries / len(classes))
    generator = stage.rng.at("canaries", int(giant)).generator()

    def drawn(pool: Tensor, count: int) -> Tensor:
        """Without repetition as long as there are enough."""
        rounds = math.ceil(count / len(pool))
        return pool[torch.cat([torch.randperm(len(pool), generator=generator) for _ in range(rounds)])[:count]]

    canaries = torch.stack([drawn(stage.strangers[c], num_sites) for c in classes], dim=1).flatten()
    around = [torch.cat([drawn(stage.known[c], companions) for c in classes]) for _ in range(num_sites)]
    factor = None
    if giant:
        factor = torch.ones(len(stage.images), device=canaries.device)
        factor[canaries] = GIANT
    coins = torch.rand(len(canaries), generator=generator) < 0.5
    return Plan(canaries, list(classes) * num_sites, coins.to(canaries.device), around, factor)


def rankings(
    stage: Stage,
    plan: Plan,
    real: At,
    imagined: At,
    attacks: Sequence[str] = ATTACKS,
    participations: int = 1,
    retries: int = 1,
) -> dict[str, Tensor]:
    """Scores [m] of these attacks over all participations; above 0: in. ``retries``: how often each round is asked.

    The pictures after a release are looked at once: they are costly, and made of the sums, which are looked at every time.
    """
    scores = {"replay": torch.zeros(len(plan.labels), dtype=torch.float64)}
    scores["look"] = torch.full_like(scores["replay"], -torch.inf)
    for turn in range(participations):
        answers = [
            uploads(stage, plan.held(plan.included), real, turn, plan.factor, "look" in attacks and not turn + again)
            for again in range(retries)
        ]
        if "replay" in attacks:
            scores["replay"] += _replay(stage, plan, answers, imagined, turn)
        if "look" in attacks and (not turn or not answers[0][0].sums):
            scores["look"] = torch.maximum(scores["look"], _look(stage, plan, answers[0]))
    return {name: _centred(scores[name]) if name == "look" else scores[name] for name in attacks}


def _replay(stage: Stage, plan: Plan, answers: Sequence[list[Seen]], imagined: At, turn: int) -> Tensor:
    everyone = torch.ones_like(plan.included)
    inside, outside = (
        uploads(stage, plan.held(who), imagined, turn, plan.factor, False) for who in (everyone, ~everyone)
    )
    found = []
    for i, label in enumerate(plan.labels):
        k = i // len(stage.task.classes)
        seen = _mean([answer[k].of(label) for answer in answers])
        found.append(_nearer(seen, inside[k].of(label), outside[k].of(label)))
    return torch.tensor(found, dtype=torch.float64)


def _look(stage: Stage, plan: Plan, answer: list[Seen]) -> Tensor:
    canaries = stage.transform.normalise(stage.images.pixels[plan.canaries])
    found = []
    for i, (label, canary) in enumerate(zip(plan.labels, canaries, strict=True)):
        seen = answer[i // len(stage.task.classes)]
        own = seen.images[seen.labels == label]
        found.append(-float((own - canary).square().flatten(1).mean(dim=1).min()) if len(own) else -math.inf)
    return torch.tensor(found, dtype=torch.float64)


def _centred(likeness: Tensor) -> Tensor:
    """Without knowledge of what to expect, the more alike half is guessed in; no picture, no guess."""
    there = torch.isfinite(likeness)
    return torch.where(there, likeness - likeness[there].median(), 0.0) if there.any() else torch.zeros_like(likeness)


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    """Repeated answers averaged; answers of different shapes cannot be."""
    same = [t.double() for t in tensors if t.shape == tensors[0].shape]
    return torch.stack(same).mean(dim=0)


def _nearer(seen: Tensor, inside: Tensor, outside: Tensor) -> float:
    """How much nearer to the world with the canary: under Gaussian noise the log-likelihood ratio, but for a factor."""

    def distance(world: Tensor) -> float:
        return float((seen - world).square().sum()) if seen.shape == world.shape else math.inf

    difference = distance(outside) - distance(inside)
    return 0.0 if math.isnan(difference) else difference


def canary_audit(
    stage: Stage, real: At, imagined: At, delta: float, num_canaries: int, participations: int = 1
) -> list[dict[str, Any]]:
    """One row for each kind of canary and attack; all bounds hold together at 95 %.

    A mechanism is tested with giants too, which its clip must hold, and with few other images, which the attacker knows anyway.
    """
    guarded = real(0, 0) is not None
    attacks: dict[str, tuple[Tensor, Tensor]] = {}
    for kind in ("photograph", "giant")[: 1 + guarded]:
        placed = plan(stage, num_canaries, kind == "giant", FEW if guarded else MANY)
        used = ATTACKS if kind == "photograph" else ATTACKS[:1]
        found = rankings(stage, placed, real, imagined, used, participations)
        attacks |= {f"{kind}, {attack}": (scores, placed.included.cpu()) for attack, scores in found.items()}
    return [{"attack": name, **asdict(bound)} for name, bound in bounds(attacks, delta).items()]
