"""Curves of a run in somebody's favourite tool. A tracker is three methods; none of the four here needs an account.

JSONL and CSV are always written. ``rescene run demo --log tensorboard,wandb`` adds tools; in Python ``log`` also takes an
object with the three methods. A tool that fails is left out with a warning (W420): no curve is worth a run.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from rescene.core.errors import ConfigError, ResceneWarning, did_you_mean
from rescene.engine.observers import Observer, RunView

LoggedNumbers = Mapping[str, float]


class Tracker(Protocol):
    """What a tool is told. ``step`` counts rounds from 1 over the whole run, also where a resumed run goes on."""

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        """Called once, with the run's folder and its flat configuration."""

    def log(self, step: int, values: LoggedNumbers) -> None:
        """Called after each round; ``step`` counts rounds over the whole run."""

    def finish(self, summary: LoggedNumbers) -> None:
        """Called once, with the final figures."""


class TensorBoard:
    """Event files in <run>/tensorboard: ``tensorboard --logdir runs``."""

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"))
        self.writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in config.items()))
        self.last = 0

    def log(self, step: int, values: LoggedNumbers) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, step)
        self.last = step

    def finish(self, summary: LoggedNumbers) -> None:
        for key, value in summary.items():
            self.writer.add_scalar(f"summary/{key}", value, self.last)
        self.writer.close()


class WandB:
    """Weights & Biases, offline in <run>/wandb unless WANDB_MODE says otherwise; ``wandb sync`` sends it when you want."""

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE", "offline")
        name, same = _name(folder), hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
        self.run = wandb.init(
            project="rescene", name=name, id=same, resume="allow", dir=str(folder), config=dict(config), mode=mode
        )

    def log(self, step: int, values: LoggedNumbers) -> None:
        self.run.log(dict(values), step=step)

    def finish(self, summary: LoggedNumbers) -> None:
        self.run.summary.update(dict(summary))
        self.run.finish()


class MLflow:
    """In <run>/mlflow unless MLFLOW_TRACKING_URI says otherwise."""

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        import mlflow

        self.mlflow = mlflow
        if "MLFLOW_TRACKING_URI" not in os.environ:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # newer versions prefer a database, and ask
            mlflow.set_tracking_uri((folder / "mlflow").resolve().as_uri())
        mlflow.set_experiment("rescene")
        mlflow.start_run(run_name=_name(folder))
        mlflow.log_params({key: str(value)[:500] for key, value in config.items()})

    def log(self, step: int, values: LoggedNumbers) -> None:
        self.mlflow.log_metrics(dict(values), step=step)

    def finish(self, summary: LoggedNumbers) -> None:
        self.mlflow.log_metrics({f"summary/{key}": value for key, value in summary.items()})
        self.mlflow.end_run()


class Trackio:
    """A local database in <run>/trackio unless TRACKIO_DIR says otherwise: ``TRACKIO_DIR=... trackio show``."""

    def start(self, folder: Path, config: Mapping[str, Any]) -> None:
        os.environ.setdefault("TRACKIO_DIR", str((folder / "trackio").resolve()))
        import trackio

        self.trackio = trackio
        trackio.init(project="rescene", name=_name(folder), config={key: str(value) for key, value in config.items()})

    def log(self, step: int, values: LoggedNumbers) -> None:
        self.trackio.log(dict(values), step=step)

    def finish(self, summary: LoggedNumbers) -> None:
        if summary:
            self.trackio.log({f"summary/{key}": value for key, value in summary.items()})
        self.trackio.finish()


TRACKERS: dict[str, tuple[str, Callable[[], Tracker]]] = {
    "tensorboard": ("tensorboard", TensorBoard),
    "wandb": ("wandb", WandB),
    "mlflow": ("mlflow", MLflow),
    "trackio": ("trackio", Trackio),
}


def open_trackers(log: str | Sequence[str | Tracker]) -> list[Curves]:
    """Trackers by name (``"tensorboard,wandb"``) or as they are; an unknown or missing one is told before the run."""
    wanted: Sequence[str | Tracker] = [w.strip() for w in log.split(",") if w.strip()] if isinstance(log, str) else log
    trackers = [_by_name(one) if isinstance(one, str) else one for one in wanted]
    return [Curves(trackers)] if trackers else []


def _by_name(name: str) -> Tracker:
    if name not in TRACKERS:
        fix = did_you_mean(name, TRACKERS) or f"one or more of: {','.join(TRACKERS)}"
        raise ConfigError("E187", f"unknown tracker {name!r}", where="--log", fix=fix)
    module, make = TRACKERS[name]
    if find_spec(module) is None:
        why = "it is not part of the plain installation; JSONL and CSV are always written"
        raise ConfigError(
            "E188", f"{name} is not installed", where="--log", why=why, fix=f"pip install 'rescene[{name}]'"
        )
    return make()


class Curves(Observer):
    """Tells the trackers of a run what a curve can show; they are closed however the run ends."""

    name = "trackers"

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers, self.open = trackers, list[Tracker]()
        self.summary: dict[str, float] = {}

    def begin_run(self, run: RunView) -> None:
        self.open = list(self.trackers)
        self._each(lambda tracker: tracker.start(run.folder, run.recipe))

    def end_round(self, run: RunView) -> None:
        row = run.row
        found = {"accuracy/seen": row["accuracy"], "bytes/up": row["uplink_bytes"], "bytes/down": row["downlink_bytes"]}
        self._log(row["round"] + 1, run, found | {f"notes/{key}": value for key, value in row["notes"].items()})

    def end_task(self, run: RunView) -> None:
        found = {f"accuracy/task_{j}": value for j, value in enumerate(run.row["accuracy"])}
        self._log(run.recipe["federation.num_rounds"], run, found | {"accuracy/aa": run.row["aa"]})

    def end_run(self, run: RunView, results: dict[str, Any]) -> None:
        self.summary = _summary(results)

    def close(self) -> None:
        self._each(lambda tracker: tracker.finish(self.summary))

    def _log(self, round: int, run: RunView, found: Mapping[str, Any]) -> None:
        step, values = run.task.index * run.recipe["federation.num_rounds"] + round, _finite(found)
        if values:
            self._each(lambda tracker: tracker.log(step, values))

    def _each(self, words: Callable[[Tracker], None]) -> None:
        for tracker in list(self.open):
            try:
                with redirect_stdout(sys.stderr):  # standard output is for results
                    words(tracker)
            except Exception as error:  # somebody else's code, network or disk
                self.open.remove(tracker)
                told = f"{type(tracker).__name__} failed and is left out: {error or type(error).__name__}"
                warnings.warn(ResceneWarning("W420", told), stacklevel=2)


def _summary(results: Mapping[str, Any]) -> dict[str, float]:
    found = {key: results.get(key) for key in ("aa", "aia", "forgetting", "bwt", "worst_task")}
    return _finite(found | {"near_copies": (results.get("leakage") or {}).get("near_copies")})


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in values.items() if value is not None and math.isfinite(value)}


def _name(folder: Path) -> str:
    return f"{folder.resolve().parent.name}/{folder.name}"
