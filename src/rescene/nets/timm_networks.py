"""Networks of the package timm, and checkpoint files with weights for them. Nothing is downloaded."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rescene.core.errors import DataError, did_you_mean, lines_of
from rescene.nets.weights import read_weights

TIMM = "timm:"


def timm_network(name: str, where: str) -> nn.Module:
    """The network without its classifier and without weights. Names that would fetch something are not names here."""
    timm = _loaded_timm()
    if not name.replace("_", "").isalnum() or not timm.is_model(name):
        listed = "python -c 'import timm; print(timm.list_models())'"
        fix = did_you_mean(name, timm.list_models(), f"{TIMM}{{}}") or listed
        raise DataError("E224", f"timm has no model {name!r}", where=where, fix=fix)
    net: nn.Module = timm.create_model(name, pretrained=False, num_classes=0)
    return net.eval()


def _loaded_timm() -> Any:
    """The package. It needs torchvision, which fails to load beside a build of torch that it was not made for."""
    need("timm", "timm")
    try:
        return import_module("timm")
    except (ImportError, RuntimeError, OSError) as error:
        fix = "uv pip install --torch-backend=auto torch torchvision    # cpu instead of auto without a GPU; both of one kind"
        why = f"{lines_of(error)[0]}; this torch is {torch.__version__}"
        raise DataError("E223", "timm is installed and does not load", why=why, fix=fix) from error


def checkpoint(file: Path) -> dict[str, Tensor]:
    """Weights by name from .safetensors, or from .pth, .pt, .bin or .tar without running what is pickled in there."""
    if file.suffix == ".safetensors":
        return read_weights(file)[1]
    if not file.is_file():
        raise _no_checkpoint(file, "there is no such file")
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # zip, pickle and torch's own, depending on where the damage is
        raise _no_checkpoint(file, lines_of(error)[0]) from None
    for key in ("state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        raise _no_checkpoint(file, "it holds no weights by name")
    return {str(key).removeprefix("module."): value for key, value in found.items()}


def fitting(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor], file: Path, name: str) -> dict[str, Tensor]:
    """The weights that the network wants; a classifier may be over, nothing may be missing or of another shape."""
    missing = [key for key in wanted if key not in state]
    if missing:
        raise misfit(file, name, f"{len(missing)} of {len(wanted)} tensors are missing, the first is {missing[0]}")
    other = [key for key, value in wanted.items() if state[key].shape != value.shape]
    if other:
        shapes = f"{list(state[other[0]].shape)} in the file, {list(wanted[other[0]].shape)} in the network"
        raise misfit(file, name, f"{len(other)} tensors have another shape, the first is {other[0]}: {shapes}")
    return {key: state[key] for key in wanted}


def misfit(file: Path, name: str, why: str) -> DataError:
    fix = f"the checkpoint of {name} as timm names its tensors"
    return DataError("E225", f"these weights are not those of {name}", where=str(file), why=why, fix=fix)


def _no_checkpoint(file: Path, why: str) -> DataError:
    fix = "a .safetensors file, or a .pth file with weights and nothing else"
    return DataError("E225", "no weights can be read there", where=str(file), why=why, fix=fix)


def need(module: str, extra: str) -> None:
    if find_spec(module) is None:
        raise DataError(
            "E223",
            f"this network needs {module}",
            why="it is not part of the plain installation",
            fix=f"pip install 'rescene[{extra}]'",
        )


def own_look(net: nn.Module) -> dict[str, Any]:
    """How pictures must look to a network of timm: ``mean``, ``std``, and ``size`` where it takes one size only."""
    about: dict[str, Any] = net.pretrained_cfg  # type: ignore[assignment]
    size = int(about["input_size"][1]) if about.get("fixed_input_size") else None
    return {"mean": tuple(about["mean"]), "std": tuple(about["std"]), "size": size}
