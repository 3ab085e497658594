"""TinyImageNet-200 in its original layout; the test split is the labelled ``val`` (its ``test`` has no labels)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rescene.core.errors import DataError
from rescene.data.images import Dataset
from rescene.data.reading import Options
from rescene.data.sources.image_folder import subfolders, survey
from rescene.data.sources.listing import File, assemble

SIZE = 64


def read(path: Path, options: Options, num_classes: int = 200, num_train: int = 500, num_test: int = 10_000) -> Dataset:
    """``num_train`` images of each class in train/<wnid>/images, ``num_test`` in val/images; other counts are E202.

    Classes are in the order of their WordNet ids and carry the first word of ``words.txt`` where that is there.
    """
    path = root(path)
    ids = _class_ids(path, num_classes)
    names = _class_names(path, ids)
    train = _list_train(path, ids, num_train)
    test = _list_val(path, set(ids), num_test)
    files = [File(image, names[wnid], split) for wnid, image, split in train + test]
    return assemble("tinyimagenet", files, options, classes=tuple(names[wnid] for wnid in ids), size=SIZE)


def root(path: Path) -> Path:
    """The folder with ``wnids.txt``: the given one or ``tiny-imagenet-200`` in it."""
    return path / "tiny-imagenet-200" if (path / "tiny-imagenet-200").is_dir() else path


def _class_ids(path: Path, num_classes: int) -> list[str]:
    listed = path / "wnids.txt"
    ids = listed.read_text().split() if listed.is_file() else [folder.name for folder in subfolders(path / "train")]
    if len(ids) != num_classes:
        raise incomplete(path, f"{len(ids)} classes listed, not {num_classes}")
    return sorted(ids)


def _class_names(path: Path, ids: list[str]) -> dict[str, str]:
    """WordNet id -> first word; ids whose word is missing or shared keep the id beside it."""
    words = {}
    if (path / "words.txt").is_file():
        rows = (line.split("\t", 1) for line in (path / "words.txt").read_text(encoding="utf-8").splitlines())
        words = {row[0]: row[1].split(",")[0].strip() for row in rows if len(row) == 2}
    first = {wnid: words.get(wnid, wnid) for wnid in ids}
    shared = Counter(first.values())
    return {wnid: word if shared[word] == 1 else f"{word} ({wnid})" for wnid, word in first.items()}


def _list_train(path: Path, ids: list[str], expected: int) -> list[tuple[str, Path, str]]:
    rows = []
    for wnid in ids:
        folder = path / "train" / wnid / "images"
        images = survey(folder)[0].images if folder.is_dir() else ()
        if len(images) != expected:
            raise incomplete(path, f"train/{wnid}/images holds {len(images)} images, not {expected}")
        rows += [(wnid, image, "train") for image in images]
    return rows


def _list_val(path: Path, ids: set[str], expected: int) -> list[tuple[str, Path, str]]:
    notes = path / "val" / "val_annotations.txt"
    if not notes.is_file():
        raise incomplete(path, "val/val_annotations.txt is missing")
    rows = [line.split("\t") for line in notes.read_text().splitlines() if line.strip()]
    known = [(row[1], path / "val" / "images" / row[0], "test") for row in rows if len(row) > 1 and row[1] in ids]
    found = [row for row in known if row[1].is_file()]
    if len(found) != expected:
        raise incomplete(path, f"val holds {len(found)} labelled images, not {expected}")
    return found


def incomplete(path: Path, why: str) -> DataError:
    """The error for a copy of the data set with parts missing (E202)."""
    return DataError("E202", "TinyImageNet is incomplete", where=str(path), why=why, fix="copy or unpack it again")
