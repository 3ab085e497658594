"""Tasks, rounds, sampling, transport, evaluation, cost, records and checkpoints: the one loop and what it needs."""

from rescene.engine.experiment import Experiment, prepare, use_all_cores
from rescene.engine.folder import RunFolder
from rescene.engine.loop import run

__all__ = ["Experiment", "RunFolder", "prepare", "run", "use_all_cores"]
