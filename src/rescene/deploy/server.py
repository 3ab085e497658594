"""The server's side of a run across sites: the engine's own loop with sites behind a post."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rescene.config import Resolved
from rescene.deploy.exchange import Patience, Post
from rescene.deploy.plan_file import accuracy_warning, is_closed
from rescene.deploy.post_transport import PostTransport
from rescene.deploy.site_config import OWN
from rescene.engine import RunFolder
from rescene.engine.checkpoint import write_json
from rescene.engine.loop import Run
from rescene.engine.run_parts import check_transport


def run_across(
    resolved: Resolved,
    folder: RunFolder,
    post: Post,
    patience: Patience = Patience(),
    run: type[Run] = Run,
    plan: Path | None = None,
    elsewhere: bool = False,
    seats: Mapping[int, int] | None = None,
    ledgers: Path | None = None,
    peers: Path | None = None,
    names: Sequence[str] = (),
) -> dict[str, Any]:
    """Run, or continue, the experiment of this folder across the sites behind ``post``.

    ``plan`` is the federation's plan.yaml, in which an operator may close a task while it runs. ``seats`` says which node
    is which client, as far as their keys tell. ``ledgers`` is where the federation keeps how far the sites' privacy ledgers
    go, for all its runs; without one it lies in the run folder. ``peers`` is the list of the sites' public keys, for secure sums.
    ``names`` are those of the sites, in the order of their numbers, for events.
    """
    folder.check(resolved)
    recipe = resolved.recipe
    transport = PostTransport(
        post,
        run=f"{recipe.method['name']}-s{recipe.seed}-{resolved.digest()}",
        recipe=json.dumps(recipe.model_dump(mode="json")),
        patience=patience,
        uploads=folder.path / "uploads",
        seats=seats,
        ledgers=ledgers or folder.path / "uploads" / "ledgers.json",
        peers=peers,
    )
    transport.waiting = lambda facts: write_json(folder.path / "waiting.json", facts, sync="none")
    check_transport(resolved, transport)
    with folder:
        going = run(resolved, folder, transport=transport, elsewhere=elsewhere)
        going.context.names = tuple(names)
        dataset = going.context.experiment.dataset
        transport.fingerprint = OWN if recipe.sites else dataset.pictures or dataset.fingerprint()
        if warning := accuracy_warning(recipe):
            going.context.note_later("warning", warning.code, warning.told)
        if plan is not None:
            going.closed = lambda task: is_closed(plan, task.index)
        results = going.complete()
        transport.journal.clear()
        return results
