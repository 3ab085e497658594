"""A trained model as a person uses it: pictures in, scores of named classes out, from whichever file holds it.

It also answers to pictures on disk (``predict``).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rescene import __version__
from rescene.core.documents import read_text
from rescene.core.errors import ConfigError, DataError, ResceneWarning, lines_of
from rescene.core.results import Results, read_results
from rescene.core.run_state import finished_in, is_done, read_object
from rescene.data.sources.decode import EXTENSIONS, decode, reason, shown
from rescene.data.sources.image_folder import survey, warn_of_left
from rescene.lens import Lens, expect_looks, open_lens, tell_looked
from rescene.lens.lens import lens_of
from rescene.nets import Arch, Net, load_weights
from rescene.nets.model_file import about_of, check_rows, contradiction, parted
from rescene.use.formats import CAN_RUN_CODE, READERS, picture_size

NOT_HERE = ("E130", "E168")  # a network of a plug-in that was not loaded, or of another process


@dataclass(frozen=True)
class Model:
    """``scores``: uint8 [n, 3, S, S] -> logits [n, classes] on the CPU. ``about``: what the file says about itself."""

    path: Path
    about: dict[str, Any]
    scores: Callable[[Tensor], Tensor]

    @property
    def classes(self) -> list[str]:
        """Names of the classes, in the order of the scores."""
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

    def __init__(self, net: Net, mean: list[float], std: list[float], lens: Lens | None = None) -> None:
        super().__init__()
        self.net, self.lens = net, lens
        self.looks_with = None if lens is None else lens.module  # its numbers become part of the file
        self.register_buffer("mean", torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(-1, 1, 1))
        self.eval()

    def forward(self, pixels: Tensor) -> Tensor:
        values = pixels.float() if self.lens is None else self.lens.seen(pixels)
        scores: Tensor = self.net((values / 255 - self.mean) / self.std)
        return scores


def open_model(path: Path, trust: bool = False) -> Model:
    """The model of a finished run folder or of an exported .safetensors, .onnx or, if it is trusted, .pt2 file."""
    if path.is_dir():
        place = finished_in(path)
        about, whole = of_run(place)
        told = origin_of(place, picture_size(about)) if is_done(place) else {}
        return Model(path, about | told, torch.no_grad()(whole))
    kind = path.suffix.lower()[1:]
    if not path.is_file() or kind not in READERS:
        why = "there is no such file or folder" if not path.exists() else f"a model ends in .{', .'.join(READERS)}"
        raise no_model(path, why)
    if kind in CAN_RUN_CODE and not trust:
        raise ConfigError(
            "E158",
            f"this .{kind} file is not opened: it could run code of whoever made it",
            where=str(path),
            why="torch keeps parts of such a file as pickles, and opening a pickle runs what its maker put there",
            fix="use the model's .safetensors file, which holds numbers only; if you trust who made this one: --trust",
        )
    text, content = READERS[kind](path)
    about = checked(path, text)
    if kind == "safetensors":
        return Model(path, about, torch.no_grad()(_whole(path, about, content)))
    _try(path, about, content)
    return Model(path, about, content)


def of_run(folder: Path) -> tuple[dict[str, Any], Whole]:
    """What a finished run says about its model, and the model."""
    try:
        about = checked(folder, read_text(folder / "model" / "model.json"))
    except OSError:
        raise no_model(folder, "this folder holds no model/model.json: no run, or one that has not finished") from None
    return about, _whole(folder, about, load_weights(folder / "model" / "final.safetensors"))


def origin_of(folder: Path, size: int) -> dict[str, Any]:
    """Where a run's model comes from and what must be known to use it, for people who see its file alone."""
    results = read_results(folder / "results.json", [])
    return {
        "input": f"uint8 RGB pixels [n, 3, {size}, {size}]: shorter side scaled, centre cropped",
        "output": "one score (logit) per class; softmax gives confidences",
        "method": results.method,
        "title": results.style.get("title") or results.method,
        "data": _data(folder, results),
        "aa": results.aa,
        "privacy": results.privacy.statement,
        "written_by": f"rescene {__version__}",
    }


def _data(folder: Path, results: Results) -> str | None:
    """The images that a run was trained on, in words: their name, how many, at how many sites."""
    sites = (results.config.get("federation") or {}).get("num_clients")
    sizes = [task.train_size for task in results.tasks if task.train_size is not None]
    told = len(sizes) == len(results.tasks)
    count = f"{sum(sizes):,} images" if told else "images that stayed at the sites"
    with contextlib.suppress(OSError, ValueError):
        name = read_object(folder / "env.json").get("data")
        return f"{name}: {count}, {sites} sites" if name else count
    return count


def _whole(path: Path, about: dict[str, Any], weights: Mapping[str, Tensor]) -> Whole:
    weights, tensors = parted(weights)
    try:
        net = Arch(**about["arch"]).restore(weights)
    except ConfigError as error:
        if error.code in NOT_HERE:
            raise
        raise contradiction(path, f"{error.what}: {error.why}") from None
    check_rows(about, net.head.out_features, path)
    return Whole(net, about["mean"], about["std"], _lens(path, about, tensors))


def _lens(path: Path, about: dict[str, Any], tensors: dict[str, Tensor]) -> Lens | None:
    """From the model's own file, or by its name. A model sees what it was trained on only through the very lens."""
    wanted, name = about.get("lens_sha256"), about.get("lens")
    if name is None:
        return None
    try:
        lens = lens_of((about["lens_file"], tensors), name, str(path)) if about.get("lens_file") else open_lens(name)
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise contradiction(path, f"its lens: {lines_of(error)[0]}") from None
    if wanted not in (None, lens.sha256):
        raise ConfigError(
            "E136",
            f"the model was trained with another lens than the {name!r} that is here",
            where=str(path),
            why=f"SHA-256 {wanted[:16]} there, {lens.sha256[:16]} here",
            fix="the release of rescene, or the lens file, that the model was trained with",
        )
    return lens


def _try(path: Path, about: dict[str, Any], scores: Callable[[Tensor], Tensor]) -> None:
    """What a computation of others takes and gives is known once it was asked."""
    size = picture_size(about)
    try:
        found = scores(torch.zeros(1, 3, size, size, dtype=torch.uint8))
        num_images, num_outputs = found.shape
    except Exception as error:  # of torch or of onnxruntime, whose exceptions share no public base
        said = lines_of(error)[0]
        raise contradiction(path, f"it gives no answer to a picture of {size}x{size} pixels: {said}") from None
    if num_images != 1:
        raise contradiction(path, f"it gives {num_images} answers to one picture")
    check_rows(about, num_outputs, path)


def checked(path: Path, text: str | None) -> dict[str, Any]:
    """What a model says about itself, as far as this version can read it."""
    about = about_of(text, path)
    if about is None:
        raise no_model(path, "it does not say which classes it knows; only models exported by rescene do")
    return about


def no_model(path: Path, why: str) -> ConfigError:
    """The error for a path without a model (E180)."""
    fix = "give a finished run folder (rescene runs) or a file made by rescene export"
    return ConfigError("E180", "no model there", where=str(path), why=why, fix=fix)


_AT_ONCE, _THROUGH_LENS = 256, 32  # pictures; bounds memory, of which a lens takes more


@dataclass(frozen=True)
class Prediction:
    """One picture: the likeliest classes with their confidence (0 to 1), and the uint8 [3, S, S] the model saw."""

    file: Path
    top: tuple[tuple[str, float], ...]
    pixels: Tensor

    def __repr__(self) -> str:
        named = ", ".join(f"{name} {100 * share:.0f} %" for name, share in self.top)
        return f"<Prediction {shown(self.file)}: {named}>"


def find_images(paths: Iterable[Path]) -> list[Path]:
    """The files named, and every picture below the folders named; each once, folders in name order. Files below a folder
    that are not read are told (W214)."""
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            place, left = survey(path)
            warn_of_left(left, path)
            found |= dict.fromkeys(sorted(place.everything()))
        elif path.is_file():
            found[path] = None
        else:
            raise DataError("E201", f"there is nothing at {path}", where=str(path.absolute()), fix="check the path")
    if not found:
        kinds = ", ".join(sorted(EXTENSIONS))
        where = ", ".join(map(str, paths))
        raise DataError(
            "E212", "no image there", where=where, why=f"images end in {kinds}", fix="name files or folders"
        )
    return list(found)


def mending(unreadable: Iterable[Path]) -> str:
    """What to do about files that could not be read.

    >>> mending([Path("a.heic")]), mending([Path("a.gif")])
    ('save them as JPEG or PNG', 'copy them again: the files are damaged; or save them as JPEG or PNG')
    """
    foreign = all(path.suffix.lower() not in EXTENSIONS for path in unreadable)
    return (
        "save them as JPEG or PNG" if foreign else "copy them again: the files are damaged; or save them as JPEG or PNG"
    )


def predict(model: Model, files: Sequence[Path], top: int = 3) -> tuple[list[Prediction], dict[Path, str]]:
    """Answers in the order of ``files``, and why the others could not be read as pictures."""
    answers: list[Prediction] = []
    unreadable: dict[Path, str] = {}
    at_once = _THROUGH_LENS if model.about.get("lens") else _AT_ONCE
    expect_looks(len(files))
    for start in range(0, len(files), at_once):
        some = files[start : start + at_once]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResceneWarning)  # told by the second value
            seen = decode(some, [shown(file) for file in some], model.image_size, skip_unreadable=True)
        unreadable |= {some[i]: reason(problem) for i, problem in seen.refused.items()}
        if not seen.kept:
            tell_looked(len(some))
            continue
        values, places = torch.softmax(model.scores(seen.pixels), dim=1).topk(min(top, len(model.classes)))
        for i, pixels, value, place in zip(seen.kept, seen.pixels, values.tolist(), places.tolist(), strict=True):
            named = tuple((model.classes[c], v) for c, v in zip(place, value, strict=True))
            answers.append(Prediction(some[i], named, pixels))
        tell_looked(len(some))
    return answers, unreadable
