"""Named places around everything a run writes, where it can be killed on purpose; otherwise nothing happens here.

``RESCENE_CRASH_AT="step renamed"`` kills the process (SIGKILL) where that place is reached first, ``"step renamed#3"`` the
third time. ``benchmarks/trust_crash.py`` visits them all.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

Watcher = Callable[[str], None]


def killer(place: str) -> Watcher:
    """Kills this process at the n-th visit of a place, given as ``name`` or ``name#n``."""
    name, _, number = place.partition("#")
    left = int(number or 1)

    def watch(reached: str) -> None:
        nonlocal left
        left -= reached == name
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    return watch


_place = os.environ.get("RESCENE_CRASH_AT")
watcher: Watcher | None = killer(_place) if _place else None


def reach(place: str, path: Path | None = None) -> None:
    """Tell whoever watches that this place of the code, about this file, was reached."""
    if watcher is not None:
        watcher(f"{path.name.split('-')[0]} {place}" if path else place)  # all steps and all chunks have one name
