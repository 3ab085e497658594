"""The way to the terminal. Names come from files, and a name may hold escape sequences that move the cursor, hide text or
change the title of the window: here they become visible text. Everything we print passes here."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

# Control characters but for newline and tab; marks that turn the direction of writing; bytes of a name that is not UTF-8.
_UNSAFE = re.compile("\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""The text with control characters written out.

    >>> print(visible("dog\x1b[2J and cat"))
    dog\x1b[2J and cat
    """
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class Plain:
    """A text stream that passes everything on, control characters written out. To whoever asks, it is no terminal: colours
    and moving lines are not for it."""

    def __init__(self, stream: TextIO) -> None:
        self.raw = stream

    def write(self, text: str) -> int:
        return self.raw.write(visible(text))

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def isatty(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def console(stderr: bool = False, width: int | None = None) -> Console:
    """Rich's console on the terminal itself, for our tables and panels. It sends escape sequences of its own, so the text
    that is put into them is made visible instead; it is never read as markup."""
    from rich.console import Console

    class Screen(Console):
        def render_str(self, text: str, **options: Any) -> Text:  # type: ignore[override]
            return super().render_str(visible(text), **options)

    stream = sys.stderr if stderr else sys.stdout
    file = stream.raw if isinstance(stream, Plain) else stream
    return Screen(file=file, markup=False, width=width)


def guard_streams() -> None:
    """From here on everything that this process prints passes ``visible``, error messages and tracebacks too."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Plain):
            setattr(sys, name, Plain(stream))
