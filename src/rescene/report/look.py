"""How methods look: one fixed name, colour and marker each, everywhere.

Colours are Okabe and Ito's set with a brown and a slate, so that all ten differ also to people with colour-blindness; a marker
goes with each so that no figure depends on colour alone. The blue of ReSCENE is the tint of the paper's tables.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

# Neutral colours of the figures. On the page they become the theme's variables, so figures follow light and dark.
INK, MUTED, GRID, CARD = "#22262e", "#6a7180", "#dfe2e8", "#ffffff"
WHITE, BLACK = "#fefefe", "#191b20"  # these stay as they are in both themes: text on a filled shape

BLUE, ORANGE, SKY, GREEN = "#0072b2", "#e69f00", "#56b4e9", "#009e73"
VERMILLION, PURPLE, YELLOW, GREY = "#d55e00", "#cc79a7", "#f0e442", "#8a909c"
BROWN, SLATE = "#7b3f00", "#5f6570"

_GLYPHS = {"o": "●", "s": "■", "^": "▲", "v": "▼", "D": "◆", "P": "✚", "X": "✖", "*": "★", "<": "◀", ">": "▶"}


@dataclass(frozen=True)
class Look:
    """Name, colour, marker of a method, and what its clients send (None: not known)."""

    label: str
    colour: str
    marker: str
    sends: str | None = None

    @property
    def glyph(self) -> str:
        """The marker as a character, so that tables can serve as the legend."""
        return _GLYPHS[self.marker]

    @property
    def server_trains(self) -> bool:
        """Whether the server trains on what it gets, for E_srv epochs: images, or nobody knows what."""
        return self.sends is None or "images" in self.sends

    @property
    def css_colour(self) -> str:
        return {INK: "var(--ink)", BROWN: "var(--brown)", SLATE: "var(--slate)"}.get(self.colour, self.colour)


_IMAGES, _WEIGHTS, SUMS = "surrogate images with labels", "model weights", "counts and sums of features"
_KNOWN = {
    "rescene": Look("ReSCENE", BLUE, "o", _IMAGES),
    "fedavg": Look("FedAvg", SLATE, "s", _WEIGHTS),
    "fedewc": Look("FedEWC", SKY, "^", _WEIGHTS),
    "fedlwf": Look("FedLwF", BROWN, "v", _WEIGHTS),
    "target": Look("TARGET", PURPLE, "D", _WEIGHTS),
    "glfc": Look("GLFC", GREEN, "P", "model weights and gradients of class prototypes"),
    "fedcbdr": Look("FedCBDR", VERMILLION, "X", "model weights and rotated features"),
    "refed": Look("Re-Fed", ORANGE, "*", _WEIGHTS),
    "feddm": Look("FedDM", INK, "<", _IMAGES),
    "fedaf": Look("FedAF", YELLOW, ">", "surrogate images, class-mean logits and soft labels"),
    "moments": Look("Moments", VERMILLION, "D", SUMS),
    "afl": Look("AFL", GREEN, "^", SUMS),
    "fedcgs": Look("FedCGS", PURPLE, "s", SUMS),
    "joint": Look("joint (upper bound)", GREY, "P", "all its images"),
    "local": Look("local (lower bound)", GREY, "v", "nothing"),
    "rawupload": Look("raw upload (control)", GREY, "D", "real images with labels"),
}
REFERENCES = frozenset({"joint", "local", "rawupload"})  # lines to read the others by, not competitors


def key_of(method: str) -> str:
    """Spelling-proof key of a method.

    >>> key_of("Re-Fed")
    'refed'
    """
    return re.sub(r"[^a-z0-9]", "", method.lower())


def look_of(method: str) -> Look:
    """The look of a method; one that is not ours gets a colour and marker from its name, the same in every report."""
    known = _KNOWN.get(key_of(method))
    if known:
        return known
    digest = hashlib.sha256(method.encode("utf-8", "replace")).digest()
    colours = (ORANGE, SKY, GREEN, VERMILLION, PURPLE, YELLOW)
    markers = tuple(_GLYPHS)[1:]
    return Look(plain(method), colours[digest[0] % len(colours)], markers[digest[1] % len(markers)])


def is_ours(method: str) -> bool:
    return key_of(method) == "rescene"


def text_on(colour: str) -> str:
    """Colour of text on a shape of this colour, readable in both themes."""
    if colour == INK:
        return CARD
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return BLACK if 0.299 * red + 0.587 * green + 0.114 * blue > 0.58 else WHITE


def plain(text: object, limit: int = 80) -> str:
    """Text from a file as one printable line, cut at ``limit`` characters.

    Control and direction-changing characters become spaces: they would break an SVG or disguise a name.

    >>> plain("a\\nb"), plain("abcdef", 4)
    ('a b', 'abc…')
    """
    line = "".join(char if char.isprintable() else " " for char in str(text)).strip()
    return line if len(line) <= limit else line[: limit - 1] + "…"


def slug(text: str) -> str:
    """A file-name and id made of a-z, 0-9 and dashes, unique enough for names that share those letters.

    >>> slug("ReSCENE"), slug("rescene · beta=0.1")
    ('rescene', 'rescene-beta-0-1')
    """
    kept = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40]
    return kept or "method-" + hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:6]
