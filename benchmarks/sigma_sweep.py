"""Accuracy beside leakage on fashion-mini: the paper's sigma sweep, every private mode, and the raw-upload control.

    python benchmarks/sigma_sweep.py --out results/frontier.jsonl --jobs 2 [--seeds 0,1,2] [--only NAME ...]

One process and one thread per run. Each run is a line of JSON, and a folder beside the file (results/frontier/NAME-sSEED) that
`rescene plot frontier`, `rescene table` and `rescene paper table privacy-lite` read. A line that is there is not run again.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from functools import partial
from pathlib import Path

from cells import Cell, options, run_cells

KEPT = ("results.json", "config.yaml", "env.json", "timing.json", "metrics.jsonl")
NOISE, PAPER = "method.start=noise", "privacy.mechanism=paper-experiment"
# few steps: each takes a backward pass per record
PER_EXAMPLE = ("privacy.mechanism=per-example", "privacy.typical_count=60", "method.num_steps=3")
# recipes waves and waves-dp (once private and private-dp) as they were before the lens: moments of the pixels
PIXELS = ("demo", "train.augment=false", "train.soften=0.3", "train.batch_size=32", "method.start=coloured",
          "method.num_steps=0", "method.min_images=10")  # fmt: skip
PIXELS_DP = (*PIXELS, "model.norm=group", "privacy.mechanism=release", "privacy.epsilon=8", "privacy.clip=1.2",
             "privacy.mean_grid=16", "privacy.covariance_grid=4", "privacy.covariance_weight=0.5")  # fmt: skip
CELLS: dict[str, tuple[str, ...]] = {  # the costly ones first, so that no process is left with one at the end
    "per-example-eps8": ("demo", NOISE, *PER_EXAMPLE, "privacy.epsilon=8"),
    "fedcbdr": ("demo", "method=fedcbdr"),
    "private": ("waves",),
    "private-dp-eps8": ("waves-dp",),
    "private-dp-eps4": ("waves-dp", "privacy.epsilon=4"),
    "private-dp-eps2": ("waves-dp", "privacy.epsilon=2"),
    "private-dp-eps1": ("waves-dp", "privacy.epsilon=1"),
    "pixel-moments": PIXELS,
    "pixel-moments-dp-eps8": PIXELS_DP,
    "raw-upload-waves": ("waves", "method=raw-upload"),
    "refed": ("demo", "method=refed"),
    **{f"paper-sigma{s}": ("demo", PAPER, f"privacy.noise_multiplier={s}") for s in (0, 1, 3, 5)},
    "real": ("demo",),
    "white-noise": ("demo", NOISE),
    "release-eps8": ("demo", NOISE, "privacy.mechanism=release", "privacy.epsilon=8"),
    "raw-upload": ("demo", "method=raw-upload"),
    "fedavg": ("demo", "method=fedavg"),
}  # fmt: skip


def measure(cell: Cell, keep: Path) -> Cell:
    """Run one cell, keep its small files below ``keep``, and return what to add to its line."""
    from rescene.api import execute
    from rescene.config import resolve

    recipe, *overrides = CELLS[cell["cell"]]
    keep /= f"{cell['cell']}-s{cell['seed']}"
    overrides = [*overrides, f"seed={cell['seed']}", "device=cpu", "federation.evaluate_every=0"]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        found = execute(resolve(recipe, overrides), out).values
        keep.mkdir(parents=True, exist_ok=True)
        for file in KEPT:
            shutil.copy(out / file, keep / file)
    (keep / "command.txt").write_text(f"rescene run {' '.join([recipe, *overrides])}\n")
    leakage, privacy, events = found.get("leakage") or {}, found["privacy"], found.get("events_summary") or {}
    return {
        "settings": [recipe, *overrides],
        **{key: found[key] for key in ("aa", "aia", "old", "recent", "within_task")},
        "per_task": found["accuracy_matrix"][-1],
        **{key: leakage.get(key) for key in ("near_copies", "exact_copies", "nearest_rms_median", "nearest_rms_min")},
        **{key: privacy.get(key) for key in ("mechanism", "epsilon", "noise_multiplier")},
        "events": {key: value for key, value in events.items() if value},
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = options(__doc__ or "", "0,1,2", Path(__file__).parents[1] / "results" / "frontier.jsonl")
    parser.add_argument("--only", nargs="*", choices=CELLS, default=list(CELLS))
    told = parser.parse_args()
    wanted = [{"cell": name, "seed": seed} for name in told.only for seed in told.seeds]
    run_cells(wanted, partial(measure, keep=told.out.with_suffix("")), told.out, told.jobs)


if __name__ == "__main__":
    main()
