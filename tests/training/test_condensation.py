"""Condensation: what it must leave unchanged, what it must compute, and that one pass for all equals one client at a time."""

import copy
import sys

import pytest
import torch
from pydantic import ValidationError

from rescene.core.rng import Rng, seeded_generator
from rescene.functional import group_means
from rescene.training import Condensation, condense, embed

SETTINGS = Condensation(ipc=4, num_steps=5, image_lr=0.5, real_batch=6)


def streams(world):
    return [world["rng"].at("client", k) for k in range(3)]


def test_all_clients_at_once_agree_with_one_at_a_time(tiny_world):
    shards, net, rngs = tiny_world["shards"], tiny_world["net"], streams(tiny_world)
    together = condense(net, shards, rngs, SETTINGS, noise_seed=7)
    for shard, rng, batched in zip(shards, rngs, together, strict=True):
        (alone,) = condense(net, [shard], [rng], SETTINGS, noise_seed=7)
        assert torch.equal(alone.labels, batched.labels)
        assert torch.allclose(alone.images, batched.images, atol=1e-5)
        assert not torch.equal(alone.images, alone.start)


def test_chunks_do_not_change_the_result(tiny_world, monkeypatch):
    shards, net, rngs = tiny_world["shards"], tiny_world["net"], streams(tiny_world)
    whole = condense(net, shards, rngs, SETTINGS, noise_seed=7)
    monkeypatch.setattr(sys.modules["rescene.training.condensation"], "CHUNK", {"cpu": 5})
    cut = condense(net, shards, rngs, SETTINGS, noise_seed=7)
    for a, b in zip(whole, cut, strict=True):
        assert torch.allclose(a.images, b.images, atol=1e-5)


def test_the_network_comes_back_bit_for_bit_and_learnable(tiny_world):
    net = tiny_world["net"]
    before = {key: value.clone() for key, value in net.state_dict().items()}
    condense(net, tiny_world["shards"], streams(tiny_world), SETTINGS, noise_seed=1)
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in net.parameters())


def test_a_whole_class_as_start_has_nothing_to_learn(tiny_world):
    """With S_c = D_c and the full real batch the means agree, the gradient is 0, and raw images would be uploaded."""
    shard = tiny_world["shards"][0]  # twelve images of class 0
    settings = Condensation(ipc=12, num_steps=4, surrogates_per_class="min", real_batch="all", guard=False)
    (made,) = condense(tiny_world["net"], [shard], [Rng(0)], settings, noise_seed=0)
    assert torch.allclose(made.images, made.start, atol=1e-5)
    assert made.loss == pytest.approx(0.0, abs=1e-8)


@pytest.mark.parametrize(
    ("settings", "expected"),  # client 1 holds 13 images of class 0 and 3 of class 1
    [
        (Condensation(num_steps=0, guard=False), {0: 10, 1: 3}),  # min(10, n)
        (Condensation(num_steps=0, guard=False, surrogates_per_class="half"), {0: 6, 1: 1}),  # min(10, n // 2)
        (Condensation(num_steps=0, guard=False, surrogates_per_class="fixed"), {0: 10, 1: 10}),
        (Condensation(num_steps=0, guard=False, ipc=2), {0: 2, 1: 2}),
    ],
)
def test_how_many_surrogates_a_class_gets(tiny_world, settings, expected):
    (made,) = condense(tiny_world["net"], [tiny_world["shards"][1]], [Rng(0)], settings, noise_seed=0)
    assert {c: int((made.labels == c).sum()) for c in (0, 1)} == expected


def test_zero_steps_upload_the_start_images(tiny_world):
    (made,) = condense(
        tiny_world["net"], [tiny_world["shards"][1]], [Rng(0)], Condensation(num_steps=0, guard=False), noise_seed=0
    )
    assert torch.equal(made.images, made.start)


def test_first_step_is_the_clipped_gradient_of_eq_1(tiny_world):
    """One step with radius 0: S - lr * g / max(1, ||g|| / C), g the gradient of the two squared mean distances."""
    shard, net = tiny_world["shards"][0], tiny_world["net"].eval()
    settings = Condensation(ipc=3, num_steps=1, image_lr=0.7, radius=0.0, clip=0.01, real_batch="all")
    (made,) = condense(net, [shard], [Rng(3)], settings, noise_seed=0)
    x = made.start.clone().requires_grad_(True)
    real = shard.pictures(shard.index)
    loss = sum((f(x).mean(dim=0) - f(real).mean(dim=0).detach()).square().sum() for f in (net.features, net))
    (g,) = torch.autograd.grad(loss, x)
    expected = made.start - 0.7 * g * min(1.0, 0.01 / float(g.norm()))
    assert float(g.norm()) > 0.01
    assert torch.allclose(made.images, expected, atol=1e-5)


def test_in_train_mode_each_class_is_matched_with_the_statistics_of_its_own_batches(tiny_world):
    shards, net = [tiny_world["shards"][k] for k in (0, 2)], tiny_world["net"].eval()
    before, trained = copy.deepcopy(net.state_dict()), copy.deepcopy(net).train()
    settings = Condensation(
        ipc=3, num_steps=1, image_lr=0.7, radius=0.0, clip=None, real_batch="all", norm_statistics="batch"
    )
    together = condense(net, shards, [Rng(3), Rng(4)], settings, noise_seed=0)
    for shard, made in zip(shards, together, strict=True):  # one class each
        x, real = made.start.clone().requires_grad_(True), shard.pictures(shard.index)
        loss = sum(
            (f(x).mean(dim=0) - f(real).mean(dim=0).detach()).square().sum() for f in (trained.features, trained)
        )
        (g,) = torch.autograd.grad(loss, x)
        torch.testing.assert_close(made.images, made.start - 0.7 * g, rtol=0, atol=1e-5)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items()) and not net.training
    plain = condense(net, shards, [Rng(3), Rng(4)], settings.model_copy(update={"norm_statistics": "server"}), 0)
    assert not torch.allclose(plain[0].images, together[0].images, atol=1e-3)


def test_the_perturbation_comes_from_the_seed_of_the_broadcast(tiny_world):
    args = (tiny_world["net"], tiny_world["shards"][:1], [Rng(0)], SETTINGS)
    a, b, c = condense(*args, noise_seed=1)[0], condense(*args, noise_seed=1)[0], condense(*args, noise_seed=2)[0]
    assert torch.equal(a.images, b.images) and not torch.equal(a.images, c.images)
    assert torch.equal(a.start, c.start)


def test_images_that_leave_the_numbers_fall_back_and_are_counted(tiny_world):
    settings = Condensation(ipc=4, num_steps=3, image_lr=1e38, clip=None, radius=0.0)
    (made,) = condense(tiny_world["net"], [tiny_world["shards"][1]], [Rng(0)], settings, noise_seed=0)
    assert made.num_fallbacks > 0
    assert torch.isfinite(made.images).all()


def test_a_client_without_images_sends_nothing(tiny_world):
    from dataclasses import replace

    empty = replace(tiny_world["shards"][0], index=torch.zeros(0, dtype=torch.long))
    first, second = condense(
        tiny_world["net"], [empty, tiny_world["shards"][2]], [Rng(0), Rng(1)], SETTINGS, noise_seed=0
    )
    assert len(first.labels) == 0 and first.images.shape == (0, 3, 16, 16)
    assert len(second.labels) > 0


def test_condensing_brings_the_means_closer(tiny_world):
    shard, net = tiny_world["shards"][2], tiny_world["net"]
    settings = Condensation(ipc=3, num_steps=30, radius=0.0, start="noise", real_batch="all")
    (made,) = condense(net, [shard], [Rng(0)], settings, noise_seed=0)
    real = embed(net, shard.pictures(shard.index)).mean(dim=0, keepdim=True)
    groups = torch.zeros(len(made.labels), dtype=torch.long)
    before, after = (group_means(embed(net, images), groups, 1) for images in (made.start, made.images))
    assert (after - real).norm() < 0.5 * (before - real).norm()


def test_under_a_steep_network_fixed_steps_overshoot_and_polyaks_do_not(tiny_world):
    """What a network becomes after long training: a small change of pixels moves its features far."""
    net = copy.deepcopy(tiny_world["net"])
    for parameter in net.parameters():
        parameter.data *= 2.0

    def last_loss(**change):
        settings = Condensation(ipc=3, radius=0.0, real_batch="all", guard=False, **change)
        return condense(net, tiny_world["shards"][2:], [Rng(0)], settings, noise_seed=0)[0].loss

    start = last_loss(num_steps=1)
    assert last_loss(step="fixed") > start
    assert last_loss(step="polyak") < 0.1 * start


def test_literal_restores_the_printed_form_and_can_be_refined():
    assert Condensation(literal=True).clip is None and Condensation(literal=True).surrogates_per_class == "min"
    assert Condensation(literal=True, clip=2.0).clip == 2.0
    assert Condensation().clip == 5.0 and Condensation().surrogates_per_class == "min" and Condensation().guard


@pytest.mark.parametrize("bad", [{"ipc": 0}, {"image_lr": 0.0}, {"real_batch": 0}, {"start": "photo"}, {"unknown": 1}])
def test_bad_settings_are_refused(bad):
    with pytest.raises(ValidationError):
        Condensation(**bad)


def test_noise_is_the_same_wherever_it_is_drawn():
    assert torch.equal(torch.randn(5, generator=seeded_generator(9)), torch.randn(5, generator=seeded_generator(9)))
