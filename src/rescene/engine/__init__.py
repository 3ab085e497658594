"""Tasks, rounds, sampling, transport, evaluation, cost, records and checkpoints: the one loop and what it needs.

Parts load on first use: a site needs the experiment and never the loop.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rescene.engine.experiment import Experiment, pick_device, prepare, prepare_sizes, use_all_cores
    from rescene.engine.loop import run
    from rescene.engine.run_folder import RunFolder

__all__ = [
    "Experiment",
    "RunFolder",
    "pick_device",
    "prepare",
    "prepare_sizes",
    "run",
    "use_all_cores",
]
_HOME = {"RunFolder": "run_folder", "run": "loop"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(f"rescene.engine.{_HOME.get(name, 'experiment')}"), name)
    raise AttributeError(f"module 'rescene.engine' has no attribute {name!r}")
