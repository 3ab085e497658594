"""Load a data set by name or by path, and prepare one so that the next load takes a moment.

A path alone tells which reader it needs (``detect``).
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rescene.core.errors import ConfigError, DataError, ResceneWarning, did_you_mean
from rescene.data.catalog import CATALOG, cache_folder, places, prepare_command, prepared_name, usual_hold_out
from rescene.data.images import Dataset
from rescene.data.objects import is_own_dataset, own_dataset, own_datasets
from rescene.data.sources import array_files, cifar, image_folder, image_table, published_sets
from rescene.data.sources.array_files import PREPARED, is_prepared, read_prepared, split_of, write_prepared
from rescene.data.sources.cifar import CIFAR10, CIFAR100
from rescene.data.sources.decode import fit_dataset, shown
from rescene.data.sources.image_folder import subfolders
from rescene.data.sources.listing import HELD_OUT, Options

READERS: dict[str, Callable[[Path, Options], Dataset]] = {  # one for each form of data
    "fashion-mini": published_sets.read_fashion_mini,
    "cifar10": partial(cifar.read, cifar=CIFAR10),
    "cifar100": partial(cifar.read, cifar=CIFAR100),
    "tinyimagenet": published_sets.read_tinyimagenet,
    "office31": published_sets.read_office31,
    "folder": image_folder.read,
    "csv": image_table.read_csv,
    "parquet": image_table.read_parquet,
    "npz": array_files.read_npz,
}


def detect(path: Path) -> str:
    """Name of the reader for a file or folder (``folder`` if nothing more special); an unknown kind of file is E205."""
    if path.is_file():
        return _detect_file(path)
    return _detect_cifar(path) or _detect_named(path) or _detect_tables(path) or "folder"


def _detect_file(path: Path) -> str:
    kind = path.suffix.lower()[1:]
    if kind in ("npz", "csv", PREPARED):
        return kind
    if kind == "tsv":
        return "csv"
    found = _detect_cifar(path) or ("parquet" if kind == "parquet" else None)
    if found:
        return found
    raise DataError(
        "E205",
        f"cannot tell what kind of data {path.name} is",
        where=str(path),
        fix="a folder of images, a .csv, .tsv, .parquet or .npz file, a CIFAR archive, or a prepared .safetensors file",
    )


def _detect_cifar(path: Path) -> str | None:
    shards = cifar.find_parquet(path)
    for files in shards.values():
        return _cifar_of_columns(image_table.column_names(files[0]), image_table.class_names(files[0]))
    for known in (CIFAR10, CIFAR100):
        if cifar.find_archive(path, known):
            return known.name
    if (path / "train").is_dir():
        names = {folder.name for folder in subfolders(path / "train")}
        return next((known.name for known in (CIFAR10, CIFAR100) if names == set(known.classes)), None)
    return None


def _cifar_of_columns(columns: list[str], names: dict[str, list[str]]) -> str | None:
    """CIFAR's columns are img and label, or img and two labels; other tables of images are somebody's own."""
    if "img" in columns and CIFAR100.columns[0] in columns:
        return "cifar100"
    plain = set(columns) == {"img", "label"}
    return "cifar10" if plain and names.get("label", [*CIFAR10.classes]) == [*CIFAR10.classes] else None


def _detect_named(path: Path) -> str | None:
    tiny = published_sets.tinyimagenet_root(path)
    if (tiny / "wnids.txt").is_file() or (tiny / "val" / "val_annotations.txt").is_file():
        return "tinyimagenet"
    domains = {folder.name for folder in subfolders(published_sets.office31_root(path))}
    return "office31" if domains == set(published_sets.OFFICE31_IMAGES) else None


def _detect_tables(path: Path) -> str | None:
    """A folder with parquet files, one list of images, one NumPy file or one prepared file: that is the data set."""
    listed = _only(path, "csv")
    if listed and image_table.is_listing(listed):
        return "csv"
    stored = image_table.parquet_files(path)[0]
    if stored:
        inside = {file.relative_to(path).parts[0] for file in stored}
        _tell_of_folders(path, "parquet files", [f.name for f in subfolders(path) if f.name not in inside])
        return "parquet"
    packed = _only(path, "npz")
    if packed:
        _tell_of_folders(path, shown(packed.name), [folder.name for folder in subfolders(path)])
        return "npz"
    ready = _only(path, PREPARED)
    return PREPARED if ready and is_prepared(ready) else None


def _tell_of_folders(path: Path, taken: str, beside: list[str]) -> None:
    if beside:
        names = ", ".join(shown(name) for name in beside[:5])
        what = f"not read: folders beside {taken} in {shown(path.name)}, taken for the data set: {names}"
        warnings.warn(ResceneWarning("W214", what, fix="data.name=folder reads the folders"), stacklevel=5)


def single_file(path: Path, kind: str) -> Path:
    """The file itself, or the only one of that kind in a folder."""
    found = path if path.is_file() else _only(path, kind)
    if found is None:
        raise DataError("E205", f"not exactly one .{kind} file here", where=str(path), fix="give the file itself")
    return found


def _only(path: Path, kind: str) -> Path | None:
    found = [file for file in path.glob(f"*.{kind}") if not file.name.startswith(".")]
    return found[0] if len(found) == 1 else None


AnyPath = str | os.PathLike[str]
NAMES = ("auto", *READERS)


def load(
    name: str = "auto",
    path: AnyPath | None = None,
    *,
    image_size: int | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    held_out: str | None = None,
    skip_unreadable: bool = False,
    layout: str = "auto",
    outside: str = "warn",
    columns: Mapping[str, str] | None = None,
) -> Dataset:
    """A data set on the CPU.

    ``auto`` without a path is the embedded fashion-mini, with one the layout is detected; ``folder``, ``csv`` and
    ``npz`` need a path; the paper's sets are looked for in ./data, $RESCENE_DATA and the user cache if none is given. A
    prepared file (:func:`prepare`) is preferred, unless its test split was chosen with other options. Without a test split
    of its own the data set gets one: of each class a share is drawn, or with ``held_out="last"`` its last images. By
    default Office-31's test is its last images, and that of other data is drawn; a prepared file with another test is taken
    only where the originals are missing.
    ``layout`` (classes, domains, sites or sites-domains) says what the first folders are where they do not tell;
    ``outside="refuse"`` takes no image that a link or a table names outside of the folder; ``columns`` says what the columns
    of a table are called: ``{"label": "species", "site": "ward"}``.

    >>> load().classes[:3]
    ('T-shirt', 'Trouser', 'Pullover')
    """
    pairs = tuple(sorted((columns or {}).items()))
    options = Options(image_size, test_fraction, seed, skip_unreadable, layout, outside, held_out, pairs)
    _check_name(name, path)
    if is_own_dataset(name):
        dataset = own_dataset(name, path, options)
    elif name == "fashion-mini" or (name == "auto" and path is None):
        dataset = _read_source("fashion-mini", published_sets.FASHION_MINI, options)
    elif path is not None:
        dataset = _load_path(name, _storable(path), options)
    else:
        dataset = _load_named(name, options)
    return fit_dataset(dataset, image_size)


def prepare(
    name: str,
    source: AnyPath,
    out: AnyPath | None = None,
    *,
    image_size: int | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
    held_out: str | None = None,
    skip_unreadable: bool = False,
    layout: str = "auto",
    columns: Mapping[str, str] | None = None,
) -> Path:
    """Decode ``source`` once and write <out>/<name>.safetensors, which ``load`` prefers; returns that file.

    ``name`` is a known set, or a name of your own for a source whose layout is detected. ``out``: a folder, by default
    the one in the user cache in which ``load(name)`` looks. A set of your own is loaded by the path of that file.
    """
    pairs = tuple(sorted((columns or {}).items()))
    options = Options(image_size, test_fraction, seed, skip_unreadable, layout, held_out=held_out, columns=pairs)
    source = _storable(source)
    kind = name if name in READERS else detect(source)
    dataset = replace(fit_dataset(_read_source(kind, source, options), image_size), name=name)
    folder = Path(out).expanduser() if out is not None else cache_folder() / name
    return write_prepared(dataset, folder / prepared_name(name, "last" if dataset.has_last_as_test else "drawn"))


def _check_name(name: str, path: AnyPath | None) -> None:
    if name not in NAMES and not is_own_dataset(name):
        known = (*NAMES, *own_datasets())
        if looks_like_path(name):
            there = existing(name)
            raise DataError("E201", f"{name!r} is a path, not the name of a data set", fix=f"data.path={there}")
        fix = did_you_mean(name, known, "{!r}") or f"one of: {', '.join(known)}"
        fix = f"data.path={name} reads what lies there" if Path(name).exists() else fix
        why = None if Path(name).exists() else "there is no file or folder of this name here, either"
        raise DataError("E201", f"unknown data set {name!r}", why=why, fix=fix)
    if name == "fashion-mini" and path is not None:
        raise ConfigError("E208", "fashion-mini is part of the package and takes no path", fix="name=auto")


def looks_like_path(name: str) -> bool:
    """Whether somebody means a place on the disk, and not the name of a data set.

    >>> [looks_like_path(name) for name in ("./images", "images/birds", "birds.csv", "images", "cifar-10")]
    [True, True, True, False, False]
    """
    separators = filter(None, (os.sep, os.altsep))
    return name.startswith((".", "~")) or any(map(name.__contains__, separators)) or Path(name).suffix[1:] in READERS


def existing(path: AnyPath) -> Path:
    """The path, if there is something (E201)."""
    found = Path(path).expanduser()
    if not found.exists():
        raise DataError("E201", f"there is nothing at {found}", where=str(found.absolute()), fix="check the path")
    return found


def _storable(path: AnyPath) -> Path:
    """The path, if it can be written into records (E217) and there is something (E201)."""
    found = Path(path).expanduser()
    if shown(found) != str(found):
        why = "the path has bytes that are not UTF-8, or control characters"
        raise DataError(
            "E217",
            "this path has characters that cannot be stored",
            where=shown(found),
            why=why,
            fix="rename the folder",
        )
    return existing(found)


def _load_path(name: str, path: Path, options: Options) -> Dataset:
    name = detect(path) if name == "auto" or path.suffix == f".{PREPARED}" else name
    if name == PREPARED:
        return _read_same_split(single_file(path, name), options)
    ready = _prepared(path, name, options)
    originals = [] if ready and set(path.iterdir()) <= set(ready) else [path]
    return _read_best(name, ready, originals, options)


def _load_named(name: str, options: Options) -> Dataset:
    if name not in CATALOG:
        raise DataError("E201", f"data of kind {name!r} needs a path", fix="give path (data.path=...)")
    ready, originals = _copies(name, options)
    if not ready and not originals:
        raise _not_found(name, options)
    return _read_best(name, ready, originals, options)


def _read_best(name: str, ready: Sequence[Path], originals: Sequence[Path], options: Options) -> Dataset:
    """A prepared file with the test that is asked for or usual, else the originals, else a prepared file that fits."""
    usual = replace(options, held_out=options.held_out or usual_hold_out(name))
    if fitting := [file for file in ready if _fits(file, usual)]:
        return read_prepared(fitting[0])
    return _read_source(name, originals[0], options) if originals else _read_same_split(ready[0], options)


def has_split(name: str, held_out: str) -> bool:
    """Whether a named data set lies on this machine with this hold-out, or as it was published."""
    if name == "fashion-mini":  # embedded
        return True
    options = Options(held_out=held_out)
    ready, originals = _copies(name, options)
    return bool(originals) or any(_fits(file, options) for file in ready)


def _copies(name: str, options: Options) -> tuple[list[Path], list[Path]]:
    """Prepared files of a named data set, and folders with anything else in them."""
    ready = [file for folder in places(name) for file in _prepared(folder, name, options)]
    originals = [folder for folder in places(name) if folder.is_dir() and set(folder.iterdir()) - set(ready)]
    return ready, originals


def _read_source(name: str, path: Path, options: Options) -> Dataset:
    options = replace(options, held_out=options.held_out or usual_hold_out(name))
    return READERS[name](single_file(path, name) if name in ("csv", "npz") else path, options)


def _prepared(folder: Path, name: str, options: Options) -> list[Path]:
    """The prepared files in a folder, first the one whose name says this hold-out, or the usual one."""
    first = options.held_out or usual_hold_out(name)
    names = [prepared_name(name, held_out) for held_out in sorted(HELD_OUT, key=first.__ne__)]
    return [folder / file for file in names if (folder / file).is_file()]


def _fits(file: Path, options: Options) -> bool:
    """Whether a prepared file's test split is the data's own or was chosen with these options; without a hold-out, either."""
    ways = HELD_OUT if options.held_out is None else (options.held_out,)
    return split_of(file) in ("given", *(replace(options, held_out=way).split for way in ways))


def _read_same_split(file: Path, options: Options) -> Dataset:
    if not _fits(file, options):
        stored = split_of(file)
        way = next((way for way in HELD_OUT if replace(options, held_out=way).split == stored), None)
        same = f"data.held_out={way}" if way else "use the same test_fraction, seed and held_out"
        raise DataError(
            "E202",
            "a prepared data file has another test split",
            where=str(file),
            why=f"prepared with {stored}, asked for {options.split}",
            fix=f"{same}, or prepare it again (rescene data prepare has --held-out)",
        )
    return read_prepared(file)


def _not_found(name: str, options: Options) -> DataError:
    looked = [str(folder) for folder in places(name)]
    unset = "" if os.environ.get("RESCENE_DATA") else "\n$RESCENE_DATA (unset)"
    return DataError(
        "E201",
        f"data set {name!r} is not on this machine",
        where="looked in " + ", ".join(looked) + unset,
        fix=f"{prepare_command(name, options.held_out)}, where SOURCE is {CATALOG[name].source};\n"
        "or give its path (data.path=...); fashion-mini needs no download",
    )
