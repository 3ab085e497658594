"""Data that a person holds as Python objects: arrays, a torch Dataset, a Hugging Face data set, a pandas frame of paths.

Everything becomes one :class:`Dataset` of uint8 pictures before a run begins, so what is wrong with it is found before it too.
Nothing of torch's or Hugging Face's data packages is imported here: an object is known by what it can do.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rescene.core.errors import DataError, ResceneError, ResceneWarning, kind_of
from rescene.core.plugins import installed, note_registered
from rescene.data.images import Dataset, Images, measure
from rescene.data.sources.array_files import dataset_of_pixels
from rescene.data.sources.decode import fit_pixels
from rescene.data.sources.listing import File, Options, assemble, class_order, draw_test

OBJECT = "object:"  # before the name of a data set that exists in this process only
GROUP = "rescene.datasets"  # entry points of installed packages
IMAGE_COLUMNS = ("image", "img", "picture", "pixel_values")
LABEL_COLUMNS = ("label", "labels", "fine_label", "class", "target")
PATH_COLUMNS = ("path", "file", "filename", "image", "image_path")
TEST_SPLITS = ("test", "validation", "valid", "val")
Rows = tuple[list[Tensor], list[str], tuple[str, ...] | None]  # pictures, label names, class names where they are given
Change = Callable[[Tensor], Any]


def dataset_of(
    data: Any, transform: Change | None = None, name: str | None = None, options: Options = Options()
) -> Dataset:
    """A data set made of whatever ``data`` is; ``transform`` sees each picture once, as uint8 [3, H, W].

    ``data``: a :class:`Dataset`; ``(x, y)`` or ``(x_train, y_train, x_test, y_test)`` arrays, or a mapping with these
    names; a torch ``Dataset`` of (picture, label) pairs; a Hugging Face ``Dataset`` or ``DatasetDict``; a pandas frame with
    columns path and label (and split, domain, site); a pair (train, test) of any of these. Without test pictures some of each
    class are held out, as for folders.

    >>> x, y = np.zeros((8, 8, 8, 3), "uint8"), np.arange(8) % 2
    >>> len(dataset_of((x, y), options=Options(test_fraction=0.5)).test)
    4
    """
    name = name or type(data).__name__
    if isinstance(data, (str, Path)):
        raise no_data(name, f"{str(data)!r} is a path", "data.path for a folder or a file")
    if is_frame(data):
        data = from_frame(data, name, options)
    if isinstance(data, Dataset):
        return data if transform is None else changed(data, transform)
    train, test = split(data)
    if test is not None and is_frame(train):
        return dataset_of(_joined_frames(train, test), transform, name, options)
    pictures, labels, classes = rows_of(train, "training data", transform)
    if test is None:
        held = set(draw_test([("", label) for label in labels], options))
        parts = [[i for i in range(len(labels)) if (i in held) is chosen] for chosen in (False, True)]
        halves = [([pictures[i] for i in part], [labels[i] for i in part]) for part in parts]
    else:
        more, names, other = rows_of(test, "test data", transform)
        if classes is not None and other is not None and classes != other:
            why = f"{', '.join(classes[:3])}, ... and {', '.join(other[:3])}, ..."
            raise no_data(name, f"training and test data name other classes: {why}", "one order of classes for both")
        halves, classes = [(pictures, labels), (more, names)], classes or other
    return _assembled(name, halves, classes, options.split if test is None else "given", options.image_size)


def split(data: Any) -> tuple[Any, Any]:
    """(train, test); test is None where there is none."""
    if isinstance(data, Mapping) and not hasattr(data, "column_names"):
        for first, second in (("x_train", "y_train"), ("x", "y")):
            if first in data and second in data:
                pair = (data[first], data[second])
                return pair, (data["x_test"], data["y_test"]) if "x_test" in data else None
    if isinstance(data, Mapping) and "train" in data:  # a Hugging Face DatasetDict, or one like it
        return data["train"], next((data[key] for key in TEST_SPLITS if key in data), None)
    if isinstance(data, Mapping):
        raise no_data("data", f"a mapping with {', '.join(map(str, list(data)[:5]))}", "x and y, or train and test")
    if isinstance(data, (tuple, list)) and len(data) == 4 and is_array(data[0]):
        return (data[0], data[1]), (data[2], data[3])
    if isinstance(data, (tuple, list)) and len(data) == 2 and not _is_pair(data):
        return data[0], data[1]
    return data, None


def is_array(value: Any) -> bool:
    return isinstance(value, (np.ndarray, Tensor))


def _is_pair(value: Any) -> bool:
    """Whether this is (pictures, labels)."""
    return isinstance(value, (tuple, list)) and len(value) == 2 and is_array(value[0]) and np.ndim(value[1]) < 3


def is_frame(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "pandas" and hasattr(value, "columns")


def rows_of(part: Any, where: str, transform: Change | None) -> Rows:
    """Pictures, the names of their labels, and the names of all classes where the data tell them."""
    if _is_pair(part):
        if len(part[0]) != len(part[1]):
            raise no_data(where, f"{len(part[0])} pictures and {len(part[1])} labels", "one label for each picture")
        items: Iterable[tuple[Any, Any]] = zip(part[0], np.asarray(part[1]), strict=True)
        classes = None
    else:
        items, classes = items_of(part, where)
    pictures, labels = [], []
    for number, (picture, label) in enumerate(items):
        place = f"{where}, item {number}"
        pixels = pixels_of(picture, place)
        pictures.append(pixels if transform is None else pixels_of(_changed(transform, pixels, place), place))
        labels.append(label_of(label, place, classes))
    if not pictures:
        raise no_data(where, "it is empty", "at least one picture of each class")
    return pictures, labels, classes


def items_of(part: Any, where: str) -> tuple[Iterable[tuple[Any, Any]], tuple[str, ...] | None]:
    """(picture, label) pairs of a data set, and its class names."""
    names = getattr(part, "classes", None)
    if hasattr(part, "column_names") and hasattr(part, "features"):  # Hugging Face
        image, label = (_column(part.column_names, wanted, where) for wanted in (IMAGE_COLUMNS, LABEL_COLUMNS))
        names = getattr(part.features[label], "names", None)
        return ((row[image], row[label]) for row in part), tuple(map(str, names)) if names else None
    if hasattr(part, "__getitem__") and hasattr(part, "__len__"):
        found: Iterable[Any] = (_item(part, number, where) for number in range(len(part)))
    elif hasattr(part, "__iter__"):
        found = iter(part)
    else:
        fix = "a torch Dataset of (picture, label) pairs, arrays, a Hugging Face data set, or a frame of paths"
        raise no_data(where, f"{kind_of(part)} is no data set", fix)
    if not (isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)):
        names = None
    return (_pair(item, where, number) for number, item in enumerate(found)), tuple(names) if names else None


def _item(part: Any, number: int, where: str) -> Any:
    try:
        return part[number]
    except ResceneError:
        raise
    except Exception as error:  # of the user's code
        why = f"it fails with {type(error).__name__}: {error}"
        raise no_data(f"{where}, item {number}", why, "correct its __getitem__") from error


def _pair(item: Any, where: str, number: int) -> tuple[Any, Any]:
    if isinstance(item, Mapping):
        picture, label = (_column(list(item), wanted, where) for wanted in (IMAGE_COLUMNS, LABEL_COLUMNS))
        return item[picture], item[label]
    if isinstance(item, (tuple, list)) and len(item) == 2:
        return item[0], item[1]
    what = f"{len(item)} values" if isinstance(item, (tuple, list)) else kind_of(item)
    raise no_data(f"{where}, item {number}", f"it is {what}", "two values: the picture and its label")


def _column(columns: Iterable[str], wanted: tuple[str, ...], where: str) -> str:
    columns = list(columns)
    found = next((name for name in wanted if name in columns), None)
    if found is None:
        raise no_data(where, f"columns {', '.join(columns)}", f"a column called {' or '.join(wanted)}")
    return found


def pixels_of(picture: Any, place: str) -> Tensor:
    """uint8 [3, H, W] of a PIL image, an array or a tensor; floats are from 0 to 1."""
    if hasattr(picture, "convert"):  # PIL
        picture = np.array(picture.convert("RGB"))
    if isinstance(picture, Mapping):
        raise no_data(place, "a picture that is not decoded", "cast the column: datasets.Image(decode=True)")
    try:
        values = torch.as_tensor(picture if is_array(picture) else np.asarray(picture)).detach().cpu()
    except Exception:
        raise no_data(place, f"{kind_of(picture)} is no picture", "a PIL image, an array or a tensor") from None
    if values.ndim == 2:
        values = values[None]
    elif values.ndim == 3 and values.shape[0] not in (1, 3) and values.shape[2] in (1, 3):
        values = values.permute(2, 0, 1)
    if values.ndim != 3 or values.shape[0] not in (1, 3) or min(values.shape) < 1:
        raise no_data(place, f"a picture of shape {list(values.shape)}", "[H, W], [H, W, 1 or 3] or [1 or 3, H, W]")
    return _bytes(values, place).expand(3, -1, -1).contiguous()


def _bytes(values: Tensor, place: str) -> Tensor:
    """As uint8. Normalised floats are refused: which mean and deviation they had, nobody here knows."""
    if values.dtype == torch.uint8:
        return values
    low, high = float(values.min()), float(values.max())
    if values.is_floating_point() and (not np.isfinite([low, high]).all() or low < 0 or high > 1):
        why = f"floating-point pixels from {low:.3g} to {high:.3g}"
        raise no_data(place, why, "floats from 0 to 1, or bytes from 0 to 255; leave normalisation to the run")
    if values.is_floating_point():
        return (values.float() * 255).round().to(torch.uint8)
    if values.dtype == torch.bool or low < 0 or high > 255:
        raise no_data(place, f"{str(values.dtype)[6:]} pixels from {low:g} to {high:g}", "bytes from 0 to 255")
    return values.to(torch.uint8)


def label_of(label: Any, place: str, classes: tuple[str, ...] | None) -> str:
    """The name of a label: an integer, or text."""
    if isinstance(label, (Tensor, np.ndarray, np.generic)) and np.ndim(label) == 0:
        label = label.item()
    if isinstance(label, (list, tuple, np.ndarray, Tensor)) and len(label) == 1:
        return label_of(label[0], place, classes)
    if isinstance(label, bool) or not isinstance(label, (int, str)):
        shown = f"{type(label).__name__} {label!r}"[:80]
        raise no_data(place, f"its label is {shown}", "an integer, or the name of a class")
    if isinstance(label, int) and label < 0:
        raise no_data(place, f"its label is {label}", "labels from 0 on; leave unlabelled pictures out")
    if isinstance(label, int) and classes is not None:
        if label >= len(classes):
            raise no_data(place, f"label {label}, but {len(classes)} classes are named", "a name for each class")
        return classes[label]
    return str(label)


def _changed(transform: Change, pixels: Tensor, place: str) -> Any:
    try:
        return transform(pixels.clone())
    except Exception as error:  # of the user's code
        why = f"the transform fails on uint8 {list(pixels.shape)}: {type(error).__name__}: {error}"
        raise no_data(place, why, "a function from a uint8 tensor [3, H, W] to a picture") from error


def _assembled(
    name: str,
    halves: list[tuple[list[Tensor], list[str]]],
    classes: tuple[str, ...] | None,
    split: str,
    size: int | None,
) -> Dataset:
    """Both splits as squares of one size: the one asked for, or the training pictures' shorter side (at most 224)."""
    used = class_order(label for _, labels in halves for label in labels)
    classes = tuple(c for c in classes if c in set(used)) if classes else used
    train, test = (([p[None] for p in pictures], labels) for pictures, labels in halves)
    size = size or min(224, min(min(p.shape[-2:]) for p in train[0]))
    add_test = "give test data, or raise data.test_fraction"
    return dataset_of_pixels(name, name, classes, train, test, split, size, add_test)


def changed(dataset: Dataset, transform: Change) -> Dataset:
    """The data set with every picture changed once."""
    parts = {}
    for split_name in ("train", "test"):
        images: Images = getattr(dataset, split_name)
        made = [
            pixels_of(_changed(transform, p, f"{split_name}, picture {i}"), f"{split_name}, picture {i}")
            for i, p in enumerate(images.pixels)
        ]
        if len({tuple(p.shape) for p in made}) > 1:
            raise no_data(split_name, "the transform gives pictures of several sizes", "one size for all pictures")
        side = min(made[0].shape[1:])
        parts[split_name] = replace(images, pixels=fit_pixels(torch.stack(made), side))
    told = f"changed by the transform {getattr(transform, '__name__', type(transform).__name__)}"
    train, test = parts["train"], parts["test"]
    notes = (*dataset.notes, told)
    return replace(dataset, train=train, test=test, transform=measure(train.pixels), notes=notes)


def from_frame(frame: Any, name: str, options: Options) -> Dataset:
    """A pandas frame with a row for each file: path, label, and perhaps split, domain and site."""
    columns = {str(c).strip().lower(): c for c in frame.columns}
    path, label = (_column(columns, wanted, "frame") for wanted in (PATH_COLUMNS, LABEL_COLUMNS))
    known = {"path": path, "label": label} | {key: key for key in ("split", "domain", "site") if key in columns}
    table = {key: frame[columns[column]].tolist() for key, column in known.items()}
    for number, value in enumerate(table["label"]):
        table["label"][number] = label_of(value, f"frame, row {number}", None)
    fields = {key: table[key] for key in table if key in File.__dataclass_fields__}
    if "site" in table and "site" not in fields:
        told = "the column `site` is not used: who holds which picture is drawn (federation.partition)"
        warnings.warn(ResceneWarning("W240", told), stacklevel=3)
    files = [_file(dict(zip(fields, row, strict=True))) for row in zip(*fields.values(), strict=True)]
    gone = [file.path for file in files if not file.path.is_file()]
    if gone:
        raise no_data("frame", f"{len(gone)} of {len(files)} files are not there, the first is {gone[0]}", "full paths")
    domains = tuple(dict.fromkeys(file.domain for file in files if file.domain))
    return assemble(name, files, options, domains=domains)


def _file(row: Mapping[str, Any]) -> File:
    words: dict[str, Any] = {key: str(value) for key, value in row.items()}
    return File(**words | {"path": Path(row["path"]).expanduser()})


def _joined_frames(train: Any, test: Any) -> Any:
    import pandas  # an extra's package, which whoever hands a frame over has

    return pandas.concat([train.assign(split="train"), test.assign(split="test")], ignore_index=True)


def no_data(where: str, why: str, fix: str) -> DataError:
    return DataError("E240", "these data cannot be used", where=where, why=why, fix=fix)


_OWN: dict[str, Any] = {}


def register_dataset(name: str) -> Callable[[Any], Any]:
    """Make a data set known as ``data.name=NAME``: a decorator for a function that gives anything :func:`dataset_of` takes.

    The function is called without arguments; where it has a parameter ``path``, with ``data.path``. A file that does this is
    a plug-in (``--plugin FILE``); an installed package does it by an entry point of the group ``rescene.datasets``.
    """

    def decorate(function: Any) -> Any:
        enter(name, function)
        note_registered(function)
        return function

    return decorate


def enter(name: str, data: Any) -> str:
    if _OWN.setdefault(name, data) is not data:
        raise DataError("E241", f"two data sets are called {name!r}", where="data.name", fix="another name for one")
    return name


def enter_object(dataset: Dataset) -> str:
    """A data set that was handed over as an object, under a name that holds its fingerprint."""
    name = f"{OBJECT}{dataset.name}-{dataset.fingerprint()[:8]}"
    _OWN.setdefault(name, dataset)
    return name


def own_datasets() -> list[str]:
    """Names of data sets from plug-ins and installed packages."""
    for entry in installed(GROUP):
        if entry.name not in _OWN:
            found = entry.load()
            if callable(found):
                _OWN.setdefault(entry.name, found)
    return sorted(name for name in _OWN if not name.startswith(OBJECT))


def is_own_dataset(name: str) -> bool:
    return name.startswith(OBJECT) or name in _OWN or name in own_datasets()


def maker_of(name: str) -> Any:
    """The function that was registered as a data set under this name."""
    return _OWN[name]


def own_dataset(name: str, path: Any, options: Options) -> Dataset:
    """An own data set by name. E242 for an object that this process was not given."""
    if name not in _OWN:
        raise DataError(
            "E242",
            f"{name.removeprefix(OBJECT)} was handed over as a Python object, and this process does not have it",
            where="data.name",
            fix="the same rescene.run(...) call again; or make it a plug-in: rescene.register_dataset, --plugin FILE",
        )
    found = _OWN[name]
    if isinstance(found, Dataset):
        return found
    takes_path = "path" in inspect.signature(found).parameters
    if path is not None and not takes_path:
        raise DataError("E240", f"{name} takes no path", where="data.path", fix="leave data.path out")
    try:
        made = found(path) if takes_path and path is not None else found()
    except ResceneError:
        raise
    except Exception as error:  # of the user's code
        why = f"{type(error).__name__}: {error}"
        raise no_data(name, f"the function that gives it fails: {why}", "--debug shows where") from error
    return dataset_of(made, name=name, options=options)
