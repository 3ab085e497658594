"""What server and site say to each other, as records, and how letters travel."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from rescene.core.errors import DECLINED
from rescene.core.record import Tree, record

if TYPE_CHECKING:  # letters are read before it is known whether there is work, and the ledger takes long to load
    from rescene.privacy.ledger import End

HELLO = "hello"  # the verb that asks a site who it is
SUM_STEPS = ("sum-deal", "sum-receive", "sum-mask", "sum-agree", "sum-reveal")  # of a secure sum, in this order
LONGEST_LINE = 1000  # characters of what one side tells the other in words
EVALUATE = "evaluate"  # and the one that asks how the model does on its hold-out; neither is the method's


class Letter(NamedTuple):
    """``head`` is one site's; ``body``, the payload, is often the same for all and then travels to the link once."""

    head: bytes
    body: bytes = b""


@record
class Request:
    """Call ``verb`` in this task, from the remembered state with this hash, with randomness from this address."""

    version: str
    run: str
    recipe: str  # JSON; the site puts its own data and device in
    verb: str
    task: int
    round: int  # -1 outside rounds
    address: tuple[str | int, ...]
    state: str | None
    token: str  # of this question to this site; the answer repeats it
    ledger: End | None = None  # how far the site's privacy ledger went, as its answers said
    lens: str = ""  # SHA-256 of the lens that every site must look through, where there is one
    session: str = ""  # of the secure sum that this is a part of


@record
class Remembered:
    """What a site keeps, as the server knows it: by hash, so that a resumed run starts from the right one."""

    sha256: str
    num_bytes: int


@record
class Reply:
    """A site's answer, or the code and words of what stopped it."""

    client: int
    upload: Tree
    state: Remembered | None = None
    flops: int = 0
    problem: tuple[str, str] | None = None
    told: tuple[tuple[str, str], ...] = ()  # codes and words the server should hear, though there is an answer
    token: str = ""
    ledger: End | None = None  # how far the site's privacy ledger goes with what this answer releases


def declines(reply: Reply) -> bool:
    """Whether a site did not send what it was asked for, because its privacy floor forbids it."""
    return any(code == DECLINED for code, _ in reply.told)


def is_digest(value: Any) -> bool:
    """Whether this is a SHA-256, as both sides write it."""
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def in_a_line(words: str) -> str:
    """Printable, short and in one line, as the other side wants to log it.

    >>> in_a_line("out of\\nmemory\\x1b[0m")
    'out of memory[0m'
    """
    return "".join(c for c in " ".join(words.split()) if c.isprintable())[:LONGEST_LINE]


class Undelivered(NamedTuple):
    """The engine below could not bring a letter to a site, or its answer back."""

    why: str


class Post(Protocol):
    """Brings letters to nodes. Flower's grid is one; tests have another."""

    def nodes(self) -> Sequence[int]:
        """Nodes that are there now."""

    def push(self, letters: dict[int, Letter]) -> dict[str, int]:
        """Send one letter to each node; returns the node by the letter's id."""

    def pull(self, ids: Sequence[str]) -> dict[str, bytes | Undelivered]:
        """Answers that have come since, by the id of the letter they answer."""


@dataclass(frozen=True)
class Patience:
    """How long the server waits for an answer, how often it looks, how often it sends a letter that got lost."""

    gather_s: float = 600.0  # for the sites of the first round to be there
    deadline_s: float = 3600.0
    poll_s: float = 1.0
    attempts: int = 3
