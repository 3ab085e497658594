"""A whole federation on one machine, with real processes, TLS and node keys; nothing is left behind but its folder."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from rescene.config import Resolved
from rescene.deploy.control import run, start_server, start_site
from rescene.deploy.exchange import Patience
from rescene.deploy.federation_folder import init, require_flower
from rescene.deploy.operator import watch_sites
from rescene.deploy.processes import free_port, stop
from rescene.lens import BUILT_IN, absolute


def rehearse(
    resolved: Resolved,
    folder: Path | None,
    out: Path,
    tell: Callable[[str], None] = print,
    patience: Patience = Patience(gather_s=300, deadline_s=600),
) -> dict[str, Any]:
    """Set up one site per client of the recipe, run it, stop everything; returns the run's results."""
    require_flower()
    with tempfile.TemporaryDirectory(prefix="rescene-") as spare:
        names = [f"site-{k}" for k in range(resolved.recipe.federation.num_clients)]
        federation = init(folder or Path(spare) / "rehearsal", names, port=free_port())
        lens = resolved.recipe.model.lens
        if lens is not None and lens not in BUILT_IN:  # as an operator would give it out
            for name in names:
                with open(federation.site(name) / "site.yaml", "a") as file:
                    file.write(yaml.safe_dump({"lens": absolute(lens)}))
        tell(f"keys and certificates for the server and {', '.join(names)}")
        try:
            start_server(federation)
            tell(f"server at https://{federation.host}:{federation.port}")
            for name in names:
                start_site(federation.site(name))
            tell(f"{len(names)} sites started")
            results = run(federation, resolved, out, patience, tell)
            watch_sites(federation, out)
            return results
        finally:
            for place in (*map(federation.site, names), federation.server):
                stop(place)
            tell("all processes stopped")
