"""A trained model as a person uses it: pictures in, scores of named classes out, from whichever file holds it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rescene.errors import ConfigError
from rescene.lens import open_lens
from rescene.nets import Arch, Net, load_weights
from rescene.use.formats import READERS, picture_size
from rescene.versions import MODEL, refuse_newer


@dataclass(frozen=True)
class Model:
    """``scores``: uint8 [n, 3, S, S] -> logits [n, classes] on the CPU. ``about``: what the file says about itself."""

    path: Path
    about: dict[str, Any]
    scores: Callable[[Tensor], Tensor]

    @property
    def classes(self) -> list[str]:
        return list(self.about["classes"])

    @property
    def image_size(self) -> int:
        """Side of the pictures it takes."""
        return picture_size(self.about)


class Whole(nn.Module):
    """Lens, normalisation and network in one: uint8 pixels [n, 3, S, S] -> logits. Nothing is left to the caller.

    What the lens gives is not rounded to bytes as in training: between two bytes every runtime would choose for itself.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, net: Net, mean: list[float], std: list[float], lens: str | None = None) -> None:
        super().__init__()
        self.net, self._lens = net, None if lens is None else open_lens(lens)
        self.looks_with = None if self._lens is None else self._lens.module  # its numbers become part of the file
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))
        self.eval()

    def forward(self, pixels: Tensor) -> Tensor:
        values = pixels.float() if self._lens is None else self._lens.seen(pixels)
        scores: Tensor = self.net((values / 255 - self.mean) / self.std)
        return scores


def open_model(path: Path) -> Model:
    """The model of a finished run folder or of an exported .safetensors, .pt2 or .onnx file."""
    if path.is_dir():
        about, whole = of_run(path)
        return Model(path, about, torch.no_grad()(whole))
    kind = path.suffix.lower()[1:]
    if not path.is_file() or kind not in READERS:
        why = "there is no such file or folder" if not path.exists() else f"a model ends in .{', .'.join(READERS)}"
        raise no_model(path, why)
    text, content = READERS[kind](path)
    about = checked(path, text)
    if kind == "safetensors":
        content = torch.no_grad()(_whole(about, content))
    return Model(path, about, content)


def of_run(folder: Path) -> tuple[dict[str, Any], Whole]:
    """What a finished run says about its model, and the model."""
    try:
        about = checked(folder, (folder / "model" / "model.json").read_text("utf-8"))
    except OSError:
        raise no_model(folder, "this folder holds no model/model.json: no run, or one that has not finished") from None
    return about, _whole(about, load_weights(folder / "model" / "final.safetensors"))


def _whole(about: dict[str, Any], weights: Mapping[str, Tensor]) -> Whole:
    return Whole(Arch(**about["arch"]).restore(weights), about["mean"], about["std"], about.get("lens"))


def checked(path: Path, text: str | None) -> dict[str, Any]:
    """What a model says about itself, as far as this version can read it."""
    try:
        about = json.loads(text or "")
        known = {key: about[key] for key in ("arch", "classes", "mean", "std", "schema")}
    except (ValueError, KeyError, TypeError):
        raise no_model(path, "it does not say which classes it knows; only models exported by rescene do") from None
    refuse_newer(known["schema"], MODEL, path)
    return dict(about)


def no_model(path: Path, why: str) -> ConfigError:
    fix = "give a finished run folder (rescene runs) or a file made by rescene export"
    return ConfigError("E180", "no model there", where=str(path), why=why, fix=fix)
