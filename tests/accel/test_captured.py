"""The recorded step is the plain step: same draws, same numbers to rounding. (Here without a GPU: run, not recorded.)"""

import pytest
import torch

from rescene.accel.fused_layers import FlatWeights, fuse
from rescene.accel.sgd_graph import KEPT, fit_captured
from rescene.nets import Arch
from rescene.training import Training, fit_pool, fit_shard
from rescene.training.sgd import PoolEpochs, ShardEpochs, cosine_rate

SETTINGS = Training(server_epochs=3, local_epochs=2, batch_size=8, lr=0.05, precision="float32")
RATES = [cosine_rate(SETTINGS.lr, epoch, 3) for epoch in range(3)]


def pool(world):
    shard = world["shards"][2]
    return shard.pictures(shard.index), shard.labels


def least(smallest_batch):
    return SETTINGS.model_copy(update={"smallest_batch": smallest_batch})


def assert_same(one, other, tolerance=1e-4):
    for key, value in one.state_dict().items():
        assert torch.allclose(value.float(), other.state_dict()[key].float(), atol=tolerance), key


@pytest.mark.parametrize(("alpha", "tau", "classes"), [(0.5, 1.0, 2), (1.0, 0.0, 2), (0.5, 1.0, 3)])
def test_the_step_for_recording_agrees_with_the_plain_loop(tiny_world, alpha, tau, classes):
    images, labels = pool(tiny_world)
    assert len(labels) % SETTINGS.batch_size > 1, "the last batch is a smaller one"
    net = tiny_world["arch"].build(classes, torch.Generator().manual_seed(2))
    plain, fast = (tiny_world["arch"].restore(net.state_dict()) for _ in range(2))
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    look = tiny_world["transform"]
    a = fit_pool(plain, images, labels, look, SETTINGS, generators[0], num_classes=classes, alpha=alpha, tau=tau)
    epochs = PoolEpochs(images, labels, classes, alpha, look, True, generators[1])
    b = fit_captured(fast, epochs, SETTINGS, RATES, epochs.adjustment(tau))
    assert abs(a - b) < 1e-4
    assert_same(plain, fast)


@pytest.mark.parametrize("arch", [Arch("resnet18", 16), Arch("convnet", 16, norm="group"), Arch("vit-small", 16)])
def test_it_holds_for_every_kind_of_network(tiny_world, arch):
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(13, 3, 16, 16, generator=generator), torch.randint(3, (13,), generator=generator)
    plain = arch.build(3, torch.Generator().manual_seed(2))
    fast = arch.restore(plain.state_dict())
    settings = SETTINGS.model_copy(update={"server_epochs": 1, "lr": 0.01})
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    look = tiny_world["transform"]
    fit_pool(plain, images, labels, look, settings, generators[0], num_classes=3)
    epochs = PoolEpochs(images, labels, 3, 1.0, look, True, generators[1])
    fit_captured(fast, epochs, settings, [0.01], epochs.adjustment(0.0))
    assert_same(plain, fast, 1e-3)  # ResNet-18 with batches of 8 and 5 magnifies rounding


@pytest.mark.parametrize(("first_class", "smallest_batch"), [(0, 2), (1, 2), (0, 4)])
def test_local_training_agrees_too(tiny_world, first_class, smallest_batch):
    shard, settings = tiny_world["shards"][2], least(smallest_batch)
    shard = shard if first_class == 0 else _only(shard, labels_from=1)
    plain, fast = (tiny_world["arch"].restore(tiny_world["net"].state_dict()) for _ in range(2))
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    a = fit_shard(plain, shard, settings, generators[0], first_class=first_class)
    adjustment = torch.zeros(2)
    adjustment[:first_class] = -1e9
    b = fit_captured(fast, ShardEpochs(shard, settings, generators[1]), settings, [settings.lr] * 2, adjustment)
    assert abs(a - b) < 1e-4
    assert_same(plain, fast)


def _only(shard, labels_from):
    from dataclasses import replace

    return replace(shard, index=shard.index[shard.labels >= labels_from])


def test_a_last_batch_of_one_image_is_left_out_in_both(tiny_world):
    images, labels = (part[:9] for part in pool(tiny_world))
    plain, fast = (tiny_world["arch"].restore(tiny_world["net"].state_dict()) for _ in range(2))
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    look = tiny_world["transform"]
    fit_pool(plain, images, labels, look, SETTINGS, generators[0], num_classes=2)
    epochs = PoolEpochs(images, labels, 2, 1.0, look, True, generators[1])
    fit_captured(fast, epochs, SETTINGS, RATES, epochs.adjustment(0.0))
    assert_same(plain, fast)


def test_a_second_round_reuses_the_recording_and_starts_without_momentum(tiny_world):
    images, labels = pool(tiny_world)
    ends = []
    for _ in range(2):
        net = tiny_world["arch"].restore(tiny_world["net"].state_dict())
        epochs = PoolEpochs(images, labels, 2, 0.5, tiny_world["transform"], True, torch.Generator().manual_seed(1))
        before = set(KEPT.by_key)
        fit_captured(net, epochs, SETTINGS, RATES, epochs.adjustment(1.0))
        ends.append(net.state_dict())
    assert set(KEPT.by_key) == before
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


def test_a_grown_head_and_a_larger_pool_below_the_capacity_reuse_the_recording(tiny_world):
    images, labels = pool(tiny_world)
    kept = []
    for classes, repeat in [(2, 1), (7, 3)]:
        net = tiny_world["arch"].build(classes, torch.Generator().manual_seed(2))
        more = images.repeat(repeat, 1, 1, 1), labels.repeat(repeat)
        epochs = PoolEpochs(*more, classes, 0.5, tiny_world["transform"], True, torch.Generator().manual_seed(1))
        fit_captured(net, epochs, SETTINGS, RATES, epochs.adjustment(1.0))
        kept.append(set(KEPT.by_key))
    assert kept[0] == kept[1]


def test_the_meter_hears_of_work_no_hook_sees(tiny_world):
    """27 images in batches of 8: the last three count unless they are left out, and no recording serves both cases."""
    images, labels = pool(tiny_world)
    counted = []
    net = tiny_world["arch"].restore(tiny_world["net"].state_dict())
    net.count_passes = counted.append
    for smallest_batch in (2, 4):
        epochs = PoolEpochs(images, labels, 2, 0.5, tiny_world["transform"], True, torch.Generator().manual_seed(1))
        fit_captured(net, epochs, least(smallest_batch), RATES, epochs.adjustment(1.0))
    assert counted == [3 * 3 * 27, 3 * 3 * 24]


def test_half_precision_copies_follow_the_weights():
    net = fuse(Arch("convnet", 32).build(2), torch.tensor(4, dtype=torch.int32))
    weights = FlatWeights(net, half=True)
    conv = next(p for p in net.parameters() if p.ndim == 4)
    assert conv.dtype == torch.bfloat16
    assert torch.equal(weights.master(conv).bfloat16(), conv)
    gradients = [torch.ones_like(p) for p in weights.parameters]
    before = weights.master(conv).clone()
    weights.step([gradients], torch.tensor(0.5), momentum=0.9, decay=0.0)
    assert torch.allclose(weights.master(conv), before - 0.5)
    assert torch.equal(weights.master(conv).bfloat16(), conv)
