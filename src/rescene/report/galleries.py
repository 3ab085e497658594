"""Pages of pictures: uploads beside the real images they resemble most, and class by class beside the real mean; and others.

Of uploads there are pairs for the page of a run, a contact sheet and a CSV of each. The other pages show what a model says about
pictures (``rescene predict``), what a folder holds (``rescene data inspect``) and what a site would send
(``rescene deploy check``).
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rescene.core.files import US_ALONE
from rescene.core.json_files import Row, record_of, records_of, row_of
from rescene.core.method_style import INK
from rescene.core.results import MeanRecord, PairRecord
from rescene.report.drawing import MUTED, WIDTH_IN, Plot, render
from rescene.report.formatting import count, data_uri, known, percent, plain, put_page, render_page, task_name
from rescene.report.groups import RunGroup
from rescene.report.load import RunRecord

_MOST = 60  # pairs on the page: enough to judge, light enough to mail
_ACROSS, _MOST_CLASSES = 5, 12  # of the contact sheet
_SMALL: Any = {"color": MUTED, "fontsize": 6.5}
RecordEntry = TypeVar("RecordEntry", PairRecord, MeanRecord)
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
class Mean:
    """The mean of a class's uploads and that of its real images."""

    label: str
    place: str
    surrogate_uri: str
    real_uri: str
    rms: str


@dataclass(frozen=True)
class Gallery:
    """Pairs of one run. ``num_recorded`` may exceed the number of pairs shown; ``lens`` is what to say of one, if any.

    ``means`` are there where the run could know the real ones and might write them down.
    """

    group: RunGroup
    pairs: tuple[Pair, ...]
    num_recorded: int
    lens: str
    means: tuple[Mean, ...]


def gallery(group: RunGroup, folder: Path) -> Gallery | None:
    """Pairs and class means of the group's first run that kept any; also draws their contact sheets into ``folder``."""
    found = _first_pairs(group)
    if found is None:
        return None
    entries, uploads, nearest = found
    render(_pair_sheet(group, *found), folder)
    chosen = sorted(_evenly(entries), key=lambda i: _class_of(entries[i]))
    pairs = tuple(pair_of(entries[i], uploads[i], nearest[i]) for i in chosen)
    return Gallery(group, pairs, len(entries), through_lens(uploads), _means(group, folder))


def _means(group: RunGroup, folder: Path) -> tuple[Mean, ...]:
    names = ("means", "surrogate_means", "real_means")
    found = next((found for run in group.shown if (found := _recorded(run, MeanRecord, *names))[0]), None)
    if found is None:
        return ()
    entries, sent, real = found
    render(_mean_sheet(group, *found), folder)
    return tuple(
        Mean(
            plain(entry.class_name, 40),
            f"{task_name(entry.task)}, {known(entry.num_uploads)} uploads, {known(entry.num_real)} real",
            png_uri(sent[i]),
            png_uri(real[i]),
            percent(entry.rms, 3),
        )
        for i in _evenly(entries)
        for entry in [entries[i]]
    )


def contact_sheet(group: RunGroup) -> Plot | None:
    """Uploads beside their nearest real images, one class to a row."""
    found = _first_pairs(group)
    return _pair_sheet(group, *found) if found else None


def _first_pairs(group: RunGroup) -> tuple[list[PairRecord], np.ndarray, np.ndarray] | None:
    return next((found for run in group.shown if (found := recorded_pairs(run))[0]), None)


def recorded_pairs(run: RunRecord) -> tuple[list[PairRecord], np.ndarray, np.ndarray]:
    """What a run kept of its uploads: entries, uploads and their nearest real images (uint8 [n,3,H,W])."""
    return _recorded(run, PairRecord, "pairs", "surrogates", "nearest")


def _recorded(
    run: RunRecord, kind: type[RecordEntry], rows: str, left: str, right: str
) -> tuple[list[RecordEntry], np.ndarray, np.ndarray]:
    """Entries and the two uint8 arrays; nothing if a file is missing or they do not fit together."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    none = np.zeros((0, 3, 1, 1), np.uint8)
    try:
        told = json.loads((run.folder / "surrogates.json").read_text("utf-8"))
        found = (told if isinstance(told, dict) else {"pairs": told})[rows]  # a plain list: folders of format 1
        tensors = load_file(run.folder / "surrogates.safetensors")
        uploads, nearest = tensors[left], tensors[right]
    except (OSError, ValueError, KeyError, SafetensorError):
        return [], none, none
    entries = records_of(kind, found if isinstance(found, list) else [], "surrogates.json", [])
    if uploads.ndim != 4 or uploads.shape != nearest.shape or len(uploads) != len(entries):
        return [], none, none
    return entries, uploads, nearest


def _class_of(entry: PairRecord) -> tuple[int, int, str]:
    """Tasks in order, classes in order inside them."""
    return (entry.task or 0, entry.label or 0, entry.class_name)


def _evenly(entries: Sequence[PairRecord | MeanRecord]) -> list[int]:
    """Positions of the entries on the page, in order: the same number from every class as far as possible."""
    queues: dict[str, list[int]] = {}
    for i, entry in enumerate(entries):
        queues.setdefault(entry.class_name, []).append(i)
    turns = [[queue[n] for queue in queues.values() if n < len(queue)] for n in range(max(map(len, queues.values())))]
    return sorted([i for turn in turns for i in turn][:_MOST])


def pair_of(entry: PairRecord, upload: np.ndarray, nearest: np.ndarray) -> Pair:
    """Pictures uint8 [3,H,W] and what is known of them, ready for the page."""
    places = (("T", entry.task), ("round ", entry.round))  # counted from 0 in files, from 1 on pages
    return Pair(
        label=plain(entry.class_name, 40),
        place=", ".join(f"{word}{value + 1}" for word, value in places if value is not None),
        surrogate_uri=png_uri(upload),
        nearest_uri=png_uri(nearest),
        rms=percent(entry.rms, 3),
        psnr=_decibel(entry),
        near_copy=entry.rms == 0.0 or (entry.psnr is not None and entry.psnr > NEAR_COPY_DB),
    )


def through_lens(pictures: np.ndarray) -> str:
    """What must be said beside pictures [n,channels,H,W] whose channels are not colours; nothing of others."""
    num, side = pictures.shape[1], pictures.shape[-1]
    return "" if num == 3 else f"Both as the lens sees them: the light of {side} x {side} parts, 1 of {num} channels."


def _decibel(entry: PairRecord) -> str:
    """PSNR as text; that of an exact copy is infinite, which JSON cannot say."""
    return "∞" if entry.rms == 0.0 else percent(entry.psnr, 1)


def png_uri(image: np.ndarray) -> str:
    """uint8 [3,H,W] as an <img> source; of other channels the first, which is light."""
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(_pixels(image)).save(out, "PNG", optimize=True)
    return data_uri("image/png", out.getvalue())


def _pixels(image: np.ndarray) -> np.ndarray:
    """uint8 [3,H,W] as [H,W,3]; of other channels the first as grey."""
    pixels = np.moveaxis(image.astype(np.uint8), 0, -1)
    return pixels if pixels.shape[-1] == 3 else np.repeat(pixels[..., :1], 3, axis=-1)


def _pair_sheet(group: RunGroup, entries: list[PairRecord], uploads: np.ndarray, nearest: np.ndarray) -> Plot:
    """Five pairs of each of at most twelve classes, upload at the left of each pair, its PSNR below."""
    classes = sorted({_class_of(entry) for entry in entries})
    shown = classes[:: -(-len(classes) // _MOST_CLASSES)]
    lines = [[i for i, entry in enumerate(entries) if _class_of(entry) == own][:_ACROSS] for own in shown]
    below = [f"round {known(entry.round)}, {_decibel(entry)} dB" for entry in entries]
    caption = "Left of each pair what a site uploaded, right the real image nearest to it; round and PSNR below. "
    draw, height = _drawing(lines, [plain(own[2], 16) for own in shown], uploads, nearest, below)
    caption = (caption + through_lens(uploads)).strip()
    return Plot(f"surrogates-{group.slug}", group.label, caption, list(map(row_of, entries)), draw, height_in=height)


def _mean_sheet(group: RunGroup, entries: list[MeanRecord], sent: np.ndarray, real: np.ndarray) -> Plot:
    """The means of all classes, those of the uploads at the left."""
    below = [f"{plain(entry.class_name, 14)}, {percent(entry.rms, 3)}" for entry in entries]
    chosen = _evenly(entries)
    lines = [chosen[i : i + _ACROSS] for i in range(0, len(chosen), _ACROSS)]
    caption = (
        "Left of each pair the mean of a class's uploads, right that of its real images, known to the simulator only; "
    )
    caption += "class and RMS between the two below. " + through_lens(sent)
    draw, height = _drawing(lines, [""] * len(lines), sent, real, below)
    return Plot(
        f"class-means-{group.slug}", group.label, caption.strip(), list(map(row_of, entries)), draw, height_in=height
    )


def _drawing(
    lines: list[list[int]], names: list[str], lefts: np.ndarray, rights: np.ndarray, below: list[str]
) -> tuple[Callable[[Any], None], float]:
    """How to draw pairs, and in what height: which of them stand in a line, what stands before it, and what below each."""
    across = max(map(len, lines))

    def draw(sheet: Any) -> None:
        axes = sheet.subplots()
        for y, line in enumerate(lines):
            for x, i in enumerate(line):
                for side, image in enumerate((lefts[i], rights[i])):
                    left = 2.2 * x + side
                    box = (left, left + 0.97, 1.3 * y + 0.97, 1.3 * y)
                    axes.imshow(_pixels(image), extent=box, interpolation="nearest")
                axes.text(2.2 * x + 0.98, 1.3 * y + 1.0, below[i], **_SMALL, va="top", ha="center")
            axes.text(-0.15, 1.3 * y + 0.5, names[y], ha="right", va="center", color=INK, fontsize=8.5)
        axes.set(xlim=(-0.05, 2.2 * across - 0.2), ylim=(1.3 * len(lines), -0.1), aspect="equal")
        axes.set_axis_off()

    return draw, 0.35 + len(lines) * 1.3 * (WIDTH_IN - 1.0) / (2.2 * across)


MOST = 500  # pictures on a page; more would be slow to open
UNSURE = 0.5  # confidence below which an answer is marked


@dataclass(frozen=True)
class GalleryAnswer:
    """A picture uint8 [3,H,W] and its likeliest classes with confidence (0 to 1)."""

    name: str
    top: Sequence[tuple[str, float]]
    pixels: np.ndarray


def write_gallery(answers: Sequence[GalleryAnswer], model: str, classes: Sequence[str], out: Path) -> Path:
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
    counts = Counter(answer.top[0][0] for answer in answers)
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
    return put_page(html, out, mode=US_ALONE)
