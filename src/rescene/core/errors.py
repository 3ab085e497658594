"""Errors that say what, where, why and how to fix it; each has a code and an exit status.

Every layer may raise these. The command line prints them without a traceback (``--debug`` gives one).
"""

from __future__ import annotations

import difflib
import errno
import re
import shlex
from collections.abc import Iterable, Sequence


class ResceneError(Exception):
    """An error meant for a person. ``code`` is stable and listed in the docs; ``exit_code`` is the process status."""

    exit_code = 1

    def __init__(
        self,
        code: str,
        what: str,
        *,
        where: str | None = None,
        why: str | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(code, what)  # both, so that it can be pickled
        self.code, self.what, self.where, self.why, self.fix = code, what, where, why, fix

    def __str__(self) -> str:
        lines = [f"error[{self.code}] {self.what}"]
        for label in ("where", "why", "fix"):
            text = getattr(self, label)
            if text:
                first, *rest = str(text).splitlines()
                lines.append(f"  {label:<6} {first}")
                lines.extend(f"  {'':<6} {line}" for line in rest)
        return "\n".join(lines)


class ConfigError(ResceneError):
    """Something in the recipe, an override or a command-line argument (E1xx, E5xx)."""

    exit_code = 2


class MethodCannot(ConfigError):
    """A method that cannot do what the recipe asks for. ``sweep method=all`` leaves it out; named, it is refused."""


class DataError(ResceneError):
    """Images that are missing, half copied, unreadable or too few (E2xx)."""

    exit_code = 3


class RunError(ResceneError):
    """A run that cannot go on (E3xx) or cannot be resumed (E4xx)."""

    exit_code = 4


def is_out_of_memory(error: BaseException) -> bool:
    """Whether something was too large for this device. Torch has a class for it on a GPU, on a CPU only words.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."))
    True
    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("CUDA out of memory")), is_out_of_memory(RuntimeError("?"))
    (True, True, False)
    """
    words = ("DefaultCPUAllocator", "out of memory", "bad_alloc")
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(w in str(error) for w in words))


def for_people(error: Exception) -> Exception:
    """The error with a name and a fix where we know them: what this machine refuses is nobody's mistake in the code."""
    if isinstance(error, OSError) and error.filename is not None:
        return _refused(error, shortened(str(error.filename))) or error
    if not is_out_of_memory(error):
        return error
    return RunError(
        "E324",
        "too large for this device: out of memory",
        why=str(error).splitlines()[0] if str(error) else None,
        fix="a device with more memory; outside the paper's recipes also a smaller model, train.batch_size or method.real_batch",
    )


def _refused(error: OSError, path: str) -> ResceneError | None:
    """What the system does not do with a path, if it is something a person can change."""
    if error.errno == errno.ENAMETOOLONG:
        return ConfigError("E154", "a path is too long for this system", where=path, fix="a shorter name")
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        fix = "check who may read and write there, or use another place"
        return ConfigError("E155", f"this system does not allow it: {error.strerror}", where=path, fix=fix)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunError(
            "E424", f"could not write: {error.strerror}", where=path, fix="make room, then the same command"
        )
    return None


def lines_of(error: BaseException) -> list[str]:
    """What an error of somebody else's code says, line by line; the name of its kind where it says nothing.

    >>> lines_of(ValueError("no\\nway")), lines_of(ValueError())
    (['no', 'way'], ['ValueError'])
    """
    return str(error).strip().splitlines() or [type(error).__name__]


def with_article(word: str) -> str:
    """
    >>> with_article("int"), with_article("dict")
    ('an int', 'a dict')
    """
    return f"{'an' if word[:1].lower() in ('a', 'e', 'i', 'o') else 'a'} {word}"


def kind_of(value: object) -> str:
    """The type of a value, as a message can say it.

    >>> kind_of(3), kind_of([])
    ('an int', 'a list')
    """
    return with_article(type(value).__name__)


def shortened(text: str, most: int = 200) -> str:
    """A text that may be very long, such as a path that is too long, as a message can show it.

    >>> shortened("x" * 300, most=20)
    'xxxxxxxxxx ... xxxxx'
    """
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 4 :]}"


def few(names: Sequence[str], most: int = 5) -> str:
    """The first of these names, and how many more there are.

    >>> few(["ant", "bee"]), few(list("abcdefgh"), most=6)
    ('ant, bee', 'a, b, c, d, e, f and 2 more')
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def command(*words: object) -> str:
    """A command of ours as text that can be copied into a shell, also where a path has spaces or quotes in it.

    >>> command("resume", "runs/my run")
    "rescene resume 'runs/my run'"
    """
    return shlex.join(["rescene", *map(str, words)])


def error_in(text: str) -> ResceneError | None:
    """The error whose words a text holds, such as the last ones of a process elsewhere; None if it holds none.

    >>> print(error_in(f"Flower says: {RunError('E416', 'elsewhere', why='threads: 1 -> 2', fix='--elsewhere')}"))
    error[E416] elsewhere
      why    threads: 1 -> 2
      fix    --elsewhere
    """
    found = re.search(r"error\[(E(\d)\d\d)\] (.*)", text)
    if not found:
        return None
    code, kind, what = found.groups()
    parts = re.findall(r"^  (where|why|fix) +(.*(?:\n {9}.*)*)", text[found.end() :], re.MULTILINE)
    more = {label: words.replace("\n" + " " * 9, "\n") for label, words in parts}
    return {"1": ConfigError, "2": DataError}.get(kind, RunError)(code, what, **more)


DECLINED = "W310"  # a site did not send what it was asked for, because its privacy floor forbids it


class ResceneWarning(UserWarning):
    """A warning worth keeping: shown once and written to the run's events."""

    def __init__(self, code: str, what: str, *, fix: str | None = None) -> None:
        super().__init__(f"warning[{code}] {what}" + (f"  fix: {fix}" if fix else ""))
        self.code, self.what, self.fix = code, what, fix

    @property
    def told(self) -> str:
        """What it says and what to do about it, in one line, for events.

        >>> ResceneWarning("W217", "2 test images are training images", fix="remove them").told
        '2 test images are training images; remove them'
        """
        return f"{self.what}; {' '.join(self.fix.split())}" if self.fix else self.what


def closest(word: str, options: Iterable[str]) -> str | None:
    """The closest option to a mistyped word, or None.

    >>> closest("buget", ["budget", "beta"])
    'budget'
    """
    close = difflib.get_close_matches(word, list(options), n=1, cutoff=0.6)
    return close[0] if close else None


def did_you_mean(word: str, options: Iterable[str], form: str = "{}") -> str:
    """The question whether the closest option was meant; empty where none is close.

    >>> did_you_mean("buget", ["budget", "beta"]), did_you_mean("buget", ["budget"], "'{}'"), did_you_mean("x", ["beta"])
    ('did you mean budget?', "did you mean 'budget'?", '')
    """
    close = closest(word, options)
    return f"did you mean {form.format(close)}?" if close else ""


def with_guess(what: str, word: str, options: Iterable[str], form: str = "{}") -> str:
    """What is wrong with a word, and the question whether the closest option was meant.

    >>> with_guess("unknown key 'buget'", "buget", ["budget", "beta"]), with_guess("unknown key 'x'", "x", ["beta"])
    ("unknown key 'buget'; did you mean budget?", "unknown key 'x'")
    """
    question = did_you_mean(word, options, form)
    return f"{what}; {question}" if question else what
