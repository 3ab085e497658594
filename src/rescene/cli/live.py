"""Watching a run: a live panel in a terminal, one line per round elsewhere."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from rescene.cli.terminal import console

Event = dict[str, Any]
PAGE = "the page so far, which follows the run: {page}"
WIDE = 1.5  # slowest over mean pace from which one number would promise too much


@contextmanager
def watch(quiet: bool) -> Iterator[Callable[[Event], None]]:
    """Give the engine somebody to talk to."""
    screen = console(stderr=True)
    if quiet:
        yield lambda event: None
    elif screen.is_terminal:
        panel = Panel(screen)
        with Live(get_renderable=panel.table, console=screen, refresh_per_second=4):
            yield panel.take
    else:
        yield Lines().take


class Pace:
    """Time to go, from the last few steps: rounds get slower as the pool grows, so old steps count little.

    Where steps differ much the answer is a range, from their mean and from the slowest; before two steps there is none.
    """

    def __init__(self) -> None:
        self.marks: deque[tuple[int, float]] = deque(maxlen=5)
        self.done = self.steps = 0

    def start(self, event: Event) -> None:
        self.done, self.steps = event["done"], event["steps"]
        self.marks.clear()
        self.marks.append((self.done, event["elapsed_s"]))

    def step(self, event: Event) -> None:
        """A round or a task is over; the schedule also has a beginning for each task."""
        task, rounds = event["task"], event["num_rounds"]
        self.done = task * (rounds + 2) + (event["round"] + 2 if event["event"] == "round" else rounds + 2)
        self.marks.append((self.done, event["elapsed_s"]))

    def left(self) -> str:
        marks = list(self.marks)
        spans = [(b - a, end - begin) for (a, begin), (b, end) in pairwise(marks) if b > a]
        if not spans:
            return "-"
        rest = self.steps - marks[-1][0]
        mean = rest * sum(seconds for _, seconds in spans) / sum(steps for steps, _ in spans)
        slow = rest * max(seconds / steps for steps, seconds in spans)
        return f"{clock(mean)} to {clock(slow)}" if slow > WIDE * mean and slow - mean > 10 else clock(mean)


def clock(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Lines:
    """One line per round on standard error, for logs and pipes."""

    def __init__(self) -> None:
        self.pace = Pace()

    def take(self, event: Event) -> None:
        kind = event["event"]
        if kind == "start":
            self.pace.start(event)
        elif kind == "round":
            self.pace.step(event)
            accuracy = "-" if event["accuracy"] is None else f"{event['accuracy']:5.1f} %"
            self._say(
                f"{event['method']:<8} task {event['task'] + 1}/{event['num_tasks']} round {event['round'] + 1}/{event['num_rounds']}"
                f"  seen {accuracy}  up {event['uplink_bytes'] / 1e6:.2f} MB  {clock(event['elapsed_s'])}  left {self.pace.left()}"
            )
        elif kind == "task":
            self.pace.step(event)
            self._say(
                f"{event['method']:<8} task {event['task'] + 1} done: "
                + "  ".join(f"{a:.1f}" for a in event["accuracy"])
            )
        elif kind == "page":
            self._say(PAGE.format(**event))
        elif kind == "event" and event["level"] != "info":
            self._say(f"{event['level']}[{event['code']}] {event['message']}")

    @staticmethod
    def _say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)


class Panel:
    """One row per method: where it is, what it does, how well, how long."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.rows: dict[str, dict[str, str]] = {}
        self.pace = Pace()
        self.bytes: dict[str, int] = {}

    def take(self, event: Event) -> None:
        row = self.rows.setdefault(event["method"], {"accuracy": "-", "upload": "-", "left": "-"})
        task, round = event["place"]
        row["task"] = f"{task + 1}/{event['num_tasks']}"
        if round >= 0:  # the beginning and the end of a task are no rounds
            row["round"] = f"{round + 1}/{event['num_rounds']}"
        row["time"] = clock(event["elapsed_s"])
        kind = event["event"]
        if kind == "start":
            self.pace.start(event)
        elif kind == "phase":
            row["phase"] = event["phase"]
        elif kind == "round":
            self.pace.step(event)
            self.bytes[event["method"]] = self.bytes.get(event["method"], 0) + event["uplink_bytes"]
            row["upload"] = f"{self.bytes[event['method']] / 1e6:.1f} MB"
            if event["accuracy"] is not None:
                row["accuracy"] = f"{event['accuracy']:.1f}"
        elif kind == "task":
            self.pace.step(event)
            row["tasks"] = "  ".join(f"{a:.0f}" for a in event["accuracy"])
        elif kind == "done":
            row["phase"] = "done"
        elif kind == "page":
            self.console.print(PAGE.format(**event), markup=False)
        elif kind == "event" and event["level"] != "info":
            self.console.print(f"{event['level']}[{event['code']}] {event['message']}", markup=False)
        row["left"] = "" if kind == "done" else self.pace.left()

    def table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for name in ("method", "task", "round", "phase", "seen %", "uploaded", "time", "left", "per task"):
            table.add_column(name, style="bold" if name in ("method", "seen %") else None)
        for method, row in self.rows.items():
            keys = ("task", "round", "phase", "accuracy", "upload", "time", "left", "tasks")
            table.add_row(method, *(row.get(key, "") for key in keys))
        return table
