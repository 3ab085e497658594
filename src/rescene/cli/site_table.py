"""rescene sites: accuracy at each natural site of a finished run, and what a head of its own would change."""

from __future__ import annotations

from pathlib import Path

from rescene.api import load
from rescene.cli.terminal import Row, busy
from rescene.config import resolve
from rescene.core.errors import RunError
from rescene.engine import prepare, use_all_cores
from rescene.engine.checkpoint import write_json
from rescene.engine.site_accuracy import Tuning, tuned_records
from rescene.nets import load_weights
from rescene.report import write_report

FILE = "site_heads.json"


def site_rows(folder: Path) -> list[Row]:
    """One row per site, from results.json."""
    found = load(folder).values.get("sites")
    if not found:
        raise RunError(
            "E448",
            "this run has no sites of its own",
            where=str(folder),
            why="its images were split over simulated sites, or its test images belong to none",
            fix="federation.partition=sites, with a folder or a column of sites",
        )
    return [
        {"site": row["name"], "train": row["train_size"], "test": row["test_size"], "accuracy": _known(row["accuracy"])}
        for row in found
    ]


def tuned_rows(folder: Path, steps: int) -> list[Row]:
    """One row per site with the shared and the tuned head; kept in the run folder, and shown on its page."""
    site_rows(folder)
    use_all_cores()
    with busy("tuning a head for each site"):
        experiment = prepare(resolve(folder / "config.yaml").recipe)
        net = experiment.arch.restore(load_weights(folder / "model" / "final.safetensors")).to(experiment.device)
        tuning = Tuning(steps=steps)
        rows = tuned_records(net, experiment, tuning)
        write_json(folder / FILE, {"schema": 1, "tuning": vars(tuning), "sites": rows})
        write_report([folder], folder / "report.html")
    return [{key: _known(value) if isinstance(value, float) else value for key, value in row.items()} for row in rows]


def _known(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
