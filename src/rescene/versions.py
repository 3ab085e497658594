"""Versions of what rescene writes. A number grows when an older reader would misread the file; newer files are refused.

FOLDER stands in origin.json and speaks for the files of a run folder that cannot carry a number themselves: config.yaml,
command.txt, metrics.jsonl, events.jsonl, csv/. The JSON files have their own ``schema``; see docs/files.md.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from rescene.errors import RunError

FOLDER = 2  # 1: origin.json and partition.json without a number, surrogates.json a plain list
RESULTS = 1
CHECKPOINT = 2  # 1: surrogates on the server without `clients`, the sites that sent them
MODEL = 2  # 1: arch without `channels`, no `lens`
# keys of recipes of later versions, and what was before there was a choice: then names stay
NEWER = {
    ("data", "layout"): "auto",
    ("data", "outside"): "warn",
    ("tasks", "drift"): None,
    ("method", "close_after"): None,
    ("privacy", "send"): None,
    ("privacy", "centre"): None,
    ("privacy", "covariance_colour"): None,
    ("privacy", "pool"): None,
    ("privacy", "honest_sites"): None,
    ("model", "lens"): None,
    ("method", "step"): "fixed",
}


def refuse_newer(found: Any, known: int, path: Path) -> None:
    """E414 if a file says that a newer version wrote it; a file without a number is the first version.

    >>> refuse_newer(1, known=1, path=Path("results.json"))
    >>> refuse_newer(None, known=1, path=Path("results.json"))
    """
    if isinstance(found, (int, float)) and found > known:
        raise RunError(
            "E414",
            "this was written by a newer version of rescene",
            where=str(path),
            why=f"its format is {found}, this version knows {known}",
            fix="pip install --upgrade rescene",
        )


def as_it_was(config: dict[str, Any]) -> dict[str, Any]:
    """The recipe in a run's record, with what it does not say because there was no choice yet and the default is another now.

    Other keys that a record lacks stood at the default they have today. A recipe written by hand is not a record: it does not
    tell what stands at its default.

    >>> as_it_was({"method": {"literal": False, "reduction": "sum", "precision": "auto"}})["method"]["step"]
    'fixed'
    """
    method = config.get("method")
    if isinstance(method, dict) and method.keys() >= {"literal", "reduction", "precision"}:
        return config | {"method": {"step": NEWER["method", "step"]} | method}
    return config


def source_hash(*folders: str) -> str:
    """SHA-256 of the package's source, or of these folders of it: says what a commit does not, whether something was changed."""
    root, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(path for part in folders or (".",) for path in (root / part).rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()
