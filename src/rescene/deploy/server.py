"""The server's side of a run across sites: the engine's own loop with sites behind a post."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rescene.config import Resolved
from rescene.deploy.federation import GridFederation
from rescene.deploy.holding import OWN
from rescene.deploy.journal import Ends, Journal
from rescene.deploy.letters import Patience, Post
from rescene.deploy.plan import is_closed
from rescene.engine import RunFolder
from rescene.engine.checkpoint import write_json
from rescene.engine.loop import Run
from rescene.engine.watch import Progress


def run_across(
    resolved: Resolved,
    folder: RunFolder,
    post: Post,
    patience: Patience = Patience(),
    progress: Progress = lambda event: None,
    run: type[Run] = Run,
    plan: Path | None = None,
    elsewhere: bool = False,
    seats: Mapping[int, int] | None = None,
    ledgers: Path | None = None,
    peers: Path | None = None,
) -> dict[str, Any]:
    """Run, or continue, the experiment of this folder across the sites behind ``post``.

    ``plan`` is the federation's plan.yaml, in which an operator may close a task while it runs. ``seats`` says which node
    is which client, as far as their keys tell. ``ledgers`` is where the federation keeps how far the sites' privacy ledgers
    go, for all its runs; without one it lies in the run folder. ``peers`` is the list of the sites' public keys, for secure sums.
    """
    folder.check(resolved)
    recipe = resolved.recipe

    def federate(*args: Any, **options: Any) -> GridFederation:
        name = f"{recipe.method['name']}-s{recipe.seed}-{resolved.digest()}"
        text = json.dumps(recipe.model_dump(mode="json"))
        journal = Journal(folder.path / "uploads")
        ends = Ends(ledgers or folder.path / "uploads" / "ledgers.json")
        return GridFederation(
            *args,
            post=post,
            run=name,
            recipe=text,
            patience=patience,
            journal=journal,
            seats=seats,
            ends=ends,
            peers=peers,
            **options,
        )

    with folder:
        going = run(resolved, folder, progress, federate, elsewhere)
        federation = going.federation
        assert isinstance(federation, GridFederation)
        dataset = going.experiment.dataset
        federation.fingerprint = OWN if recipe.sites else dataset.pictures or dataset.fingerprint()
        if plan is not None:
            going.closed = lambda task: is_closed(plan, task.index)
        federation.waiting = lambda facts: write_json(folder.path / "waiting.json", facts, sync="none")
        results = going.complete()
        federation.journal.clear()
        return results
