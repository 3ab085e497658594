"""The paper's own cost conventions (App. E), apart from what a run measures.

Bytes: final head size in every round, float32, labels free, every class of a task on every site, IPC surrogates each,
nominal memories (so many exemplars of every old class on every site), TARGET's images in every round. FLOPs: one image
forward costs F, a backward pass 2F whatever learns, a surrogate and condensation step 8F; a round's participants are average
sites. Only this column can match the printed digits; the measured column is what really happened. A method the paper does
not price has no entry. docs/cost.md compares both with the printed tables.

    C classes in all    C_t of a task    M storage    E local epochs    n images of a site and task
"""

from __future__ import annotations

from typing import Any

from rescene.engine.experiment import Experiment
from rescene.methods import Method
from rescene.nets import FLOAT_BYTES, Arch, body_cost, forward_flops, model_bytes, num_parameters
from rescene.steps.generator import generator_flops
from rescene.steps.reconstruction import INVERSION_PASSES, encoder_flops

CONDENSATION_PASSES = 8  # per surrogate and step: two matching terms, each 3F synthetic and F real
TRAINING_PASSES = 3
SURROGATE_METHODS = ("rescene", "feddm", "fedaf", "raw-upload")
AVERAGING_METHODS = ("fedavg", "fedewc", "fedlwf", "target", "glfc", "fedcbdr", "refed")


def nominal_cost(experiment: Experiment) -> dict[str, float] | None:
    """Bytes of one message each way, client state, and the FLOPs of the run on all clients and on the server.

    None where the paper has no convention: for plug-ins, where the images are at the sites, where sites are drawn lazily,
    and where classes drift in.
    """
    if experiment.is_lazy or not experiment.has_images or experiment.recipe.tasks.drift is not None:
        return None
    tasks = experiment.tasks
    largest = max(len(task.classes) for task in tasks)
    cost = nominal_bytes(experiment.method, experiment.arch, largest, tasks[-1].num_seen)
    if cost is None:
        return None
    server = sum(nominal_server_flops(experiment, t) for t in range(len(tasks)))
    return cost | {"client_flops": nominal_client_flops(experiment), "server_flops": server}


def nominal_bytes(method: Method, arch: Arch, classes_per_task: int, num_classes: int) -> dict[str, float] | None:
    """The three byte columns: uplink and downlink of one message, persistent client state."""
    model, weights = model_bytes(arch, num_classes), num_parameters(arch, num_classes) * FLOAT_BYTES
    image = arch.channels * arch.image_size**2 * FLOAT_BYTES
    settings: Any = method
    if method.name in SURROGATE_METHODS:
        up = surrogate_upload_bytes(classes_per_task, settings.ipc, arch.image_size, arch.channels)
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


def surrogate_upload_bytes(num_classes: int, ipc: int, image_size: int, channels: int = 3) -> int:
    """C_t * IPC images in float32.

    >>> surrogate_upload_bytes(2, 10, 32), surrogate_upload_bytes(10, 10, 32), surrogate_upload_bytes(20, 10, 64)
    (245760, 1228800, 9830400)
    """
    return num_classes * ipc * channels * image_size * image_size * FLOAT_BYTES


def nominal_client_flops(experiment: Experiment) -> float:
    """All client-side work of the run, summed over participants."""
    method: Any = experiment.method
    federation = experiment.recipe.federation
    forward = forward_flops(experiment.arch, experiment.tasks[-1].num_seen)
    turns = federation.per_round * federation.num_rounds
    if method.name in SURROGATE_METHODS:
        # min(IPC, n) of each class: here the paper's figures follow the split, as its printed pool sizes do
        surrogates = turns * sum(
            sum(min(method.ipc, n) for site in task["counts"] for n in site) / len(task["counts"])
            for task in experiment.counts()["tasks"]
        )
        return float(CONDENSATION_PASSES * surrogates * getattr(method, "num_steps", 0) * forward)
    sizes = [[len(shard) for shard in shards] for shards in experiment.shards]
    replayed, scored = _re_fed(sizes, method.storage) if method.name == "refed" else ([0.0] * len(sizes), 0)
    passes = 0.0
    for t, (task, sites) in enumerate(zip(experiment.tasks, sizes, strict=True)):
        images = sum(sites) / len(sites) + replayed[t]  # of the average site
        if method.name in ("glfc", "fedcbdr"):
            images += _old_classes(experiment, t) * (method.num_exemplars if method.name == "glfc" else method.budget)
        each = TRAINING_PASSES + (task.index > 0 and method.name in ("fedlwf", "glfc"))  # the old model looks, too
        passes += images * each
        if task.index > 0 and method.name == "target":  # a synthetic batch beside every real one: student 3F, teacher F
            batches = sum(-(-n // experiment.recipe.train.batch_size) for n in sites) / len(sites)
            passes += batches * method.synthetic_batch * (TRAINING_PASSES + 1)
    epochs = experiment.recipe.train.local_epochs
    if method.name == "fedewc":
        epochs += 1  # one more pass for the Fisher
    total = turns * epochs * passes
    if method.name == "refed":  # an epoch of the informative model and one of scoring, each forward and backward
        total += method.pim_epochs * scored * 2 * TRAINING_PASSES
    return total * forward


def nominal_server_flops(experiment: Experiment, task: int) -> float:
    """The server's work of one task with all earlier ones completed; a weighted average is 2P per model."""
    method: Any = experiment.method
    federation, train, arch = experiment.recipe.federation, experiment.recipe.train, experiment.arch
    num_classes, own = experiment.tasks[-1].num_seen, len(experiment.tasks[task].classes)
    forward = forward_flops(arch, num_classes)
    if method.name in SURROGATE_METHODS:
        per_round = federation.per_round * own * method.ipc
        images = per_round * federation.num_rounds
        if method.name in ("rescene", "raw-upload"):  # |B u S|: the pool grows, the buffers of earlier tasks stay
            buffers = _old_classes(experiment, task) * min(method.budget, _pool_of_class(experiment))
            images = federation.num_rounds * buffers + per_round * sum(range(1, federation.num_rounds + 1))
        return float(images * train.server_epochs * TRAINING_PASSES * forward)
    flops = 2.0 * federation.num_rounds * federation.per_round * num_parameters(arch, num_classes)
    if method.name == "target":
        flops += _synthesis_flops(method, arch, forward)
    elif method.name == "glfc" and task > 0:
        inversions = method.num_inversions * method.inversion_steps
        encoder = encoder_flops(num_classes, arch.image_size, arch.image_size)
        flops += inversions * federation.per_round * own * INVERSION_PASSES * encoder
    elif method.name == "fedcbdr":
        flops += 2.0 * len(experiment.tasks[task].train) * body_cost(arch).feature_size ** 2
    return flops


def nominal_replay(experiment: Experiment) -> dict[str, float] | None:
    """A method's memory parameter, and the images that a client and everybody together hold for replay (App. D.3).

    Counted as in Table 8: at the end of the sequence, every site with its full share. None for a method it does not list.
    """
    method: Any = experiment.method
    num_classes, num_clients = experiment.tasks[-1].num_seen, experiment.recipe.federation.num_clients
    if method.name == "rescene":
        kept = num_classes * min(method.budget, _pool_of_class(experiment))
        return {"budget": method.budget, "images_per_client": 0, "images_in_all": kept}
    if method.name == "target":
        budget = each = method.images_per_client or method.synthesis_rounds * method.synthesis_batch
    elif method.name in ("glfc", "fedcbdr"):
        budget = method.num_exemplars if method.name == "glfc" else method.budget
        each = budget * num_classes
    elif method.name == "refed":
        sizes = [[len(shard) for shard in shards] for shards in experiment.shards]
        budget, each = method.storage, _re_fed(sizes, method.storage)[0][-1]
    else:
        return None
    return {"budget": budget, "images_per_client": each, "images_in_all": each * num_clients}


def _pool_of_class(experiment: Experiment) -> int:
    """Surrogates of a class that a task collects, if every participant sends IPC of them."""
    federation = experiment.recipe.federation
    return int(federation.per_round * federation.num_rounds * experiment.method.ipc)  # type: ignore[attr-defined]


def _synthesis_flops(method: Any, arch: Arch, forward: int) -> float:
    """R_syn searches through generator, teacher and, after the warm-up, student; then S_kd steps of distillation."""
    after = max(0, method.synthesis_rounds - method.warmup_rounds)
    painting = generator_flops(method.latent_size, method.generator_width, arch.image_size) + forward
    searches = method.generator_steps * TRAINING_PASSES * (method.synthesis_rounds * painting + after * forward)
    distillation = after * method.student_steps * (TRAINING_PASSES + 1) * forward
    return float(method.synthesis_batch * (searches + distillation))


def _old_classes(experiment: Experiment, task: int) -> int:
    """Classes of finished tasks; with domains, every class once per finished domain."""
    own = experiment.tasks[task]
    return own.num_seen - len(own.classes) if own.domain is None else task * len(own.classes)


def _re_fed(sizes: list[list[int]], storage: int) -> tuple[list[float], int]:
    """Cached images of the average site in each task, and how many previous images are scored in all.

    Storage covers current and previous images together; where the previous ones fit nothing is scored.
    """
    cache, cached, scored = [0] * len(sizes[0]), [0.0], 0
    for before, now in zip(sizes, sizes[1:], strict=False):
        pools = [kept + n for kept, n in zip(cache, before, strict=True)]
        rooms = [max(0, storage - n) for n in now]
        scored += sum(pool for pool, room in zip(pools, rooms, strict=True) if pool > room > 0)
        cache = [min(pool, room) for pool, room in zip(pools, rooms, strict=True)]
        cached.append(sum(cache) / len(cache))
    return cached, scored
