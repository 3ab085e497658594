"""How far a look through a lens is: whoever listens hears after each chunk how many pictures were looked at, of how many.

``LookWords`` says it in words, for a line that changes, and ``LookLog`` writes the words into a log.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[int, int], None]  # pictures that were looked at, of all that will be
LINE_S = 15.0  # seconds between two lines about a look in a log


class _Count:
    """Pictures of the look that is under way."""

    def __init__(self, listener: Listener) -> None:
        self.listener, self.done, self.total = listener, 0, 0


_count: ContextVar[_Count | None] = ContextVar("looks", default=None)


@contextmanager
def looks_to(listener: Listener) -> Iterator[None]:
    """Looks that happen inside are told to ``listener``.

    >>> with looks_to(lambda done, total: print(f"{done} of {total}")):
    ...     expect_looks(3)
    ...     tell_looked(2)
    ...     tell_looked(1)
    2 of 3
    3 of 3
    """
    token = _count.set(_Count(listener))
    try:
        yield
    finally:
        _count.reset(token)


def expect_looks(num: int) -> None:
    """So many pictures are about to be looked at. A look before is over."""
    if count := _count.get():
        count.done, count.total = 0, num


def tell_looked(num: int) -> None:
    """So many more pictures were looked at."""
    if count := _count.get():
        count.done += num
        count.listener(count.done, count.total)


class LookWords:
    """How far a look at pictures is. The time left comes from the chunks since the first one; ``words`` is empty when it is over."""

    def __init__(self) -> None:
        self.first = self.last = (0, 0.0)  # pictures looked at, and when
        self.words = ""

    def take(self, done: int, total: int) -> None:
        """So many of all pictures were looked at."""
        now = time.monotonic()
        if not self.words or done <= self.last[0]:  # another look began
            self.first = (done, now)
        self.last = (done, now)
        num, seconds = done - self.first[0], now - self.first[1]
        left = f", {clock((total - done) * seconds / num)} left" if num else ""
        self.words = f"looked at {done:,} of {total:,} pictures{left}" if done < total else ""


class LookLog:
    """A line about a look on standard error every 15 seconds, for logs and pipes. A short look gets none."""

    def __init__(self) -> None:
        self.look, self.said = LookWords(), time.monotonic()

    def take(self, done: int, total: int) -> None:
        """So many of all pictures were looked at."""
        self.look.take(done, total)
        if self.look.words and time.monotonic() - self.said >= LINE_S:
            self.said = time.monotonic()
            print(self.look.words, file=sys.stderr, flush=True)


def clock(seconds: float) -> str:
    """A length of time as on a clock.

    >>> clock(75), clock(3700)
    ('1:15', '1:01:40')
    """
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
