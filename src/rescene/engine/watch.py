"""What the engine notices while a run goes on: phases, events, and how close uploads are to real images."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rescene.data import Dataset, Task
from rescene.engine.class_means import ClassMeans
from rescene.errors import ResceneWarning
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

SAMPLES = {"first": 1, "middle": 1, "latest": 2}  # uploads of each class kept from these rounds of a task
Progress = Callable[[dict[str, Any]], None]


class Timer:
    """Seconds per phase; phases do not nest, the inner one counts and the outer one waits."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.aside: dict[str, float] = {}  # work in other threads, which goes on during some phase
        self.memory_mb: list[int] = []  # held after each round
        self._open: list[tuple[str, float]] = []
        self._begin = time.perf_counter()
        self._parts = 1

    def resume(self, earlier: dict[str, Any]) -> None:
        """Go on from the report of an earlier part of the same run."""
        self._begin -= earlier["total_s"]
        self._parts += earlier["parts"]
        for name, value in earlier["phases"].items():
            if name != "other":
                self.seconds[name] = self.seconds.get(name, 0.0) + value
        self.aside = dict(earlier.get("aside", {}))
        self.memory_mb = list(earlier.get("memory_mb", []))

    @contextmanager
    def beside(self, name: str) -> Iterator[None]:
        """Seconds of a thread beside the loop (one thread per name)."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.aside[name] = self.aside.get(name, 0.0) + time.perf_counter() - begin

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._pause()
        self._open.append((name, time.perf_counter()))
        try:
            yield
        finally:
            self._pause()
            self._open.pop()
            if self._open:
                self._open[-1] = (self._open[-1][0], time.perf_counter())

    def _pause(self) -> None:
        if self._open:
            name, since = self._open[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - since
            self._open[-1] = (name, time.perf_counter())

    def total(self) -> float:
        return time.perf_counter() - self._begin

    def report(self) -> dict[str, Any]:
        total = self.total()
        rounded = {name: round(value, 3) for name, value in sorted(self.seconds.items())}
        return {
            "schema": 1,
            "total_s": round(total, 3),
            "parts": self._parts,
            "phases": rounded | {"other": round(total - sum(self.seconds.values()), 3)},
            "aside": {name: round(value, 3) for name, value in self.aside.items()},
            "memory_mb": self.memory_mb,
        }


def memory_mb(device: torch.device) -> int:
    """What this process holds now: of the GPU's memory, or of the machine's (0 where the system does not say)."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device) >> 20
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


class LeakageWatch:
    """Looks at every upload that carries images and measures its distance to the nearest real training image."""

    def __init__(self, dataset: Dataset, num_rounds: int, records_means: bool = True) -> None:
        self.dataset, self.num_rounds = dataset, num_rounds
        self.means = ClassMeans(dataset, records_means)
        self.blind = not len(dataset.train)  # the images are at the sites: nothing to compare with
        self.samples: dict[str, dict[str, Tensor]] = {}  # "task/moment": a few uploads beside their nearest real images
        self.begin(None)

    def begin(self, task: Task | None) -> None:
        self.task, self.round = task, 0
        self.rms: list[Tensor] = []
        self.psnr: list[Tensor] = []
        self.starts: list[Tensor] = []  # [m, 2] RMS and PSNR of surrogates against their own start images
        self.kept, self.kept_from = (
            torch.zeros(0),
            torch.zeros(0),
        )  # uploads to compare with care at the task's end; senders

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

    def tree(self) -> dict[str, Any]:
        """For the checkpoint: the task's distances so far, and the samples."""
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

    def restore(self, task: Task, tree: dict[str, Any]) -> None:
        self.begin(task)
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


_listener: ContextVar[Callable[..., None] | None] = ContextVar("listener", default=None)  # of the run at work here
_show = warnings.showwarning


def _forward(message: Any, category: Any, filename: str, lineno: int, *rest: Any, **more: Any) -> None:
    note = _listener.get()
    if note is not None and isinstance(message, ResceneWarning):
        note("warning", message.code, message.what)
    else:
        _show(message, category, filename, lineno, *rest, **more)


@contextmanager
def warnings_to(note: Callable[..., None]) -> Iterator[None]:
    """Our own warnings become events as they happen; everybody else's stay warnings.

    Python has one place for all threads where warnings are shown. What stands there looks up whose context it is in, so
    runs in several threads hear their own warnings only; a thread that a run starts must be given its context.
    """
    global _show
    if warnings.showwarning is not _forward:  # it stays there: another run may need it when this one is done
        _show, warnings.showwarning = warnings.showwarning, _forward
    warnings.simplefilter("always", ResceneWarning)
    token = _listener.set(note)
    try:
        yield
    finally:
        _listener.reset(token)
