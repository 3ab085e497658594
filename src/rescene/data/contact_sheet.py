"""A contact sheet: a row of pictures for each class, as the network will see them, to check labels with one look."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from rescene.data.images import Dataset, Images

if TYPE_CHECKING:
    from PIL.Image import Image

COLUMNS, MOST_ROWS = 12, 60
SIDE, GAP, LABEL = 72, 4, 190  # pixels: of a picture, between pictures, for the name of a class
INK, QUIET, PAPER = (20, 20, 20), (120, 120, 120), (255, 255, 255)


def contact_sheet(dataset: Dataset) -> Image:
    """Up to twelve training images of each of the first sixty classes, spread over sites and domains."""
    from PIL import Image, ImageDraw, ImageFont

    names = dataset.classes[:MOST_ROWS]
    sheet = Image.new("RGB", (LABEL + COLUMNS * (SIDE + GAP), GAP + len(names) * (SIDE + GAP)), PAPER)
    pen = ImageDraw.Draw(sheet)
    font, small = ImageFont.load_default(15), ImageFont.load_default(12)
    for row, name in enumerate(names):
        places, top = torch.nonzero(dataset.train.labels == row).flatten(), GAP + row * (SIDE + GAP)
        pen.text((10, top + SIDE // 2 - 18), _fitted(name), fill=INK, font=font)
        pen.text((10, top + SIDE // 2 + 4), f"{len(places):,} training images", fill=QUIET, font=small)
        for column, place in enumerate(spread(dataset.train, places)):
            picture = Image.fromarray(dataset.train.pixels[place].permute(1, 2, 0).numpy())
            sheet.paste(picture.resize((SIDE, SIDE), _scaling(picture)), (LABEL + column * (SIDE + GAP), top))
    return sheet


def spread(images: Images, places: torch.Tensor, most: int = COLUMNS) -> list[int]:
    """A few of these places, evenly over sites, domains and the order of the files."""
    groups = [own[places] for own in (images.sites, images.domains) if own is not None]
    order = np.lexsort([group.numpy() for group in reversed(groups)]) if groups else np.arange(len(places))
    if not len(places):
        return []
    chosen = np.unique(np.linspace(0, len(places) - 1, min(most, len(places))).round().astype(int))
    return [int(places[order[i]]) for i in chosen]


def _scaling(picture: Image) -> int:
    """Small pictures keep their pixels visible."""
    from PIL import Image

    return Image.Resampling.NEAREST if picture.width < SIDE else Image.Resampling.LANCZOS


def _fitted(name: str) -> str:
    return name if len(name) <= 22 else f"{name[:20]}..."
