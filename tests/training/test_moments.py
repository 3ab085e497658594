"""Condensation by moments: what it must approach, leave alone and refuse; and that the defaults did not change."""

from dataclasses import replace

import pytest
import torch

from rescene.core.errors import ConfigError
from rescene.core.rng import seeded_generator
from rescene.nets import build
from rescene.training import Condensation, condense

TERMS = ("features", "logits", "stages", "pixels", "covariance")
SETTINGS = Condensation(ipc=4, num_steps=6, image_lr=0.1, start="leaves", match=TERMS, random_nets=2)


def streams(world):
    return [world["rng"].at("client", k) for k in range(3)]


def made(world, settings, **kwargs):
    return condense(world["net"], world["shards"], streams(world), settings, noise_seed=7, **kwargs)


@pytest.mark.parametrize("term", TERMS)
def test_each_statistic_comes_closer(tiny_world, term):
    short, long = (made(tiny_world, SETTINGS.model_copy(update={"match": (term,), "num_steps": n})) for n in (1, 40))
    assert sum(s.loss for s in long) < 0.7 * sum(s.loss for s in short)


def test_all_clients_at_once_agree_with_one_at_a_time(tiny_world):
    for shard, rng, batched in zip(tiny_world["shards"], streams(tiny_world), made(tiny_world, SETTINGS), strict=True):
        (alone,) = condense(tiny_world["net"], [shard], [rng], SETTINGS, noise_seed=7)
        assert torch.allclose(alone.images, batched.images, atol=1e-3)


def test_the_network_comes_back_bit_for_bit(tiny_world):
    net = tiny_world["net"]
    before = {key: value.clone() for key, value in net.state_dict().items()}
    made(tiny_world, SETTINGS)
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    assert all(p.requires_grad for p in net.parameters())


def test_uploads_are_pictures(tiny_world):
    transform = tiny_world["shards"][0].transform
    for settings in (SETTINGS, Condensation(start="coloured", num_steps=0)):
        for upload in made(tiny_world, settings):
            assert torch.allclose(upload.images, transform.possible(upload.images), atol=1e-6)


def test_without_the_own_network_its_weights_do_not_matter(tiny_world):
    settings = SETTINGS.model_copy(update={"own_net": False})
    first = made(tiny_world, settings)
    other = {**tiny_world, "net": tiny_world["arch"].build(2, seeded_generator(99))}
    for a, b in zip(first, made(other, settings), strict=True):
        assert torch.allclose(a.images, b.images, atol=1e-4)


def test_a_class_with_few_images_is_not_sent(tiny_world):
    """Client 1 holds 13 images of class 0 and 3 of class 1."""
    settings = Condensation(start="coloured", num_steps=0, min_images=4)
    assert made(tiny_world, settings)[1].labels.unique().tolist() == [0]
    assert settings.num_surrogates(3) == 0 and settings.num_surrogates(4) == 4


def test_no_draw_is_deleted_for_being_a_near_copy(tiny_world):
    """The moments of a class whose images are all the same picture are that picture. It is sent, so that the reported figure sees it."""
    shard = tiny_world["shards"][0]
    same = shard.images.pixels.clone()
    same[shard.index] = 128
    shard = replace(shard, images=replace(shard.images, pixels=same))
    settings = Condensation(start="coloured", num_steps=0)
    (upload,) = condense(tiny_world["net"], [shard], [tiny_world["rng"]], settings, 0)
    expected = sum(settings.num_surrogates(len(own)) for own in shard.by_class().values())
    assert len(upload.images) == expected > 0


def test_a_transformer_is_refused(tiny_world):
    net = build("vit-small", num_classes=2, image_size=8)
    with pytest.raises(ConfigError, match="convolutional") as refused:
        condense(net, tiny_world["shards"], streams(tiny_world), SETTINGS, noise_seed=0)
    assert refused.value.code == "E148"
