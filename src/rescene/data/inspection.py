"""Look at a data set before a long run: what is in it, what is odd about it, what to do; and a contact sheet.

The contact sheet has a row of pictures for each class, as the network will see them, to check labels with one look.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from rescene.core.errors import DataError, ResceneWarning, few
from rescene.core.json_files import Row
from rescene.data.images import Dataset, Images
from rescene.data.loading import AnyPath, load
from rescene.data.sources.decode import header_sizes
from rescene.data.sources.image_folder import survey

if TYPE_CHECKING:
    from PIL.Image import Image


TESTED = "test images of every class"  # a row of content_rows
_TINY_CLASS = 10  # images; below it condensation and a hold-out have little to work with
_FEW_TESTED = 20  # test images in all; with fewer an accuracy is uncertain by ten points and more
_NEAR = 0.999  # correlation of two thumbnails above which pictures are nearly the same
_THUMBNAIL = 16
_MOST_PAIRS = 10**8  # of a test and a training image, compared at the start of a run: about a second
APART = "put each series of one object, day or camera into train/ or test/ as a whole"
_MORE = " (docs/own-images.md)"
_LAST = "set data.held_out=last if names are in the order of the series, or "
_ALIKE = 0.1  # of what pictures of a class leave to a correlation of 1; sets in no order stay below 0.02
_SURELY, _PAIRS = 4, 10  # standard errors, and neighbours at least
# images of a class: enough for recipe own; from here on its lens is better than a smaller one; the least (docs/own-images.md)
_MANY, _LEAVES, _FEW = 150, 100, 50


def inspect(dataset: Dataset, told: Sequence[ResceneWarning] = ()) -> Row:
    """What a data set holds, in plain values: counts per class and split, size, notes, proposed tasks, warnings.

    ``told``: what loading warned of.
    """
    train, test = (_counts(images, len(dataset.classes)) for images in (dataset.train, dataset.test))
    series = in_series(dataset)
    return {
        "name": dataset.name,
        "num_train": len(dataset.train),
        "num_test": len(dataset.test),
        "image_size": dataset.image_size,
        "classes": [
            {"name": name, "train": n, "test": m} for name, n, m in zip(dataset.classes, train, test, strict=True)
        ],
        "domains": _held(dataset, "domains"),
        "sites": _held(dataset, "sites"),
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
            *(f"{one.what} [{one.code}]" for one in (nearly_trained(dataset), series) if one),
            *(["all images come from one site"] if len(dataset.sites) == 1 else []),
        ],
        "in_series": series is not None,
        "fingerprint": dataset.fingerprint(),
    }


def verify(name: str, path: AnyPath | None = None, layout: str = "auto") -> list[Row]:
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
        _row("images readable", "; ".join(w.what for w in told if w.code == "W203"), "copy them again"),
        *(
            _row("nothing odd about the files", warning.what, warning.fix or "")
            for warning in told
            if warning.code != "W203"
        ),
        *content_rows(dataset),
    ]


def load_readable(
    name: str = "auto",
    path: AnyPath | None = None,
    layout: str = "auto",
    columns: Mapping[str, str] | None = None,
) -> tuple[Dataset, list[ResceneWarning]]:
    """A data set without the images that cannot be read (W203), and everything that loading warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResceneWarning)
        dataset = load(name, path, skip_unreadable=True, layout=layout, columns=columns)
    return dataset, [w.message for w in caught if isinstance(w.message, ResceneWarning)]


def propose_tasks(dataset: Dataset) -> Row:
    """A task plan to start from, as arguments of ``plan_tasks``: one task per domain if there are several, else 5 tasks (10
    for 50 classes or more, as in the paper), with at least two classes each where there are enough."""
    if len(dataset.domains) > 1:
        return {"scenario": "domain"}
    num_classes = len(dataset.classes)
    return {"scenario": "class", "count": min(5 if num_classes < 50 else 10, max(1, num_classes // 2))}


def propose_settings(dataset: Dataset, exact: bool = False) -> list[str]:
    """The proposed tasks and the data's sites as overrides of the recipe own.

    ``exact``: without noise. With noise and few images, also a lens that gives fewer numbers to noise.
    """
    tasks = propose_tasks(dataset)
    plan = ["tasks.scenario=domain"] if tasks["scenario"] == "domain" else [f"tasks.count={tasks['count']}"]
    plan += ["federation.partition=sites"] if len(dataset.sites) > 1 else []
    if exact:
        return [*plan, "privacy.mechanism=none", "method.num_features=null"]  # cutting features serves the noise
    return plan + (["model.lens=waves"] if _typical(dataset) < _LEAVES else [])


def why_not(dataset: Dataset) -> str:
    """Why no run makes sense on these images; empty if one does."""
    if len(dataset.classes) < 2:
        return f"there is one class only ({dataset.classes[0]}): a classifier needs at least two to tell apart"
    return ""


def found_files(path: Path) -> Row:
    """Pictures in a folder by kind and what is not read by reason, counted, with examples; sizes of the pictures."""
    place, left = survey(path)
    pictures = place.everything()
    kinds = Counter(picture.suffix.lower() for picture in pictures)
    sides = sorted(header_sizes(pictures), key=lambda size: size[0] * size[1])
    picked = {"smallest": 0, "median": len(sides) // 2, "largest": -1} if sides else {}
    return {
        "found": dict(kinds.most_common()),
        "not_read": [
            {"what": reason, "count": len(files), "examples": [str(file.relative_to(path)) for file in files[:3]]}
            for reason, files in left.items()
            if files
        ],
        "sizes": {name: "{}x{}".format(*sides[i]) for name, i in picked.items()},
    }


def noise_words(dataset: Dataset) -> str:
    """What the noise of recipe own (epsilon 8, three sites) leaves of so many images; measured on fashion-mini."""
    held = _typical(dataset)
    if held >= _MANY:
        return (
            f"a typical class has {held} images: enough for epsilon 8. The noise still costs accuracy, more where kinds look alike; "
            "a run without it shows how much, and a secure sum costs less (privacy.honest_sites)"
        )
    if held >= _FEW:
        lens = f". The smaller lens waves is proposed; leaves is better from {_LEAVES} images of a class on"
        return (
            f"a typical class has {held} images, which is few for epsilon 8: expect to lose a quarter of the accuracy or more"
            + (lens if held < _LEAVES else "")
        )
    return (
        f"a typical class has {held} images, which is too few: noise at epsilon 8 drowns most of what they tell. "
        f"{_FEW} of a class are the least, {_MANY} are enough"
    )


def _typical(dataset: Dataset) -> int:
    return int(statistics.median(_counts(dataset.train, len(dataset.classes))))


def content_rows(dataset: Dataset) -> list[Row]:
    """Tiny and untested classes, repeated images: rows of check, problem and fix."""
    train = _counts(dataset.train, len(dataset.classes))
    small = [f"{name} ({n})" for name, n in zip(dataset.classes, train, strict=True) if n < _TINY_CLASS]
    digests = [images.digests for images in (dataset.train, dataset.test)]
    repeats = [len(values) - len(set(values)) for values in digests]
    leaked = _num_trained(dataset, dataset.test.digests)
    return [
        _row(
            f"at least {_TINY_CLASS} training images per class",
            _listed(small, "tiny classes"),
            "add images or merge classes",
        ),
        _row(TESTED, _listed(_untested(dataset), "classes without test image"), "add test images"),
        _row("no repeated training image", _repeated(repeats[0], "training"), "remove the copies"),
        _row("no repeated test image", _repeated(repeats[1], "test"), "remove the copies"),
        _row("no test image in training", _in_both(leaked), "remove them"),
    ]


def nearly_trained(dataset: Dataset, most_pairs: int | None = None) -> ResceneWarning | None:
    """W561, if test images are nearly training images. It is no failed check: pictures of a series may be meant.

    With more than ``most_pairs`` pairs of a test and a training image, a part of the test images is looked at.
    """
    step = 1 if most_pairs is None else max(1, math.ceil(len(dataset.train) * len(dataset.test) / most_pairs))
    pixels, digests = dataset.test.pixels[::step], dataset.test.digests[::step]
    near = near_copies(dataset.train.pixels, pixels) - _num_trained(dataset, digests)
    if near <= 0:
        return None
    looked = f"{len(pixels):,} test images" + (" that were looked at" if step > 1 else "")
    what = f"{near:,} of {looked} are nearly the same as a training image, which flatters the accuracy"
    return ResceneWarning("W561", f"{what}; {_LAST if dataset.is_drawn else ''}{APART}{_MORE}")


def near_copies(train: torch.Tensor, test: torch.Tensor) -> int:
    """Test images whose thumbnail is that of a training image but for brightness and contrast; exact copies among them."""
    known, asked = _thumbnails(train), _thumbnails(test)
    if not len(known):
        return 0
    return sum(int(((part @ known.T).amax(dim=1) > _NEAR).sum()) for part in asked.split(1024))


def in_series(dataset: Dataset, advice: str = _LAST + APART) -> ResceneWarning | None:
    """W563, if test images were drawn at random although the images seem to be series: those next to each other are alike.

    Pictures of one object in a row come on both sides of such a split, so the test does not ask about new objects.
    """
    if not dataset.is_drawn:
        return None
    found = {name: likeness for name, part in _parts(dataset) if (likeness := neighbour_likeness(part))}
    if not found:
        return None
    where = f" of {few(list(found))}" if "" not in found else ""
    name, (beside, within) = max(found.items(), key=lambda item: item[1][0] - item[1][1])
    told = f"{name}: " if name and len(found) > 1 else ""
    what = (
        f"images{where} that follow each other are more alike than others of their class ({told}correlation {beside:.2f} against "
        f"{within:.2f}), as in a series of one object or in a subfolder; if test images are drawn from a series, the accuracy "
        "looks better than it is"
    )
    return ResceneWarning("W563", f"{what}; {advice}{_MORE}")


def _parts(dataset: Dataset) -> list[tuple[str, Images]]:
    """The training images, of each domain apart."""
    train = dataset.train
    if train.domains is None or len(dataset.domains) < 2:
        return [("", train)]
    return [(name, train.select(train.domains == i)) for i, name in enumerate(dataset.domains)]


def neighbour_likeness(images: Images) -> tuple[float, float] | None:
    """Mean correlation of thumbnails of neighbours, and of all pairs of a class at a site; None unless the first is surely
    larger."""
    group = images.groups(domains=False, sites=True)
    order = group.argsort(stable=True)
    _, group, sizes = group[order].unique_consecutive(return_inverse=True, return_counts=True)
    z = _thumbnails(images.pixels)[order]
    sums = torch.zeros(len(sizes), z.shape[1]).index_add_(0, group, z)
    own = torch.zeros(len(sizes)).index_add_(0, group, z.square().sum(dim=1))
    pairs = (sums.square().sum(dim=1) - own) / (sizes * (sizes - 1)).clamp(min=1)
    together = group[1:] == group[:-1]
    beside, within = (z[1:] * z[:-1]).sum(dim=1)[together], pairs[group[1:][together]]
    if len(beside) < _PAIRS:
        return None
    more = beside - within
    error = float(more.std()) / math.sqrt(len(more))
    near, far = float(beside.mean()), float(within.mean())
    return (near, far) if near - far > max(_ALIKE * (1 - far), _SURELY * error) else None


def _thumbnails(pixels: torch.Tensor) -> torch.Tensor:
    """Grey 16 x 16 pictures as vectors of length 1 with mean 0, [n, 256]; of a flat picture all 0, which is like no other."""
    parts = [
        F.adaptive_avg_pool2d(part.float().mean(dim=1, keepdim=True), _THUMBNAIL).flatten(1)
        for part in pixels.cpu().split(256)  # small parts stay in the cache
    ]
    grey = torch.cat(parts) if parts else torch.zeros(0, _THUMBNAIL**2)
    grey = grey - grey.mean(dim=1, keepdim=True)
    length = grey.norm(dim=1, keepdim=True)
    return torch.where(length > _THUMBNAIL, grey / length.clamp_min(1e-6), 0.0)


def warn_of_one_class(classes: Sequence[str]) -> None:
    """Say that a run has one class only (W548): whatever the model answers, it is right."""
    if len(classes) == 1:
        what = f"this run has one class only ({classes[0]}): every answer is right, so its accuracy says nothing"
        fix = "add images of a second class, or plan tasks that leave fewer classes out"
        warnings.warn(ResceneWarning("W548", what, fix=fix), stacklevel=2)


def warn_of_leaks(dataset: Dataset) -> None:
    """Say that test images are training images, pixel by pixel (W217): they flatter the accuracy."""
    if leaked := _num_trained(dataset, dataset.test.digests):
        what = f"{leaked:,} of {len(dataset.test):,} test images are also training images, which flatters the accuracy"
        warnings.warn(ResceneWarning("W217", what, fix="remove them; rescene data inspect counts them"), stacklevel=2)


def warn_of_thin_tests(dataset: Dataset) -> None:
    """Say that a class has no test image, or that there are few test images in all (W568): the accuracy tells little."""
    untested, total = _untested(dataset), len(dataset.test)
    told = [f"no test image of {few(untested)}"] if untested else []
    told += [f"test images in all: {total}"] if total < _FEW_TESTED else []
    if told:
        what = f"the accuracy tells little: {'; '.join(told)}"
        warnings.warn(ResceneWarning("W568", what, fix="add images, or raise data.test_fraction"), stacklevel=2)


def warn_of_series(dataset: Dataset) -> None:
    """Say that test images are nearly training images (W561), or come from series of which others are trained on (W563)."""
    for warning in (nearly_trained(dataset, _MOST_PAIRS), in_series(dataset)):
        if warning:
            warnings.warn(warning, stacklevel=2)


def warn_of_repeats(dataset: Dataset) -> None:
    """Say that images lie more than once (W566): a guarantee is about one of them at one site."""
    repeats = len(dataset.train) - len(set(dataset.train.digests))
    if repeats:
        what = (
            f"{repeats:,} of {len(dataset.train):,} training images are copies of another one; epsilon is that of one image in one place, "
            "and a picture that lies twice has about twice as much"
        )
        warnings.warn(ResceneWarning("W566", what, fix="remove copies, also those at another site"), stacklevel=2)


def _row(check: str, problem: str = "", fix: str = "") -> Row:
    return {"check": check, "problem": problem, "fix": fix if problem else ""}


def _listed(names: list[str], what: str) -> str:
    """
    >>> _listed(["a", "b"], "tiny classes"), _listed(["a"], "tiny classes"), _listed([], "tiny classes")
    ('2 tiny classes: a, b', '1 tiny class: a', '')
    """
    what = what.replace("classes", "class") if len(names) == 1 else what
    return f"{len(names)} {what}: {few(names)}" if names else ""


def _repeated(num: int, part: str) -> str:
    """
    >>> _repeated(1, "test"), _repeated(2, "test"), _repeated(0, "test")
    ('1 image repeats another test image', '2 images repeat another test image', '')
    """
    words = "1 image repeats" if num == 1 else f"{num:,} images repeat"
    return f"{words} another {part} image" if num else ""


def _in_both(num: int) -> str:
    """
    >>> _in_both(1), _in_both(2), _in_both(0)
    ('1 image of the test split is also a training image', '2 images of the test split are also training images', '')
    """
    if num == 1:
        return "1 image of the test split is also a training image"
    return f"{num:,} images of the test split are also training images" if num else ""


def _untested(dataset: Dataset) -> list[str]:
    """Classes without test image."""
    counts = _counts(dataset.test, len(dataset.classes))
    return [name for name, num in zip(dataset.classes, counts, strict=True) if not num]


def _counts(images: Images, num_classes: int) -> list[int]:
    return [int(n) for n in torch.bincount(images.labels, minlength=num_classes)]


def _held(dataset: Dataset, what: str) -> list[Row]:
    """Name and numbers of images of each of the ``domains`` or ``sites``."""

    def count(images: Images, number: int) -> int:
        own = getattr(images, what)
        return 0 if own is None else int((own == number).sum())

    names = enumerate(getattr(dataset, what))
    return [{"name": name, "train": count(dataset.train, i), "test": count(dataset.test, i)} for i, name in names]


def _num_trained(dataset: Dataset, digests: Sequence[bytes]) -> int:
    """How many of these digests are those of training images."""
    trained = set(dataset.train.digests)
    return sum(digest in trained for digest in digests)


COLUMNS, MOST_ROWS = 12, 60
SIDE, GAP, LABEL = 72, 4, 190  # pixels: of a picture, between pictures, for the name of a class
INK, QUIET, PAPER = (20, 20, 20), (120, 120, 120), (255, 255, 255)


def contact_sheet(dataset: Dataset) -> Image:
    """Up to twelve training images of each of the first sixty classes, spread over sites and domains."""
    from PIL import Image, ImageDraw, ImageFont

    names = dataset.classes[:MOST_ROWS]
    sheet = Image.new("RGB", (LABEL + COLUMNS * (SIDE + GAP), GAP + len(names) * (SIDE + GAP)), PAPER)
    pen = ImageDraw.Draw(sheet)
    font, small = ImageFont.load_default(15), ImageFont.load_default(12)
    for row, name in enumerate(names):
        places, top = torch.nonzero(dataset.train.labels == row).flatten(), GAP + row * (SIDE + GAP)
        pen.text((10, top + SIDE // 2 - 18), _fitted(name), fill=INK, font=font)
        pen.text((10, top + SIDE // 2 + 4), f"{len(places):,} training images", fill=QUIET, font=small)
        for column, place in enumerate(spread(dataset.train, places)):
            picture = Image.fromarray(dataset.train.pixels[place].permute(1, 2, 0).numpy())
            sheet.paste(picture.resize((SIDE, SIDE), _scaling(picture)), (LABEL + column * (SIDE + GAP), top))
    return sheet


def spread(images: Images, places: torch.Tensor, most: int = COLUMNS) -> list[int]:
    """A few of these places, evenly over sites, domains and the order of the files."""
    groups = [own[places] for own in (images.sites, images.domains) if own is not None]
    order = np.lexsort([group.numpy() for group in reversed(groups)]) if groups else np.arange(len(places))
    if not len(places):
        return []
    chosen = np.unique(np.linspace(0, len(places) - 1, min(most, len(places))).round().astype(int))
    return [int(places[order[i]]) for i in chosen]


def _scaling(picture: Image) -> int:
    """Small pictures keep their pixels visible."""
    from PIL import Image

    return Image.Resampling.NEAREST if picture.width < SIDE else Image.Resampling.LANCZOS


def _fitted(name: str) -> str:
    return name if len(name) <= 22 else f"{name[:20]}..."
