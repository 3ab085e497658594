"""The embedded default: 600 training and 200 test images of each Fashion-MNIST class (licence in ``embedded/``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rescene.data.images import Dataset, Images, measure
from rescene.data.reading import Options

FILE = Path(__file__).parent.parent / "embedded" / "fashion-mini.npz"
CLASSES = ("T-shirt", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def read(path: Path, options: Options) -> Dataset:
    """The embedded file; ``path`` and ``options`` have no say (resizing is done by ``load``)."""
    with np.load(FILE, allow_pickle=False) as arrays:
        train, test = (Images(_pixels(arrays[f"x_{s}"]), _labels(arrays[f"y_{s}"])) for s in ("train", "test"))
    notes = ("28x28 padded to 32x32 with black, grey repeated in three channels",)
    return Dataset("fashion-mini", CLASSES, train, test, measure(train.pixels), notes=notes)


def _pixels(grey: np.ndarray) -> Tensor:
    return F.pad(torch.from_numpy(grey), (2, 2, 2, 2))[:, None].expand(-1, 3, -1, -1).contiguous()


def _labels(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))
