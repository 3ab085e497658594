"""How a method looks in every table and figure, and what its sites send.

A method class states its style (``Method.style``), and each run records it, so a page needs no list of methods. Runs that are
older than the record get theirs from ``method_styles.json``, which is written from the registry
(``python benchmarks/method_styles.py``). A method that nobody described gets a colour and a marker from its name.

Colours are Okabe and Ito's set with a brown and a slate: the methods of the paper differ also to people with
colour-blindness. Each has a marker too, so no figure depends on colour alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from rescene.core.errors import ConfigError

INK = "#22262e"  # the colour of text; on a page it follows the theme
BLUE, ORANGE, SKY, GREEN = "#0072b2", "#e69f00", "#56b4e9", "#009e73"
VERMILLION, PURPLE, YELLOW, GREY = "#d55e00", "#cc79a7", "#f0e442", "#8a909c"
BROWN, SLATE = "#7b3f00", "#5f6570"

GLYPHS = {"o": "●", "s": "■", "^": "▲", "v": "▼", "D": "◆", "P": "✚", "X": "✖", "*": "★", "<": "◀", ">": "▶"}
UploadKind = Literal["images", "weights", "generator", "sums", "nothing", ""]  # "": not known
UPLOAD_KINDS: tuple[UploadKind, ...] = ("images", "weights", "generator", "sums", "nothing", "")
RECONSTRUCTED = "reconstructed by the server"
GENERATOR = "a generator of images is sent"


@dataclass(frozen=True)
class MethodStyle:
    """Title, colour (``#rrggbb``), marker (a key of GLYPHS) of a method, and what leaves its sites.

    ``uploads`` is the kind of what is sent, ``sends`` the same in words. ``reference`` is empty for a method that competes;
    else it says which line it draws ("upper bound"). Costs of the others are also shown as multiples of a ``cost_unit``.
    ``reconstructs``: no image is sent as such, but the server can reconstruct images of the sites from what is sent.

    >>> MethodStyle("All data", "#8a909c", "P", reference="upper bound").label
    'All data (upper bound)'
    """

    title: str
    colour: str
    marker: str
    uploads: UploadKind = ""
    sends: str = ""
    reference: str = ""
    cost_unit: bool = False
    reconstructs: bool = False

    def __post_init__(self) -> None:
        wrong = [
            *([f"colour {self.colour!r} is not #rrggbb"] if not re.fullmatch("#[0-9a-f]{6}", self.colour) else []),
            *([f"marker {self.marker!r} is not one of {' '.join(GLYPHS)}"] if self.marker not in GLYPHS else []),
            *([f"uploads {self.uploads!r} is not one of {', '.join(UPLOAD_KINDS[:-1])}"] if self.uploads not in UPLOAD_KINDS else []),
        ]  # fmt: skip
        if wrong:
            raise ConfigError("E179", f"the style of method {self.title!r} cannot be drawn", why="; ".join(wrong))

    @property
    def label(self) -> str:
        """The title, and for a reference line what it stands for."""
        return f"{self.title} ({self.reference})" if self.reference else self.title

    @property
    def glyph(self) -> str:
        """The marker as a character, so that tables can serve as the legend."""
        return GLYPHS[self.marker]

    @property
    def server_trains(self) -> bool:
        """Whether the server trains on what it receives, for E_srv epochs."""
        return self.uploads in ("images", "")

    def without_images(self, words: str = "no images") -> str:
        """What stands in place of a share of near-copies where no image was sent.

        >>> MethodStyle("A", "#8a909c", "P").without_images("none sent")
        'none sent'
        >>> MethodStyle("B", "#8a909c", "P", reconstructs=True).without_images("none sent")
        'reconstructed by the server'
        """
        instead = GENERATOR if self.uploads == "generator" else words
        return RECONSTRUCTED if self.reconstructs else instead


def method_key(method: str) -> str:
    """A method's name in the one spelling that is compared.

    >>> method_key("My-Method")
    'mymethod'
    """
    return re.sub(r"[^a-z0-9]", "", method.lower())


def derived_colour(method: str) -> str:
    """A colour that depends on the name alone: the same in every report."""
    colours = (ORANGE, SKY, GREEN, VERMILLION, PURPLE, YELLOW)
    return colours[_digest(method)[0] % len(colours)]


def derived_marker(method: str) -> str:
    """A marker that depends on the name alone."""
    markers = tuple(GLYPHS)[1:]
    return markers[_digest(method)[1] % len(markers)]


def style_of(method: str, recorded: Any = None) -> MethodStyle:
    """The style that a run recorded, else the one that ships for this name, else one derived from the name.

    A record that is older than ``reconstructs`` gets it from the style that ships, and one that calls a generator weights as
    earlier versions did gets the kind of upload.
    """
    shipped = _shipped().get(method_key(method), {})
    if isinstance(recorded, Mapping):
        recorded = {"reconstructs": shipped.get("reconstructs")} | {**recorded}
        if shipped.get("uploads") == "generator" and recorded.get("uploads") == "weights":
            recorded["uploads"] = "generator"
    for told in (recorded, shipped):
        style = _checked(told)
        if style:
            return style
    return MethodStyle(_one_line(method), derived_colour(method), derived_marker(method))


def _checked(told: Any) -> MethodStyle | None:
    """A style from a file; None if it is missing or damaged: a wrong colour must not reach a page."""
    names = ("title", "colour", "marker", "uploads", "sends", "reference")
    if not isinstance(told, Mapping) or not all(isinstance(told.get(name, ""), str) for name in names):
        return None
    values = {name: _one_line(told[name], 600) for name in names if name in told}
    try:
        flags = {name: told.get(name) is True for name in ("cost_unit", "reconstructs")}
        return MethodStyle(**values, **flags)  # type: ignore[arg-type]
    except (ConfigError, TypeError):
        return None


def _one_line(text: str, limit: int = 80) -> str:
    return "".join(char if char.isprintable() else " " for char in text).strip()[:limit]


@cache
def _shipped() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((files("rescene.core") / "method_styles.json").read_text("utf-8"))
    return found


def _digest(method: str) -> bytes:
    return hashlib.sha256(method.encode("utf-8", "replace")).digest()
