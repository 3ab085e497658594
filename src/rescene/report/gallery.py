"""Pictures with what a model says about them, on one page that fetches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from rescene import __version__
from rescene.report.look import plain
from rescene.report.page import template
from rescene.report.surrogates import png_uri
from rescene.report.words import count

MOST = 500  # pictures on a page; more would be slow to open
UNSURE = 0.5  # confidence below which an answer is marked


@dataclass(frozen=True)
class Answer:
    """A picture uint8 [3,H,W] and its likeliest classes with confidence (0 to 1)."""

    name: str
    top: Sequence[tuple[str, float]]
    pixels: np.ndarray


def write_gallery(answers: Sequence[Answer], model: str, classes: Sequence[str], out: Path) -> Path:
    """The page; it holds the pictures themselves, so treat it like them."""
    pictures = [
        {
            "uri": png_uri(answer.pixels),
            "name": plain(answer.name, 60),
            "top": [(plain(name, 40), 100 * value) for name, value in answer.top],
            "unsure": answer.top[0][1] < UNSURE,
        }
        for answer in answers[:MOST]
    ]
    counts: dict[str, int] = {}
    for answer in answers:
        counts[answer.top[0][0]] = counts.get(answer.top[0][0], 0) + 1
    html = template("gallery.html.j2").render(
        version=__version__,
        css=(files("rescene.report") / "page.css").read_text("utf-8"),
        model=model,
        classes=[plain(name, 40) for name in classes],
        title=count(len(answers), "picture"),
        counts=sorted(counts.items(), key=lambda item: (-item[1], item[0])),
        num_unsure=sum(answer.top[0][1] < UNSURE for answer in answers),
        pictures=pictures,
        num=len(answers),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(html, encoding="utf-8")
    return out
