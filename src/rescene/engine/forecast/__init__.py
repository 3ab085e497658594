"""What a run will cost, from its recipe: FLOPs, bytes and state as the ledger will count them, before anything is trained.

Everything a cost depends on is known in advance: who holds how many images of which class, who takes part in which round,
and what an image costs on its way through the network. Each method has a pricer that goes through its verbs with counts in
place of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from rescene.engine.experiment import Experiment
from rescene.engine.forecast import averaging, replay, surrogates
from rescene.engine.forecast.world import Exchange, Moment, Pricer, World
from rescene.nets import model_bytes

__all__ = ["PRICERS", "Exchange", "Forecast", "Moment", "forecast"]

PRICERS: dict[str, type[Pricer]] = {
    "rescene": surrogates.ReScene,
    "raw-upload": surrogates.ReScene,
    "feddm": surrogates.FedDM,
    "fedaf": surrogates.FedAF,
    "joint": surrogates.Joint,
    "fedavg": averaging.FedAvg,
    "fedewc": averaging.FedEWC,
    "fedlwf": averaging.FedLwF,
    "target": averaging.Target,
    "local": averaging.Local,
    "glfc": replay.Glfc,
    "fedcbdr": replay.FedCbdr,
    "refed": replay.ReFed,
}


@dataclass(frozen=True)
class Forecast:
    """The whole run, step by step. ``unsure`` names the figures that training decides: "at most: why", "about: why"."""

    moments: tuple[Moment, ...]
    client_state_bytes: int
    evaluation_flops: int
    unsure: dict[str, str]

    @property
    def rounds(self) -> list[Moment]:
        return [moment for moment in self.moments if moment.round is not None]

    def measured(self) -> dict[str, float]:
        """The figures that the ledger of the run will hold, under the same names."""
        turns = max(sum(len(moment.asked) for moment in self.rounds), 1)
        return {
            "uplink_bytes": sum(moment.up_bytes for moment in self.moments),
            "downlink_bytes": sum(moment.down_bytes for moment in self.moments),
            "uplink_bytes_per_message": sum(moment.up_bytes for moment in self.rounds) / turns,
            "downlink_bytes_per_message": sum(moment.down_bytes for moment in self.rounds) / turns,
            "client_state_bytes": self.client_state_bytes,
            "client_flops": sum(moment.client_flops for moment in self.moments),
            "server_flops": sum(moment.server_flops for moment in self.moments),
        }


def forecast(experiment: Experiment, stands_for: float = 1) -> Forecast | None:
    """Price every step of the schedule; None for what nobody has written a pricer for: plug-ins, privacy mechanisms, drift.

    ``stands_for``: sites that each participant stands for in the server's pool, for federations too large to draw in full.
    """
    pricer_class = PRICERS.get(experiment.method.name)
    recipe = experiment.recipe
    if pricer_class is None or recipe.privacy.mechanism != "none" or recipe.tasks.drift is not None:
        return None
    world = World(experiment, stands_for)
    pricer = pricer_class(world)
    moments, largest_state = [], 0
    for task in experiment.tasks:
        begin, end = Moment(task.index, None), Moment(task.index, None)
        pricer.begin(begin)
        moments.append(begin)
        model = model_bytes(experiment.arch, task.num_seen)
        for r in range(world.num_rounds):
            moment = Moment(task.index, r)
            pricer.round(moment, world.participants(task.index, r))
            moments.append(moment)
            largest_state = max(largest_state, model + max(pricer.remembered().values(), default=0))
        pricer.end(end)
        moments.append(end)
    return Forecast(tuple(moments), largest_state, _evaluation_flops(world), pricer.unsure)


def _evaluation_flops(world: World) -> int:
    """One pass over the test images of all tasks so far: every so many rounds, and after each task."""
    every, total, images = world.experiment.recipe.federation.evaluate_every, 0, 0
    for task in world.tasks:
        images += len(task.test)
        times = 1 + (world.num_rounds // every if every else 0)
        total += times * images * world.flops(task.num_seen)
    return total
