"""The sites' side of privacy: each client's mechanism, its noise and its ledger; in a simulation, in the run folder."""

from __future__ import annotations

import os
from pathlib import Path

from rescene.core.errors import RunError
from rescene.engine.experiment import Experiment
from rescene.privacy.ledger import Ledger
from rescene.privacy.mechanism import SitePrivacy
from rescene.privacy.noise import Noise


class Sites:
    """One ledger file per client; a ``floor.yaml`` beside them limits them all.

    They stand in the run folder, or in $RESCENE_LEDGERS, where they outlive the run: then runs on the same images add up.
    """

    def __init__(self, experiment: Experiment, run: str, folder: Path) -> None:
        self.experiment, self.run = experiment, run
        self.folder = folder

    def at(self, task: int, round: int, client: int) -> SitePrivacy | None:
        """The site of this client in this round; None without a mechanism, which a site with a floor does not accept."""
        ledger = ledger_in(self.folder, client)
        made, floor = site_at(self.experiment, self.run, task, round, client, ledger), ledger.floor_path
        if (made is None or made.noise.generator is not None) and floor.exists():
            raise RunError(
                "E415",
                "the site has a privacy floor, and the recipe has no guarantee, so nothing is sent",
                where=str(floor),
                fix="a recipe with privacy.mechanism and privacy.noise=os",
            )
        return made


def ledger_in(folder: Path, client: int) -> Ledger:
    """The ledger of a simulated client."""
    return Ledger(Path(os.environ.get("RESCENE_LEDGERS", folder)) / f"client-{client}.jsonl")


def site_at(
    experiment: Experiment, run: str, task: int, round: int, client: int, ledger: Ledger, why: str = ""
) -> SitePrivacy | None:
    """A client at one place in time, with its own ledger; None without a mechanism."""
    promise = experiment.recipe.promise(len(experiment.tasks))
    if promise is None:
        return None
    fresh = ("again", promise.earlier_sums) if promise.earlier_sums else ()  # no sum has the noise of an earlier one
    seeded = experiment.rng.at("privacy", task, round, client, *fresh).generator() if promise.test_mode else None
    participations = promise.composition.participations
    # one release for the whole task has one place: in a later round the site gives the same numbers
    place = 0 if experiment.method.additive else round
    return SitePrivacy(promise.mechanism, Noise(seeded), run, task, place, participations, ledger, why=why)
