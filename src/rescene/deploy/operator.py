"""What the operator sees of the sites while a run goes on, and a rehearsal: a whole federation on one machine.

Who is there, who has answered and whom we wait for is written as sites.json into the run folder, beside what the run itself writes;
the report reads files only. A rehearsal has real processes, TLS and node keys; nothing is left behind but its folder.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from rescene.config import Resolved
from rescene.core.errors import RunError
from rescene.core.results import read_waiting
from rescene.deploy.control import run, start_server, start_site, status_rows
from rescene.deploy.exchange import Patience
from rescene.deploy.federation_folder import FederationFolder, init, require_flower
from rescene.deploy.processes import free_port, stop
from rescene.engine.checkpoint import write_json
from rescene.lens import BUILT_IN, absolute


def watch_sites(federation: FederationFolder, run: Path) -> None:
    """Write down how each site is now; what the link cannot tell stays unknown."""
    states: dict[str, str] = {}
    with contextlib.suppress(RunError):  # the link is busy, or away
        states = {str(row["name"]): str(row["state"]) for row in status_rows(federation) if row["what"] == "site"}
    told = read_waiting(run)
    sites = [
        {
            "client": client,
            "name": name,
            "state": states.get(name, "unknown"),
            "last_answer": told.heard.get(f"site {client}"),
            "waiting_since": told.asked if f"site {client}" in told.waiting_for else None,
        }
        for client, name in enumerate(federation.sites)
    ]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    facts = {"schema": 1, "federation": federation.name, "updated": now, "sites": sites}
    write_json(run / "sites.json", facts, sync="none")


def newest_run(federation: FederationFolder) -> Path | None:
    """The run folder that was touched last."""
    found = sorted((federation.server / "runs").glob("*/status.json"), key=lambda path: path.stat().st_mtime)
    return found[-1].parent if found else None


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
