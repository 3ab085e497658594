"""Progress of a run in a notebook: one line that changes in its place, without widgets; as text where HTML is not shown."""

from __future__ import annotations

import html
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from rescene.lens import looks_to
from rescene.lens.look_progress import LookLog, LookWords

Event = dict[str, Any]
FINISHED = "W562"  # the run that was asked for had finished before


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook. IPython is looked at only if somebody has loaded it."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


class NotebookLine:
    """``with NotebookLine(tell) as show``: ``show`` gets the events of a run. Without ``tell`` they become a line in the notebook."""

    def __init__(self, tell: Callable[[Event], None] | None) -> None:
        self.tell, self.handle = tell, None
        self.look, self.looks = LookWords(), ExitStack()

    def __enter__(self) -> Callable[[Event], None]:
        if self.tell is None:
            self.looks.enter_context(looks_to(self.take_look))
        elif self.tell is show_lines:
            self.looks.enter_context(looks_to(LookLog().take))
        return self.take if self.tell is None else self.tell

    def take_look(self, done: int, total: int) -> None:
        """Show how far a look through a lens is."""
        self.look.take(done, total)
        if self.look.words:
            self._say(self.look.words)

    def take(self, event: Event) -> None:
        """Show the latest state; warnings keep a line of their own above it."""
        if event["event"] == "event" and event["level"] in ("warning", "error"):
            self._say(f"{event['code']}: {event['message']}", new=True)
        elif line := line_of(event):
            self._say(line)

    def _say(self, line: str, new: bool = False) -> None:
        from IPython import display as shown

        display: Any = shown.display

        bundle = {"text/plain": line, "text/html": f"<code>{html.escape(line)}</code>"}
        if new:
            display(bundle, raw=True)
        elif self.handle is None:
            self.handle = display(bundle, raw=True, display_id=True)
        else:
            self.handle.update(bundle, raw=True)

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self.looks.close()
        if kind is not None and self.tell is None and self.handle is not None:
            self._say(f"stopped: {kind.__name__}; the same call goes on from the last round that is saved")


def line_of(event: Event) -> str:
    """
    >>> line_of({"event": "round", "method": "FedAvg", "task": 0, "num_tasks": 5, "round": 2, "num_rounds": 20,
    ...     "accuracy": 41.25, "elapsed_s": 75.2})
    'FedAvg  task 1/5  round 3/20  seen classes 41.2 %  1:15'
    """
    minutes, seconds = divmod(round(event.get("elapsed_s", 0)), 60)
    clock = f"{minutes}:{seconds:02d}"
    if event["event"] == "start":
        left_out = f"  {event['left_out']}" if event.get("left_out") else ""
        return f"{event['method']}  {'goes on' if event['done'] else 'begins'}{left_out}"
    if event["event"] == "round":
        accuracy = "" if event["accuracy"] is None else f"  seen classes {event['accuracy']:.1f} %"
        place = f"task {event['task'] + 1}/{event['num_tasks']}  round {event['round'] + 1}/{event['num_rounds']}"
        return f"{event['method']}  {place}{accuracy}  {clock}"
    return ""


def show_lines(event: Event) -> None:
    """A line on standard error for the start and each round, and for a run that had finished before."""
    show_finished(event)
    if event["event"] in ("start", "round"):
        print(line_of(event), file=sys.stderr)


def show_finished(event: Event) -> None:
    """A line on standard error for a run that had finished before, and nothing else."""
    if event.get("code") == FINISHED:
        print(f"{event['code']}: {event['message']}", file=sys.stderr)
