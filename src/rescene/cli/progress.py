"""Watching work in progress: a panel or lines on the terminal, the report of a run that is going, a page on loopback."""

from __future__ import annotations

import contextlib
import html
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rescene.cli.terminal import console, position
from rescene.core.errors import ConfigError
from rescene.deploy.federation_folder import FederationFolder
from rescene.lens import looks_to
from rescene.lens.look_progress import LookLog, LookWords, clock
from rescene.notebook import FINISHED
from rescene.report import write_report
from rescene.report.load import is_run

Event = dict[str, Any]
WIDE = 1.5  # from this ratio of the slowest to the mean pace, the time left is a range
HOST = "127.0.0.1"
REPORT_SHARE = 1 / 20  # of the time of a run may go into its report
FIRST_REPORT_S = 3.0  # assumed for the first report: short runs get theirs at the end only
PAGE_LEAST_S, PAGE_SHARE = 5.0, 1 / 5  # seconds between two served pages; share of the time that may go into them
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
NOTHING_YET = """\
<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="refresh" content="5"><meta name="color-scheme" content="light dark"><title>{name}</title>
<body style="font:16px/1.5 system-ui,sans-serif;max-width:40em;margin:3em auto;padding:0 1em"><h1>{name}</h1>
<p>No round has been held yet. This page looks again every five seconds.</p>
"""


@contextmanager
def watch(quiet: bool) -> Iterator[Callable[[Event], None]]:
    """A function that shows the events of a run: in a live table, in lines, or not at all."""
    panel = Panel(console(stderr=True))
    take = panel.take if panel.console.is_terminal else Lines().take
    with watch_looks(quiet, panel):
        yield _say_if_finished if quiet else take


@contextmanager
def watch_looks(quiet: bool, panel: Panel | None = None) -> Iterator[None]:
    """Show how many pictures passed the lens, of how many, and the time left: in a line that changes, in lines, or not at all.

    On a terminal the line stands above the table of ``panel``, while it says something.
    """
    screen = panel.console if panel else console(stderr=True)
    if quiet:
        yield
    elif screen.is_terminal:
        look = LookWords()

        def shown() -> Text | Table | Group:
            line = Text(look.words)
            if panel is None:
                return line
            return Group(line, panel.table()) if line else panel.table()

        with (
            looks_to(look.take),
            Live(get_renderable=shown, console=screen, refresh_per_second=4, transient=panel is None),
        ):
            yield
    else:
        with looks_to(LookLog().take):
            yield


class Pace:
    """The time that is left, from the last few steps: rounds get slower as the pool grows, so only the last five count.

    Where steps differ much, the answer is a range: from their mean and from the slowest. Before two steps there is none.
    """

    def __init__(self) -> None:
        self.marks: deque[tuple[int, float]] = deque(maxlen=5)
        self.done = self.steps = 0

    def start(self, event: Event) -> None:
        """A run begins, or continues after some steps."""
        self.done, self.steps = event["done"], event["steps"]
        self.marks.clear()
        self.marks.append((self.done, event["elapsed_s"]))

    def step(self, event: Event) -> None:
        """A round or a task is over. The beginning of each task is a step, too."""
        task, rounds = event["task"], event["num_rounds"]
        self.done = task * (rounds + 2) + (event["round"] + 2 if event["event"] == "round" else rounds + 2)
        self.marks.append((self.done, event["elapsed_s"]))

    def left(self) -> str:
        """The time that is left, as text; a dash while it is not known."""
        marks = list(self.marks)
        spans = [(b - a, end - begin) for (a, begin), (b, end) in pairwise(marks) if b > a]
        if not spans:
            return "-"
        rest = self.steps - marks[-1][0]
        mean = rest * sum(seconds for _, seconds in spans) / sum(steps for steps, _ in spans)
        slow = rest * max(seconds / steps for steps, seconds in spans)
        return f"{clock(mean)} to {clock(slow)}" if slow > WIDE * mean and slow - mean > 10 else clock(mean)


def _remark(event: Event) -> str:
    """What an event says in a line of its own, wherever the run is shown; mostly nothing."""
    if event["event"] == "page":
        return f"the report follows the run: {event['page']}"
    told = event["event"] == "event" and event["level"] != "info"
    return f"{event['level']}[{event['code']}] {event['message']}" if told else ""


def _say_if_finished(event: Event) -> None:
    """Of a quiet run only that nothing ran, because its table is that of an earlier run."""
    if event.get("code") == FINISHED:
        print(_remark(event), file=sys.stderr)


class Lines:
    """One line per round on standard error, for logs and pipes."""

    def __init__(self) -> None:
        self.pace = Pace()

    def take(self, event: Event) -> None:
        """Print a line for an event of the run, if it is worth one."""
        kind = event["event"]
        if kind == "start":
            self.pace.start(event)
            if event.get("left_out"):
                self._say(f"{event['method']:<8} {event['left_out']}")
        elif kind == "round":
            self.pace.step(event)
            accuracy = "-" if event["accuracy"] is None else f"{event['accuracy']:5.1f} %"
            place = position(event["task"], event["num_tasks"], event["round"], event["num_rounds"])
            size = f"all sites up {event['uplink_bytes'] / 1e6:.2f} MB"
            time_left = f"{clock(event['elapsed_s'])}  left {self.pace.left()}"
            self._say(f"{event['method']:<8} {place}  seen {accuracy}  {size}  {time_left}")
        elif kind == "task":
            self.pace.step(event)
            self._say(
                f"{event['method']:<8} {position(event['task'], event['num_tasks'])} done: "
                + "  ".join(f"{a:.1f}" for a in event["accuracy"])
            )
        elif remark := _remark(event):
            self._say(remark)

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
        """Note an event of the run in the row of its method."""
        row = self.rows.setdefault(event["method"], {"accuracy": "-", "upload": "-", "left": "-"})
        task, round = event["place"]
        row["task"] = f"{task + 1}/{event['num_tasks']}"
        if round >= 0:  # the beginning and the end of a task are no rounds
            row["round"] = f"{round + 1}/{event['num_rounds']}"
        row["time"] = clock(event["elapsed_s"])
        kind = event["event"]
        if kind == "start":
            self.pace.start(event)
            if event.get("left_out"):
                self.console.print(f"{event['method']} {event['left_out']}", markup=False)
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
        elif remark := _remark(event):
            self.console.print(remark, markup=False)
        row["left"] = "" if kind == "done" else self.pace.left()

    def table(self) -> Table:
        """The rows as they are now."""
        table = Table(box=None, pad_edge=False)
        for name in ("method", "task", "round", "phase", "seen %", "all sites up", "time", "left", "per task"):
            style = "bold" if name in ("method", "seen %") else None
            table.add_column(name, style=style, no_wrap=name not in ("phase", "per task"))
        for method, row in self.rows.items():
            keys = ("task", "round", "phase", "accuracy", "upload", "time", "left", "tasks")
            table.add_row(method, *(row.get(key, "") for key in keys))
        return table


@contextmanager
def live_page(tell: Callable[[Event], None], folders: Sequence[Path], page: Path) -> Iterator[Callable[[Event], None]]:
    """Pass events on and keep the report ``page`` up to date; after an interruption it says so."""
    with open_page(folders, page) as kept:
        yield kept.after(tell)


@contextmanager
def open_page(folders: Sequence[Path], page: Path) -> Iterator[LivePage]:
    """A report of several runs that go one after the other; one clock decides when it is written again."""
    kept = LivePage(folders, page)
    try:
        yield kept
    except BaseException:
        if kept.exists or os.path.isfile(page):  # `rescene report` may have written one before ours was due
            kept.write()
        raise


class LivePage:
    """The report of those of the folders that hold a run."""

    def __init__(self, folders: Sequence[Path], page: Path) -> None:
        self.folders, self.page, self.exists = folders, page, False
        self.seconds, self.last = FIRST_REPORT_S, time.monotonic()

    def after(self, tell: Callable[[Event], None]) -> Callable[[Event], None]:
        """A listener that passes each event on and then writes the report if it is due."""

        def take(event: Event) -> None:
            tell(event)
            if event["event"] in ("round", "task"):
                before = self.exists
                self.perhaps()
                if self.exists and not before:
                    tell({**event, "event": "page", "page": str(self.page)})

        return take

    def perhaps(self) -> None:
        """Write the report if enough time has passed."""
        if REPORT_SHARE * (time.monotonic() - self.last) >= self.seconds:
            self.write()

    def write(self) -> None:
        """Write the report, and note how long it took."""
        start = time.monotonic()
        # A run must not fail because of its report: the one at the end says what is wrong.
        with contextlib.suppress(Exception):
            write_report([folder for folder in self.folders if is_run(folder)], self.page)
            self.exists = True
        self.last = time.monotonic()
        self.seconds = self.last - start


class ServedPage:
    """The page that ``build`` makes. It is made again when somebody looks, but only so often."""

    def __init__(self, build: Callable[[], bytes]) -> None:
        self._build, self._lock = build, threading.Lock()
        self._page, self._made, self._seconds = b"", -float("inf"), 0.0

    def get(self) -> bytes:
        """The page, made again if it is old enough."""
        with self._lock:
            begin = time.monotonic()
            if begin - self._made >= max(PAGE_LEAST_S, self._seconds / PAGE_SHARE):
                self._page = self._build()
                self._made = time.monotonic()
                self._seconds = self._made - begin
            return self._page


@contextmanager
def serving(build: Callable[[], bytes], port: int) -> Iterator[str]:
    """Serve one page on loopback in a thread of its own; yields its address. Nothing else is served or changed."""
    page = ServedPage(build)

    class Handler(_Handler):
        live = page

    try:
        server = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        why = f"{error.strerror}: another program, or another page of ours, is there"
        raise ConfigError("E196", f"cannot serve the page on {HOST}:{port}", why=why, fix="another --port") from None
    server.daemon_threads = False  # the end waits for a page that is being made, because it writes a file
    thread = threading.Thread(target=server.serve_forever, name="page", daemon=True)
    thread.start()
    try:
        yield f"http://{HOST}:{server.server_address[1]}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def operator_page(federation: FederationFolder, run: Callable[[], Path | None], port: int) -> Iterator[None]:
    """Serve the report of ``run()`` on loopback and print the address."""
    from rescene.deploy.operator import watch_sites

    def build() -> bytes:
        place = run()
        if place is None or not is_run(place):
            return NOTHING_YET.format(name=html.escape(federation.name)).encode()
        watch_sites(federation, place)
        return write_report([place], place / "report.html").read_bytes()

    with serving(build, port) as address:
        print(f"the operator's page: {address}", flush=True)
        yield


class _Handler(BaseHTTPRequestHandler):
    live: ServedPage
    timeout = 10  # seconds; a silent client does not keep a thread
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        port = self.server.server_address[1]  # type: ignore[index]
        if self.headers.get("Host") not in {f"{HOST}:{port}", f"localhost:{port}"}:
            # a web page elsewhere that gave our address a name of its own
            self.send_error(HTTPStatus.MISDIRECTED_REQUEST)
            return
        if self.path.partition("?")[0] != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        body = self.live.get()
        self.send_response(HTTPStatus.OK)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def version_string(self) -> str:
        return "rescene"

    def log_message(self, format: str, *args: object) -> None:
        """No line per request: the terminal shows the run."""
