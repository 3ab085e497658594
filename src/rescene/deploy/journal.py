"""What a server keeps of its sites' answers: the uploads of the step under way, and how far each privacy ledger goes.

Uploads are on disk as they came before they are used: a server that dies between receipt and use does not ask again.

    uploads/secret                        what the tokens of this run are made with
    uploads/uploads-<task>-<round>.bin    one entry after the other: a line of JSON (token, SHA-256, length), then the bytes

A token stands for one question to one site in one place of one run. Its first answer counts; the same bytes again change
nothing, and other bytes are refused. Entries are kept for the step under way and the one before, whose checkpoint may not
be on disk yet. What a killed server wrote half is cut off, and that site is asked again.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from rescene.core.errors import RunError
from rescene.engine.checkpoint import could_not_save, reach, write_json
from rescene.privacy.ledger import End


class _Entry(NamedTuple):
    sha256: str
    begin: int
    num_bytes: int


class Journal:
    """The journal of one run; ``turn`` opens the part of one step."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path, self._before = folder, folder / "uploads", folder / "uploads"
        self._entries: dict[str, _Entry] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / "secret").exists():
                _write_secret(folder / "secret")
            self._secret = (folder / "secret").read_bytes()
        except OSError as error:
            raise could_not_save(folder, error) from error

    def token(self, *place: Any) -> str:
        """128 bits that only this run's server can make, the same for the same place whenever it is asked again."""
        return hmac.new(self._secret, json.dumps(place).encode(), "sha256").hexdigest()[:32]

    def turn(self, task: int, round: int) -> None:
        """Go to a step: what was accepted in it is read, what is older than the step before is removed."""
        path = self._folder / f"uploads-{task}-{round + 1}.bin"
        if path != self._path:
            self._before, self._path = self._path, path
        try:
            for old in self._folder.glob("uploads-*.bin"):
                if old not in (self._path, self._before):
                    old.unlink()
            self._entries = self._read() if path.exists() else {}
        except OSError as error:
            raise could_not_save(path, error) from error

    def find(self, token: str) -> bytes | None:
        """What was accepted under this token."""
        entry = self._entries.get(token)
        if entry is None:
            return None
        with open(self._path, "rb") as file:
            file.seek(entry.begin)
            return file.read(entry.num_bytes)

    def accept(self, token: str, data: bytes) -> None:
        """Bring the first answer to disk; take note of the same again; E365 for another one."""
        sha256 = hashlib.sha256(data).hexdigest()
        known = self._entries.get(token)
        if known is not None:
            if known.sha256 != sha256:
                raise RunError("E365", "a second answer to the same question differs from the first, which stands")
            return
        line = json.dumps({"token": token, "sha256": sha256, "num_bytes": len(data)}).encode() + b"\n"
        try:
            reach("appending", self._path)
            with open(self._path, "ab") as file:
                begin = file.tell() + len(line)
                file.write(line)
                file.write(data)
                file.flush()
                reach("appended", self._path)
                os.fsync(file.fileno())
        except OSError as error:
            raise could_not_save(self._path, error) from error
        reach("synced", self._path)
        self._entries[token] = _Entry(sha256, begin, len(data))

    def clear(self) -> None:
        """Of a run that is finished nothing is asked again."""
        for path in self._folder.glob("uploads-*.bin"):
            path.unlink(missing_ok=True)

    def _read(self) -> dict[str, _Entry]:
        """All whole entries; from the first that is not, the file is cut off."""
        found: dict[str, _Entry] = {}
        with open(self._path, "r+b") as file:
            end = 0
            while line := file.readline():
                try:
                    about = json.loads(line)
                    data = file.read(about["num_bytes"])
                    if hashlib.sha256(data).hexdigest() != about["sha256"]:
                        break
                    found[about["token"]] = _Entry(about["sha256"], end + len(line), len(data))
                except (ValueError, KeyError, TypeError):
                    break
                end += len(line) + len(data)
            file.truncate(end)
        return found


class Ends:
    """How far each site's privacy ledger goes, as its answers said, over all runs of the federation.

    Every letter tells the site, which refuses if its own ledger does not go as far: then a part of it is lost. What is kept
    here never goes back. ``path`` None: nothing is kept.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._ends = self._read()

    def of(self, client: int) -> End | None:
        """How far this site's ledger goes, as the site last said; None if it never said."""
        return self._ends.get(client)

    def note(self, client: int, end: End) -> None:
        """Remember the end that an answer names, if it is a later one."""
        if end.entries <= self._ends.get(client, End()).entries:
            return
        self._ends = {**self._read(), client: end}  # another run may have noted something
        if self._path is not None:
            write_json(self._path, {str(client): asdict(end) for client, end in sorted(self._ends.items())})

    def _read(self) -> dict[int, End]:
        if self._path is None or not self._path.exists():
            return {}
        try:
            rows = json.loads(self._path.read_bytes())
            return {int(client): End(**row) for client, row in rows.items()}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise RunError(
                "E354",
                "what the server knows of the sites' privacy ledgers cannot be read",
                where=str(self._path),
                why=str(error),
                fix="put back a copy of this file; without one, remove it: each site still has its own mark",
            ) from None


def _write_secret(path: Path) -> None:
    """Whole or not at all, and at no moment for others to read."""
    temporary = path.with_name(".secret.tmp")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(secrets.token_bytes(32))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
