"""What `rescene deploy check` finds, one row per check, and the checks that server and site share."""

from __future__ import annotations

import base64
import binascii
import shlex
import shutil
import stat
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rescene.deploy.federation_folder import broken_apps

Row = dict[str, str]
FLOWER = ("1.41.", "1.42.")  # those that were tried; server and sites must share major.minor
ENOUGH_DISK_GB = 2.0
ENOUGH_TEMPORARY_GB = 0.1  # Flower unpacks the app there
ENOUGH_MEMORY_GB = 1.0  # a node and its app hold about 0.8 GB before any work


def row(check: str, result: str = "", problem: str = "", fix: str = "") -> Row:
    """One line of the table; a problem comes with its fix."""
    return {"check": check, "result": result, "problem": problem, "fix": fix if problem else ""}


def machine_rows(folder: Path) -> list[Row]:
    """Versions, disk and memory of this machine."""
    return [_flower(), _packages(), *_disks(folder), _memory()]


def _flower() -> Row:
    found = _version("flwr")
    wrong = "" if found.startswith(FLOWER) else f"needs {'* or '.join(FLOWER)}*" if found else "Flower is not installed"
    return row("Flower", found, wrong, 'pip install "rescene[deploy]"')


def _packages() -> Row:
    """Server and sites must have the same rescene (E343); another torch may give other bits (W341)."""
    return row("versions", ", ".join(f"{name} {_version(name) or 'missing'}" for name in ("rescene", "torch")))


def _version(package: str) -> str:
    if package == "rescene":
        import rescene

        return rescene.__version__
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _disks(folder: Path) -> list[Row]:
    """The disk of the folder, and that of temporary files if it is another."""
    spare = Path(tempfile.gettempdir())
    same = spare.stat().st_dev == folder.stat().st_dev
    return [_disk("disk", folder, ENOUGH_DISK_GB)] + (
        [] if same else [_disk(f"disk of {spare}", spare, ENOUGH_TEMPORARY_GB)]
    )


def _disk(check: str, folder: Path, enough_gb: float) -> Row:
    free = shutil.disk_usage(folder).free / 1e9
    problem = f"less than {enough_gb:g} GB" if free < enough_gb else ""
    return row(check, f"{free:.1f} GB free", problem, "make room: rounds are refused with E410 when it is full")


def app_row(folder: Path) -> Row:
    """Flower's copies of the app under this folder are whole."""
    broken = broken_apps(folder / "flwr")
    problem = "; ".join(f"{app.name} is not as rescene writes it: {name}" for app, name in broken.items())
    fix = "was the disk full? make room: with the next message it is removed and written anew"
    return row("app", "" if problem else "no broken copy", problem, fix)


def part_rows(up: set[str], parts: Sequence[str], again: str) -> list[Row]:
    """Two processes that need each other: one alone does nothing."""
    half = len(up & set(parts)) == 1
    return [
        row(
            part,
            "up" if part in up else "not started",
            "it has ended while the other runs" if half and part not in up else "",
            again,
        )
        for part in parts
    ]


def _memory() -> Row:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 1e6
    except (OSError, StopIteration, ValueError):
        return row("memory", "not known on this system")
    problem = f"less than {ENOUGH_MEMORY_GB:.0f} GB" if free < ENOUGH_MEMORY_GB else ""
    return row("memory", f"{free:.1f} GB free", problem, "close other programs, or a machine with more memory")


def secret_row(path: Path, needed: bool = True) -> Row:
    """A secret is there, and its owner alone can read it."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        with open(path, "rb"):
            pass
    except FileNotFoundError:
        return row(path.name, "not here", "it is missing" if needed else "", "ask the operator for the site's folder")
    except OSError as error:
        return row(path.name, "", f"cannot be read: {error.strerror}", f"give {path} to the user who runs this")
    shared = f"others can read it (mode {mode:04o})" if mode & 0o077 else ""
    return row(path.name, f"mode {mode:04o}", shared, f"chmod 600 {shlex.quote(str(path))}")


def key_row(folder: Path) -> Row:
    """node.key: secret, of the kind Flower takes, and the one whose other half the operator has."""
    found, path = secret_row(folder / "node.key"), folder / "node.key"
    if found["problem"]:
        return found
    lines = path.read_text(errors="replace").strip().splitlines()
    try:
        body = base64.b64decode("".join(lines[1:-1]), validate=True)
    except (binascii.Error, ValueError):
        body = b""
    if b"openssh-key-v1\0\0\0\0\4none" not in body or b"ecdsa-sha2-nistp384" not in body:  # no passphrase, P-384
        return row("node.key", found["result"], "it is no key that `rescene deploy init` wrote", "copy it again")
    public = folder / "node.pub"
    if public.is_file() and not _halves(body, public):
        return row("node.key", found["result"], "node.pub is not its other half", "ask the operator which is right")
    return row("node.key", found["result"] + (", belongs to node.pub" if public.is_file() else ""))


def _halves(body: bytes, public: Path) -> bool:
    """A private key in OpenSSH's format holds its public half as it stands in node.pub."""
    try:
        other = base64.b64decode(public.read_text().split()[1], validate=True)
    except (OSError, IndexError, ValueError):
        return False
    return bool(other) and other in body
