"""Numbers, names and pages as text: units, one printable line, labels that fit and differ, filled templates."""

from __future__ import annotations

import base64
import hashlib
import math
import re
import textwrap
from collections.abc import Sequence
from importlib.resources import files
from itertools import chain
from itertools import count as counting
from pathlib import Path
from typing import Any

from rescene import __version__
from rescene.core.files import ANYBODY, unique_draft, write_atomically

NONE = "–"


def percent(value: float | None, digits: int = 1) -> str:
    """
    >>> percent(78.26), percent(None)
    ('78.3', '–')
    """
    return NONE if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def percent_sign(value: float, digits: int = 1) -> str:
    """
    >>> percent_sign(78.26)
    '78.3\\xa0%'
    """
    return f"{percent(value, digits)}\u00a0%"  # the sign never stands alone on a line


def known(value: object) -> str:
    """
    >>> known(3), known(None)
    ('3', '–')
    """
    return NONE if value is None else str(value)


def _scaled(value: float | None, units: Sequence[str]) -> str:
    """Three significant digits with the largest unit, each a thousand of the one before, that keeps the number at 1 or more."""
    if value is None:
        return NONE
    size, i = float(value), 0
    while abs(size) >= 999.5 and i < len(units) - 1:
        size, i = size / 1000, i + 1
    digits = 0 if i == 0 or abs(size) >= 100 else 1 if abs(size) >= 10 else 2
    return f"{size:.{digits}f} {units[i]}"


def bytes_text(value: float | None) -> str:
    """Decimal units, as in the paper's tables.

    >>> bytes_text(245760), bytes_text(1228800), bytes_text(12)
    ('246 kB', '1.23 MB', '12 B')
    """
    return _scaled(value, ("B", "kB", "MB", "GB", "TB", "PB"))


def flops_text(value: float | None) -> str:
    """
    >>> flops_text(3.34e9)
    '3.34 GFLOP'
    """
    return _scaled(value, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP"))


def site_work(flops: float | None, lens: bool) -> str:
    """FLOPs of the sites; the look through a lens is not among them, and this says so.

    >>> site_work(2.82e8, lens=True), site_work(2.82e8, lens=False)
    ('282 MFLOP + lens', '282 MFLOP')
    """
    counted = flops_text(flops)
    return f"{counted} + lens" if lens and flops is not None else counted


def server_work(flops: float | None) -> str:
    """FLOPs of the server. Averages, sums and solvers are not counted, so a server that does only these did not do nothing.

    >>> server_work(0), server_work(3.34e9)
    ('none counted', '3.34 GFLOP')
    """
    return "none counted" if flops == 0 else flops_text(flops)


def seconds_text(value: float | None) -> str:
    """
    >>> seconds_text(4.26), seconds_text(61.2), seconds_text(7322)
    ('4.3 s', '1 min 01 s', '2 h 02 min')
    """
    if value is None:
        return NONE
    whole = round(value)
    if value < 59.95:
        return f"{value:.1f} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def count(num: int, noun: str) -> str:
    """
    >>> count(1, "task"), count(3, "class")
    ('1 task', '3 classes')
    """
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{num:,} {noun if num == 1 else plural}"


def times(ratio: float) -> str:
    """Two decimals, or two digits of a small ratio.

    >>> times(0.4312), times(2.0), times(1790.4), times(0.00427)
    ('0.43', '2.00', '1,790', '0.0043')
    """
    if ratio == 0:
        return "0"
    decimals = max(2, 1 - math.floor(math.log10(float(f"{ratio:.1e}"))))  # of the ratio as printed: 0.0996 is 0.10
    return f"{ratio:.{decimals}f}" if ratio < 10 else f"{ratio:,.0f}"


def task_name(index: int | None) -> str:
    """A task as people read it. Files count tasks from 0, people from 1.

    >>> task_name(0), task_name(None)
    ('T1', 'T-')
    """
    return "T-" if index is None else f"T{index + 1}"


def plain(text: object, limit: int = 80) -> str:
    """Text from a file as one printable line, cut at ``limit`` characters.

    Control and direction-changing characters become spaces: they would break an SVG or disguise a name.

    >>> plain("a\\nb"), plain("abcdef", 4)
    ('a b', 'abc…')
    """
    line = "".join(char if char.isprintable() else " " for char in str(text)).strip()
    return line if len(line) <= limit else line[: limit - 1] + "…"


def short(value: object) -> str:
    """A value of a recipe or a record on one line.

    >>> short(0.50), short("cpu")
    ('0.5', 'cpu')
    """
    return plain(f"{value:g}" if isinstance(value, float) else value, 120)


def slug(text: str) -> str:
    """A file-name and id made of a-z, 0-9 and dashes, unique enough for names that share those letters.

    >>> slug("Method"), slug("method · beta=0.1")
    ('method', 'method-beta-0-1')
    """
    kept = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40]
    return kept or "method-" + hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:6]


def data_uri(kind: str, content: bytes) -> str:
    """Content that travels inside the page."""
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"


def shortened(text: str, limit: int) -> str:
    """At most ``limit`` letters, cut in the middle: labels differ at their ends.

    >>> shortened("Example fixed steps E_srv=100", 18)
    'Example …E_srv=100'
    """
    kept = limit - 1
    return text if len(text) <= limit else f"{text[: kept - (kept + 1) // 2]}…{text[-((kept + 1) // 2) :]}"


def wrapped(text: str, width: int, lines: int = 2) -> str:
    """On at most so many lines of ``width`` letters; what does not fit is cut from the middle.

    >>> wrapped("any method (control) E_srv=10", 22)
    'any method (control)\\nE_srv=10'
    """
    for limit in range(min(len(text), lines * width), 0, -1):
        parts = textwrap.wrap(shortened(text, limit), width, break_on_hyphens=False)
        if len(parts) <= lines:
            return "\n".join(parts)
    return text


def distinct(names: Sequence[str], numbered: str = "{} ({})") -> list[str]:
    """The names, numbered from the second on where several are the same.

    >>> distinct(["a", "b", "a"]), distinct(["a", "a"], "{}-{}")
    (['a', 'b', 'a (2)'], ['a', 'a-2'])
    """
    made: list[str] = []
    for name in names:
        again = (numbered.format(name, i) for i in counting(2))
        made.append(next(each for each in chain([name], again) if each not in made))
    return made


def visible(labels: Sequence[str], width: int, lines: int = 2) -> list[str]:
    """Labels as a figure shows them: wrapped, cut where they must be, and still no two the same."""
    return distinct([wrapped(label, width, lines) for label in labels])


def render_page(template: str, /, script: str = "", **values: Any) -> str:
    """A page of ours with its style sheet and ``script``: everything put into it is escaped, and what is missing is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    env = Environment(
        loader=PackageLoader("rescene.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    css = (files("rescene.report") / "page.css").read_text("utf-8")
    if script:  # the page's policy allows this one script, by its hash
        code = (files("rescene.report") / script).read_text("utf-8")
        digest = hashlib.sha256(f"\n{code}".encode()).digest()
        values |= {"script": code, "script_hash": base64.b64encode(digest).decode()}
    return env.get_template(template).render(version=__version__, css=css, **values)


def put_page(html: str, out: Path, mode: int = ANYBODY) -> Path:
    """Whoever opens the page meanwhile sees the old one or the new one, whole."""
    write_atomically(out, html.encode(), sync="none", mode=mode, draft=unique_draft(out))
    return out
