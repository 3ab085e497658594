"""A model's answers to pictures on disk."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rescene.core.errors import DataError, ResceneWarning
from rescene.data.sources.decode import EXTENSIONS, decode, reason, shown
from rescene.data.sources.image_folder import survey, warn_of_left
from rescene.lens import expect_looks, tell_looked
from rescene.use.model import Model

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
