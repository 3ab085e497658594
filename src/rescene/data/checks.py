"""Look at a data set before a long run: what is in it, what is odd about it, what to do."""

from __future__ import annotations

import hashlib
import os
import statistics
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from rescene.data.images import Dataset, Images
from rescene.data.loading import load
from rescene.errors import DataError, ResceneWarning

_TINY_CLASS = 10  # images; below it condensation and a hold-out have little to work with
_MANY, _FEW = (
    150,
    50,
)  # images of a class: enough for recipe own with its lens; enough for a smaller lens (docs/own-images.md)
Row = dict[str, Any]


def inspect(dataset: Dataset, told: Sequence[ResceneWarning] = ()) -> Row:
    """What a data set holds, in plain values: counts per class and split, size, notes, proposed tasks, warnings.

    ``told``: what loading warned of.
    """
    train, test = (_counts(images, len(dataset.classes)) for images in (dataset.train, dataset.test))
    return {
        "name": dataset.name,
        "num_train": len(dataset.train),
        "num_test": len(dataset.test),
        "image_size": dataset.image_size,
        "classes": [
            {"name": name, "train": n, "test": m} for name, n, m in zip(dataset.classes, train, test, strict=True)
        ],
        "domains": [
            {"name": name, "train": _in_domain(dataset.train, d), "test": _in_domain(dataset.test, d)}
            for d, name in enumerate(dataset.domains)
        ],
        "mean": list(dataset.transform.mean),
        "std": list(dataset.transform.std),
        "split": dataset.split,
        "notes": list(dataset.notes),
        "proposed_tasks": propose_tasks(dataset),
        "proposed_settings": propose_settings(dataset),
        "noise": noise_words(dataset),
        "warnings": [
            *(warning.what for warning in told),
            *(row["problem"] for row in content_rows(dataset) if row["problem"]),
        ],
        "fingerprint": dataset.fingerprint(),
    }


def verify(name: str, path: str | os.PathLike[str] | None = None, layout: str = "auto") -> list[Row]:
    """Load a data set and check it: rows of check, problem (empty when all is well) and fix.

    Damaged images are all found, not only the first; a set that cannot be loaded at all gives one row that says why.
    """
    try:
        dataset, told = load_readable(name, path, layout)
    except DataError as problem:
        why = f"{problem.what}: {problem.why}" if problem.why else problem.what
        return [_row(f"complete [{problem.code}]", why, problem.fix or "")]
    found = f"{len(dataset.train):,} training and {len(dataset.test):,} test images of {len(dataset.classes)} classes"
    return [
        _row(f"complete ({found})"),
        _row("images readable", _said(told, "W203"), "copy them again"),
        *(
            _row("nothing odd about the files", warning.what, warning.fix or "")
            for warning in told
            if warning.code != "W203"
        ),
        *content_rows(dataset),
    ]


def load_readable(
    name: str = "auto", path: str | os.PathLike[str] | None = None, layout: str = "auto", outside: str = "warn"
) -> tuple[Dataset, list[ResceneWarning]]:
    """A data set without the images that cannot be read (W203), and everything that loading warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResceneWarning)
        dataset = load(name, path, skip_unreadable=True, layout=layout, outside=outside)
    return dataset, [w.message for w in caught if isinstance(w.message, ResceneWarning)]


def propose_tasks(dataset: Dataset) -> Row:
    """A task plan to start from, as arguments of ``plan_tasks``: one task per domain, else 5 tasks (10 if there are 50
    classes or more, as in the paper), with at least two classes each where there are enough."""
    if dataset.domains:
        return {"scenario": "domain"}
    num_classes = len(dataset.classes)
    return {"scenario": "class", "count": min(5 if num_classes < 50 else 10, max(1, num_classes // 2))}


def propose_settings(dataset: Dataset) -> list[str]:
    """The proposed tasks as overrides of the recipe own; with few images also a lens that gives fewer numbers to noise."""
    plan = ["tasks.scenario=domain"] if dataset.domains else [f"tasks.count={propose_tasks(dataset)['count']}"]
    return plan + (["model.lens=waves"] if _typical(dataset) < _MANY else [])


def noise_words(dataset: Dataset) -> str:
    """What the noise of recipe own (epsilon 8, three sites) leaves of so many images; measured on fashion-mini."""
    held = _typical(dataset)
    if held >= _MANY:
        return f"a typical class has {held} images: enough for epsilon 8"
    if held >= _FEW:
        return (
            f"a typical class has {held} images, which is few for epsilon 8: expect to lose a quarter of the accuracy. "
            f"The smaller lens waves is proposed; leaves needs {_MANY} images of a class"
        )
    return (
        f"a typical class has {held} images, which is too few: noise at epsilon 8 drowns most of what they tell. "
        f"{_FEW} of a class are the least, {_MANY} are enough"
    )


def _typical(dataset: Dataset) -> int:
    return int(statistics.median(_counts(dataset.train, len(dataset.classes))))


def content_rows(dataset: Dataset) -> list[Row]:
    """Tiny and untested classes, repeated images: rows of check, problem and fix."""
    train, test = (_counts(images, len(dataset.classes)) for images in (dataset.train, dataset.test))
    small = [f"{name} ({n})" for name, n in zip(dataset.classes, train, strict=True) if n < _TINY_CLASS]
    untested = [name for name, n in zip(dataset.classes, test, strict=True) if n == 0]
    digests = [hashes(images) for images in (dataset.train, dataset.test)]
    repeats = [len(values) - len(set(values)) for values in digests]
    trained = set(digests[0])
    leaked = sum(value in trained for value in digests[1])
    return [
        _row(
            f"at least {_TINY_CLASS} training images per class",
            _few(small, "tiny classes"),
            "add images or merge classes",
        ),
        _row("test images of every class", _few(untested, "classes without test image"), "add test images"),
        _row("no repeated training image", _count(repeats[0], "repeat another training image"), "remove the copies"),
        _row("no repeated test image", _count(repeats[1], "repeat another test image"), "remove the copies"),
        _row("no test image in training", _count(leaked, "of the test split are also training images"), "remove them"),
    ]


def warn_of_leaks(dataset: Dataset) -> None:
    """Say that test images are training images, pixel by pixel (W217): they flatter the accuracy."""
    trained = {hash(row.tobytes()) for row in dataset.train.pixels.cpu().flatten(1).numpy()}
    leaked = sum(hash(row.tobytes()) in trained for row in dataset.test.pixels.cpu().flatten(1).numpy())
    if leaked:
        what = f"{leaked:,} of {len(dataset.test):,} test images are also training images, which flatters the accuracy"
        warnings.warn(ResceneWarning("W217", what, fix="remove them; rescene data inspect counts them"), stacklevel=2)


def _said(told: Sequence[ResceneWarning], code: str) -> str:
    return "; ".join(warning.what for warning in told if warning.code == code)


def _row(check: str, problem: str = "", fix: str = "") -> Row:
    return {"check": check, "problem": problem, "fix": fix if problem else ""}


def _few(names: list[str], what: str) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{len(names)} {what}: {', '.join(names[:5])}{more}" if names else ""


def _count(count: int, what: str) -> str:
    return f"{count:,} images {what}" if count else ""


def _counts(images: Images, num_classes: int) -> list[int]:
    return [int(n) for n in torch.bincount(images.labels, minlength=num_classes)]


def _in_domain(images: Images, domain: int) -> int:
    return 0 if images.domains is None else int((images.domains == domain).sum())


def hashes(images: Images) -> list[bytes]:
    """One digest per picture, by its pixels."""
    rows = images.pixels.cpu().flatten(1).contiguous().numpy()
    return [hashlib.blake2b(row.data, digest_size=16).digest() for row in rows]
