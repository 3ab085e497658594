"""The paper's own cost conventions (App. E, client-resource table), apart from what a run measures.

Final head size in every round, float32, labels free, every class of a task on every site, IPC surrogates each, nominal
memories (so many exemplars of every old class on every site), TARGET's images in every round. One image forward costs F,
a training image 3F, a surrogate and condensation step 8F. Only this column can match the printed digits; the measured
column is what really happened. A method the paper does not price has no entry.

    C classes in all    C_t of a task    M storage    E local epochs    n images of a site and task
"""

from __future__ import annotations

from typing import Any

from rescene.engine.experiment import Experiment
from rescene.methods import Method
from rescene.nets import Arch, forward_flops, state_bytes

FLOAT_BYTES = 4
CONDENSATION_PASSES = 8  # per surrogate and step: two matching terms, each 3F synthetic and F real
TRAINING_PASSES = 3
SURROGATE_METHODS = ("rescene", "feddm", "fedaf", "raw-upload")
AVERAGING_METHODS = ("fedavg", "fedewc", "fedlwf", "target", "glfc", "fedcbdr", "refed")


def nominal_cost(experiment: Experiment) -> dict[str, float] | None:
    """Bytes of one message each way, client state, and client FLOPs of the run where the paper has a formula for them."""
    tasks = experiment.tasks
    largest = max(len(task.classes) for task in tasks)
    cost = nominal_bytes(experiment.method, experiment.arch, largest, tasks[-1].num_seen)
    if cost is None:
        return None
    flops = _client_flops(experiment)
    return cost if flops is None else cost | {"client_flops": flops}


def nominal_bytes(method: Method, arch: Arch, classes_per_task: int, num_classes: int) -> dict[str, float] | None:
    """The three byte columns: uplink and downlink of one message, persistent client state."""
    skeleton = arch.skeleton(num_classes)
    model = state_bytes(skeleton.state_dict())
    weights = sum(p.numel() for p in skeleton.parameters()) * FLOAT_BYTES
    image = 3 * arch.image_size**2 * FLOAT_BYTES
    settings: Any = method
    if method.name in SURROGATE_METHODS:
        up = surrogate_upload_bytes(classes_per_task, settings.ipc, arch.image_size)
        return {"uplink_bytes_per_message": up, "downlink_bytes_per_message": model, "client_state_bytes": model}
    if method.name not in AVERAGING_METHODS:
        return None
    down, remembered = model, 0
    if method.name == "fedewc":
        remembered = 2 * weights  # Fisher and anchor
    elif method.name == "fedlwf":
        remembered = model  # teacher
    elif method.name == "target":
        remembered = settings.synthesis_rounds * settings.synthesis_batch * image
        down = model + remembered
    elif method.name == "glfc":
        remembered = model + settings.num_exemplars * num_classes * image
    elif method.name == "fedcbdr":
        remembered = settings.budget * num_classes * image
    elif method.name == "refed":
        remembered = settings.storage * image
    return {
        "uplink_bytes_per_message": model,
        "downlink_bytes_per_message": down,
        "client_state_bytes": model + remembered,
    }


def surrogate_upload_bytes(num_classes: int, ipc: int, image_size: int) -> int:
    """C_t * IPC images of three channels in float32.

    >>> surrogate_upload_bytes(2, 10, 32), surrogate_upload_bytes(10, 10, 32), surrogate_upload_bytes(20, 10, 64)
    (245760, 1228800, 9830400)
    """
    return num_classes * ipc * 3 * image_size * image_size * FLOAT_BYTES


def _client_flops(experiment: Experiment) -> float | None:
    """Summed over participants and rounds; None for Re-Fed, whose scoring cost the paper leaves open."""
    method: Any = experiment.method
    federation, tasks = experiment.recipe.federation, experiment.tasks
    forward = forward_flops(experiment.arch, tasks[-1].num_seen)
    turns = federation.per_round * federation.num_rounds
    if method.name in SURROGATE_METHODS:
        surrogates = turns * sum(len(task.classes) * method.ipc for task in tasks)
        return float(CONDENSATION_PASSES * surrogates * getattr(method, "num_steps", 0) * forward)
    if method.name not in AVERAGING_METHODS or method.name == "refed":
        return None
    passes = 0.0
    for task, shards in zip(tasks, experiment.shards, strict=True):
        later = task.index > 0
        known = task.num_seen - len(task.classes) if task.domain is None else task.index * len(task.classes)
        images = sum(len(shard) for shard in shards) / len(shards)  # n of the average site
        if method.name in ("glfc", "fedcbdr"):
            images += known * (method.num_exemplars if method.name == "glfc" else method.budget)
        each = TRAINING_PASSES + (later and method.name in ("fedlwf", "glfc"))  # the old model looks at every image
        passes += images * each
        if later and method.name == "target":  # a synthetic batch beside every real one: student 3F, teacher F
            batches = sum(-(-len(shard) // experiment.recipe.train.batch_size) for shard in shards) / len(shards)
            passes += batches * method.synthetic_batch * (TRAINING_PASSES + 1)
    epochs = experiment.recipe.train.local_epochs
    extra = 1 / epochs if method.name == "fedewc" else 0.0  # one more pass for the Fisher
    return turns * epochs * passes * (1 + extra) * forward
