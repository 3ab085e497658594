"""The recorded condensation is the plain one when both see the same noise. (Here without a GPU: run, not recorded.)"""

import pytest
import torch

from rescene.accel.condensation_graph import KEPT
from rescene.accel.condensation_graph import descend_captured as descend
from rescene.accel.cuda_graph import WARM_UP
from rescene.core.rng import Rng
from rescene.training import Condensation, condense
from rescene.training.condensation import groups_of


def descend_captured(net, shard, pixels, owner, real, real_owner, settings, seed):
    return descend(net, shard, pixels, owner, real, real_owner, settings, seed, int(owner[-1]) + 1, 12)


SETTINGS = Condensation(guard=False, ipc=3, num_steps=4, real_batch=5, image_lr=0.5, precision="float32")


def inputs(world, settings):
    shards = list(world["shards"].values()) if isinstance(world["shards"], dict) else list(world["shards"])
    rngs = [Rng(0).at(k) for k in range(len(shards))]
    groups = [g for k, (s, r) in enumerate(zip(shards, rngs, strict=True)) for g in groups_of(k, s, r, settings)]
    sizes = torch.tensor([len(g.start) for g in groups])
    owner = torch.repeat_interleave(torch.arange(len(groups)), sizes)
    steps = settings.num_steps
    parts = [g.members.expand(steps, -1) if g.batches is None else g.members[g.batches] for g in groups]
    real_owner = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor([p.shape[1] for p in parts]))
    pixels = torch.cat([g.start for g in groups])
    return shards, rngs, (pixels, owner, torch.cat(parts, dim=1), real_owner)


@pytest.mark.parametrize(
    "change", [{}, {"step": "polyak"}, {"image_momentum": 0.5}, {"reduction": "mean", "match_logits": False}]
)
def test_without_perturbation_it_agrees_with_the_plain_descent(tiny_world, change):
    settings = SETTINGS.model_copy(update={"radius": 0.0, "clip": 1.0} | change)
    shards, rngs, (pixels, owner, real, real_owner) = inputs(tiny_world, settings)
    net = tiny_world["arch"].restore(tiny_world["net"].state_dict())
    plain = torch.cat([made.images for made in condense(net, shards, rngs, settings, 1)])
    found, losses = descend_captured(net, shards[0], pixels, owner, real, real_owner, settings, 1)
    assert not torch.allclose(found, pixels, atol=1e-3), "the pixels moved"
    assert torch.allclose(found, plain, atol=1e-5)
    assert len(losses) == int(owner[-1]) + 1
    assert (losses > 0).all()


def test_with_perturbation_it_agrees_with_the_plain_descent_under_the_same_noise(tiny_world):
    settings = SETTINGS.model_copy(update={"radius": 2.0})
    shards, rngs, (pixels, owner, real, real_owner) = inputs(tiny_world, settings)
    net = tiny_world["arch"].restore(tiny_world["net"].state_dict())
    found, _ = descend_captured(net, shards[0], pixels, owner, real, real_owner, settings, 7)
    condenser = list(KEPT.by_key.values())[-1]

    def move(theta, generator):
        """The recorded form draws all noise in one piece, in the order of its flat buffer."""
        condenser._load(net_copy, pixels, owner)
        condenser.eps.normal_(generator=generator)
        condenser._move()
        own = condenser.net.parameters()
        return [condenser.weights.master(p)[: len(t)].clone() for p, t in zip(own, theta, strict=True)]

    net_copy = tiny_world["arch"].restore(tiny_world["net"].state_dict())
    plain = torch.cat([made.images for made in condense(net, shards, rngs, settings, 7, move=move)])
    assert torch.allclose(found, plain, atol=1e-5)


def test_the_noise_lies_on_the_sphere(tiny_world):
    settings = SETTINGS.model_copy(update={"radius": 2.0, "num_steps": 1})
    shards, _, given = inputs(tiny_world, settings)
    descend_captured(tiny_world["net"], shards[0], *given, settings, 7)
    condenser = list(KEPT.by_key.values())[-1]
    assert float((condenser.weights.theta - condenser.anchor).norm()) == pytest.approx(2.0, rel=1e-4)


def test_another_number_of_groups_below_the_capacity_reuses_the_recording(tiny_world):
    shards, _, (pixels, owner, real, real_owner) = inputs(tiny_world, SETTINGS)
    descend_captured(tiny_world["net"], shards[0], pixels, owner, real, real_owner, SETTINGS, 7)
    before = set(KEPT.by_key)
    few, fewer_real = owner < owner[-1], real_owner < owner[-1]
    alone, _ = descend_captured(
        tiny_world["net"], shards[0], pixels[few], owner[few], real[:, fewer_real], real_owner[fewer_real], SETTINGS, 7
    )
    everybody, _ = descend_captured(tiny_world["net"], shards[0], pixels, owner, real, real_owner, SETTINGS, 7)
    assert set(KEPT.by_key) == before
    assert torch.allclose(alone, everybody[few], atol=1e-5), "a group does not depend on the others"


def test_recording_a_part_runs_beyond_the_steps_without_leaving_its_places(tiny_world):
    settings = SETTINGS.model_copy(update={"num_steps": 1})
    shards, _, given = inputs(tiny_world, settings)
    descend_captured(tiny_world["net"], shards[0], *given, settings, 7)
    condenser = list(KEPT.by_key.values())[-1]
    condenser.start.zero_()
    for _ in range(WARM_UP):
        condenser._real(condenser.chunks[0])  # an index out of range would be an error here, a wild read on a GPU
    assert int(condenser.start) == WARM_UP * condenser.chunks[0]
