"""Sites' answers at the server: what is taken from a site, and what is kept of it.

Taken is an answer to the very question that was asked, exactly as it was asked for, and nothing else.
The header is read and matched before memory is taken for the values, then the values. Whatever does not fit is refused with
a code, and the words of the refusal are ours: nothing of what came is repeated in a log.

Kept are the uploads of the step under way, and how far each privacy ledger goes.
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
import re
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rescene.core.errors import RunError
from rescene.core.files import US_ALONE, write_atomically
from rescene.core.record import Tree
from rescene.deploy.exchange import LONGEST_LINE, Remembered, Reply, is_digest
from rescene.deploy.message_bytes import unpack_message
from rescene.engine.checkpoint import could_not_save, reach, write_json
from rescene.engine.evaluate import Tally
from rescene.methods.upload_schema import MOST, Form, KnownSizes, Misfit, both, check_form, fields, tensor, whole
from rescene.privacy.ledger import End

HEADER_BYTES, TENSOR_BYTES = 1 << 16, 512  # of JSON, which takes a hundred times its size while it is read
MOST_TOLD = 20
CODE = re.compile(r"[EW]\d{3}")


@dataclass(frozen=True)
class Question:
    """What one site was asked. ``client`` is None where we ask who it is; ``decode`` turns coded pictures into values.

    An answer has hardly more tensors than the payload, so ``num_tensors`` of that bound its header.
    """

    token: str
    client: int | None
    form: Form
    decode: Callable[[Tree], Tree] | None = None
    num_tensors: int = 0


def open_reply(data: bytes, question: Question) -> Reply:
    """The reply, if it is one to this question. RunError E340 (no message), E342 (does not fit), E364 (another question)."""
    limit = HEADER_BYTES + TENSOR_BYTES * question.num_tensors
    try:
        reply: Reply = unpack_message(data, header_limit=limit, look=lambda tree: _check(tree, question)).tree
        _check(reply, question)
        if question.decode is not None and reply.problem is None:
            check_form(question.form, question.decode(reply.upload))
        return reply
    except RunError:
        raise
    except Misfit as misfit:
        raise RunError("E342", f"the answer does not fit: {misfit}") from None
    except Exception as error:  # a plug-in's form may not expect everything; a stranger's bytes never stop the run
        raise RunError("E340", f"the message is refused: it cannot be read ({type(error).__name__})") from None


def _check(reply: Any, question: Question) -> None:
    if not isinstance(reply, Reply):
        raise RunError("E340", "the message is refused: it is no reply")
    token = reply.token
    if not isinstance(token, str) or not token.isascii() or not hmac.compare_digest(token, question.token):
        raise RunError("E364", "the answer is to another question, or from another site")
    low, high = (0, MOST) if question.client is None else (question.client, question.client)
    whole(low, high)(reply.client, "its number", {})
    whole()(reply.flops, "flops", {})
    if not isinstance(reply.told, tuple) or len(reply.told) > MOST_TOLD or not all(map(_is_told, reply.told)):
        raise Misfit("what it tells is no list of codes and words")
    if reply.problem is not None:
        rest = (reply.upload, reply.state, reply.ledger)
        if not _is_told(reply.problem) or any(part is not None for part in rest):
            raise Misfit("its problem is no code with words")
        return
    if reply.ledger is not None:
        if not isinstance(reply.ledger, End) or not is_digest(reply.ledger.head):
            raise Misfit("the end of its privacy ledger is not named by a hash")
        whole(1, MOST)(reply.ledger.entries, "the length of its privacy ledger", {})
    state = reply.state
    if state is not None:
        if not isinstance(state, Remembered) or not is_digest(state.sha256):
            raise Misfit("its memory is not named by a hash")
        whole()(state.num_bytes, "the size of its memory", {})
    check_form(question.form, reply.upload)


def _is_told(pair: Any) -> bool:
    if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
        return False
    return CODE.fullmatch(pair[0]) is not None and _is_line(pair[1])


def _is_line(words: Any) -> bool:
    return isinstance(words, str) and words.isprintable() and len(words) <= LONGEST_LINE


def _line(value: Any, name: str, sizes: KnownSizes) -> None:
    if not _is_line(value):
        raise Misfit(f"{name} is not a line of text")


def _lens(value: Any, name: str, sizes: KnownSizes) -> None:
    if value != "" and not is_digest(value):
        raise Misfit(f"{name} is not named by a hash")


GREETING: Form = fields({"fingerprint": _line, "torch": _line, "lens": _lens})


def tally_form(num_classes: int) -> Form:
    """Counts per class of a hold-out; no more right answers than images."""
    counts = tensor(torch.int64, num_classes, low=0, high=MOST)

    def check(value: Any, name: str, sizes: KnownSizes) -> None:
        if not isinstance(value, Tally):
            raise Misfit(f"{name} holds no counts")
        for part in (value.num, value.right, value.right_within):
            counts(part, name, sizes)

    def holds(found: Tally) -> bool:
        return bool(((found.right <= found.num) & (found.right_within <= found.num)).all())

    return fields({"tally": both(check, holds, "has more right answers than images")})


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
                write_atomically(folder / "secret", secrets.token_bytes(32), sync="file", mode=US_ALONE)
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
