"""What a run costs: as its ledger counts it (bytes, operations, remembered state), and in the paper's own conventions (App. E).

Methods know nothing of the ledger. The paper's figures are those that the method states (``methods.nominal_cost``).
"""

from __future__ import annotations

from typing import Any

from rescene.core.record import Tree, num_bytes
from rescene.engine.experiment import Experiment
from rescene.methods.nominal_cost import Setting
from rescene.nets.cost import FlopMeter


class CostLedger:
    """Sums over a run; a plain dict goes into every checkpoint and comes back from it."""

    def __init__(self, meter: FlopMeter) -> None:
        self.meter = meter
        self.sums: dict[str, int] = dict.fromkeys(
            ("uplink_bytes", "downlink_bytes", "round_uplink_bytes", "round_downlink_bytes", "round_messages"), 0
        )
        self.client_state_bytes = 0
        self.server_state_bytes = 0
        self.sites_tell = True  # what they do and remember

    def exchange(
        self, down: Tree, ups: list[Tree], num_asked: int, turns: int | None, more_up: int = 0, more_down: int = 0
    ) -> tuple[int, int]:
        """Enter one call of ``ask`` or ``total``: the payload went to everybody asked, the answers came back; with keys and
        shares of a secure sum ``more`` of both. Returns (up, down).

        ``turns``: of those asked, the sites that had not been asked in this round before; None outside rounds. A round may
        have several exchanges, and what a site sends and receives in a round is the sum over them.
        """
        down_bytes = num_bytes(down) * num_asked + more_down
        up_bytes = sum(num_bytes(up) for up in ups) + more_up
        self.sums["downlink_bytes"] += down_bytes
        self.sums["uplink_bytes"] += up_bytes
        if turns is not None:
            self.sums["round_downlink_bytes"] += down_bytes
            self.sums["round_uplink_bytes"] += up_bytes
            self.sums["round_messages"] += turns
        return up_bytes, down_bytes

    def states(self, server: Tree, largest_client: int, model_bytes: int) -> None:
        """Remember the largest state so far: a client holds the model plus what it keeps between rounds."""
        self.server_state_bytes = max(self.server_state_bytes, num_bytes(server))
        self.client_state_bytes = max(self.client_state_bytes, model_bytes + largest_client)

    def so_far(self) -> dict[str, int]:
        """Floating-point operations and bytes of all messages since the run began, as the row of each task tells them."""
        work = {f"{side}_flops": self.meter.flops[side] for side in ("client", "server")}
        return work | {f"{way}_bytes_so_far": self.sums[f"{way}_bytes"] for way in ("uplink", "downlink")}

    def facts(self) -> dict[str, Any]:
        """A copy: the run counts on while a checkpoint is written."""
        return {
            "sums": dict(self.sums),
            "flops": dict(self.meter.flops),
            "client_state_bytes": self.client_state_bytes,
            "server_state_bytes": self.server_state_bytes,
        }

    def restore(self, facts: dict[str, Any]) -> None:
        """Continue from the figures of a checkpoint."""
        self.sums = dict(facts["sums"])
        self.meter.flops = dict(facts["flops"])
        self.client_state_bytes = facts["client_state_bytes"]
        self.server_state_bytes = facts["server_state_bytes"]

    def measured(self) -> dict[str, float | None]:
        """None: nobody knows, because the sites do not tell."""
        turns = max(self.sums["round_messages"], 1)  # a site in a round
        return {
            "uplink_bytes": self.sums["uplink_bytes"],
            "downlink_bytes": self.sums["downlink_bytes"],
            "uplink_bytes_per_message": self.sums["round_uplink_bytes"] / turns,
            "downlink_bytes_per_message": self.sums["round_downlink_bytes"] / turns,
            "client_state_bytes": self.client_state_bytes if self.sites_tell else None,
            "server_state_bytes": self.server_state_bytes,
            "client_flops": self.meter.flops["client"] if self.sites_tell else None,
            "server_flops": self.meter.flops["server"],
        }


def setting_of(experiment: Experiment) -> Setting:
    """The experiment in the paper's symbols."""
    federation = experiment.recipe.federation
    return Setting(
        arch=experiment.arch,
        tasks=experiment.tasks,
        counts=[task["counts"] for task in experiment.counts()["tasks"]],
        num_clients=federation.num_clients,
        per_round=federation.per_round,
        num_rounds=federation.num_rounds,
        train=experiment.recipe.train,
    )


def nominal_cost(experiment: Experiment) -> dict[str, float] | None:
    """Bytes of one message each way, client state, and the FLOPs of the run on all clients and on the server.

    None where there is no convention: for a method that states none, where the images are at the sites, where sites are drawn
    lazily, where classes drift in, and where sites have orders of their own.
    """
    one_plan = experiment.recipe.tasks.drift is None and experiment.orders is None
    if experiment.is_lazy or not experiment.has_images or not one_plan:
        return None
    method, tasks = experiment.method, experiment.tasks
    found = method.nominal_bytes(experiment.arch, max(len(task.classes) for task in tasks), tasks[-1].num_seen)
    if found is None:
        return None
    setting = setting_of(experiment)
    return {
        "uplink_bytes_per_message": found.up,
        "downlink_bytes_per_message": found.down,
        "client_state_bytes": found.state,
        "client_flops": method.nominal_client_flops(setting),
        "server_flops": sum(method.nominal_server_flops(setting, t) for t in range(len(tasks))),
    }
