"""A site leaves its federation: the run goes on without it in another folder, and nobody asks the site again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import yaml

from rescene.config import Resolved
from rescene.core.documents import read_yaml
from rescene.core.errors import ConfigError, command
from rescene.deploy.federation_folder import FederationFolder
from rescene.engine.checkpoint import write_atomically


def federation_of(run: Path) -> FederationFolder | None:
    """The federation on whose server this run folder lies; None if it lies elsewhere."""
    folder = run.resolve()
    root = folder.parents[2] if len(folder.parents) > 2 else folder
    inside = folder.parent == root / "server" / "runs" and (root / "federation.yaml").is_file()
    return FederationFolder.open(root) if inside else None


def place_without(federation: FederationFolder, run: Path, client: int) -> Path:
    """The folder in which the run goes on: where `rescene deploy run` looks for it. Refuses one that was left behind."""
    if run.resolve().name.split("-without-")[0] == "plan" and run.resolve() != federation.plan_run:
        raise ConfigError(
            "E165", "the federation goes on elsewhere", where=str(run), fix=command("forget", federation.plan_run)
        )
    gone = sorted({*federation.exclude, client})
    return run.with_name("-without-".join([run.resolve().name.split("-without-")[0], *map(str, gone)]))


def leave(federation: FederationFolder, name: str, run: Path) -> None:
    """Write into federation.yaml that the site has left, and where a plan goes on."""
    path = federation.path / "federation.yaml"
    facts = read_yaml(path)
    facts["left"] = sorted({*federation.left, name})
    if run.name.split("-without-")[0] == "plan":
        facts["plan_folder"] = run.name
    write_atomically(path, yaml.safe_dump(facts, sort_keys=False).encode())


def without_left(federation: FederationFolder, resolved: Resolved) -> Resolved:
    """The recipe without the sites that left."""
    recipe = resolved.recipe
    for client in federation.exclude:
        if client < recipe.federation.num_clients:
            recipe = recipe.without(client)
    return replace(resolved, recipe=recipe)
