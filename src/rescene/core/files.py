"""Files and folders that appear in one piece: a reader, and whoever comes after a crash, sees the old content or the new one.

The content is written under another name beside the file, the draft, which then takes the name of the file. This is the only
module that lets one file take the place of another (``tests/test_house.py``).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

Sync = Literal["folder", "file", "none"]  # survives a power cut; does once the folder is synced; survives a kill
ANYBODY, US_ALONE = 0o666, 0o600  # who may read a new file: as the umask says; this user


def write_atomically(
    path: Path,
    *parts: bytes | memoryview,
    sync: Sync = "folder",
    mode: int = ANYBODY,
    draft: Path | None = None,
    reach: Callable[[str], None] = lambda place: None,
) -> None:
    """All ``parts`` under ``path``, or the old content: draft, fsync, rename, fsync of the folder. OSError if that fails.

    ``mode``: of the new file, less the umask. ``draft``: as in :func:`replacing`. ``reach`` hears of each step.
    """
    with replacing(path, draft) as draft:
        reach("opening")
        with open(draft, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            for part in parts:
                reach("writing")
                file.write(part)
            file.flush()
            reach("written")
            if sync != "none":
                os.fsync(file.fileno())
        reach("synced")
    reach("renamed")
    if sync == "folder":
        sync_folder(path.parent)


@contextlib.contextmanager
def replacing(path: Path, draft: Path | None = None) -> Iterator[Path]:
    """The draft of a file or folder, for the block to write; it becomes ``path`` at the end, or is removed if the block fails.

    The draft is ``.NAME.tmp``; a killed process leaves it, and the next one writes over it. Where two processes may write the
    same file at the same time, give ``unique_draft(path)``. Nothing is synced: after a power cut the file may be damaged.
    """
    draft = draft or path.with_name(f".{path.name}.tmp")
    try:
        yield draft
        os.replace(draft, path)
    except BaseException:
        _remove(draft)
        raise


def unique_draft(path: Path) -> Path:
    """A name for a draft that nobody else has. What clears up ``.*.tmp`` after a killed run leaves it alone."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.draft")


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to disk: a new name must survive a power cut too. Not where folders cannot be opened."""
    if hasattr(os, "O_DIRECTORY"):
        opened = os.open(folder, os.O_DIRECTORY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def _remove(draft: Path) -> None:
    if draft.is_dir():
        shutil.rmtree(draft, ignore_errors=True)
    with contextlib.suppress(OSError):
        draft.unlink(missing_ok=True)
