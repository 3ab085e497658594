"""`rescene deploy check` on the server: keys, certificates, port, processes, clock, what the sites need from here."""

from __future__ import annotations

import shlex
import stat
import time
from datetime import UTC, datetime

from rescene.core.errors import ConfigError, command
from rescene.deploy.connection import certificate_row
from rescene.deploy.federation_folder import FederationFolder
from rescene.deploy.findings import Row, app_row, machine_rows, part_rows, row, secret_row
from rescene.deploy.plan_file import read_plan
from rescene.deploy.processes import check_port, running
from rescene.privacy.statement import HOW_TO_MEASURE, NO_COUNTS

PARTS = ("link", "executor")


def check_server(federation: FederationFolder) -> list[Row]:
    """Everything that can be known before a site calls; starts nothing."""
    server = federation.server
    return [
        row("federation.yaml", f"{federation.name}: {', '.join(federation.sites)}"),
        _closed(federation),
        secret_row(server / "ca.key", needed=False),  # may be kept apart: it signs nothing in daily work
        secret_row(server / "server.key"),
        *(certificate_row(server, host) for host in dict.fromkeys([federation.host, "localhost"])),
        *(_site(federation, name) for name in federation.sites),
        *_processes(federation),
        *_evaluation(federation),
        app_row(server),
        _clock(federation),
        *machine_rows(federation.path),
    ]


def _closed(federation: FederationFolder) -> Row:
    mode = stat.S_IMODE(federation.path.stat().st_mode)
    shared = f"others can look into it (mode {mode:04o})" if mode & 0o077 else ""
    return row("folder", f"mode {mode:04o}", shared, f"chmod 700 {shlex.quote(str(federation.path))}")


def _site(federation: FederationFolder, name: str) -> Row:
    """The server registers a site by node.pub; a node.key still here is no fault, but no longer a secret of the site."""
    folder = federation.site(name)
    check = f"site {name}"
    if not (folder / "node.pub").is_file():
        return row(check, "", "node.pub is missing", f"copy it from the site into {folder}")
    ours, theirs = federation.server / "ca.crt", folder / "ca.crt"
    if theirs.is_file() and ours.is_file() and theirs.read_bytes() != ours.read_bytes():
        fix = f"{shlex.join(['cp', str(ours), str(theirs)])}, and carry it to the site"
        return row(check, "", "its ca.crt is not the server's", fix)
    left = "; node.key is still here: delete it once the site has it" if (folder / "node.key").is_file() else ""
    return row(check, f"node.pub{left}")


def _evaluation(federation: FederationFolder) -> list[Row]:
    """Where the accuracy of the plan will be measured."""
    plan = read_plan(federation.plan)
    if plan is None:
        return []
    if plan.test is not None:
        return [row("accuracy", f"measured on the server's test images, {plan.test}")]
    return [
        row(
            "accuracy",
            f"measured at the sites; not with recipe own or another guarantee: {NO_COUNTS}; then {HOW_TO_MEASURE}",
        )
    ]


def _processes(federation: FederationFolder) -> list[Row]:
    up = {one.name for one in running(federation.server)}
    port = f"127.0.0.1:{federation.port}"
    if "link" in up:
        rows = [row("port", f"{port}, ours")]
    else:
        try:
            check_port("127.0.0.1", federation.port)
            rows = [row("port", f"{port}, free")]
        except ConfigError as error:
            rows = [row("port", port, error.what, error.fix or "")]
    return rows + part_rows(up, PARTS, command("deploy", "server", federation.path))


def _clock(federation: FederationFolder) -> Row:
    """Sites compare their clock with this one, so at least it must not stand before our own files."""
    made = (federation.path / "federation.yaml").stat().st_mtime
    early = "it stands before the day this folder was made" if time.time() < made - 60 else ""
    return row("clock", f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC", early, "set the clock (NTP)")
