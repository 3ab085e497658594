"""Positive controls: five ways to break privacy on purpose. An audit that does not notice them notices nothing.

Each broken site claims the same epsilon as its sound twin. The control has fired if the attack refutes the broken one's claim
and does not refute the twin's.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rescene.audit.canaries import FEW, MANY, plan, rankings
from rescene.audit.stage import At, Stage, as_promised, seeded, without_noise
from rescene.privacy.accounting import Composition, sigma_for
from rescene.privacy.epsilon_bounds import Bound, bounds
from rescene.privacy.ledger import Ledger
from rescene.privacy.mechanism import Mechanism, SitePrivacy
from rescene.privacy.noise import Noise

CLAIM, DELTA = 1.0, 1e-5
RETRIES = 100  # of the same round; their average has a tenth of the noise
UNCLIPPED = 1e12


@dataclass(frozen=True, eq=False)
class Control:
    """One positive control: a site that is broken on purpose, and a sound site, attacked in the same way."""

    name: str
    broken: At
    known_broken: At  # what the attacker can work out about the broken site
    sound: At
    known_sound: At
    attack: str = "replay"
    giant: bool = False
    retries: int = 1


def claimed(clip: float = 5.0, kappa: float = 5.0 / 3) -> Mechanism:
    """A release whose noise keeps a record within the claim. Nothing is suppressed, which only helps the attacker."""
    once = Composition(1, 1)
    return Mechanism("release", sigma_for(CLAIM, once, DELTA), clip, once, DELTA, kappa, num_nets=1, threshold=0.0)


def controls(stage: Stage, mechanism: Mechanism, folder: Path) -> Iterator[Control]:
    """All five, with ledgers in ``folder``."""
    sound, known = as_promised(mechanism), without_noise(mechanism)
    silent = replace(mechanism, sigma=0.0)
    unclipped = replace(mechanism, clip=UNCLIPPED, sigma=mechanism.deviation / math.hypot(UNCLIPPED, mechanism.kappa))

    known_seed = seeded(mechanism, stage.rng, stage.task.index)

    def keeping_books(site: int, turn: int) -> SitePrivacy:
        return SitePrivacy(
            mechanism, Noise(), "audit", stage.task.index, turn, 1, Ledger(folder / f"client-{site}.jsonl")
        )

    yield Control("surrogates start as real images", as_promised(None), as_promised(None), sound, known, attack="look")
    yield Control("noise switched off", as_promised(silent), known, sound, known)
    yield Control(
        "clip switched off, giant record", as_promised(unclipped), without_noise(unclipped), sound, known, giant=True
    )
    yield Control("noise drawn again at every retry", sound, known, keeping_books, known, giant=True, retries=RETRIES)
    yield Control("noise from a seed the server knows", known_seed, known_seed, sound, known_seed)


def run_controls(stage: Stage, num_canaries: int, mechanism: Mechanism | None = None) -> list[dict[str, Any]]:
    """One row for each: what the attack showed on the broken site and on its sound twin, and whether it fired."""
    real_start = replace(stage, settings=stage.settings.model_copy(update={"start": "real"}))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for control in controls(stage, mechanism or claimed(), Path(folder)):
            where = real_start if control.attack == "look" else stage
            broken = _shown(where, control, control.broken, control.known_broken, num_canaries)
            sound = _shown(where, control, control.sound, control.known_sound, num_canaries)
            rows.append(
                {
                    "control": control.name,
                    "claimed": CLAIM,
                    "broken": broken.epsilon,
                    "sound": sound.epsilon,
                    "num_canaries": num_canaries,
                    "right": [broken.num_right, broken.num_guesses],
                    "fired": broken.epsilon > CLAIM >= sound.epsilon,
                }
            )
    return rows


def _shown(stage: Stage, control: Control, real: At, known: At, num_canaries: int) -> Bound:
    placed = plan(stage, num_canaries, control.giant, MANY if control.attack == "look" else FEW)
    found = rankings(stage, placed, real, known, (control.attack,), retries=control.retries)[control.attack]
    return bounds({control.name: (found, placed.included.cpu())}, DELTA)[control.name]
