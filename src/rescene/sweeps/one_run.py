"""One run of a sweep in a process of its own: ``python -m rescene.sweeps.one_run '{"recipe": "demo", ...}'``.

Its exit code is that of ``rescene run``. What happens is written to standard error, which the sweep keeps in a file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

INTERRUPTED = (130, 143)


@dataclass(frozen=True)
class Order:
    """What the process of a run must know. Texts only: it travels as JSON."""

    recipe: str
    overrides: tuple[str, ...]
    folder: str
    log: str = ""
    plugins: tuple[str, ...] = ()
    elsewhere: bool = False

    @property
    def command(self) -> list[str]:
        """The command that does it."""
        return [sys.executable, "-m", "rescene.sweeps.one_run", json.dumps(asdict(self))]

    @property
    def repeated(self) -> list[str]:
        """What a person types to repeat this run.

        >>> Order("demo", ("method=fedavg", "seed=0"), "runs/x", plugins=("mine.py",)).repeated
        ['rescene', 'run', 'demo', 'method=fedavg', 'seed=0', '--plugin', 'mine.py']
        """
        plugins = [word for path in self.plugins for word in ("--plugin", path)]
        return ["rescene", "run", self.recipe, *self.overrides, *plugins]


def work(order: Order) -> None:
    """Do the run, or continue it."""
    from rescene.api import execute
    from rescene.config import resolve
    from rescene.core.plugins import load_plugin
    from rescene.lens import looks_to
    from rescene.lens.look_progress import LookLog

    for path in order.plugins:
        load_plugin(Path(path))
    resolved = resolve(order.recipe, order.overrides)
    with looks_to(LookLog().take):
        execute(resolved, Path(order.folder), _tell, order.log, order.elsewhere)


def _tell(event: dict[str, Any]) -> None:
    if event["event"] == "round":
        accuracy = "" if event["accuracy"] is None else f", {event['accuracy']:.1f} % of the classes so far"
        place = f"task {event['task'] + 1}/{event['num_tasks']} round {event['round'] + 1}/{event['num_rounds']}"
        print(f"{place}{accuracy}", file=sys.stderr, flush=True)
    elif event["event"] == "event" and event["level"] != "info":
        print(f"{event['level']}[{event['code']}] {event['message']}", file=sys.stderr, flush=True)


class _Terminated(KeyboardInterrupt):
    """SIGTERM."""


def _terminate(number: int, frame: object) -> None:
    raise _Terminated


def main() -> int:
    """Entry point; returns the exit code."""
    from rescene.core.errors import ResceneError, for_people

    told: dict[str, Any] = json.loads(sys.argv[1])
    order = Order(**told | {"overrides": tuple(told["overrides"]), "plugins": tuple(told["plugins"])})
    sys.argv = order.repeated  # the run folder keeps the command
    signal.signal(signal.SIGTERM, _terminate)
    try:
        work(order)
    except KeyboardInterrupt as stop:
        print("interrupted; every finished round is saved", file=sys.stderr)
        return INTERRUPTED[isinstance(stop, _Terminated)]
    except Exception as error:
        known = for_people(error)
        if isinstance(known, ResceneError) and not os.environ.get("RESCENE_DEBUG"):
            print(known, file=sys.stderr)
            return known.exit_code
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
