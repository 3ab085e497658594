"""Weights that a run starts from (``model.init``): another model's body, and its head's rows by the names of their classes."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rescene.core.errors import ConfigError, ResceneWarning
from rescene.engine.model_description import listed, stored_model
from rescene.nets import Arch, check_fits, grow_head
from rescene.nets.timm_networks import TIMM, checkpoint, fitting

BODY = "body.net."  # before the names of an own network's tensors
HEAD = ("head.weight", "head.bias")


def initial_weights(
    file: Path, arch: Arch, lens: str | None, classes: Sequence[str], generator: torch.Generator
) -> dict[str, Tensor]:
    """Weights for a network of these classes. A class that the file does not name gets a fresh row; both are told.

    A file that does not say what its rows stand for gives its body only. Another network is a ConfigError.
    """
    about, state = _stored(file, arch)
    if about is not None:
        _check_same("model.name", about["arch"]["name"], arch.name, file)
        _check_same("model.lens", about.get("lens"), lens, file)
    names = list(about["classes"]) if about and "head.weight" in state else []
    if not names:
        size = arch.skeleton(1).feature_size
        state |= {"head.weight": torch.zeros(1, size), "head.bias": torch.zeros(1)}  # no row of it is used
    check_fits(arch, state)
    state = {key: value.float() if value.is_floating_point() else value for key, value in state.items()}
    known = [name for name in classes if name in names]
    fresh = [name for name in classes if name not in names]
    rows = [names.index(name) for name in known]
    grown = grow_head(state | {key: state[key][rows] for key in HEAD}, len(classes), generator)
    order = [[*known, *fresh].index(name) for name in classes]
    _tell(file, names, known, fresh)
    return grown | {key: grown[key][order] for key in HEAD}


def _stored(file: Path, arch: Arch) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """A model of ours, or the body of timm's network from a checkpoint as timm names its tensors."""
    if not arch.name.startswith(TIMM):
        return stored_model(file)
    if file.suffix == ".safetensors":
        about, state = stored_model(file)
        if about is not None or "head.weight" in state:
            return about, state
    wanted = {k.removeprefix(BODY): v for k, v in arch.skeleton(1).state_dict().items() if k.startswith(BODY)}
    found = fitting(checkpoint(file), wanted, file, arch.name.removeprefix(TIMM))
    return None, {BODY + key: value for key, value in found.items()}


def _check_same(key: str, there: str | None, here: str | None, file: Path) -> None:
    if there != here:
        raise ConfigError(
            "E159",
            "the file of model.init holds another network",
            where=str(file),
            why=f"{key} is {there or 'null'} in the file and {here or 'null'} here",
            fix=f"{key}={there or 'null'}, or another file",
        )


def _tell(file: Path, names: list[str], known: list[str], fresh: list[str]) -> None:
    """A warning, unless every class of the file is one of the first task and the other way round."""
    left = [name for name in names if name not in known]
    if not names:
        what = f"model.init: {file.name} does not name its classes, so only the body of its network is used"
        fix = (
            "give an export (rescene export RUN), or model/final.safetensors in its run folder, to use its classes too"
        )
        warnings.warn(ResceneWarning("W168", what, fix=fix), stacklevel=3)
    elif fresh or left:
        parts = {
            "known from the file": known or ["none"],
            "new": fresh,
            "in the file, but not in the first task, and not used": left,
        }
        told = "; ".join(f"{words}: {listed(some)}" for words, some in parts.items() if some)
        warnings.warn(ResceneWarning("W169", f"model.init: classes {told}"), stacklevel=3)
