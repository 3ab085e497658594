"""What was uploaded, beside the real image it resembles most: pairs for the page, a contact sheet and a CSV."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rescene.report.canvas import csv_text, data_uri
from rescene.report.groups import Group
from rescene.report.look import plain
from rescene.report.runs import Run, number
from rescene.report.words import percent

_MOST = 60  # pairs on the page: enough to judge, light enough to mail
NEAR_COPY_DB = 30.0


@dataclass(frozen=True)
class Pair:
    """One upload and its nearest real image, ready for an <img>."""

    label: str
    place: str
    surrogate_uri: str
    nearest_uri: str
    rms: str
    psnr: str
    near_copy: bool


@dataclass(frozen=True)
class Gallery:
    """Pairs of one run. ``num_recorded`` may exceed the number of pairs shown."""

    group: Group
    pairs: tuple[Pair, ...]
    num_recorded: int


def gallery(group: Group, folder: Path) -> Gallery | None:
    """Pairs of the group's first run that kept any; also writes surrogates-<slug>.png and .csv into ``folder``."""
    for run in group.shown:
        entries, uploads, nearest = _load(run)
        if not entries:
            continue
        (folder / f"surrogates-{group.slug}.csv").write_text(csv_text(entries), "utf-8", newline="")
        chosen = sorted(_evenly(entries), key=lambda i: (entries[i].get("task") or 0, entries[i].get("label") or 0, i))
        _sheet(uploads[chosen], nearest[chosen]).save(folder / f"surrogates-{group.slug}.png")
        pairs = tuple(_pair(entries[i], uploads[i], nearest[i]) for i in chosen)
        return Gallery(group, pairs, len(entries))
    return None


def _load(run: Run) -> tuple[list[dict[str, Any]], np.ndarray, np.ndarray]:
    """Entries and the two uint8 [n,3,H,W] arrays; nothing if a file is missing or they do not fit together."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    none = np.zeros((0, 3, 1, 1), np.uint8)
    try:
        entries = json.loads((run.folder / "surrogates.json").read_text("utf-8"))
        tensors = load_file(run.folder / "surrogates.safetensors")
        uploads, nearest = tensors["surrogates"], tensors["nearest"]
    except (OSError, ValueError, KeyError, SafetensorError):
        return [], none, none
    fits = isinstance(entries, list) and all(isinstance(entry, dict) for entry in entries)
    if not fits or uploads.ndim != 4 or uploads.shape != nearest.shape or len(uploads) != len(entries):
        return [], none, none
    return entries, uploads, nearest


def _evenly(entries: list[dict[str, Any]]) -> list[int]:
    """Up to _MOST positions, the same number from every class as far as possible."""
    queues: dict[Any, list[int]] = {}
    for i, entry in enumerate(entries):
        queues.setdefault(str(entry.get("class")), []).append(i)
    turns = [[queue[n] for queue in queues.values() if n < len(queue)] for n in range(max(map(len, queues.values())))]
    return [i for turn in turns for i in turn][:_MOST]


def _pair(entry: dict[str, Any], upload: np.ndarray, nearest: np.ndarray) -> Pair:
    psnr, rms = number(entry.get("psnr")), number(entry.get("rms"))
    exact = rms == 0.0  # PSNR is then infinite, which JSON cannot say
    return Pair(
        label=plain(entry.get("class", "?"), 40),
        place=f"T{plain(entry.get('task', '?'), 6)}, round {plain(entry.get('round', '?'), 6)}",
        surrogate_uri=_png_uri(upload),
        nearest_uri=_png_uri(nearest),
        rms=percent(rms, 3),
        psnr="∞" if exact else percent(psnr, 1),
        near_copy=exact or (psnr is not None and psnr > NEAR_COPY_DB),
    )


def _png_uri(image: np.ndarray) -> str:
    out = io.BytesIO()
    _picture(image).save(out, "PNG", optimize=True)
    return data_uri("image/png", out.getvalue())


def _picture(image: np.ndarray) -> Any:
    """uint8 [3,H,W] (or [1,H,W]) as a PIL image."""
    from PIL import Image

    pixels = np.moveaxis(image.astype(np.uint8), 0, -1)
    return Image.fromarray(pixels if pixels.shape[-1] == 3 else np.repeat(pixels[..., :1], 3, axis=-1))


def _sheet(uploads: np.ndarray, nearest: np.ndarray) -> Any:
    """Contact sheet, ten pairs a row, upload at the left of each pair."""
    from PIL import Image

    height, width = uploads.shape[-2:]
    cell_width, cell_height, across = 2 * width + 6, height + 6, min(10, len(uploads))
    sheet = Image.new("RGB", (across * cell_width, -(-len(uploads) // across) * cell_height), "white")
    for i, (left, top) in enumerate(_places(len(uploads), across, cell_width, cell_height)):
        sheet.paste(_picture(uploads[i]), (left + 2, top + 3))
        sheet.paste(_picture(nearest[i]), (left + 3 + width, top + 3))
    return sheet.resize((sheet.width * 2, sheet.height * 2), Image.Resampling.NEAREST)


def _places(num: int, across: int, cell_width: int, cell_height: int) -> Iterator[tuple[int, int]]:
    return ((i % across * cell_width, i // across * cell_height) for i in range(num))
