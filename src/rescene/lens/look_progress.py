"""How far a look through a lens is: whoever listens hears after each chunk how many pictures were looked at, of how many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[int, int], None]  # pictures that were looked at, of all that will be


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
