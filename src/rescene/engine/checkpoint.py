"""Checkpoints that survive a kill at any moment.

A checkpoint is a manifest (JSON) that refers to chunks of tensors (safetensors) by the SHA-256 of their bytes. A chunk that
is already on disk is not written again, so a round costs the model and that round's uploads, not the whole pool. Every file
goes through a temporary name, fsync and rename; the previous checkpoint is kept, and a damaged one is never loaded.
Saving happens in a thread beside the run: tensors are hashed and written from where they lie, which holds nobody up.

Around everything that a run writes are named places where it can be killed on purpose. ``RESCENE_CRASH_AT="step renamed"`` kills
the process (SIGKILL) where that place is reached first, ``"step renamed#3"`` the third time; otherwise nothing happens there.
``benchmarks/trust_crash.py`` visits them all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from rescene.core.errors import ResceneWarning, RunError
from rescene.core.files import Sync, write_atomically
from rescene.core.record import Chunk, Tree, pack, tensors, unpack
from rescene.core.versions import CHECKPOINT, refuse_newer

Watcher = Callable[[str], None]


def killer(place: str) -> Watcher:
    """Kills this process at the n-th visit of a place, given as ``name`` or ``name#n``."""
    name, _, number = place.partition("#")
    left = int(number or 1)

    def watch(reached: str) -> None:
        nonlocal left
        left -= reached == name
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    return watch


_place = os.environ.get("RESCENE_CRASH_AT")
watcher: Watcher | None = killer(_place) if _place else None


def reach(place: str, path: Path | None = None) -> None:
    """Tell whoever watches that this place of the code, about this file, was reached."""
    if watcher is not None:
        watcher(f"{path.name.split('-')[0]} {place}" if path else place)  # all steps and all chunks have one name


KEEP = 2
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def save_atomically(path: Path, *parts: bytes | memoryview, sync: Sync = "folder") -> None:
    """A file of a run: all ``parts`` under ``path`` or the old content, with named places between the steps. E410 if it fails."""
    try:
        write_atomically(path, *parts, sync=sync, reach=lambda place: reach(place, path))
    except OSError as error:
        raise could_not_save(path, error) from error


def could_not_save(path: Path, error: OSError) -> RunError:
    """Full disk, read-only folder, failing device: what is on disk already stays good."""
    return RunError(
        "E410",
        f"could not save {path.name}: {error.strerror or error}",
        where=str(path.parent),
        why="nothing is lost: the last complete state is still there",
        fix="make room (or make the folder writable), then: rescene resume <run folder>",
    )


def write_json(path: Path, value: Any, sync: Sync = "folder") -> None:
    """Sorted, readable JSON with a final newline, written atomically. NaN must have become null before."""
    save_atomically(path, (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode(), sync=sync)


def encoded(chunk: Chunk) -> list[bytes | memoryview]:
    """The chunk in the safetensors format: a header, then the memory of each tensor as it lies, without a copy.

    Wide types come first, which keeps them aligned, then the names in order, so equal chunks have equal bytes.
    """
    header: dict[str, Any] = {}
    parts: list[bytes | memoryview] = []
    end = 0
    for name, tensor in sorted(chunk.items(), key=lambda item: (-item[1].element_size(), item[0])):
        value = tensor.detach().cpu().contiguous()
        parts.append(value.reshape(-1).view(torch.uint8).numpy().data)
        begin, end = end, end + len(parts[-1])
        header[name] = {"dtype": DTYPES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight
    return [len(text).to_bytes(8, "little"), text, *parts]


@dataclass(frozen=True)
class Saved:
    """A loaded checkpoint: how many steps of the schedule are done, the state, and plain facts beside it."""

    step: int
    tree: Tree
    facts: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written: dict[tuple[int, ...], tuple[str, list[Tensor]]] = {}  # ids of a chunk's tensors -> its digest

    def save(self, step: int, tree: Tree, facts: dict[str, Any]) -> None:
        """Write a checkpoint, then remove what neither it nor its predecessor needs."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            skeleton, chunks = pack(tree)
            held: dict[tuple[int, ...], tuple[str, list[Tensor]]] = {}
            digests = [self._store(chunk, held) for chunk in chunks]
            body = {"schema": CHECKPOINT, "step": step, "facts": facts, "skeleton": skeleton, "chunks": digests}
            body["sha256"] = _digest_of(body)
            newest = self.folder / f"step-{step:06d}.json"
            save_atomically(newest, json.dumps(body).encode())
            self._written = held
            self._prune(newest)
        except OSError as error:
            raise could_not_save(self.folder, error) from error

    def load(self) -> Saved | None:
        """The newest checkpoint that is whole; older ones stand in for damaged ones, with a warning. None if none is."""
        for path in self._manifests():
            try:
                return self._read(path)
            except (OSError, ValueError, KeyError) as error:
                warnings.warn(
                    ResceneWarning(
                        "W401", f"checkpoint {path.name} is damaged ({error}); going back to the one before"
                    ),
                    stacklevel=2,
                )
        return None

    def _store(self, chunk: Chunk, held: dict[tuple[int, ...], tuple[str, list[Tensor]]]) -> str:
        """Write a chunk unless these very tensors were written before. States are never changed in place, and the
        tensors are held on to here, so equal ids mean equal values."""
        values = list(tensors(chunk))
        key = tuple(id(value) for value in values)
        known = self._written.get(key)
        digest = known[0] if known else None
        if digest is None:
            parts, sha256 = encoded(chunk), hashlib.sha256()
            for part in parts:
                sha256.update(part)
            digest = sha256.hexdigest()
            path = self._chunk_path(digest)
            if not (path.exists() and _sha256(path) == digest):  # one that was damaged on disk must not live on
                save_atomically(path, *parts, sync="file")  # the manifest syncs the folder, before anything is removed
        held[key] = (digest, values)
        return digest

    def _read(self, path: Path) -> Saved:
        text = path.read_bytes()
        body = json.loads(text)
        whole = json.dumps(body).encode() == text  # a changed bit may mean the same, as in 1e5 and 1E5
        if not whole or not isinstance(body, dict) or body.pop("sha256") != _digest_of(body):
            raise ValueError("its checksum does not match")
        refuse_newer(body["schema"], CHECKPOINT, path)
        chunks = []
        for digest in body["chunks"]:
            data = self._chunk_path(digest).read_bytes()
            if hashlib.sha256(data).hexdigest() != digest:
                raise ValueError(f"chunk {digest[:12]} does not match its checksum")
            chunks.append(load(data))
        if body["schema"] < 2:
            _to_2(body["skeleton"], chunks)
        return Saved(body["step"], unpack(body["skeleton"], chunks), body["facts"])

    def _manifests(self) -> list[Path]:
        return sorted(self.folder.glob("step-*.json"), reverse=True) if self.folder.is_dir() else []

    def _chunk_path(self, digest: str) -> Path:
        return self.folder / f"chunk-{digest[:32]}.safetensors"

    def _prune(self, newest: Path) -> None:
        """Keep this one and its predecessor. Later ones were damaged, else the run would have gone on from them."""
        manifests = self._manifests()
        kept = [path for path in manifests if path <= newest][:KEEP]
        needed = set()
        for path in kept:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                needed |= {self._chunk_path(digest).name for digest in json.loads(path.read_bytes())["chunks"]}
        reach("pruning", newest)
        for path in set(manifests) - set(kept):
            path.unlink(missing_ok=True)
            reach("removed", path)
        for path in [*self.folder.glob("chunk-*.safetensors"), *self.folder.glob(".*.tmp")]:  # of a killed write
            if path.name not in needed:
                path.unlink(missing_ok=True)
                reach("removed", path)


def _to_2(skeleton: Any, chunks: list[Chunk]) -> None:
    """Format 1 did not record who sent a surrogate: nobody knows now, which is -1."""
    if not isinstance(skeleton, dict | list):
        return
    if isinstance(skeleton, dict) and skeleton.get("$record") == "rescene.methods.rescene.Collected":
        number, name = skeleton["fields"]["labels"]["$tensor"]
        chunks[number] |= {"clients": torch.full_like(chunks[number][name], -1)}
        skeleton["fields"]["clients"] = {"$tensor": [number, "clients"]}
    for inner in skeleton.values() if isinstance(skeleton, dict) else skeleton:
        _to_2(inner, chunks)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
