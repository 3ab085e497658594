"""The paper's own cost conventions (App. E), apart from what a run measures.

Final head size in every round, float32, labels free, every class of the task on every site, IPC surrogates each; eight
forward passes per surrogate and condensation step; one training image costs three. Only this column can match the printed
digits; the measured column is what really happened. Methods the paper does not price have no nominal column.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rescene.engine.experiment import Experiment
from rescene.nets import forward_flops, state_bytes

FLOAT_BYTES = 4
CONDENSATION_PASSES = 8  # per surrogate and step: two matching terms, each 3F synthetic and F real
TRAINING_PASSES = 3


def nominal_cost(experiment: Experiment) -> dict[str, float] | None:
    """Bytes of one message each way, client state, client FLOPs of the run; None where the paper has no convention."""
    formula = _FORMULAS.get(experiment.method.name)
    return formula(experiment) if formula else None


def surrogate_upload_bytes(num_classes: int, ipc: int, image_size: int) -> int:
    """C_t * IPC images of three channels in float32.

    >>> surrogate_upload_bytes(2, 10, 32), surrogate_upload_bytes(10, 10, 32), surrogate_upload_bytes(20, 10, 64)
    (245760, 1228800, 9830400)
    """
    return num_classes * ipc * 3 * image_size * image_size * FLOAT_BYTES


def _model_bytes(experiment: Experiment) -> int:
    return state_bytes(experiment.arch.skeleton(experiment.tasks[-1].num_seen).state_dict())


def _surrogates(experiment: Experiment) -> dict[str, float]:
    method: Any = experiment.method
    federation, model = experiment.recipe.federation, _model_bytes(experiment)
    largest = max(len(task.classes) for task in experiment.tasks)
    flops = forward_flops(experiment.arch, experiment.tasks[-1].num_seen)
    images = federation.per_round * federation.num_rounds * sum(len(t.classes) * method.ipc for t in experiment.tasks)
    return {
        "uplink_bytes_per_message": surrogate_upload_bytes(largest, method.ipc, experiment.dataset.image_size),
        "downlink_bytes_per_message": model,
        "client_state_bytes": model,
        "client_flops": CONDENSATION_PASSES * images * method.num_steps * flops,
    }


def _model_updates(experiment: Experiment) -> dict[str, float]:
    federation, model = experiment.recipe.federation, _model_bytes(experiment)
    flops = forward_flops(experiment.arch, experiment.tasks[-1].num_seen)
    share = federation.per_round / federation.num_clients  # of a task's images, in the average round
    images = federation.num_rounds * share * sum(len(task.train) for task in experiment.tasks)
    return {
        "uplink_bytes_per_message": model,
        "downlink_bytes_per_message": model,
        "client_state_bytes": model,
        "client_flops": TRAINING_PASSES * images * experiment.recipe.train.local_epochs * flops,
    }


_FORMULAS: dict[str, Callable[[Experiment], dict[str, float]]] = {
    "rescene": _surrogates,
    "feddm": _surrogates,
    "fedavg": _model_updates,
}
