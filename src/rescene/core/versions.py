"""Versions of what rescene writes. A number grows when an older reader would misread the file; newer files are refused.

FOLDER stands in origin.json and speaks for the files of a run folder that cannot carry a number themselves: config.yaml,
command.txt, metrics.jsonl, events.jsonl, csv/. The JSON files have their own ``schema``; see docs/files.md.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from rescene.core.errors import RunError
from rescene.core.recipe_keys import flatten

FOLDER = 2  # 1: origin.json and partition.json without a number, surrogates.json a plain list
RESULTS = 1
CHECKPOINT = 2  # 1: surrogates on the server without `clients`, the sites that sent them
MODEL = 2  # 1: arch without `channels`, no `lens`
# keys of recipes of later versions, and what was before there was a choice: then names stay
NEWER = {
    ("data", "layout"): "auto",
    ("data", "outside"): "warn",
    ("data", "validation"): None,
    ("data", "held_out"): "drawn",
    ("data", "more"): None,
    ("data", "mean"): None,
    ("data", "std"): None,
    ("data", "columns"): dict.fromkeys(("path", "label", "split", "domain", "site")),
    ("tasks", "drift"): None,
    ("federation", "delay"): 0,
    ("federation", "staleness"): None,
    ("federation", "staleness_exponent"): 0.5,
    ("method", "close_after"): None,
    ("method", "temperatures"): "classes",
    ("method", "kd_reduction"): "sum",
    ("privacy", "send"): None,
    ("privacy", "centre"): None,
    ("privacy", "covariance_colour"): None,
    ("privacy", "pool"): None,
    ("privacy", "honest_sites"): None,
    ("privacy", "late"): None,
    ("privacy", "earlier_sums"): None,
    ("train", "smallest_batch"): 2,
    ("model", "lens"): None,
    ("model", "frozen"): False,
    ("method", "step"): "fixed",
    ("method", "server_augment"): True,
    ("method", "norm_statistics"): "server",
}
# how a record of a method that condenses, or sends raw pictures to such a server, is known: it names every setting
RECORDED = ({"literal", "reduction", "precision"}, {"ipc", "surrogates_per_class", "budget", "recent_fraction", "tau"})


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
    tell what stands at its default. A method whose former defaults have a name of their own today gets that name.

    >>> as_it_was({"method": {"literal": False, "reduction": "sum", "precision": "auto"}})["method"]["step"]
    'fixed'
    """
    method = config.get("method")
    if not isinstance(method, dict) or not any(method.keys() >= keys for keys in RECORDED):
        return config
    steps = {"step": NEWER["method", "step"]} if method.keys() >= RECORDED[0] else {}
    told = {**steps, "server_augment": NEWER["method", "server_augment"], **method}
    return config | {"method": told | {"name": _name_today(config | {"method": told}, method)}}


def _name_today(config: dict[str, Any], recorded: dict[str, Any]) -> Any:
    """The name under which a method's settings stand today (split_methods.json): ``since`` is the key that came with the split."""
    name = recorded.get("name")
    split = _split_methods().get(name) if isinstance(name, str) else None
    if split is None or split["since"] in recorded:
        return name
    flat = flatten(config)
    return name if all(flat.get(key) == value for key, value in split["unless"].items()) else split["now"]


def name_then(method: dict[str, Any]) -> Any:
    """The name that a method's settings had before the split, where ``since`` was left out because it stands as it was then."""
    name = method.get("name")
    before = (old for old, split in _split_methods().items() if split["now"] == name and split["since"] not in method)
    return next(before, name)


@cache
def _split_methods() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((files("rescene.core") / "split_methods.json").read_text("utf-8"))
    return found


def source_hash(*folders: str) -> str:
    """SHA-256 of the package's source, or of these folders of it: says what a commit does not, whether something was changed."""
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(path for part in folders or (".",) for path in (root / part).rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()
