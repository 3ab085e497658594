"""The way to the terminal: safe text, tables, files, interruption.

Names come from files, and a name may hold escape sequences that move the cursor, hide text or change the title of the
window. Everything we print passes here, and such sequences become visible text.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

from rescene.core.errors import ConfigError, ResceneWarning
from rescene.core.json_files import Row

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status
    from rich.text import Text

# Control characters but for newline and tab; marks that turn the direction of writing; bytes of a name that is not UTF-8.
_UNSAFE = re.compile("\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_PIPE_WIDTH = 160  # columns of a table that goes into a file or a pipe
_GAP = 2  # columns between two cells
_LONG = 14  # a word up to this length is never cut in a table; a longer one, such as a path, may be
_PIECE = re.compile(r"[^/,:;=_-]*[/,:;=_-]+|[^/,:;=_-]+")  # of a word, with the separators after it


def visible(text: str) -> str:
    r"""The text with control characters written out.

    >>> print(visible("dog\x1b[2J and cat"))
    dog\x1b[2J and cat
    """
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class Plain:
    """A text stream that writes control characters out. It says that it is no terminal, so it gets no colours."""

    def __init__(self, stream: TextIO) -> None:
        self.raw = stream

    def write(self, text: str) -> int:
        """Write text with control characters made visible."""
        return self.raw.write(visible(text))

    def writelines(self, lines: list[str]) -> None:
        """Write several lines in the same way."""
        for line in lines:
            self.write(line)

    def isatty(self) -> bool:
        """Always False, so that nobody writes colours or cursor movements here."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


def guard_streams() -> None:
    """From here on everything that this process prints passes ``visible``, error messages and tracebacks too."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Plain):
            setattr(sys, name, Plain(stream))


def console(stderr: bool = False, width: int | None = None) -> Console:
    """Rich's console on the terminal itself, for our tables and panels.

    It sends escape sequences of its own. So the text inside is made visible first, and it is never read as markup.
    """
    from rich.console import Console

    class PlainConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(visible(text), **options)

    stream = sys.stderr if stderr else sys.stdout
    file = stream.raw if isinstance(stream, Plain) else stream
    return PlainConsole(file=file, markup=False, width=width)


def busy(what: str) -> Status:
    """``with busy("counting") as status``: shows on a terminal what takes a while; elsewhere it prints nothing."""
    return console(stderr=True).status(f"{what} ...")


def teller(quiet: bool) -> Callable[[str], None]:
    """A function that prints a line on standard error at once, or one that prints nothing."""
    return (lambda line: None) if quiet else (lambda line: print(line, file=sys.stderr, flush=True))


def print_rows(rows: Iterable[Row], as_json: bool = False) -> None:
    """Print rows as one table, or as JSON.

    Long cells wrap at spaces, long words after a separator. Where the columns do not fit side by side, each row is
    printed as a block of its own, so that no header and no number is broken.
    """
    rows = list(rows)
    if as_json:
        print(json.dumps(rows))
        return
    if not rows:
        print("nothing here")
        return
    keys = list(dict.fromkeys(key for row in rows for key in row))
    heads = [visible(key) for key in keys]  # before anything is measured
    lines = [[visible(_text(row.get(key))) for key in keys] for row in rows]
    screen = console(width=None if console().is_terminal else _PIPE_WIDTH)
    widths = _widths(heads, lines, screen.width)
    if widths is None:
        _print_blocks(screen, heads, lines)
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    for head, width in zip(heads, widths, strict=True):
        table.add_column(head, overflow="fold", width=width)
    for line in lines:
        table.add_row(*(wrapped(cell, width) for cell, width in zip(line, widths, strict=True)))
    screen.print(table)


def wrapped(cell: str, width: int) -> str:
    """The cell in lines of at most this width. A word that is longer ends a line after a separator, and anywhere if it has none.

    >>> print(wrapped("a run of cifar10/0.5/rescene-plus", 14))
    a run of
    cifar10/0.5/
    rescene-plus
    """
    from rich.cells import cell_len

    lines: list[str] = []
    for line in cell.split("\n"):
        lines += [line] if cell_len(line) <= width else _filled(line.split(), width)
    return "\n".join(lines)


def _filled(words: Sequence[str], width: int) -> list[str]:
    """Lines of at most this width, each as full as it can be."""
    from rich.cells import cell_len, chop_cells

    lines = [""]
    for word in words:
        whole = cell_len(word) <= width
        between = " " if lines[-1] else ""
        for piece in [word] if whole else [part for one in _PIECE.findall(word) for part in chop_cells(one, width)]:
            fits = cell_len(lines[-1] + between + piece) <= width and (whole or not between)
            lines = [*lines[:-1], lines[-1] + between + piece] if fits else [*lines, piece]
            between = ""
    return lines if lines[0] else lines[1:]


def _widths(heads: Sequence[str], lines: Sequence[Sequence[str]], room: int) -> list[int] | None:
    """The width of each column, or None if the columns do not fit.

    >>> _widths(["name", "about it"], [["a", "some long words"]], 40)
    [4, 15]
    >>> _widths(["name", "about it"], [["a", "some long words"]], 14)
    [4, 8]
    >>> _widths(["name", "about it"], [["a", "some long words"]], 10) is None
    True
    """
    from rich.cells import cell_len

    columns = [[head, *(line[i] for line in lines)] for i, head in enumerate(heads)]
    widths = [max(cell_len(part) for cell in column for part in cell.split("\n")) for column in columns]
    words = [[cell_len(word) for cell in column[1:] for word in cell.split()] for column in columns]
    least = [
        max(max(cell_len(word) for word in head.split() or [""]), *(min(size, _LONG) for size in sizes), 1)
        for head, sizes in zip(heads, words, strict=True)
    ]
    room -= _GAP * (len(heads) - 1)
    if sum(least) > room:
        return None
    while sum(widths) > room:
        widest = max((i for i in range(len(widths)) if widths[i] > least[i]), key=lambda i: widths[i])
        widths[widest] -= 1
    return widths


def _print_blocks(screen: Console, heads: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Each row as lines of ``header  value``, with an empty line between two rows."""
    margin = max(map(len, heads)) + _GAP
    room = max(screen.width - margin, _LONG)
    for number, line in enumerate(lines):
        if number:
            screen.print()
        for head, cell in zip(heads, line, strict=True):
            if cell not in ("", "-"):
                text = wrapped(cell, room).replace("\n", "\n" + " " * margin)
                screen.print(screen.render_str(f"{head:<{margin}}", style="bold"), screen.render_str(text), sep="")


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value)
    return str(value)


def accuracy_text(value: float | None) -> str:
    """An accuracy in percent; a dash where no site had an image to measure it on."""
    return "-" if value is None else f"{value:.1f}"


def position(task: int, num_tasks: int | None = None, round: int | None = None, num_rounds: int | None = None) -> str:
    """Where a run is, in words. The arguments count from 0 as in files; people count from 1.

    >>> position(0, 3, 1, 5), position(2), position(0, 3, -1)
    ('task 1/3 round 2/5', 'task 3', 'task 1/3')
    """
    words = f"task {task + 1}" + (f"/{num_tasks}" if num_tasks else "")
    if round is None or round < 0:  # the beginning and the end of a task are no rounds
        return words
    return f"{words} round {round + 1}" + (f"/{num_rounds}" if num_rounds else "")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make the folder of a file that is about to be written; what cannot be written becomes an error message."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise ConfigError("E147", f"cannot write '{path}'", where="--out", why=error.strerror) from error


class Terminated(KeyboardInterrupt):
    """SIGTERM, treated like Ctrl-C: the last committed round is safe."""


def warnings_for_people() -> None:
    """Our own warnings are printed without the line of code that gave them, as errors are."""
    warnings.formatwarning = _words


_usual = warnings.formatwarning


def _words(message: Any, *rest: Any, **more: Any) -> str:
    return f"{message}\n" if isinstance(message, ResceneWarning) else _usual(message, *rest, **more)


def interruptible(work: Callable[[], int | None], again: str = "the same command") -> None:
    """Ctrl-C and SIGTERM end the process politely; every finished round is on disk. ``work`` may return an exit code."""

    def terminate(number: int, frame: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        code = work()
    except KeyboardInterrupt as stop:
        print(f"\ninterrupted; every finished round is saved, if there is one. Go on with: {again}", file=sys.stderr)
        raise typer.Exit(143 if isinstance(stop, Terminated) else 130) from None
    finally:
        signal.signal(signal.SIGTERM, before)
    if code:
        raise typer.Exit(code)


def until_stopped() -> None:
    """Wait for Ctrl-C or SIGTERM."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        stop.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
