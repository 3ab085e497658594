"""ReSCENE: federated continual learning with server-side replay.

``rescene.run("demo", **{"data.path": "images/"})`` runs an experiment and returns its result. Submodules load on first use,
so that importing the package (and asking the command line for help) does not import torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_SUBMODULES = {
    "functional",
    "nets",
    "data",
    "privacy",
    "steps",
    "methods",
    "config",
    "engine",
    "report",
    "paper",
    "use",
    "trackers",
    "cli",
    "errors",
}
_FROM_API = {"run", "load", "Result"}
__all__ = ["__version__", "load", "run", "Result"]  # noqa: F822  (resolved by __getattr__)


def __getattr__(name: str) -> Any:
    if name in _FROM_API:
        return getattr(import_module("rescene.api"), name)
    if name in _SUBMODULES:
        return import_module(f"rescene.{name}")
    raise AttributeError(f"module 'rescene' has no attribute {name!r}")
