"""The key by which the server knows a site: whether node.key can be it, and whose it is, without asking anybody."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
from pathlib import Path


def key_fault(folder: Path) -> tuple[str, str]:
    """What is wrong with the content of node.key, and the fix; empty texts if Flower takes it and node.pub is its other half."""
    body = _private(folder)
    if b"openssh-key-v1\0\0\0\0\4none" not in body or b"ecdsa-sha2-nistp384" not in body:  # no passphrase, P-384
        return "it is no key that `rescene deploy init` wrote", "copy it again"
    public = folder / "node.pub"
    if public.is_file() and not _halves(body, public_key(public)):
        return "node.pub is not its other half", "ask the operator which is right"
    return "", ""


def number_fault(folder: Path, client: int) -> tuple[str, str]:
    """What is wrong with a site's number, and the fix; empty texts if peers.pub does not give this node.key another one."""
    body = _private(folder)
    own = [number for number, key in listed_keys(folder / "peers.pub").items() if _halves(body, key)]
    if not own or client in own:
        return "", ""
    why = f"`client: {client}` is the number of another site; by its key this is site {own[0]}"
    return why, f"client: {own[0]} in site.yaml; ask the operator if you should be site {client}"


def public_key(path: Path) -> str:
    """The key in node.pub, as text; empty if there is none."""
    return next((row[1] for row in _rows(path) if len(row) > 1), "")


def listed_keys(path: Path) -> dict[int, str]:
    """The key of each site in peers.pub, as text, by the site's number."""
    return {int(row[2]): row[1] for row in _rows(path) if len(row) == 3 and row[2].isdecimal()}


def fingerprint(key: str) -> str:
    """A key in short, as ``ssh-keygen -lf node.pub`` prints it; "unknown" for what is none."""
    with contextlib.suppress(ValueError):
        if body := base64.b64decode(key, validate=True):
            return "SHA256:" + base64.b64encode(hashlib.sha256(body).digest()).decode().rstrip("=")
    return "unknown"


def _private(folder: Path) -> bytes:
    """The content of node.key; nothing if it is no key."""
    try:
        lines = (folder / "node.key").read_text(errors="replace").strip().splitlines()
        return base64.b64decode("".join(lines[1:-1]), validate=True)
    except (OSError, binascii.Error, ValueError):
        return b""


def _rows(path: Path) -> list[list[str]]:
    """The words of each line; nothing if the file cannot be read."""
    try:
        return [line.split() for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError):
        return []


def _halves(body: bytes, key: str) -> bool:
    """A private key in OpenSSH's format holds its public half."""
    with contextlib.suppress(ValueError):
        other = base64.b64decode(key, validate=True)
        return bool(other) and other in body
    return False
