"""Pages of pictures: what a model says about them (``rescene predict``), and what a site would send (``rescene deploy check``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rescene.core.json_files import Row, record_of
from rescene.core.results import PairRecord
from rescene.report.formatting import count, data_uri, plain
from rescene.report.page import put_page, render_page
from rescene.report.uploads import pair_of, png_uri, through_lens

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
    html = render_page(
        "gallery.html.j2",
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


def write_inspection(found: Row, sheet: bytes, out: Path) -> Path:
    """The page of ``rescene data inspect``: counts, what is odd, the command, and the contact sheet (a PNG)."""
    tables = {key: found[key] for key in ("classes", "sites", "domains") if found[key]}
    html = render_page("inspection.html.j2", found=found, tables=tables, uri=data_uri("image/png", sheet))
    return put_page(html, out)


@dataclass(frozen=True)
class Preview:
    """A trial round in words and pictures (uint8 [n,3,H,W], one entry per pair)."""

    facts: dict[str, str]
    leaves_site: str
    drawn: bool
    num_images: int
    near_copies: float
    entries: Sequence[Row]
    surrogates: np.ndarray
    nearest: np.ndarray


def write_check(rows: Sequence[Row], preview: Preview | None, name: str, out: Path) -> Path:
    """One page that fetches nothing and that nobody else can read: it shows the site's images."""
    pairs = []
    if preview:
        shown = zip(preview.entries, preview.surrogates, preview.nearest, strict=True)
        pairs = [pair_of(record_of(PairRecord, entry, []), surrogate, nearest) for entry, surrogate, nearest in shown]
    html = render_page(
        "check.html.j2",
        name=name,
        rows=rows,
        problems=[row for row in rows if row["problem"]],
        preview=preview,
        pairs=pairs,
        lens=through_lens(preview.surrogates) if preview else "",
    )
    return put_page(html, out, mode=0o600)
