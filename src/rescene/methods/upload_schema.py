"""What an upload must look like, stated by its method before it comes.

A form is a function that looks at a value and raises ``Misfit`` naming the place. Across sites it looks twice: at tensors
that have a type and a shape but no memory (device ``meta``), when only the header of a message has been read, and at the
values. What it says never repeats what it was sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rescene.core.record import check_tree, tensors
from rescene.data import Task
from rescene.privacy.mechanism import Mechanism, honest_sums

LARGEST = 1e12  # of any number: sums over a million sites stay finite in float32
LARGEST_PIXEL = 1e4  # normalised; those of images are below 10, those of surrogates stay within hundreds
MOST = 1 << 40  # of anything that is counted
MOST_NOTES, LONGEST_NAME = 32, 40
POSITIVE = ("running_var", "num_batches_tracked")  # the square root of the former is taken


class Misfit(ValueError):
    """The value is not what was asked for."""


class Dim(NamedTuple):
    """A size that the site chooses: at most this, and the same wherever the name occurs in one upload."""

    name: str
    most: int


@dataclass(frozen=True)
class Place:
    """Where and of what kind an answer is: the task, a picture's side and channels, whether pictures travel coded, the mechanism."""

    task: Task
    image_size: int
    is_coded: bool = False
    mechanism: Mechanism | None = None
    channels: int = 3


KnownSizes = dict[str, int]
Form = Callable[[Any, str, KnownSizes], None]  # value, its name, sizes met so far


def check_form(form: Form, value: Any) -> None:
    """Raise ``Misfit`` if ``value`` does not have this form."""
    form(value, "upload", {})


def whole(low: int = 0, high: int = MOST) -> Form:
    """The form of a whole number from ``low`` to ``high``."""

    def check(value: Any, name: str, sizes: KnownSizes) -> None:
        if type(value) is not int or not low <= value <= high:
            raise Misfit(f"{name} is not a whole number from {low} to {high}")

    return check


def tensor(dtype: torch.dtype, *shape: int | Dim, low: float = -LARGEST, high: float = LARGEST) -> Form:
    """This type, this shape, no value outside the range; NaN is outside of every range."""

    def check(value: Any, name: str, sizes: KnownSizes) -> None:
        if not isinstance(value, Tensor) or value.dtype != dtype or value.ndim != len(shape):
            raise Misfit(f"{name} is not a {str(dtype).removeprefix('torch.')} of {len(shape)} dimensions")
        for found, wanted in zip(value.shape, shape, strict=True):
            if isinstance(wanted, Dim):
                wanted = sizes.setdefault(wanted.name, found) if found <= wanted.most else -1
            if found != wanted:
                raise Misfit(f"{name} has another shape than asked for")
        if not value.is_meta and value.numel():
            smallest, largest = (bound.item() for bound in value.aminmax())
            if not low <= smallest <= largest <= high:
                raise Misfit(f"{name} has values that are not numbers from {low:g} to {high:g}")

    return check


def fields(required: Mapping[str, Form], optional: Mapping[str, Form] | None = None) -> Form:
    """A dict with exactly these keys, the required ones in this order."""
    forms = {**required, **(optional or {})}

    def check(value: Any, name: str, sizes: KnownSizes) -> None:
        if not isinstance(value, dict) or [key for key in value if key not in (optional or {})] != list(required):
            raise Misfit(f"{name} does not have the parts asked for")
        for key, part in value.items():
            forms[key](part, f"{name}.{key}", sizes)

    return check


def either(*forms: Form) -> Form:
    """The form of a value that fits at least one of these forms."""

    def check(value: Any, name: str, sizes: KnownSizes) -> None:
        for form in forms[:-1]:
            try:
                form(value, name, dict(sizes))
                return
            except Misfit:
                continue
        forms[-1](value, name, sizes)

    return check


def both(form: Form, holds: Callable[[Any], bool], words: str) -> Form:
    """A form, and a condition on its values."""

    def check(value: Any, name: str, sizes: KnownSizes) -> None:
        form(value, name, sizes)
        if not any(t.is_meta for t in tensors(value)) and not holds(value):
            raise Misfit(f"{name} {words}")

    return check


NOTHING: Form = fields({})


def notes(value: Any, name: str, sizes: KnownSizes) -> None:
    """Numbers for the log; they need not be finite, but what is counted is."""
    if not isinstance(value, dict) or len(value) > MOST_NOTES:
        raise Misfit(f"{name} is not a few numbers with names")
    for key, number in value.items():
        if not key.isidentifier() or not key.isascii() or len(key) > LONGEST_NAME:
            raise Misfit(f"{name} has a name that is none")
        if key.startswith("num_"):
            whole()(number, f"{name}.{key}", sizes)
        elif type(number) not in (int, float) or LARGEST < abs(number) < math.inf:
            raise Misfit(f"{name}.{key} is not a number within {LARGEST:g}")


def like(model: Mapping[str, Tensor]) -> Form:
    """Weights of the very network that was sent, in the same order."""
    return fields(
        {
            name: tensor(value.dtype, *value.shape, low=0 if name.endswith(POSITIVE) else -LARGEST)
            for name, value in model.items()
        }
    )


def labels(classes: Collection[int], most_per_class: int, num: Dim) -> Form:
    """Labels of these classes, of each at most so many."""
    known = torch.tensor(sorted(classes), dtype=torch.int64)

    def holds(value: Tensor) -> bool:
        found, counts = value.unique(return_counts=True)
        return (
            not len(found)
            or bool(torch.isin(found, known.to(found.device)).all())
            and int(counts.max()) <= most_per_class
        )

    return both(tensor(torch.int64, num, low=0), holds, f"holds other classes, or more than {most_per_class} of one")


def pictures(place: Place, most_per_class: int = MOST, classes: Collection[int] | None = None) -> dict[str, Form]:
    """``images`` with their ``labels``, of the task's classes unless others are named."""
    classes, side = place.task.classes if classes is None else classes, place.image_size
    values = place.channels * side * side
    num = Dim("pictures", most_per_class * len(classes))
    plain = tensor(torch.float32, num, place.channels, side, side, low=-LARGEST_PIXEL, high=LARGEST_PIXEL)
    coded = tensor(torch.uint8, Dim("bytes", 4 * values * num.most + 1024), high=255)
    return {
        "images": either(coded, plain) if place.is_coded else plain,
        "labels": labels(classes, most_per_class, num),
    }


def sums(place: Place, mechanism: Mechanism, size: int, centre: Tensor | None = None) -> Form:
    """Noised sums of ``size`` numbers of the classes that are not suppressed, or that the site declines."""
    num, m = Dim("classes", len(place.task.classes)), mechanism
    rows = both(
        tensor(torch.float32, num, size),
        lambda value: honest_sums(value, m.clip, m.kappa, m.deviation, m.least_count, centre),
        "holds sums that no such mechanism gives",
    )
    sent = {"labels": labels(place.task.classes, 1, num), "sums": rows, "notes": NOTHING}
    return either(fields({"notes": fields({"num_declined": whole(1, 1)})}), fields(sent))


def anything(place: Place) -> Form:
    """Of a method that states nothing: a dict of finite numbers, pictures with known labels, notes for the log."""
    known = pictures(place, classes=range(place.task.num_seen)) | {"notes": notes}

    def check(value: Any, name: str, sizes: KnownSizes) -> None:
        if not isinstance(value, dict) or ("images" in value and "labels" not in value):
            raise Misfit(f"{name} is not a dict, or has pictures without labels")
        try:
            check_tree(value, name)
        except TypeError:
            raise Misfit(f"{name} holds something else than values") from None
        for key, form in known.items() if "images" in value else [("notes", notes)]:
            if key in value:
                form(value[key], f"{name}.{key}", sizes)
        finite = all(bool(t.isfinite().all()) for t in tensors(value) if not t.is_meta and t.is_floating_point())
        if not finite:
            raise Misfit(f"{name} has numbers that are not finite")

    return check
