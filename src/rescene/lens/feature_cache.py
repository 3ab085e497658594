"""Features that were computed once and lie on disk, so that no later run looks at the same pictures again.

    key      what features depend on beside the picture: lens, size, kind of device, torch, threads, processor, the code that looks
    name     of a picture: a digest of its pixels, and how many pictures the lens had before it at a time
    file     <key>-<block>.safetensors: a block of pictures (names and features) that were looked at together, and a SHA-256 over
             them; mode 0600 in a folder of mode 0700

What a lens gives for a picture may depend in the last bits on how many pictures it sees at a time, so the name holds that number.
It does not depend on which pictures they are (``tests/lens/test_kept_features.py`` checks this).

A file that is damaged, or was changed, is removed and its pictures are looked at again. A simulation keeps its features in the
user's cache folder. Features of a site's images are as private as the images: a site keeps them in its own folder, those of its
last look only, so that images it deletes are gone there too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rescene.core.errors import ResceneWarning
from rescene.core.files import US_ALONE, replacing, unique_draft
from rescene.core.record import record
from rescene.core.versions import source_hash
from rescene.data.catalog import cache_folder
from rescene.data.images import Images

LIMIT = 8_000_000_000  # bytes in the user's cache folder; what was not used for longest goes first
SUFFIX = ".safetensors"
ENDINGS = (SUFFIX, ".draft", ".tmp")  # of features, and of unfinished files; earlier versions called those .tmp
NAMES, FEATURES = "pictures", "features"  # tensors of a block
SHA256 = "sha256"


@record
class FeatureCache:
    """A folder of features. ``last_only``: what the last look gave and nothing older."""

    folder: Path
    last_only: bool = False

    def read(self, key: str, names: Collection[bytes]) -> dict[bytes, Tensor]:
        """The features of those of the named pictures that are here, by name."""
        found: dict[bytes, Tensor] = {}
        missing = set(names)
        for path, _ in self.files():
            if missing and path.name.startswith(f"{key}-") and path.suffix == SUFFIX:
                block = self._block(path, missing)
                found |= block
                missing -= block.keys()
        return found

    def write(self, key: str, features: Mapping[bytes, Tensor], new: Collection[bytes]) -> None:
        """Keep those of the features that are ``new``; with ``last_only`` all of them, and nothing else.

        A block is written whole or not at all. A full disk costs the next run time, and this one nothing.
        """
        names = sorted(features if self.last_only else new)
        path = self.folder / f"{key}-{hashlib.sha256(b''.join(names)).hexdigest()[:32]}{SUFFIX}"
        try:
            if names and (new or not path.exists()):
                self._save(path, block_of(names, features))
            self._drop_old(path)
        except (OSError, SafetensorError) as error:
            warnings.warn(
                ResceneWarning(
                    "W221",
                    f"what the lens saw could not be kept in {self.folder}, so the next run looks again: {error}",
                    fix="free some space: rescene lens seen --clear",
                ),
                stacklevel=2,
            )

    def _block(self, path: Path, wanted: set[bytes]) -> dict[bytes, Tensor]:
        """The wanted features of one block. A block without any is not read further; a damaged one is removed."""
        try:
            with safe_open(path, "pt") as stored:
                if wanted.isdisjoint(names_of(stored.get_tensor(NAMES))):
                    return {}
                told = (stored.metadata() or {}).get(SHA256)
                found = {part: stored.get_tensor(part) for part in (NAMES, FEATURES)}
        except (SafetensorError, OSError):
            found, told = {}, None
        with contextlib.suppress(OSError):
            if told is None or told != content_hash(found):
                path.unlink(missing_ok=True)
                return {}
            os.utime(path)  # used now
        rows = zip(names_of(found[NAMES]), found[FEATURES], strict=True)
        return {name: row for name, row in rows if name in wanted}

    def _save(self, path: Path, block: dict[str, Tensor]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder.chmod(0o700)
        with replacing(path, unique_draft(path)) as draft:
            draft.touch(US_ALONE)
            save_file(block, draft, {SHA256: content_hash(block)})
            draft.chmod(US_ALONE)

    def files(self) -> list[tuple[Path, os.stat_result]]:
        """All files of features, the one used last first; also what a process left that was killed while it wrote."""
        found = []
        for path in (path for ending in ENDINGS for path in self.folder.glob(f"*{ending}")):
            with contextlib.suppress(OSError):  # another process may have removed it
                found.append((path, path.stat()))
        return sorted(found, key=lambda pair: -pair[1].st_mtime_ns)

    def clear(self) -> int:
        """Remove everything; the bytes that were freed."""
        freed = 0
        for path, stat in self.files():
            path.unlink(missing_ok=True)
            freed += stat.st_size
        return freed

    def _drop_old(self, written: Path) -> None:
        total = 0
        for path, stat in self.files():
            total += stat.st_size
            if path != written and (self.last_only or total > LIMIT):
                path.unlink(missing_ok=True)


def users_own() -> FeatureCache:
    """In the user's cache folder, for simulations."""
    return FeatureCache(cache_folder() / "seen")


def key_of(lens: str, shape: Sequence[int], device: torch.device) -> str:
    """A name for what a lens, named by its hash, gives for pictures of this shape on this device."""
    parts = [lens, str(list(shape)), torch.__version__, source_hash("lens", "nets", "functional"), *_machine(device)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def picture_names(images: Images, chunk: int) -> list[bytes]:
    """Names of pictures that are looked at ``chunk`` at a time; the last chunk may be smaller."""
    last = len(images) % chunk
    sizes = [chunk] * (len(images) - last) + [last] * last
    return [digest + size.to_bytes(2, "big") for digest, size in zip(images.digests, sizes, strict=True)]


def block_of(names: Sequence[bytes], features: Mapping[bytes, Tensor]) -> dict[str, Tensor]:
    """What a file holds: names uint8 [n, length] and features uint8 [n, ...] of these pictures."""
    rows = torch.frombuffer(bytearray(b"".join(names)), dtype=torch.uint8)
    return {NAMES: rows.reshape(len(names), -1), FEATURES: torch.stack([features[name] for name in names])}


def names_of(rows: Tensor) -> list[bytes]:
    """Names of pictures from the rows of a block."""
    return [row.tobytes() for row in rows.numpy()]


def _machine(device: torch.device) -> Iterator[str]:
    """What rounding depends on; most bytes are the same everywhere, and a run must not depend on the rest."""
    yield device.type
    if device.type == "cuda":
        yield torch.cuda.get_device_name(device)
    else:
        yield f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}"


def content_hash(features: dict[str, Tensor]) -> str:
    """A SHA-256 over names, types, shapes and values, independent of the order of the dict."""
    digest = hashlib.sha256()
    for name in sorted(features):
        values = features[name].cpu().contiguous()
        digest.update(f"{name} {values.dtype} {list(values.shape)}".encode())
        digest.update(values.numpy().data)
    return digest.hexdigest()
