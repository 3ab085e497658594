"""A data set decoded once: one safetensors file with both splits and everything said about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from rescene.core.documents import parse_json
from rescene.core.errors import ConfigError, DataError
from rescene.core.files import replacing, unique_draft
from rescene.data.images import Dataset, Images, Transform

KIND = "safetensors"
FORMAT = "rescene-data-1"
_FIELDS = ("pixels", "labels", "domains", "sites")


def write(dataset: Dataset, file: Path) -> Path:
    """Write atomically (a half-written file never has the final name); returns the file."""
    from safetensors.torch import save_file

    tensors = {
        f"{split}.{field}": getattr(images, field).cpu().contiguous()
        for split, images in (("train", dataset.train), ("test", dataset.test))
        for field in _FIELDS
        if getattr(images, field) is not None
    }
    about = {
        "name": dataset.name,
        "classes": dataset.classes,
        "domains": dataset.domains,
        "sites": dataset.sites,
        "notes": dataset.notes,
        "split": dataset.split,
        "mean": dataset.transform.mean,
        "std": dataset.transform.std,
        "pad": dataset.transform.pad,
        "sha256": dataset.fingerprint(),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file, unique_draft(file)) as unfinished:
        save_file(tensors, unfinished, metadata={"format": FORMAT, "about": json.dumps(about)})
    return file


def read(file: Path) -> Dataset:
    """Inverse of :func:`write`; a file that is damaged or not one of these is E202."""
    about, tensors = _open(file)
    try:
        dataset = _rebuild(about, tensors)
    except (KeyError, TypeError, ValueError) as problem:
        raise _damaged(file, str(problem)) from problem
    if dataset.fingerprint() != about.get("sha256"):
        raise _damaged(file, "its checksum does not match its content")
    return dataset


def is_prepared(file: Path) -> bool:
    """Whether a safetensors file holds a data set (and not, say, a model)."""
    try:
        return bool(_open(file, header_only=True)[0])
    except DataError:
        return False


def split_of(file: Path) -> str:
    """How the test split of a prepared file was chosen, from its header alone."""
    return str(_open(file, header_only=True)[0].get("split"))


def sites_of(file: Path) -> tuple[str, ...]:
    """Names of the sites in a prepared file, from its header alone."""
    return tuple(map(str, _open(file, header_only=True)[0].get("sites", ())))


def _open(file: Path, header_only: bool = False) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as stored:
            metadata = stored.metadata() or {}
            tensors = {} if header_only else {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as problem:
        raise _damaged(file, str(problem)) from problem
    if metadata.get("format") != FORMAT:
        raise _damaged(file, f"its format is {metadata.get('format')!r}, not {FORMAT!r}")
    try:
        return dict(parse_json(metadata["about"], "its header")), tensors
    except (ConfigError, KeyError, TypeError, ValueError) as problem:
        raise _damaged(file, f"its header makes no sense ({type(problem).__name__})") from None


def _rebuild(about: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Dataset:
    train, test = (
        Images(
            tensors[f"{split}.pixels"],
            tensors[f"{split}.labels"],
            tensors.get(f"{split}.domains"),
            tensors.get(f"{split}.sites"),
        )
        for split in ("train", "test")
    )
    transform = Transform(tuple(about["mean"]), tuple(about["std"]), about["pad"])
    classes, domains, notes = (tuple(about[key]) for key in ("classes", "domains", "notes"))
    sites = tuple(about.get("sites", ()))  # files of earlier versions know of none
    return Dataset(about["name"], classes, train, test, transform, domains, notes, about["split"], sites=sites)


def _damaged(file: Path, why: str) -> DataError:
    fix = "delete it and prepare the data set again: rescene data prepare"
    return DataError("E202", "a prepared data file cannot be used", where=str(file), why=why, fix=fix)
