"""What a site remembers does not grow when it is asked again: the cost of an image is that of having it once."""

from dataclasses import replace

import pytest
import torch

from rescene.core.errors import RunError
from rescene.core.record import tensors
from rescene.methods import method_class
from rescene.methods.base import weights_of
from rescene.privacy.accounting import Composition
from rescene.privacy.mechanism import Mechanism, SitePrivacy
from rescene.privacy.noise import Noise
from rescene.training import Training

QUICK = Training(local_epochs=1, batch_size=8, lr=0.1, augment=False)
PRIVATE = Mechanism("dp-sgd", 1.0, 1.0, Composition(2, 1, 0.5), typical_count=8.0)
FILLING = {
    "refed": ("set_aside",),
    "fedcbdr": ("share_features", "score_images"),
    "glfc": ("keep_exemplars",),
    "icarl": ("keep_exemplars",),
}


def setting(world, name, hidden):
    """The method, a shard of its own, and how the verbs that fill its memory are asked."""
    method, model, shard = method_class(name)(), weights_of(world["net"]), world["shards"][1]
    if hidden:
        shard = replace(shard, site=SitePrivacy(PRIVATE, Noise()))
    size = model["head.weight"].shape[1]
    payload = {"model": model, "rotation_seed": 1, "inverse": torch.eye(size, dtype=torch.float64)}
    verbs = FILLING[name][:1] if hidden else FILLING[name]

    def fill(state, shard=shard):
        for verb in verbs:
            _, state = getattr(method, verb)(payload, shard, state, world["rng"])
        return state

    return method, payload, shard, fill


CASES = [
    ("refed", True),
    ("refed", False),
    ("fedcbdr", True),
    ("fedcbdr", False),
    ("glfc", False),
    ("icarl", True),
    ("icarl", False),
]


@pytest.mark.parametrize(("name", "hidden"), CASES)
def test_asking_five_times_is_asking_once(tiny_world, name, hidden):
    _, _, shard, fill = setting(tiny_world, name, hidden)
    once = state = fill(None)
    assert 0 < len(once.labels) <= len(shard)
    for _ in range(4):
        state = fill(state)
    assert all(torch.equal(a, b) for a, b in zip(tensors(state), tensors(once), strict=True))
    later = replace(shard, task=replace(shard.task, index=1), index=torch.arange(33, 60))
    both = fill(state, later)
    assert len(both.labels) > len(once.labels), "the next task still has its turn"
    if name != "glfc":
        assert len(fill(both).labels) == len(both.labels), "an earlier task has had its own"


@pytest.mark.parametrize("name", ["refed", "fedcbdr", "icarl"])
def test_images_that_are_in_the_memory_are_not_trained_on_beside_it(tiny_world, name):
    """One image would be in twice, and weigh twice what is accounted."""
    method, payload, shard, fill = setting(tiny_world, name, hidden=True)
    with pytest.raises(RunError, match="E375"):
        method.client_round(payload, shard, fill(None), tiny_world["rng"])


@pytest.mark.parametrize("name", FILLING)
def test_a_site_weighs_by_all_it_trains_on_or_by_the_new_pictures_alone(tiny_world, name):
    _, payload, shard, fill = setting(tiny_world, name, hidden=False)
    memory = fill(None)
    later = replace(shard, task=replace(shard.task, index=1), index=shard.index[:5])
    payload |= {"encoder_seed": 0}
    answers = {}
    for weighting in ("size", "new", "uniform"):
        method = method_class(name)(weighting=weighting, train=QUICK)
        answers[weighting] = method.client_round(payload, later, memory, tiny_world["rng"])[0]
        nothing_new = replace(later, index=later.index[:0])
        idle = method.client_round(payload, nothing_new, memory, tiny_world["rng"])[0]
        assert (idle["num_images"] == 0) is (weighting == "new") and ("model" in idle) is (weighting != "new")
    assert [answers[w]["num_images"] for w in ("size", "new", "uniform")] == [
        5 + len(memory.labels),
        5,
        5 + len(memory.labels),
    ]
    for key, value in answers["size"]["model"].items():
        assert torch.equal(value, answers["new"]["model"][key]), "the same training, another weight"
