"""Tasks, rounds, sampling, transport, evaluation, cost, records and checkpoints: the one loop and what it needs."""

from rescene.engine.experiment import Experiment, pick_device, prepare, use_all_cores
from rescene.engine.folder import RunFolder
from rescene.engine.loop import run
from rescene.engine.streams import Streams, attempt

__all__ = ["Experiment", "RunFolder", "Streams", "attempt", "pick_device", "prepare", "run", "use_all_cores"]
