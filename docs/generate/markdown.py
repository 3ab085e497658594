"""Tables and safe text, for every generated page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any


def safe(value: Any) -> str:
    """Text in which nothing is markup.

    >>> safe("a_b | <c>")
    'a\\\\_b \\\\| \\\\<c\\\\>'
    """
    return re.sub(r"([\\`*_{}\[\]<>#|$])", r"\\\1", " ".join(str(value).split()))


def code(value: Any) -> str:
    """A value in code; an empty one is left out.

    >>> code("a|b"), code("")
    ('`a\\\\|b`', '')
    """
    text = " ".join(str(value).split()).replace("|", "\\|")
    return f"`{text}`" if text else ""


def yaml_value(value: Any) -> str:
    """A default as it is written in a recipe.

    >>> yaml_value(None), yaml_value(True), yaml_value(0.5)
    ('null', 'true', '0.5')
    """
    return (
        {None: "null", True: "true", False: "false"}[value]
        if value is None or value is True or value is False
        else str(value)
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the cells are Markdown already."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
