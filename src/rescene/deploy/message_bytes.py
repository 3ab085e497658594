"""One tree of values as one array of bytes. Flower moves an array in few objects and a state dict in hundreds.

    magic, length and SHA-256 of the header | header (JSON) | chunks, each tensor at a multiple of eight

The header holds the skeleton of ``record.pack`` and for each chunk its SHA-256, its tensors' types and shapes, and whether
it is here: one that the receiver already has is named and not sent. What comes in is a stranger's. The whole header is
checked against the length of the message, must be the one that its own content would be packed into, and can be looked at
by the receiver, all before memory is taken for a single tensor; and nothing is pickled. No two messages mean the same.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from rescene.core.errors import RunError
from rescene.core.record import Chunk, Tree, pack, unpack
from rescene.engine.checkpoint import DTYPES

LARGE = 1 << 16  # bytes from which a chunk is worth remembering by its hash
HEADER_LIMIT = 1 << 24
MESSAGE_LIMIT = 1 << 31  # of protobuf, which carries the array

_HEAD = struct.Struct("<4sI32s")
_MAGIC = b"RSM2"
_TYPES = {name: dtype for dtype, name in DTYPES.items()}
_REFUSED = (KeyError, ValueError, TypeError, AttributeError, IndexError, RecursionError, RuntimeError, OverflowError)


class Packed(NamedTuple):
    """A message as bytes."""

    data: bytes
    large: frozenset[str]  # hashes of the chunks worth remembering, sent or only named
    sha256: str  # of the content: the same whatever the receiver already has


class Unpacked(NamedTuple):
    """A message that was read: its content, and the chunks to remember."""

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
    bodies = [_body(chunk) for chunk in chunks]
    digests = [hashlib.sha256(body).hexdigest() for body in bodies]
    large = frozenset(digest for digest, body in zip(digests, bodies, strict=True) if len(body) >= LARGE)
    here = [digest not in large or digest not in known for digest in digests]
    content = hashlib.sha256(_text(skeleton, chunks, digests, [True] * len(chunks))).hexdigest()
    text = _text(skeleton, chunks, digests, here)
    head = _HEAD.pack(_MAGIC, len(text), hashlib.sha256(text).digest())
    return Packed(b"".join([head, text, *(b for b, sent in zip(bodies, here, strict=True) if sent)]), large, content)


def unpack_message(
    data: bytes | memoryview,
    held: Mapping[str, bytes] | None = None,
    limit: int = MESSAGE_LIMIT,
    header_limit: int = HEADER_LIMIT,
    look: Callable[[Tree], None] = lambda tree: None,
) -> Unpacked:
    """The tree of a message; ``held`` are chunks of earlier ones. RunError E340 for anything that is not a message.

    ``look`` sees the tree before its tensors have any memory, and raises what the receiver does not want.
    """
    view = memoryview(data)
    parts, skeleton, text = _header(view, limit, header_limit)
    missing = [part.digest for part in parts if not part.here and part.digest not in (held or {})]
    if missing:
        raise ChunksMissing(missing)
    look(_outline(parts, skeleton, text))
    chunks, large, place = [], {}, _HEAD.size + len(text)
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
    return Unpacked(unpack(skeleton, chunks), large)


def _text(skeleton: Any, chunks: list[Chunk], digests: list[str], here: list[bool]) -> bytes:
    """The header, as long as lets the first chunk begin at a multiple of eight."""
    described = [
        {"sha256": d, "here": h, "tensors": {name: [DTYPES[t.dtype], list(t.shape)] for name, t in chunk.items()}}
        for d, h, chunk in zip(digests, here, chunks, strict=True)
    ]
    text = json.dumps({"skeleton": skeleton, "chunks": described}).encode()
    return text + b" " * (-(len(text) + _HEAD.size) % 8)


def _outline(parts: list[_Part], skeleton: Any, text: bytes) -> Tree:
    """The tree with tensors that take no memory, if packing it again gives this very header."""
    try:
        chunks = [{n: torch.empty(s, dtype=d, device="meta") for n, (d, s) in part.tensors.items()} for part in parts]
        tree = unpack(skeleton, chunks)
        again = _text(*pack(tree), [part.digest for part in parts], [part.here for part in parts])
    except _REFUSED as error:
        raise _refusal(f"its skeleton makes no sense ({type(error).__name__})") from None
    if again != text:
        raise _refusal("its header is not the one that its content has")
    return tree


def _header(view: memoryview, limit: int, header_limit: int) -> tuple[list[_Part], Any, bytes]:
    """Chunks, skeleton and the header itself; the message's length must be exactly what they say."""
    if len(view) < _HEAD.size:
        raise _refusal(f"{len(view)} bytes are too few")
    if len(view) > limit:
        raise _refusal(f"{len(view)} bytes are more than the {limit} allowed")
    magic, length, digest = _HEAD.unpack_from(view)
    if magic != _MAGIC:
        known = magic[:3] == _MAGIC[:3]
        raise _refusal("it is of another version" if known else "it is no message of rescene")
    begin = _HEAD.size + length
    if length > header_limit or begin > len(view):
        raise _refusal(f"a header of {length} bytes is not possible")
    text = bytes(view[_HEAD.size : begin])
    if hashlib.sha256(text).digest() != digest:
        raise _refusal("its header does not match its checksum")
    try:
        header = json.loads(text)
        parts = [_part(entry) for entry in header["chunks"]]
        skeleton = header["skeleton"]
    except _REFUSED as error:
        raise _refusal(f"its header cannot be read ({type(error).__name__})") from None
    expected = begin + sum(part.size for part in parts if part.here)
    if len(view) != expected:
        raise _refusal(f"it has {len(view)} bytes instead of {expected}")
    return parts, skeleton, text


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
            raise _refusal(f"a tensor cannot be made ({type(error).__name__})") from None
        if dtype is torch.bool and any(memory[place : place + count].translate(None, b"\0\1")):
            raise _refusal("a truth value is neither 0 nor 1")
        end = place + count * dtype.itemsize
        place += _padded(count * dtype.itemsize)
        if any(memory[end:place]):
            raise _refusal("there is something between its tensors")
    return chunk


def _padded(size: int) -> int:
    return size + -size % 8


def _refusal(what: str) -> RunError:
    return RunError("E340", f"the message is refused: {what}", fix="both sides need the same version of rescene")
