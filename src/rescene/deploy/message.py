"""One tree of values as one array of bytes. Flower moves an array in few objects and a state dict in hundreds.

    magic, length of the header | header (JSON) | chunks, each tensor at a multiple of eight

The header holds the skeleton of ``record.pack`` and for each chunk its SHA-256, its tensors' types and shapes, and whether
it is here: one that the receiver already has is named and not sent. What comes in is a stranger's: the whole header is
checked against the length of the message before memory is taken for a single tensor, and nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rescene.engine.checkpoint import DTYPES
from rescene.errors import RunError
from rescene.record import Chunk, Tree, pack, unpack

LARGE = 1 << 16  # bytes from which a chunk is worth remembering by its hash
HEADER_LIMIT = 1 << 24
MESSAGE_LIMIT = 1 << 31  # of protobuf, which carries the array

_HEAD = struct.Struct("<4sI")
_MAGIC = b"RSM1"
_TYPES = {name: dtype for dtype, name in DTYPES.items()}
_REFUSED = (KeyError, ValueError, TypeError, AttributeError, IndexError, RecursionError, RuntimeError)


class Packed(NamedTuple):
    data: bytes
    large: frozenset[str]  # hashes of the chunks worth remembering, sent or only named


class Unpacked(NamedTuple):
    tree: Tree
    large: dict[str, bytes]  # by hash, all chunks worth remembering


class ChunksMissing(RunError):
    """The message names chunks that this side no longer has: they must be sent again."""

    def __init__(self, digests: list[str]) -> None:
        super().__init__("E341", f"{len(digests)} parts of the message are no longer here", fix="send them again")
        self.digests = digests


@dataclass(frozen=True)
class _Part:
    """A chunk as its header describes it."""

    digest: str
    here: bool
    tensors: dict[str, tuple[torch.dtype, list[int]]]

    @property
    def size(self) -> int:
        return sum(_padded(math.prod(shape) * dtype.itemsize) for dtype, shape in self.tensors.values())


def pack_message(tree: Tree, known: Collection[str] = ()) -> Packed:
    """The tree as bytes; large chunks whose hash is ``known`` to the receiver are left out.

    >>> unpack_message(pack_message({"labels": torch.arange(3), "n": 3}).data).tree
    {'labels': tensor([0, 1, 2]), 'n': 3}
    """
    skeleton, chunks = pack(tree)
    header: list[dict[str, Any]] = []
    bodies: list[bytes] = []
    large = set()
    for chunk in chunks:
        body = _body(chunk)
        digest = hashlib.sha256(body).hexdigest()
        here = len(body) < LARGE or digest not in known
        described = {name: [DTYPES[t.dtype], list(t.shape)] for name, t in chunk.items()}
        header.append({"sha256": digest, "here": here, "tensors": described})
        if here:
            bodies.append(body)
        if len(body) >= LARGE:
            large.add(digest)
    text = json.dumps({"skeleton": skeleton, "chunks": header}).encode()
    text += b" " * (-(len(text) + _HEAD.size) % 8)
    return Packed(b"".join([_HEAD.pack(_MAGIC, len(text)), text, *bodies]), frozenset(large))


def unpack_message(
    data: bytes | memoryview, held: Mapping[str, bytes] | None = None, limit: int = MESSAGE_LIMIT
) -> Unpacked:
    """The tree of a message; ``held`` are chunks of earlier ones. RunError E340 for anything that is not a message."""
    view = memoryview(data)
    parts, skeleton, place = _header(view, limit)
    missing = [part.digest for part in parts if not part.here and part.digest not in (held or {})]
    if missing:
        raise ChunksMissing(missing)
    chunks, large = [], {}
    for part in parts:
        if part.here:
            body = bytes(view[place : place + part.size])
            place += part.size
        else:
            body = (held or {})[part.digest]
        if len(body) != part.size or hashlib.sha256(body).hexdigest() != part.digest:
            raise _refusal("a part of it does not match its checksum")
        if part.size >= LARGE:
            large[part.digest] = body
        chunks.append(_tensors(part, body))
    try:
        return Unpacked(unpack(skeleton, chunks), large)
    except _REFUSED as error:
        raise _refusal(f"its skeleton makes no sense ({error})") from None


def _header(view: memoryview, limit: int) -> tuple[list[_Part], Any, int]:
    """Chunks, skeleton and where the first chunk begins; the message's length must be exactly what they say."""
    if len(view) < _HEAD.size:
        raise _refusal(f"{len(view)} bytes are too few")
    if len(view) > limit:
        raise _refusal(f"{len(view)} bytes are more than the {limit} allowed")
    magic, length = _HEAD.unpack_from(view)
    if magic != _MAGIC:
        known = magic[:3] == _MAGIC[:3]
        raise _refusal("it is of another version" if known else "it is no message of rescene")
    begin = _HEAD.size + length
    if length > HEADER_LIMIT or begin > len(view):
        raise _refusal(f"a header of {length} bytes is not possible")
    try:
        header = json.loads(bytes(view[_HEAD.size : begin]))
        parts = [_part(entry) for entry in header["chunks"]]
        skeleton = header["skeleton"]
    except _REFUSED as error:
        raise _refusal(f"its header cannot be read ({error})") from None
    expected = begin + sum(part.size for part in parts if part.here)
    if len(view) != expected:
        raise _refusal(f"it has {len(view)} bytes instead of {expected}")
    return parts, skeleton, begin


def _part(entry: dict[str, Any]) -> _Part:
    tensors = {}
    for name, (dtype, shape) in entry["tensors"].items():
        if not all(type(size) is int and 0 <= size < MESSAGE_LIMIT for size in shape):
            raise ValueError(f"shape {shape}")
        tensors[name] = (_TYPES[dtype], list(shape))
    if type(entry["here"]) is not bool or not isinstance(entry["sha256"], str):
        raise ValueError("a chunk is not described")
    return _Part(entry["sha256"], entry["here"], tensors)


def _body(chunk: Chunk) -> bytes:
    raw = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in chunk.values())
    return b"".join(data + b"\0" * (-len(data) % 8) for data in raw)


def _tensors(part: _Part, body: bytes) -> Chunk:
    """Tensors on memory of their own, which they share; a bool that is neither 0 nor 1 is refused."""
    memory, place, chunk = bytearray(body), 0, {}
    for name, (dtype, shape) in part.tensors.items():
        count = math.prod(shape)
        try:
            flat = (
                torch.frombuffer(memory, dtype=dtype, count=count, offset=place) if count else torch.empty(0).to(dtype)
            )
            chunk[name] = flat.reshape(shape)
        except _REFUSED as error:
            raise _refusal(f"a tensor cannot be made ({error})") from None
        if dtype is torch.bool and any(memory[place : place + count].translate(None, b"\0\1")):
            raise _refusal("a truth value is neither 0 nor 1")
        place += _padded(count * dtype.itemsize)
    return chunk


def _padded(size: int) -> int:
    return size + -size % 8


def _refusal(what: str) -> RunError:
    return RunError("E340", f"the message is refused: {what}", fix="both sides need the same version of rescene")
