"""Weights from a file (``model.init=FILE``)."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from rescene.errors import ConfigError


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """The state dict in a safetensors file, on the CPU. Use ``check_fits`` before building a network from it.

    A missing, unreadable or foreign file is a ConfigError.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise _bad_file(file, "there is no such file")
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise _bad_file(file, f"not a readable safetensors file ({error})") from error


def _bad_file(file: Path, why: str) -> ConfigError:
    fix = "give a .safetensors file, such as model/final.safetensors of a run, or leave model.init out"
    return ConfigError("E133", f"cannot load weights from '{file}'", where="model.init", why=why, fix=fix)
