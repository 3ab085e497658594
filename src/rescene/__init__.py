"""ReSCENE: federated continual learning with server-side replay.

``rescene.run("demo", **{"data.path": "images/"})`` runs an experiment and returns its result. Submodules load on first use,
so that importing the package (and asking the command line for help) does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rescene.api import Result, continue_run, load, run
    from rescene.core.errors import ResceneError
    from rescene.data.objects import dataset_of, register_dataset
    from rescene.methods import Method
    from rescene.methods import register as register_method
    from rescene.nets.own_networks import OwnModel as Model
    from rescene.nets.own_networks import register_model

__version__ = "0.1.0"

_SUBMODULES = {
    "core",
    "functional",
    "nets",
    "data",
    "lens",
    "accel",
    "training",
    "privacy",
    "methods",
    "config",
    "engine",
    "deploy",
    "audit",
    "report",
    "paper",
    "use",
    "trackers",
    "testing",
    "cli",
}
_API = {
    "Method": "rescene.methods",
    "Model": "rescene.nets.own_networks",
    "Observer": "rescene.engine.observers",
    "ResceneError": "rescene.core.errors",
    "Result": "rescene.api",
    "continue_run": "rescene.api",
    "dataset_of": "rescene.data.objects",
    "load": "rescene.api",
    "register_dataset": "rescene.data.objects",
    "register_method": "rescene.methods",
    "register_model": "rescene.nets.own_networks",
    "register_observer": "rescene.engine.observers",
    "run": "rescene.api",
}
_INSIDE = {"Model": "OwnModel", "register_method": "register"}  # names that are shorter, or longer, inside
__all__ = [
    "Method",
    "Model",
    "Observer",
    "ResceneError",
    "Result",
    "__version__",
    "continue_run",
    "dataset_of",
    "load",
    "register_dataset",
    "register_method",
    "register_model",
    "register_observer",
    "run",
]


def __getattr__(name: str) -> Any:
    if name in _API:
        return getattr(import_module(_API[name]), _INSIDE.get(name, name))
    if name in _SUBMODULES:
        return import_module(f"rescene.{name}")
    raise AttributeError(f"module 'rescene' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
