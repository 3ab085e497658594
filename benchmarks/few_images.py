"""Which lens serves few images under noise? Recipe ``own`` (epsilon 8, three sites) with ``leaves`` and with ``waves``.

    python benchmarks/few_images.py DATA OUT.csv [IMAGES_PER_CLASS ...]

DATA is a data set of ten classes (fashion-mini, cifar10). Of its first 25,000 training images each class gives 100 to test on and
so many others to train on (30, 60, 100, 150); no test image of the data set is seen. Five tasks, seeds 0 to 2. A row of OUT.csv is
one run.
"""

from __future__ import annotations

import csv
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

import rescene
from rescene.data import Dataset, load

POOL, TESTED, SEEDS = 25_000, 100, (0, 1, 2)
COUNTS = (30, 60, 100, 150)


def write_folder(dataset: Dataset, count: int, folder: Path) -> None:
    """``train`` and ``test`` with a folder for each class. A larger count has the pictures of a smaller one, too."""
    draws, labels = np.random.default_rng(0), dataset.train.labels[:POOL].numpy()
    for label in range(len(dataset.classes)):
        own = draws.permutation(np.flatnonzero(labels == label))
        for part, chosen in {"test": own[:TESTED], "train": own[TESTED : TESTED + count]}.items():
            (place := folder / part / f"class{label}").mkdir(parents=True)
            for position, index in enumerate(chosen):
                pixels = dataset.train.pixels[int(index)].permute(1, 2, 0).numpy()
                Image.fromarray(pixels).save(place / f"{position}.png")


def main(data: str, out: Path, counts: tuple[int, ...]) -> None:
    dataset = load(data)
    with out.open("w", newline="") as file, tempfile.TemporaryDirectory() as root:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("data", "images_per_class", "lens", "seed", "aa", "aia"))
        for count in counts:
            write_folder(dataset, count, folder := Path(root) / str(count))
            for seed in SEEDS:
                for lens in ("leaves", "waves"):
                    settings = {"data.path": str(folder), "tasks.count": 5, "model.lens": lens, "seed": seed}
                    done = rescene.run("own", out=Path(root) / f"{count}-{lens}-{seed}", progress=False, **settings)
                    rows.writerow((data, count, lens, seed, round(done.aa, 2), round(done.aia, 2)))
                    file.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), tuple(map(int, sys.argv[3:])) or COUNTS)
