"""Starting a site's node until the server has taken it, or saying why it never will.

After a crash the link believes for up to a minute that the old node is still there, and refuses the new one with the very
words it has for a key that it does not know. So a refusal is only believed when it lasts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rescene.core.errors import RunError, command
from rescene.deploy.processes import Started, alive

ONLINE, REFUSED = "SuperNode ID", "Failed to activate"  # Flower's words in the node's log
ENDED_BY_ITSELF = "terminated gracefully"  # without having been online: its signature was not accepted
PATIENCE_S, PAUSE_S, SETTLE_S = 90.0, 10.0, 20.0


def start_kept(
    folder: Path,
    begin: Callable[[], Sequence[Started]],
    tell: Callable[[str], None] = print,
    patience_s: float = PATIENCE_S,
    pause_s: float = PAUSE_S,
    settle_s: float = SETTLE_S,
) -> list[Started]:
    """Start the node and what goes with it, again while the link refuses it; a server that is not there yet is no reason to give up."""
    log = folder / "logs" / "node.log"
    until = time.monotonic() + patience_s
    while True:
        seen = log.stat().st_size if log.exists() else 0
        started = begin()
        node = started[0]
        said = _first_words(node, log, seen, settle_s)
        if alive(node) and ONLINE not in said:
            tell("the server does not answer yet; the node goes on trying")
            said = _first_words(node, log, seen, until - time.monotonic())  # on a busy machine a refusal comes late
        if alive(node):
            if ONLINE in said:
                tell("the server has taken this site")
            return list(started)
        if REFUSED not in said or time.monotonic() > until:
            raise ended(folder, said)
        tell(f"refused: the server may believe for a minute that this site is still there; again in {pause_s:.0f} s")
        time.sleep(pause_s)


def _first_words(node: Started, log: Path, seen: int, settle_s: float) -> str:
    """What the node has logged when it is online, has ended, or has not got far in ``settle_s``."""
    until = time.monotonic() + settle_s
    while True:
        going = alive(node)
        said = log.read_bytes()[seen:].decode(errors="replace") if log.exists() else ""
        if ONLINE in said or not going or time.monotonic() > until:
            return said
        time.sleep(0.2)


def ended(folder: Path, said: str) -> RunError:
    """Why the node ended, as far as its log tells."""
    where, look = str(folder), command("deploy", "check", folder)
    if REFUSED in said:
        why = "it does not know this node.key, or another node with the same key is running"
        fix = "the operator starts `rescene deploy server` again, which registers node.pub; or stop the other node"
        return RunError("E361", "the server refuses this site", where=where, why=why, fix=fix)
    if "CERTIFICATE_VERIFY_FAILED" in said:
        why = "its certificate is not signed by this site's ca.crt, not for this name, or not valid today"
        return RunError("E362", "the server is not the one this site trusts", where=where, why=why, fix=look)
    if ENDED_BY_ITSELF in said or "401 Unauthorized" in said:
        why = "the clocks of the two differ too much, or node.key is damaged"
        return RunError("E363", "the server does not believe this site's signature", where=where, why=why, fix=look)
    return RunError("E350", "node has ended", where=str(folder / "logs" / "node.log"), why=_reason(said))


def _reason(said: str) -> str:
    """The lines in which Flower says why it exits, else the last ones."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", said).strip().splitlines()
    first = next((i for i, line in enumerate(lines) if "Exit Code" in line), max(len(lines) - 5, 0))
    return "\n".join(lines[first : first + 5])
