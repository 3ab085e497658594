"""What the operator sees of the sites while a run goes on: who is there, who has answered, whom we wait for.

It is written as sites.json into the run folder, beside what the run itself writes; the report reads files only.
"""

from __future__ import annotations

import contextlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rescene.core.errors import RunError
from rescene.deploy.control import status_rows
from rescene.deploy.federation_folder import FederationFolder
from rescene.engine.checkpoint import write_json


def watch_sites(federation: FederationFolder, run: Path) -> None:
    """Write down how each site is now; what the link cannot tell stays unknown."""
    states: dict[str, str] = {}
    with contextlib.suppress(RunError):  # the link is busy, or away
        states = {str(row["name"]): str(row["state"]) for row in status_rows(federation) if row["what"] == "site"}
    told = _waiting(run)
    sites = [
        {
            "client": client,
            "name": name,
            "state": states.get(name, "unknown"),
            "last_answer": told.get("heard", {}).get(f"site {client}"),
            "waiting_since": told.get("asked") if f"site {client}" in told.get("waiting_for", []) else None,
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


def _waiting(run: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((run / "waiting.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
