"""Trees of values: what a server or client remembers, and what crosses the wire.

A tree is made of tensors, plain values (None, bool, int, float, str), dicts with string keys, lists, tuples and records
(frozen dataclasses declared with ``@record``). Such a tree prints, can be measured in bytes, and can be split into a JSON
skeleton plus chunks of tensors and put together again: nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar, dataclass_transform

import torch
from torch import Tensor

from rescene.core.errors import kind_of

T = TypeVar("T")
Tree = Any  # a recursive type that mypy cannot express usefully; `check_tree` states it at run time
Chunk = dict[str, Tensor]

_RECORDS: dict[str, type] = {}
_PLAIN = (bool, int, float, str, type(None))


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """Declare a frozen dataclass that can be saved by name (two records may not share one)."""
    made = dataclass(frozen=True)(cls)
    name = f"{cls.__module__}.{cls.__qualname__}"
    _RECORDS[name] = made
    return made


def _record_name(value: Any) -> str | None:
    if is_dataclass(value) and not isinstance(value, type):
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        if name in _RECORDS:
            return name
    return None


def _children(value: Any) -> Iterator[tuple[str, Any]] | None:
    """Named children of an inner node, or None for a leaf."""
    if isinstance(value, dict):
        return iter(value.items())
    if isinstance(value, (list, tuple)):
        return ((str(i), item) for i, item in enumerate(value))
    if _record_name(value):
        return ((f.name, getattr(value, f.name)) for f in fields(value))
    return None


def tensors(tree: Tree) -> Iterator[Tensor]:
    """All tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        yield tree
    else:
        for _, child in _children(tree) or ():
            yield from tensors(child)


def map_tensors(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """The same tree with ``function`` applied to each tensor."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(function, value) for value in tree)
    if _record_name(tree):
        return type(tree)(**{name: map_tensors(function, value) for name, value in _children(tree) or ()})
    return tree


def to_device(tree: Tree, device: torch.device | str) -> Tree:
    """The same tree with every tensor on ``device``."""
    return map_tensors(lambda tensor: tensor.to(device), tree)


def num_bytes(tree: Tree) -> int:
    """Bytes of a tree on the wire: its tensors as they are, its plain values as JSON (None costs nothing).

    >>> num_bytes({"images": torch.zeros(20, 3, 32, 32)})
    245760
    """
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    children = _children(tree)
    if children is not None:
        return sum(num_bytes(child) for _, child in children)
    return 0 if tree is None else len(json.dumps(tree))


def check_tree(tree: Tree, where: str = "value") -> None:
    """Raise TypeError, naming the place, if the tree holds anything that cannot be saved or sent."""
    if isinstance(tree, (Tensor, *_PLAIN)):
        return
    children = _children(tree)
    if children is None:
        raise TypeError(f"{where} is {kind_of(tree)}; allowed: tensors, plain values, dicts, lists, tuples, records")
    if isinstance(tree, dict) and not all(isinstance(key, str) for key in tree):
        raise TypeError(f"{where} has a key that is not a string")
    for name, child in children:
        check_tree(child, f"{where}.{name}")


def pack(tree: Tree) -> tuple[Any, list[Chunk]]:
    """Split a tree into a JSON skeleton and chunks of tensors.

    A node whose children are all leaves with at least one tensor among them (a state dict, one round's uploads) becomes
    one chunk, so that parts which never change can be stored once. ``unpack(*pack(tree))`` gives the tree back.
    """
    chunks: list[Chunk] = []
    return _packed(tree, "state", chunks), chunks


def _packed(value: Any, path: str, chunks: list[Chunk]) -> Any:
    # no function inside pack: one that calls itself is a cycle, and would hold the tensors until Python looks for such
    if isinstance(value, Tensor):
        chunks.append({"value": value})
        return {"$tensor": [len(chunks) - 1, "value"]}
    children = _children(value)
    if children is None:
        if not isinstance(value, _PLAIN):
            raise TypeError(f"{path} is {kind_of(value)}, which cannot be saved")
        return value
    named = list(children)
    own = {name: child for name, child in named if isinstance(child, Tensor)}
    place = {}
    if own:
        chunks.append(own)
        place = {name: {"$tensor": [len(chunks) - 1, name]} for name in own}
    packed = {name: place[name] if name in place else _packed(child, f"{path}.{name}", chunks) for name, child in named}
    if isinstance(value, dict):
        return {"$dict": packed}
    if isinstance(value, (list, tuple)):
        return {"$list" if isinstance(value, list) else "$tuple": list(packed.values())}
    return {"$record": _record_name(value), "fields": packed}


def unpack(skeleton: Any, chunks: list[Chunk]) -> Tree:
    """Inverse of :func:`pack`."""
    if not isinstance(skeleton, dict):
        if isinstance(skeleton, list):
            raise TypeError("a skeleton marks its lists")
        return skeleton
    if "$tensor" in skeleton:
        number, name = skeleton["$tensor"]
        return chunks[number][name]
    if "$dict" in skeleton:
        return {key: unpack(value, chunks) for key, value in skeleton["$dict"].items()}
    if "$list" in skeleton:
        return [unpack(value, chunks) for value in skeleton["$list"]]
    if "$tuple" in skeleton:
        return tuple(unpack(value, chunks) for value in skeleton["$tuple"])
    if skeleton["$record"] not in _RECORDS:
        raise KeyError(f"unknown record {skeleton['$record']!r}: was a plug-in loaded when this was saved?")
    return _RECORDS[skeleton["$record"]](**{name: unpack(value, chunks) for name, value in skeleton["fields"].items()})
