"""Weights in safetensors files. Such a file holds numbers and a short text, and nothing that could run."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from rescene.core.errors import ConfigError

KEY = "rescene"  # under which a model's file keeps what it says about itself


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """The state dict in a safetensors file, on the CPU. Use ``check_fits`` before building a network from it.

    A missing, unreadable or foreign file is a ConfigError.
    """
    return read_weights(path)[1]


def read_weights(path: str | Path, key: str = KEY) -> tuple[str | None, dict[str, Tensor]]:
    """What a safetensors file says about itself under ``key``, if anything, and its weights."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise _bad_file(file, "there is no such file")
    try:
        with safe_open(file, "pt") as stored:
            told = (stored.metadata() or {}).get(key)
            return told, {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  (no mapping)
    except (SafetensorError, OSError) as error:
        raise _bad_file(file, f"not a readable safetensors file ({error})") from error


def _bad_file(file: Path, why: str) -> ConfigError:
    fix = "give a .safetensors file: an export, or model/final.safetensors of a run"
    return ConfigError("E133", f"cannot load weights from '{file}'", why=why, fix=fix)
