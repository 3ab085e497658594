"""A run that takes a fraction of a second, its fingerprint, and child processes to run (and kill) it in."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rescene

torch.set_num_threads(1)  # bits depend on it, and a fork of several threads is none
METHODS = ("rescene", "refed")  # ours, and one whose sites keep a memory of their own


def images(path: Path) -> Path:
    """Four classes of noise around four greys, 8 x 8 pixels."""
    random, parts = np.random.default_rng(0), {}
    for split, count in (("train", 40), ("test", 8)):
        labels = np.arange(count) % 4
        pixels = random.integers(0, 60, (count, 8, 8, 3)) + 48 * labels.reshape(-1, 1, 1, 1)
        parts |= {f"x_{split}": pixels.astype(np.uint8), f"y_{split}": labels}
    np.savez(path, **parts)
    return path


def overrides(data: Path, method: str) -> dict[str, Any]:
    """Two tasks of two rounds: begin, rounds and end of each are eight steps."""
    own = {"method.storage": 24} if method == "refed" else {"method.budget": 3}
    return {"data.path": str(data), "method": method, "model.width": 4, "train.batch_size": 16, **own}


def run(data: Path, method: str, folder: Path, **more: Any) -> Any:
    return rescene.run("smoke", out=folder, **overrides(data, method), **more)


def fingerprint(folder: Path) -> dict[str, str]:
    """Hashes of everything that must not depend on what happened to the run on its way, its last state among it.

    Left out: what tells that story (events, timing, status) and how the run was started.
    """
    told = {"events.jsonl", "timing.json", "status.json", "command.txt", "env.json", "report.html", "MODEL_CARD.md"}
    files = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent.name not in ("checkpoints", "plots")
    ]
    found = {str(path.relative_to(folder)): _sha(path.read_bytes()) for path in files if path.name not in told}
    last = json.loads(max(folder.glob("checkpoints/step-*.json")).read_bytes())
    facts = {key: last["facts"][key] for key in ("facts", "ledger")}
    state = {"step": last["step"], "facts": facts, "skeleton": last["skeleton"], "chunks": last["chunks"]}
    return found | {"last state": _sha(json.dumps(state, sort_keys=True).encode())}


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def rounds_lost(folder: Path) -> int:
    """Finished rounds that will be run again: in metrics.jsonl, but after what the newest checkpoint knows."""
    metrics, manifests = folder / "metrics.jsonl", sorted(folder.glob("checkpoints/step-*.json"))
    known = json.loads(manifests[-1].read_bytes())["facts"]["lengths"]["metrics.jsonl"] if manifests else 0
    *whole, _half = metrics.read_bytes()[known:].split(b"\n") if metrics.exists() else [b""]
    return sum(b'"kind": "round"' in line for line in whole)


def start(work: Callable[[], None], log: Path) -> int:
    """The number of a forked process that does this work and says nothing; errors go to ``log``."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
        work()
        code = 0
    except BaseException:
        log.write_text(traceback.format_exc())
    finally:
        os._exit(code)


def end(process: int) -> int:
    """Its exit code; -9 if it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def killed_after(process: int, seconds: float) -> bool:
    """kill -9 after this time; False if it had ended before."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if os.waitpid(process, os.WNOHANG)[0]:
            return False
        time.sleep(0.001)
    os.kill(process, signal.SIGKILL)
    return end(process) == -signal.SIGKILL
