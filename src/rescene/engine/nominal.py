"""What a run costs in the paper's own conventions (App. E), as its method states it (``methods.nominal_cost``)."""

from __future__ import annotations

from rescene.engine.experiment import Experiment
from rescene.methods.nominal_cost import Setting


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
