"""One reader per form of data: ``read(path, options) -> Dataset``. Pillow and pyarrow load when first needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rescene.data.images import Dataset
from rescene.data.reading import Options
from rescene.data.sources import arrays, cifar, fashion_mini, image_table, office31, tinyimagenet
from rescene.data.sources import image_folder as folder

Reader = Callable[[Path, Options], Dataset]

READERS: dict[str, Reader] = {
    "fashion-mini": fashion_mini.read,
    "cifar10": cifar.read_cifar10,
    "cifar100": cifar.read_cifar100,
    "tinyimagenet": tinyimagenet.read,
    "office31": office31.read,
    "folder": folder.read,
    "csv": image_table.read_csv,
    "parquet": image_table.read_parquet,
    "npz": arrays.read,
}
