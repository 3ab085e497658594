"""The report of a run that is going: rewritten after rounds, so that the open page, which reloads itself, stays true."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rescene.report import write_report
from rescene.report.runs import is_run

Event = dict[str, Any]
_SHARE = 1 / 20  # of the time may go into the page
_GUESS_S = 3.0  # what a page takes before one was written: short runs get theirs at the end only


@contextlib.contextmanager
def live_page(tell: Callable[[Event], None], folders: Sequence[Path], page: Path) -> Iterator[Callable[[Event], None]]:
    """Pass events on and keep ``page`` up to date; a page left behind by an interruption says so."""
    with open_page(folders, page) as kept:
        yield kept.after(tell)


@contextlib.contextmanager
def open_page(folders: Sequence[Path], page: Path) -> Iterator[LivePage]:
    """A page for several runs, one after the other: its clock goes on from run to run."""
    kept = LivePage(folders, page)
    try:
        yield kept
    except BaseException:
        if kept.exists or os.path.isfile(page):  # `rescene report` may have written it before our first one was due
            kept.write()
        raise


class LivePage:
    """The page of those of the folders that hold a run."""

    def __init__(self, folders: Sequence[Path], page: Path) -> None:
        self.folders, self.page, self.exists = folders, page, False
        self.seconds, self.last = _GUESS_S, time.monotonic()

    def after(self, tell: Callable[[Event], None]) -> Callable[[Event], None]:
        """A listener that passes each event on and then sees to the page."""

        def take(event: Event) -> None:
            tell(event)
            if event["event"] in ("round", "task"):
                before = self.exists
                self.perhaps()
                if self.exists and not before:
                    tell({**event, "event": "page", "page": str(self.page)})

        return take

    def perhaps(self) -> None:
        if _SHARE * (time.monotonic() - self.last) >= self.seconds:
            self.write()

    def write(self) -> None:
        start = time.monotonic()
        # No picture is worth a run: the page at the end will say what is wrong.
        with contextlib.suppress(Exception):
            write_report([folder for folder in self.folders if is_run(folder)], self.page)
            self.exists = True
        self.last = time.monotonic()
        self.seconds = self.last - start
