"""The mean picture of each class: of all that the sites uploaded, and of the real images, which only a simulation has.

Both stay in the run folder. Nothing is recorded where a mechanism guarantees something, because a mean of real images is
a release that nobody accounts for, nor where a site has left, because its images are in that mean.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rescene.config import Recipe
from rescene.data import Dataset, Task

Means = dict[str, dict[str, Tensor]]


def may_record(recipe: Recipe, num_tasks: int) -> bool:
    """Whether means of real images may lie in this run's folder."""
    promise = recipe.promise(num_tasks)
    return not (promise is not None and promise.formal) and not recipe.federation.exclude


class ClassMeans:
    """Adds up the uploads of a task, class by class, and at its end puts their means beside the real ones."""

    def __init__(self, dataset: Dataset, recorded: bool) -> None:
        self.dataset, self.recorded = dataset, recorded
        self.sums: Means = {}  # of the current task, by label: sum and number of the normalised uploads
        self.done: Means = {}  # of finished tasks, by index: a row per class

    def look(self, images: Tensor, labels: Tensor) -> None:
        """Add these images to the sums of their classes."""
        for label in labels.unique().tolist() if self.recorded else ():
            own = images[labels == label].float()
            seen = self.sums.get(str(label), {"sum": torch.zeros(own.shape[1:]), "num": torch.tensor(0)})
            self.sums[str(label)] = {"sum": seen["sum"] + own.sum(dim=0).cpu(), "num": seen["num"] + len(own)}

    def end(self, task: Task) -> None:
        """``task`` with all images that anybody held during it."""
        train, rows = self.dataset.train, []
        for label in sorted(map(int, self.sums)):
            real = task.train[train.labels[task.train] == label]
            if len(real):
                sent, look = self.sums[str(label)], self.dataset.transform
                means = sent["sum"] / sent["num"], look.normalise(train.pixels[real]).mean(dim=0).cpu()
                counts = torch.tensor([label, int(sent["num"]), len(real)])
                rows.append((*map(look.to_pixels, means), counts, (means[0] - means[1]).square().mean().sqrt()))
        if rows:
            names = ("surrogates", "real", "counts", "rms")
            self.done[str(task.index)] = {
                n: torch.stack(own) for n, own in zip(names, zip(*rows, strict=True), strict=True)
            }
        self.sums = {}

    def gallery(self) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """All means as two tensors of pictures, and a row of facts for each pair; nothing if nothing was recorded."""
        parts = sorted(self.done.items(), key=lambda part: int(part[0]))
        if not parts:
            return {}, []
        pictures = {
            f"{name}_means": torch.cat([part[key] for _, part in parts]).contiguous()
            for name, key in (("surrogate", "surrogates"), ("real", "real"))
        }
        rows = [
            {"task": int(task), "class": self.dataset.classes[label], "num_uploads": sent, "num_real": real, "rms": rms}
            for task, part in parts
            for (label, sent, real), rms in zip(part["counts"].tolist(), part["rms"].tolist(), strict=True)
        ]
        return pictures, rows

    def tree(self) -> dict[str, Means]:
        """For the checkpoint."""
        return {"sums": dict(self.sums), "done": dict(self.done)}

    def restore(self, tree: dict[str, Means]) -> None:
        """A checkpoint may be of a run that still recorded them, or of a version that did not yet."""
        if self.recorded:
            self.sums, self.done = dict(tree.get("sums", {})), dict(tree.get("done", {}))
