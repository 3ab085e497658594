"""Store what the tests of this folder compare with.

    python tests/golden/make_golden.py --accept NAME ...   # run these golden runs and store what came out
    python tests/golden/make_golden.py --accept runs       # all of them
    python tests/golden/make_golden.py --accept surface    # recipes, verbs, methods, error codes, public names
    python tests/golden/make_golden.py --accept results    # the index of the run folders under results/
    python tests/golden/make_golden.py --accept checkpoints  # interrupt runs anew; old ones are what must still resume

``--only NAME`` runs one or more and prints what differs from the stored files, and stores nothing.
``--into FOLDER`` stores the runs elsewhere: with RESCENE_GOLDEN=FOLDER the tests compare with those, for a machine whose
bits are not the stored ones.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: bits depend on it

import argparse
import contextlib
import io
import json
import tarfile
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from golden_runs import HERE, RUNS, machine, play, prepare, summary
from golden_surface import SURFACE, index_of_results, surface

STORED, CHECKPOINTS, INDEX = HERE / "stored", HERE / "checkpoints", HERE / "results_index.json"
TODAY = {"rescene": "rescene-plus", "fedaf": "fedaf-plus"}  # stored checkpoint -> the run whose settings it has today
INTERRUPTED = ("rescene", "fedewc", "glfc", "target", "fedcbdr", "refed", "fedaf", "release-sums", "secure-sum-moments")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--accept", nargs="+", metavar="NAME", default=[], help="run, surface, results or checkpoints to store"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[], help="runs to compare without storing them")
    parser.add_argument("--into", type=Path, default=STORED, help="folder for the runs")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if not asked.accept and not asked.only:
        parser.print_help()
    with tempfile.TemporaryDirectory() as scratch:
        prepare(Path(scratch))
        for word in asked.accept:
            _accept(word, Path(scratch), asked.into)
        for name in asked.only:
            found = made(name, Path(scratch))
            differing = differences(json.loads((asked.into / f"{name}.json").read_text()), found)
            print("\n".join([f"{name}: {'differs' if differing else 'equal'}", *differing]))


def _accept(word: str, scratch: Path, into: Path) -> None:
    if word == "surface":
        SURFACE.mkdir(exist_ok=True)
        for name, text in surface().items():
            (SURFACE / name).write_text(text)
    elif word == "results":
        INDEX.write_text(_readable(index_of_results()))
    elif word == "checkpoints":
        CHECKPOINTS.mkdir(exist_ok=True)
        for name in INTERRUPTED:
            (CHECKPOINTS / f"{name}.tar.gz").write_bytes(interrupted(name, scratch))
    else:
        into.mkdir(exist_ok=True)
        for name in RUNS if word == "runs" else [word]:
            begun = time.process_time()
            (into / f"{name}.json").write_text(_readable(made(name, scratch)))
            print(f"{time.process_time() - begun:6.2f} s  {name}", flush=True)


def made(name: str, scratch: Path) -> dict[str, Any]:
    """The golden file of a run of today's program."""
    run = RUNS[name]
    return {"run": run.overrides, "machine": machine(), **summary(play(run, scratch), run.noisy)}


def _readable(value: dict[str, Any]) -> str:
    """One line for each key, so that a diff shows which part differs."""
    lines = [f"{json.dumps(key)}: {json.dumps(inner, sort_keys=True)}" for key, inner in value.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def differences(stored: Any, found: Any, where: str = "") -> list[str]:
    """Every place where something stored is missing or another value. What is new is no difference."""
    if isinstance(stored, dict) and isinstance(found, dict):
        return [line for key, value in stored.items() for line in differences(value, found.get(key), f"{where}.{key}")]
    if isinstance(stored, list) and isinstance(found, list) and len(stored) == len(found):
        pairs = enumerate(zip(stored, found, strict=True))
        return [line for i, (one, other) in pairs for line in differences(one, other, f"{where}[{i}]")]
    return [] if stored == found else [f"  {where.lstrip('.')}: stored {_short(stored)}, now {_short(found)}"]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 100 else f"{text[:100]}..."


class _Interrupting:
    """A tracker that presses Ctrl-C after the first round of the second task."""

    def start(self, folder: Path, config: Any) -> None: ...

    def log(self, step: int, values: Any) -> None:
        if step == 3:
            raise KeyboardInterrupt

    def finish(self, summary: Any) -> None: ...


def interrupted(name: str, scratch: Path) -> bytes:
    """The folder of a run that was stopped in its second task, as tar.gz."""
    (scratch / "stopped").mkdir(exist_ok=True)
    if not (scratch / "stopped" / "images.npz").exists():
        prepare(scratch / "stopped")
    folder = scratch / "stopped" / "runs" / name
    with contextlib.suppress(KeyboardInterrupt):
        play(RUNS[name], scratch / "stopped", log=[_Interrupting()])
    if (folder / "results.json").exists() or not list(folder.glob("checkpoints/step-*.json")):
        raise SystemExit(f"{name} was not interrupted")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(folder, arcname=f"runs/{name}", filter=_anonymous)
    return packed.getvalue()


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    main()
