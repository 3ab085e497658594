"""Recipes and results as flat dictionaries with dotted keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Flat = dict[str, Any]
_NOT_THE_EXPERIMENT = {"seed", "device", "threads", "out", "tag"}


def flatten(tree: Mapping[Any, Any], prefix: str = "", into_lists: bool = False) -> Flat:
    """A nested recipe as dotted keys. Empty sections are values, and lists too, unless each of their items is wanted.

    >>> flatten({"seed": 3, "federation": {"beta": 0.1}, "privacy": {}})
    {'seed': 3, 'federation.beta': 0.1, 'privacy': {}}
    >>> flatten({"accuracy": [0.5, 0.25], "tasks": []}, into_lists=True)
    {'accuracy.0': 0.5, 'accuracy.1': 0.25, 'tasks': []}
    """
    flat: Flat = {}
    for key, value in tree.items():
        inner = dict(enumerate(value)) if into_lists and isinstance(value, list) else value
        if isinstance(inner, Mapping) and inner:
            flat |= flatten(inner, f"{prefix}{key}.", into_lists)
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def experiment_keys(tree: Mapping[str, Any]) -> Flat:
    """The dotted keys that say which experiment it is: without seeds and without where it runs.

    >>> experiment_keys({"seed": 3, "tasks": {"order_seed": 1}, "federation": {"beta": 0.1}, "device": "cpu"})
    {'federation.beta': 0.1}
    """
    return {key: value for key, value in flatten(tree).items() if not _is_place_or_seed(key)}


def with_one_augmentation(flat: Flat) -> Flat:
    """Where the sites condense, only the server could augment: two settings that come to the same become one.

    >>> with_one_augmentation({"method.server_augment": True, "train.augment": False})
    {'method.server_augment': False}
    >>> with_one_augmentation({"train.augment": True})
    {'train.augment': True}
    """
    if "method.server_augment" not in flat:
        return flat
    augments = bool(flat["method.server_augment"] and flat.get("train.augment", True))
    return {key: value for key, value in flat.items() if key != "train.augment"} | {"method.server_augment": augments}


def _is_place_or_seed(key: str) -> bool:
    return any(part in _NOT_THE_EXPERIMENT or part.endswith("_seed") for part in key.split("."))
