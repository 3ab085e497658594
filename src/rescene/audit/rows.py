"""A row of the red team's table: what is claimed, how it was attacked, what was found and what was promised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AttackVerdict = Literal["held", "BROKEN", "CONTROL DID NOT FIRE", "as stated", "not run", "untested"]


@dataclass(frozen=True)
class Found:
    """What an attack found, smaller is better, and whether it also finds what was broken on purpose.

    ``promised`` None: nothing is promised, and the row only shows what that means.
    """

    found: float
    promised: float | None
    control: bool
    unit: str
    control_words: str  # what was broken on purpose
    note: str = ""

    @property
    def verdict(self) -> AttackVerdict:
        """Compare what the attack found with what was promised. A control that does not fire makes the result void."""
        if not self.control:
            return "CONTROL DID NOT FIRE"
        if self.promised is None:
            return "as stated"
        return "held" if self.found <= self.promised else "BROKEN"


@dataclass(frozen=True)
class AttackRow:
    """One line of the audit's table."""

    claim: str
    attack: str
    control: str  # "fires: ...", "does not fire: ..." or "-"
    found: str
    promised: str
    verdict: AttackVerdict
    note: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        """Whether the claim held, or was only stated."""
        return self.verdict not in ("BROKEN", "CONTROL DID NOT FIRE")


def row_of(claim: str, attack: str, found: Found, seconds: float) -> AttackRow:
    """Turn an attack's result into a line of the table."""
    fires = "fires" if found.control else "does not fire"
    promised = "nothing" if found.promised is None else _number(found.promised, found.unit)
    return AttackRow(
        claim,
        attack,
        f"{fires}: {found.control_words}",
        _number(found.found, found.unit),
        promised,
        found.verdict,
        found.note,
        round(seconds, 1),
    )


def _number(value: float, unit: str) -> str:
    """0.031 of unit "share" is 3.1 %."""
    return f"{100 * value:.1f} %" if unit == "share" else f"{value:.4g} {unit}"
