"""Features that were computed once and lie on disk, so that the next run of the same images does not look again.

    key      what the bytes depend on: images, lens, kind of device, torch, threads, processor, and the code that looks
    file     <key>.safetensors with the features of both splits and a SHA-256 over them; mode 0600 in a folder of mode 0700

A file that is damaged, or was changed, is computed again and never used. A simulation keeps its features in the user's cache
folder. Features of a site's images are as private as the images: a site keeps them in its own folder, those of its last look
only, so that images it deletes are gone there too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rescene.core.errors import ResceneWarning
from rescene.core.record import record
from rescene.core.versions import source_hash
from rescene.data.catalog import cache_folder

LIMIT = 8_000_000_000  # bytes in the user's cache folder; what was not used for longest goes first
SHA256 = "sha256"


@record
class FeatureCache:
    """A folder of features. ``last_only``: what the last look gave and nothing older."""

    folder: Path
    last_only: bool = False

    def read(self, key: str) -> dict[str, Tensor] | None:
        """The features under this key, if they are there and whole."""
        path = self._path(key)
        try:
            with safe_open(path, "pt") as stored:
                told = (stored.metadata() or {}).get(SHA256)
                found = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  (no mapping)
        except (SafetensorError, OSError):
            return None
        if told != content_hash(found):
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used now
        return found

    def write(self, key: str, features: dict[str, Tensor]) -> None:
        """Whole or not at all. A full disk costs the next run time, and this one nothing."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder.chmod(0o700)
            handle, name = tempfile.mkstemp(suffix=".tmp", dir=self.folder)
            os.close(handle)
            try:
                save_file(features, name, {SHA256: content_hash(features)})
                os.chmod(name, 0o600)
                os.replace(name, self._path(key))
            finally:
                Path(name).unlink(missing_ok=True)
            self._drop_old(key)
        except (OSError, SafetensorError) as error:
            warnings.warn(
                ResceneWarning(
                    "W221",
                    f"what the lens saw could not be kept in {self.folder}, so the next run looks again: {error}",
                    fix="free some space: rescene lens seen --clear",
                ),
                stacklevel=2,
            )

    def files(self) -> list[tuple[Path, os.stat_result]]:
        """All files of features, the one used last first; also what a process left that was killed while it wrote."""
        found = []
        for path in [*self.folder.glob("*.safetensors"), *self.folder.glob("*.tmp")]:
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

    def _drop_old(self, key: str) -> None:
        total = 0
        for path, stat in self.files():
            total += stat.st_size
            if path != self._path(key) and (self.last_only or total > LIMIT):
                path.unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"


def users_own() -> FeatureCache:
    """In the user's cache folder, for simulations."""
    return FeatureCache(cache_folder() / "seen")


def key_of(images: str, lens: str, device: torch.device) -> str:
    """A name for what a lens gives for images on this device, both named by their hash."""
    parts = [images, lens, torch.__version__, source_hash("lens", "nets", "functional"), *_machine(device)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


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
