"""The fast path does what the plain one does: same draws in, same weights and pixels out, to rounding."""

import pytest
import torch

import reference
from rescene.training import Condensation, Training, condense, fit_pool, fit_shard

SETTINGS = Training(local_epochs=3, server_epochs=3, batch_size=8, lr=0.05)


def seed():
    return torch.Generator().manual_seed(5)


def same(a, b):
    return all(torch.allclose(value, b.state_dict()[key], atol=1e-4) for key, value in a.state_dict().items())


def test_crops_of_a_batch_are_those_of_its_pictures(tiny_world):
    look = tiny_world["transform"]
    x, draws = torch.randn(40, 3, 16, 16, generator=seed()), look.draw(40, seed())
    expected = [reference.cropped(picture, *draw, look) for picture, draw in zip(x, draws.T.tolist(), strict=True)]
    assert torch.equal(look.apply(x, draws), torch.stack(expected))


@pytest.mark.parametrize("augment", [True, False])
@pytest.mark.parametrize("size", [27, 25])  # with a remainder of three, and of one, which is left out
def test_local_training(tiny_world, augment, size):
    from dataclasses import replace

    whole = tiny_world["shards"][2]
    shard, settings = replace(whole, index=whole.index[:size]), SETTINGS.model_copy(update={"augment": augment})
    fast, plain = (tiny_world["arch"].restore(tiny_world["net"].state_dict()) for _ in range(2))
    fit_shard(fast, shard, settings, seed())
    reference.local_training(plain, shard, settings, seed())
    assert same(fast, plain) and not same(fast, tiny_world["net"])


@pytest.mark.parametrize("augment", [True, False])
def test_server_training(tiny_world, augment):
    """Unequal classes, one of them empty, so that sampling, prior and mask all matter."""
    shard, settings = tiny_world["shards"][1], SETTINGS.model_copy(update={"augment": augment})
    net = tiny_world["arch"].build(3, seed())
    fast, plain = (tiny_world["arch"].restore(net.state_dict()) for _ in range(2))
    pool = (shard.pictures(shard.index), shard.labels, shard.transform, settings)
    fit_pool(fast, *pool, seed(), num_classes=3, alpha=0.5, tau=1.0)
    reference.server_training(plain, *pool, seed(), num_classes=3, alpha=0.5, tau=1.0)
    assert same(fast, plain) and not same(fast, net)


@pytest.mark.parametrize("clip", [0.05, None])
def test_condensation(tiny_world, clip):
    """All sites and classes in one pass are one site and class at a time from the same start."""
    net, shards = tiny_world["net"], tiny_world["shards"]
    settings = Condensation(ipc=4, num_steps=5, image_lr=0.5, real_batch="all", clip=clip)
    made = condense(net, shards, [tiny_world["rng"].at(k) for k in range(3)], settings, noise_seed=7)
    for shard, own in zip(shards, made, strict=True):
        starts = {label: own.start[own.labels == label] for label in own.labels.unique().tolist()}
        plain = reference.condensation(net, shard, starts, settings, 7, seed())
        for label, images in plain.items():
            assert torch.allclose(own.images[own.labels == label], images, atol=1e-4)
            assert not torch.allclose(images, starts[label], atol=1e-3)
