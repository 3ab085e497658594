"""What a site sees before anything is sent: its checks, and a few of its own surrogates beside its own images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np

from rescene import __version__
from rescene.report.page import put_page, template
from rescene.report.runs import Row
from rescene.report.surrogates import pair_of, through_lens


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
        pairs = [pair_of(entry, surrogate, nearest) for entry, surrogate, nearest in shown]
    html = template("check.html.j2").render(
        version=__version__,
        css=(files("rescene.report") / "page.css").read_text("utf-8"),
        name=name,
        rows=rows,
        problems=[row for row in rows if row["problem"]],
        preview=preview,
        pairs=pairs,
        lens=through_lens(preview.surrogates) if preview else "",
    )
    return put_page(html, out, mode=0o600)
