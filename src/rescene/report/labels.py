"""What a series is called: short words for what sets it apart from others, and never two that look alike."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence
from itertools import chain, count
from typing import Any

from rescene.report.look import plain
from rescene.report.reading import Row

SERVER_EPOCHS = "train.server_epochs"
_FEW = 3  # settings that a label names, if no more are needed to tell it from others
_FIRST = (  # what one asks for first
    "data.name", "federation.beta", SERVER_EPOCHS, "method.step", "privacy.mechanism", "privacy.epsilon",
    "privacy.noise_multiplier", "method.start", "model.name", "federation.wire",
)  # fmt: skip
_WORDS = {  # as the paper's tables and the frontier call them
    SERVER_EPOCHS: "E_srv={}", "method.step": "{} steps", "privacy.mechanism": "{}", "privacy.epsilon": "ε={}",
    "privacy.noise_multiplier": "σ={}", "model.name": "{}", "data.name": "{}", "federation.wire": "{} wire",
    "train.augment": "no augmentation",
}  # fmt: skip
_UNSAID = {"method.step": "polyak", "privacy.mechanism": "none", "train.augment": True}  # the forms that need no word


def quiet(key: str) -> bool:
    """Whether a setting says how or where something ran: it is named only where nothing else tells two runs apart."""
    return key == "data.path" or key.endswith(".precision")


def word(key: str, value: Any) -> str:
    """A setting in one short word; empty for what goes without saying.

    >>> word("train.server_epochs", 100), word("method.step", "fixed"), word("method.step", "polyak"), word("train.lr", 0.1)
    ('E_srv=100', 'fixed steps', '', 'lr=0.1')
    >>> word("train.augment", True), word("train.augment", False)
    ('', 'no augmentation')
    """
    if value is None or value == _UNSAID.get(key):
        return ""
    text = shortened(f"{value:g}" if isinstance(value, float) else plain(value), 24)
    return _WORDS[key].format(text) if key in _WORDS else f"{plain(key.split('.')[-1], 24)}={text}"


def telling(
    settings: Sequence[Row], recipes: Sequence[str], apart: Sequence[str], always: Sequence[str] = ()
) -> list[list[str]]:
    """Words for each cell that no other one has: a few settings, or where many differ the recipe's name if that differs too.

    ``always`` is named in any case. More settings come to that as long as they tell cells apart that still look alike; what
    most cells have of them is not said. "…" marks a cell that differs from most in yet another setting.
    """
    keys = sorted(dict.fromkeys([*always, *apart]), key=_rank)
    columns = {key: [word(key, own.get(key)) for own in settings] for key in keys}
    named = sum(not quiet(key) for key in apart) > _FEW and all(recipes) and len(set(recipes)) > 1
    shown = [[shortened(plain(name), 24) for name in recipes]] if named else []
    left = []
    for key, column in columns.items():
        if key in always or (not named and len(shown) < _FEW and not quiet(key)):
            shown.append(column)
        elif _kinds([*shown, column]) > _kinds(shown):
            rare = [each if each != _common(column) else "" for each in column]
            shown.append(rare if _kinds([*shown, rare]) == _kinds([*shown, column]) else column)
        elif not named and not quiet(key):
            left.append(column)
    more = ["…" if any(column[i] != _common(column) for column in left) else "" for i in range(len(settings))]
    return [[each for each in [*(column[i] for column in shown), more[i]] if each] for i in range(len(settings))]


def _rank(key: str) -> tuple[bool, int]:
    return quiet(key), _FIRST.index(key) if key in _FIRST else len(_FIRST)


def _kinds(columns: Sequence[Sequence[str]]) -> int:
    """How many cells look different."""
    return len(set(zip(*columns, strict=True))) if columns else 1


def _common(column: Sequence[str]) -> str | None:
    """The word that more than half of the cells have.

    >>> _common(["a", "a", "b"]), _common(["a", "b"])
    ('a', None)
    """
    found, num = Counter(column).most_common(1)[0]
    return found if 2 * num > len(column) else None


def shortened(text: str, limit: int) -> str:
    """At most ``limit`` letters, cut in the middle: labels differ at their ends.

    >>> shortened("ReSCENE fixed steps E_srv=100", 18)
    'ReSCENE …E_srv=100'
    """
    kept = limit - 1
    return text if len(text) <= limit else f"{text[: kept - (kept + 1) // 2]}…{text[-((kept + 1) // 2) :]}"


def wrapped(text: str, width: int, lines: int = 2) -> str:
    """On at most so many lines of ``width`` letters; what does not fit is cut from the middle.

    >>> wrapped("raw upload (control) E_srv=10", 22)
    'raw upload (control)\\nE_srv=10'
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
        again = (numbered.format(name, i) for i in count(2))
        made.append(next(each for each in chain([name], again) if each not in made))
    return made


def visible(labels: Sequence[str], width: int, lines: int = 2) -> list[str]:
    """Labels as a figure shows them: wrapped, cut where they must be, and still no two the same."""
    return distinct([wrapped(label, width, lines) for label in labels])
