"""How good is the ridge that cross-validation on sums chooses, from few images to many?

    python benchmarks/ridge.py OUT.csv NAME=PATH ...      (NAME: cifar10, folder; PATH: where its images lie)

Training images only: a fifth of them is held back, and the first n of the others are summed up as sites would. A row has the
accuracy with the ridge that was chosen, with the least ridge, and with the best of all ridges (which held-back images choose).
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from rescene.data import load
from rescene.functional.discriminant import RIDGES, cross_validated_ridge, discriminant_head
from rescene.lens.lens import open_lens

MOST = 2500  # images of a data set; drawn with seed 0
SIZES = (250, 500, 1000, 2000)


def features_of(name: str, path: str) -> tuple[Tensor, Tensor]:
    """What the lens leaves sees of some training images at 32 pixels, and their labels."""
    train = load(name, path, image_size=32).train
    chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))[:MOST]
    lens = open_lens("leaves")
    with torch.no_grad():
        seen = [lens.look(train.pixels[part]).flatten(1) for part in chosen.split(100)]
    return torch.cat(seen).double(), train.labels[chosen]


def rows_of(name: str, path: str) -> list[dict[str, object]]:
    """One row for each number of images."""
    z, y = features_of(name, path)
    held, found = len(z) // 5, []
    for n in (size for size in SIZES if size <= len(z) - held):
        own, labels = z[held : held + n], y[held : held + n]
        onehot = F.one_hot(labels, int(y.max()) + 1).double()
        sums = onehot.sum(dim=0), onehot.T @ own, own.T @ own

        def accuracy(ridge: float, sums: tuple[Tensor, Tensor, Tensor] = sums) -> float:
            weight, bias = discriminant_head(*sums, ridge)
            right = (z[:held] @ weight.T + bias).argmax(dim=1) == y[:held]
            return round(100 * float(right.double().mean()), 1)

        chosen, all_of_them = cross_validated_ridge(*sums), {ridge: accuracy(ridge) for ridge in RIDGES}
        best = max(RIDGES, key=lambda ridge: all_of_them[ridge])
        row = {"data": f"{name} {Path(path).name}", "images": n, "features": z.shape[1], "held back": held}
        row |= {"chosen ridge": f"{chosen:.3g}", "accuracy": all_of_them[chosen]}
        row |= {"with the least ridge": all_of_them[RIDGES[0]], "best ridge": f"{best:.3g}", "best": all_of_them[best]}
        print(row, flush=True)
        found.append(row)
    return found


def main(out: str, *sets: str) -> None:
    """Write the table of all data sets."""
    rows = [row for text in sets for row in rows_of(*text.split("=", 1))]
    with open(out, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(*sys.argv[1:])
