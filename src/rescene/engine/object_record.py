"""What a run keeps of the objects it was made from (objects.json), so that it goes on with the same ones only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rescene.config import Recipe
from rescene.core.errors import RunError
from rescene.data.images import Dataset
from rescene.data.objects import OBJECT, is_own_dataset, maker_of, own_dataset
from rescene.data.reading import Options
from rescene.methods import method_class
from rescene.nets import is_own, own_model
from rescene.nets.own_networks import code_hash, functions_of, short_hash, tensor_hash
from rescene.nets.timm_networks import TIMM

FILE = "objects.json"
SHOWN = 3  # names of tensors in a message


def objects_of(recipe: Recipe) -> dict[str, Any]:
    """What is known of the network, data and method of a recipe that do not come with the package; empty for most runs."""
    found: dict[str, Any] = {}
    if is_own(recipe.model.name) and not recipe.model.name.startswith(TIMM):
        found["model"] = own_model(recipe.model.name).describe(recipe.data.image_size or 32)
    if recipe.data.name.startswith(OBJECT):
        found["data"] = _data(own_dataset(recipe.data.name, None, Options()))
    elif is_own_dataset(recipe.data.name):
        found["data"] = {"name": recipe.data.name, "code": code_hash(maker_of(recipe.data.name))}
    method = method_class(recipe.method["name"])
    if not method.__module__.startswith("rescene."):
        name = f"{method.__module__}.{method.__qualname__}"
        found["method"] = {"class": name, "code": code_hash(*functions_of(method))}
    return found


def _data(dataset: Dataset) -> dict[str, Any]:
    parts = {"training": dataset.train, "test": dataset.test}
    return {
        "name": dataset.name,
        "classes": short_hash(repr(dataset.classes).encode()),
        **{f"{name} pictures": [len(part), *part.pixels.shape[1:]] for name, part in parts.items()},
        **{f"{name} pixels": tensor_hash(part.pixels) for name, part in parts.items()},
        **{f"{name} labels": tensor_hash(part.labels) for name, part in parts.items()},
    }


def words_of(recipe: Recipe) -> list[str]:
    """One line for each part of a run that somebody handed over as a Python object."""
    parts = {"model": recipe.model.lens or recipe.model.name, "data": recipe.data.name}
    return [f"{key}: {name.removeprefix(OBJECT)}" for key, name in parts.items() if name.startswith(OBJECT)]


def refuse_others(folder: Path, recipe: Recipe) -> None:
    """E428, with what differs, unless the objects of this recipe are those that the run in this folder was made from."""
    try:
        before = json.loads((folder / FILE).read_bytes())["objects"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    changed = differences(before, json.loads(json.dumps(objects_of(recipe))))
    if changed:
        raise RunError(
            "E428",
            "this run was made from other objects",
            where=str(folder),
            why="\n".join(changed),
            fix="hand over the same objects; for others another folder (out=, --out), or remove this one",
        )


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In words, part by part.

    >>> differences({"data": {"name": "a", "test labels": "0"}}, {"data": {"name": "a", "test labels": "1"}})
    ['data: other test labels']
    """
    found = []
    for part in sorted(before.keys() | now.keys()):
        old, new = before.get(part), now.get(part)
        if old is None or new is None:
            found.append(f"{part}: " + ("none then, an object now" if old is None else "an object then, none now"))
            continue
        for key in sorted(old.keys() | new.keys()):
            if key == "code" and key not in old:
                continue  # a record from before it was kept
            if key == "weights":
                found += [f"{part}: {words}" for words in _weights(old[key], new[key])]
            elif old.get(key) != new.get(key):
                shown = key in ("name", "class", "head") or key.endswith("pictures")
                found.append(f"{part}: {key} {old.get(key)} -> {new.get(key)}" if shown else f"{part}: other {key}")
    return found


def _weights(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    kinds = {
        "tensors that are gone": [key for key in old if key not in new],
        "new tensors": [key for key in new if key not in old],
        "other first values": [key for key in old if key in new and old[key] != new[key]],
    }
    return [
        f"{words}: {', '.join(keys[:SHOWN])}{f' and {len(keys) - SHOWN} more' if len(keys) > SHOWN else ''}"
        for words, keys in kinds.items()
        if keys
    ]
