"""A model's file: what it says about itself, and the weights that a run takes from it to start with (``model.init``).

The description (network, classes, normalisation) is checked before anything is built from it. A run takes the body, and the rows of
the head by the names of their classes.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from rescene.core.documents import parse_json, read_text
from rescene.core.errors import ConfigError, ResceneWarning, few
from rescene.core.versions import MODEL, refuse_newer
from rescene.nets import Arch, check_fits, grow_head
from rescene.nets.timm_networks import TIMM, checkpoint, fitting
from rescene.nets.weights import read_weights

ImageSide = Annotated[int, Field(ge=1, le=4096)]  # of a picture's side
NAMED = 6  # names in a message
LENS = "lens."  # before the names of a lens' tensors in the file of a model
NEEDED = ("schema", "arch", "classes", "mean", "std")


class _Network(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    image_size: ImageSide
    norm: str = "batch"
    width: Annotated[int, Field(ge=1, le=65536)] | None = None
    channels: Annotated[int, Field(ge=1, le=65536)] = 3


class _About(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    arch: _Network
    classes: list[str] = Field(min_length=1)
    mean: list[float]
    std: list[Annotated[float, Field(gt=0)]]
    lens: str | None = None
    lens_sha256: str | None = None
    lens_file: dict[str, Any] | None = None  # what the lens says of itself whose tensors are in the same file
    picture_size: ImageSide | None = None

    @model_validator(mode="after")
    def _agrees_with_itself(self) -> _About:
        (name, times), *_ = Counter(self.classes).most_common(1)
        if times > 1:
            raise ValueError(f"class {name!r} stands {times} times")
        if not len(self.mean) == len(self.std) == self.arch.channels:
            raise ValueError(
                f"{self.arch.channels} channels, but {len(self.mean)} means and {len(self.std)} deviations"
            )
        if (self.arch.channels != 3) != (self.lens is not None):
            raise ValueError(f"{self.arch.channels} channels, but lens {self.lens}")
        if self.lens is not None and self.picture_size is None:
            raise ValueError("a lens, but no picture_size")
        return self


def about_of(text: str | None, path: Path) -> dict[str, Any] | None:
    """What a text says about a model; None if it says nothing of the kind, ConfigError if it makes no sense."""
    if not text:
        return None
    about = parse_json(text, str(path))
    if not isinstance(about, dict) or not all(key in about for key in NEEDED):
        return None
    refuse_newer(about["schema"], MODEL, path)
    try:
        _About.model_validate(about)
        Arch(**about["arch"])
    except ConfigError as error:
        raise _not_here(error, about["arch"].get("name"), path) from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise contradiction(path, f"{place}: {first['msg']}".removeprefix(": Value error, ")) from None
    return about


def _not_here(error: ConfigError, name: Any, path: Path) -> ConfigError:
    """The error for a model whose network this process does not know; any other error as it is."""
    if error.code != "E130" or repr(name) not in error.what:
        return error
    return ConfigError(
        "E130",
        f"no network is called {name!r} here",
        where=str(path),
        why="it holds the weights of a network that does not come with this program (of a plug-in), and not its code",
        fix="--plugin FILE, with the file that registers the network",
    )


def check_rows(about: Mapping[str, Any], num_outputs: int, path: Path) -> None:
    """A model must have a name for each output."""
    if len(about["classes"]) != num_outputs:
        why = f"it names {len(about['classes'])} classes ({few(about['classes'], NAMED)}) and has {num_outputs} outputs"
        raise contradiction(path, why)


def stored_model(path: Path) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """Weights, and what is known about them: from the file's header (an export), or from model.json beside it (a run)."""
    told, state = read_weights(path)
    beside = path.with_name("model.json")
    if told is None and path.name == "final.safetensors" and beside.is_file():
        told = read_text(beside)
    about, (state, _) = about_of(told, path), parted(state)
    if about is not None and "head.weight" in state:
        check_rows(about, len(state["head.weight"]), path)
    return about, state


def parted(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a model's network, and those of the lens that its file may hold too."""
    net = {key: value for key, value in tensors.items() if not key.startswith(LENS)}
    return net, {key.removeprefix(LENS): value for key, value in tensors.items() if key.startswith(LENS)}


def contradiction(path: Path, why: str) -> ConfigError:
    """The error for a model file whose parts do not fit together (E157)."""
    fix = "export the model again (rescene export RUN)"
    return ConfigError("E157", "the parts of this model file contradict each other", where=str(path), why=why, fix=fix)


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
        told = "; ".join(f"{words}: {few(some, NAMED)}" for words, some in parts.items() if some)
        warnings.warn(ResceneWarning("W169", f"model.init: classes {told}"), stacklevel=3)
