"""What `rescene doctor` looks at: one row per check, with the problem and its fix where there is one."""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ENOUGH_DISK_GB = 2.0
EXTRAS = {
    "deploy": ("flwr", "federations across sites"),
    "privacy": ("dp_accounting", "accounting for sampled records"),
    "onnx": ("onnxruntime", "rescene export --to onnx"),
    "tensorboard": ("tensorboard", "rescene run --log tensorboard"),
    "wandb": ("wandb", "rescene run --log wandb"),
    "mlflow": ("mlflow", "rescene run --log mlflow"),
    "trackio": ("trackio", "rescene run --log trackio"),
}
Row = dict[str, Any]


def machine_checks() -> list[Row]:
    return [_python(), _torch(), _device(), _disk(), _writable(), *_data(), *_extras()]


def _row(check: str, found: str, problem: str = "", fix: str = "") -> Row:
    return {"check": check, "found": found, "problem": problem, "fix": fix}


def _python() -> Row:
    old = sys.version_info < (3, 11)
    return _row(
        "python",
        platform.python_version(),
        "older than 3.11" if old else "",
        "install Python 3.11 or newer" if old else "",
    )


def _torch() -> Row:
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    old = version < (2, 11)
    return _row(
        "torch", torch.__version__, "older than 2.11" if old else "", "pip install 'torch>=2.11'" if old else ""
    )


def _device() -> Row:
    import torch

    if torch.cuda.is_available():
        return _row("device", f"{torch.cuda.get_device_name()} ({torch.cuda.device_count()} GPU)")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return _row("device", f"CPU only, {cores} cores: the demo and small nets; paper-scale runs want a GPU")


def _disk() -> Row:
    free = shutil.disk_usage(Path.cwd()).free / 1e9
    low = free < ENOUGH_DISK_GB
    return _row(
        "disk",
        f"{free:.1f} GB free here",
        "little room for checkpoints" if low else "",
        "use --out on another disk" if low else "",
    )


def _writable() -> Row:
    root = Path(os.environ.get("RESCENE_RUNS", "runs"))
    parent = root if root.exists() else Path.cwd()
    try:
        with tempfile.TemporaryFile(dir=parent):
            return _row("run folder", str(root))
    except OSError as error:
        return _row("run folder", str(root), f"not writable: {error.strerror}", "set RESCENE_RUNS to a folder you own")


def _data() -> list[Row]:
    from rescene.data import available

    return [
        _row(f"data {row['name']}", str(row.get("found") or "not on this machine (optional)")) for row in available()
    ]


def _extras() -> list[Row]:
    """Optional packages: none of them missing is a problem."""
    return [
        _row(f"extra {name}", f"{'installed' if find_spec(module) else 'not installed (optional)'}: {use}")
        for name, (module, use) in EXTRAS.items()
    ]
