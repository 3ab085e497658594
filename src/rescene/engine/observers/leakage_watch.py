"""How close uploads are to real images, and the mean picture of each class: of all uploads, and of the real images.

Only a simulation has the real images. Both means stay in the run folder. No mean is recorded where a mechanism guarantees
something, because a mean of real images is a release that nobody accounts for, nor where a site has left, because its images are
in that mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from rescene.config import Recipe
from rescene.core.results import Leakage
from rescene.data import Dataset, Task
from rescene.engine.checkpoint import save_atomically, write_json
from rescene.engine.observers import Observer, RunView
from rescene.engine.run_context import RunContext
from rescene.methods import Payload
from rescene.privacy import (
    MOST_TRACED,
    evenly,
    nearest_real,
    psnr,
    summarise,
    summarise_starts,
    summarise_traced,
)

SumsByClass = dict[str, dict[str, Tensor]]


def may_record(recipe: Recipe, num_tasks: int) -> bool:
    """Whether means of real images may lie in this run's folder."""
    promise = recipe.promise(num_tasks)
    return not (promise is not None and promise.formal) and not recipe.federation.exclude


class ClassMeans:
    """Adds up the uploads of a task, class by class, and at its end puts their means beside the real ones."""

    def __init__(self, dataset: Dataset, recorded: bool) -> None:
        self.dataset, self.recorded = dataset, recorded
        self.sums: SumsByClass = {}  # of the current task, by label: sum and number of the normalised uploads
        self.done: SumsByClass = {}  # of finished tasks, by index: a row per class

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

    def tree(self) -> dict[str, SumsByClass]:
        """For the checkpoint."""
        return {"sums": dict(self.sums), "done": dict(self.done)}

    def restore(self, tree: dict[str, SumsByClass]) -> None:
        """A checkpoint may be of a run that still recorded them, or of a version that did not yet."""
        if self.recorded:
            self.sums, self.done = dict(tree.get("sums", {})), dict(tree.get("done", {}))


SAMPLES = {"first": 1, "middle": 1, "latest": 2}  # uploads of each class kept from these rounds of a task


class LeakageWatch(Observer):
    """Looks at every upload that carries images and measures its distance to the nearest real training image."""

    name = "leakage"

    def __init__(self, context: RunContext) -> None:
        e = context.experiment
        self.context, self.dataset, self.num_rounds = context, e.dataset, e.recipe.federation.num_rounds
        self.means = ClassMeans(e.dataset, may_record(e.recipe, len(e.tasks)))
        self.blind = not len(e.dataset.train)  # the images are at the sites: nothing to compare with
        self.samples: dict[str, dict[str, Tensor]] = {}  # "task/moment": a few uploads beside their nearest real images
        self._begin(None)

    def begin_run(self, run: RunView) -> None:
        """Of a run that goes on, ``restore`` has brought the figures of its task."""
        self.task: Task | None = self.context.experiment.present(run.task)

    def begin_task(self, run: RunView) -> None:
        self._begin(self.context.experiment.present(run.task))

    def uploads_received(self, run: RunView, uploads: Mapping[int, Payload]) -> None:
        if run.round is not None:
            self.round = run.round
        with self.context.timer.phase("leakage"):
            self.look(uploads)

    def end_task(self, run: RunView) -> None:
        with self.context.timer.phase("leakage"):
            summary = self.summary()
            if summary is not None:
                self.context.facts.leakage.append(Leakage(task=run.task.index, **summary))
                self.means.end(self.context.experiment.present(run.task))
                self.save_gallery()

    def _begin(self, task: Task | None) -> None:
        self.task, self.round = task, 0
        self.rms: list[Tensor] = []
        self.psnr: list[Tensor] = []
        self.starts: list[Tensor] = []  # [m, 2] RMS and PSNR of surrogates against their own start images
        # uploads to compare with care at the task's end; senders
        self.kept, self.kept_from = torch.zeros(0), torch.zeros(0)

    def see_start(self, images: Tensor, start: Tensor) -> None:
        """Shown by the condensation itself, because start images are not on the wire."""
        rms = (images - start).square().flatten(1).mean(dim=1).sqrt()
        self.starts.append(torch.stack([rms, psnr(images, start, self.dataset.transform)], dim=1).cpu())

    def look(self, uploads: Mapping[int, Payload]) -> None:
        """Called with the answers to every ``ask``. The first images of each class are kept as samples in some rounds."""
        senders = {k: u for k, u in uploads.items() if "images" in u and len(u["images"])}
        parts = [(u["images"], u["labels"], torch.full_like(u["labels"], k)) for k, u in senders.items()]
        if not parts or self.task is None or self.blind:
            return
        images, labels, clients = (torch.cat(column) for column in zip(*parts, strict=True))
        real = self.dataset.train.pixels[self.task.train]
        rms, where = nearest_real(images, real, self.dataset.transform)
        decibel = psnr(images, self.dataset.transform.normalise(real[where]), self.dataset.transform)
        self.means.look(images, labels)
        self.rms.append(rms.cpu())
        self.psnr.append(decibel.cpu())
        most = min(MOST_TRACED, max(2, len(self.task.train) // 400))  # a small run is not to spend its time on this
        chosen = evenly(len(images), min(most - len(self.kept), -(-most // self.num_rounds))).to(images.device)
        more, senders_of = images[chosen].detach().cpu(), clients[chosen].cpu()
        self.kept = torch.cat([self.kept, more]) if len(self.kept) else more
        self.kept_from = torch.cat([self.kept_from, senders_of]) if len(self.kept_from) else senders_of
        for moment in self._moments():
            most = SAMPLES[moment]
            chosen = torch.cat([(labels == c).nonzero().squeeze(1)[:most] for c in labels.unique().tolist()])
            self.samples[f"{self.task.index}/{moment}"] = {
                "surrogates": self.dataset.transform.to_pixels(images[chosen]).cpu(),
                "nearest": real[where[chosen]].cpu(),
                "labels": labels[chosen].cpu(),
                "clients": clients[chosen].cpu(),
                "rms": rms[chosen].cpu(),
                "psnr": decibel[chosen].cpu(),
                "round": torch.full((len(chosen),), self.round),
            }

    def _moments(self) -> list[str]:
        """What this round may be of its task; the last one is only known when no other follows."""
        last, middle = self.num_rounds - 1, self.num_rounds // 2
        early = {0: "first", middle: "middle"} if self.round < last else {}
        return [early[self.round], "latest"] if self.round in early else ["latest"]

    def forget(self, client: int) -> None:
        """The samples without those of this client; figures of what was sent stay."""
        theirs = self.kept_from == client
        self.kept, self.kept_from = self.kept[~theirs], self.kept_from[~theirs]
        for task, part in list(self.samples.items()):
            left = (
                part["clients"] != client if "clients" in part else torch.zeros(len(part["labels"]), dtype=torch.bool)
            )
            self.samples[task] = {key: value[left] for key, value in part.items()}

    def summary(self) -> dict[str, Any] | None:
        """Figures of the current task, None if nobody sent an image."""
        if not self.rms:
            return None
        starts = summarise_starts(*torch.cat(self.starts).unbind(dim=1)) if self.starts else {}
        return summarise(torch.cat(self.rms), torch.cat(self.psnr)) | starts | self._traced()

    def _traced(self) -> dict[str, Any]:
        """Nothing for a task that an older version began."""
        if self.task is None or not len(self.kept):
            return {}
        data = self.dataset
        seen, unseen = data.train.pixels[self.task.train], data.test.pixels[self.task.test]
        return summarise_traced(self.kept.to(seen.device), seen, unseen, data.transform)

    def gallery(self) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
        """All samples as two tensors of pictures, and one row of facts for each pair."""
        keys = ("round", "rms", "psnr")
        parts = sorted(self.samples.items(), key=_task_and_moment)
        pictures = {key: torch.cat([part[key] for _, part in parts]).contiguous() for key in ("surrogates", "nearest")}
        rows = [
            {
                "task": int(name.partition("/")[0]),
                "class": self.dataset.classes[label],
                **dict(zip(keys, values, strict=True)),
            }
            for name, part in parts
            for label, *values in zip(part["labels"].tolist(), *(part[key].tolist() for key in keys), strict=True)
        ]
        return pictures, rows

    def save_gallery(self) -> None:
        """A few surrogates per class beside their nearest real images, and the means of the classes, of all tasks so far."""
        pictures, rows = self.gallery()
        means, mean_rows = self.means.gallery()
        path, more = self.context.folder.path, {"means": mean_rows} if means else {}
        save_atomically(path / "surrogates.safetensors", save(pictures | means))
        write_json(path / "surrogates.json", {"schema": 1, "pairs": rows} | more)

    def state(self) -> dict[str, Any]:
        """The task's distances so far, and the samples."""
        empty = torch.zeros(0)
        rms, decibel = (torch.cat(part) if part else empty for part in (self.rms, self.psnr))
        starts = torch.cat(self.starts) if self.starts else torch.zeros(0, 2)
        return {
            "rms": rms,
            "psnr": decibel,
            "starts": starts,
            "kept": self.kept,
            "kept_from": self.kept_from,
            "samples": dict(self.samples),
            "means": self.means.tree(),
        }

    def restore(self, tree: dict[str, Any]) -> None:
        self.samples = tree["samples"]
        self.means.restore(tree.get("means", {}))
        if len(tree["rms"]):
            self.rms, self.psnr = [tree["rms"]], [tree["psnr"]]
        self.starts = [tree["starts"]] if len(tree.get("starts", ())) else []
        if "kept_from" in tree:
            self.kept, self.kept_from = tree["kept"], tree["kept_from"]


def _task_and_moment(entry: tuple[str, Any]) -> tuple[int, int]:
    """Checkpoints of older versions have the latest moment only, without its name."""
    task, _, moment = entry[0].partition("/")
    return int(task), list(SAMPLES).index(moment or "latest")
