"""The sites' side of privacy: each client's mechanism, its noise and its ledger; in a simulation, in the run folder."""

from __future__ import annotations

import os
from pathlib import Path

from rescene.engine.experiment import Experiment
from rescene.errors import RunError
from rescene.privacy.ledger import Ledger
from rescene.privacy.mechanism import Site
from rescene.privacy.noise import Noise


class Sites:
    """One ledger file per client; a ``floor.yaml`` beside them limits them all.

    They stand in the run folder, or in $RESCENE_LEDGERS, where they outlive the run: then runs on the same images add up.
    """

    def __init__(self, experiment: Experiment, run: str, folder: Path) -> None:
        self.experiment, self.run = experiment, run
        self.folder = Path(os.environ.get("RESCENE_LEDGERS", folder))

    def at(self, task: int, round: int, client: int) -> Site | None:
        """The site of this client in this round; None without a mechanism, which a site with a floor does not accept."""
        made = site_at(self.experiment, self.run, task, round, client, Ledger(self.folder / f"client-{client}.jsonl"))
        floor = self.folder / "floor.yaml"
        if (made is None or made.noise.generator is not None) and floor.exists():
            raise RunError(
                "E415",
                "the site has a privacy floor and the recipe protects nobody, so nothing is sent",
                where=str(floor),
                fix="a recipe with privacy.mechanism and privacy.noise=os",
            )
        return made


def site_at(
    experiment: Experiment, run: str, task: int, round: int, client: int, ledger: Ledger, why: str = ""
) -> Site | None:
    """A client at one place in time, with its own ledger; None without a mechanism."""
    promise = experiment.recipe.promise(len(experiment.tasks))
    if promise is None:
        return None
    seeded = experiment.rng.at("privacy", task, round, client).generator() if promise.test_mode else None
    participations = promise.composition.participations
    return Site(promise.mechanism, Noise(seeded), run, task, round, participations, ledger, why=why)
