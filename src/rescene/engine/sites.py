"""The sites' side of privacy in a simulation: each client's mechanism, its noise and its ledger in the run folder."""

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
        self.promise = experiment.recipe.promise(len(experiment.tasks))
        self.run, self.folder = run, Path(os.environ.get("RESCENE_LEDGERS", folder))
        self.rng = experiment.rng

    def at(self, task: int, round: int, client: int) -> Site | None:
        """The site of this client in this round; None without a mechanism, which a site with a floor does not accept."""
        floor = self.folder / "floor.yaml"
        if (self.promise is None or self.promise.test_mode) and floor.exists():
            raise RunError(
                "E414",
                "the site has a privacy floor and the recipe protects nobody, so nothing is sent",
                where=str(floor),
                fix="a recipe with privacy.mechanism and privacy.noise=os",
            )
        if self.promise is None:
            return None
        seeded = self.rng.at("privacy", task, round, client).generator() if self.promise.test_mode else None
        return Site(
            self.promise.mechanism,
            Noise(seeded),
            self.run,
            task,
            round,
            self.promise.composition.participations,
            Ledger(self.folder / f"client-{client}.jsonl"),
        )
