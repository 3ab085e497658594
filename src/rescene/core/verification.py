"""What a method was compared with, where, and how close it came. Each method class says it of itself; nothing said is not verified."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from rescene.core.errors import ConfigError

Against = Literal["paper figure", "published code", "hand computation"]
NOT_VERIFIED = "not verified"


@dataclass(frozen=True)
class Verified:
    """One comparison. ``where`` is a test (``tests/file.py::test_name``) or a results folder; ``close`` says how near, with n.

    >>> Verified("published code", "tests/oracles/test_oracles.py::test_acil_recursion", "1e-9").against
    'published code'
    """

    against: Against
    where: str
    close: str

    def __post_init__(self) -> None:
        if self.against not in get_args(Against):
            raise ConfigError(
                "E540",
                f"a method cannot be verified against {self.against!r}",
                where=self.where,
                why=f"known are {', '.join(get_args(Against))}",
                fix="choose one of them in the class's `verified`",
            )
        for part, words in (("where", "where"), ("close", "how close")):
            if not getattr(self, part).strip():
                raise ConfigError(
                    "E513",
                    f"a comparison with {self.against} does not say {words} it is",
                    where=self.where or None,
                    why="nobody could check it",
                    fix='Verified("published code", "tests/test_my_idea.py::test_the_loss", "1e-6, the loss")',
                )


def in_full(found: Sequence[Verified]) -> list[str]:
    """Each comparison in words: with what, how close, and where.

    >>> in_full([Verified("published code", "tests/test_a.py::test_b", "1e-9")])
    ['published code: 1e-9 (tests/test_a.py::test_b)']
    """
    return [f"{one.against}: {one.close} ({one.where})" for one in found]


def in_short(found: Sequence[Verified]) -> str:
    """Each kind once, strongest first, or that there is none.

    >>> in_short([Verified("hand computation", "a", "b"), Verified("published code", "c", "d")])
    'published code, hand computation'
    """
    kinds = [
        kind for kind in ("published code", "paper figure", "hand computation") if kind in {v.against for v in found}
    ]
    return ", ".join(kinds) or NOT_VERIFIED
