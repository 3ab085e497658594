"""The key by which the server knows a site: whether node.key can be it, without asking anybody."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path


def key_fault(folder: Path) -> tuple[str, str]:
    """What is wrong with the content of node.key, and the fix; empty texts if Flower takes it and node.pub is its other half."""
    lines = (folder / "node.key").read_text(errors="replace").strip().splitlines()
    try:
        body = base64.b64decode("".join(lines[1:-1]), validate=True)
    except (binascii.Error, ValueError):
        body = b""
    if b"openssh-key-v1\0\0\0\0\4none" not in body or b"ecdsa-sha2-nistp384" not in body:  # no passphrase, P-384
        return "it is no key that `rescene deploy init` wrote", "copy it again"
    public = folder / "node.pub"
    if public.is_file() and not _halves(body, public):
        return "node.pub is not its other half", "ask the operator which is right"
    return "", ""


def _halves(body: bytes, public: Path) -> bool:
    """A private key in OpenSSH's format holds its public half as it stands in node.pub."""
    try:
        other = base64.b64decode(public.read_text().split()[1], validate=True)
    except (OSError, IndexError, ValueError):
        return False
    return bool(other) and other in body
