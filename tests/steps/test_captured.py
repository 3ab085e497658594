"""The recorded step is the plain step: same draws, same numbers to rounding. (Here without a GPU: run, not recorded.)"""

import torch

from rescene.steps import Training, fit_pool
from rescene.steps.captured import _TRAINERS, fit_captured
from rescene.steps.sgd import PoolEpochs

SETTINGS = Training(server_epochs=3, batch_size=8, lr=0.05, precision="float32")


def pool(world):
    shard = world["shards"][2]
    return shard.pictures(shard.index), shard.labels


def test_the_step_for_recording_agrees_with_the_plain_loop(tiny_world):
    images, labels = pool(tiny_world)
    for alpha, tau, classes in [(0.5, 1.0, 2), (1.0, 0.0, 2), (0.5, 1.0, 3)]:
        net = tiny_world["arch"].build(classes, torch.Generator().manual_seed(2))
        plain, fast = (tiny_world["arch"].restore(net.state_dict()) for _ in range(2))
        generators = [torch.Generator().manual_seed(5) for _ in range(2)]
        look = tiny_world["transform"]
        a = fit_pool(plain, images, labels, look, SETTINGS, generators[0], num_classes=classes, alpha=alpha, tau=tau)
        b = fit_captured(fast, PoolEpochs(images, labels, classes, alpha, look, True, generators[1]), SETTINGS, tau)
        assert abs(a - b) < 1e-4
        for key, value in plain.state_dict().items():
            assert torch.allclose(value.float(), fast.state_dict()[key].float(), atol=1e-4), key


def test_a_second_round_reuses_the_recording_and_starts_without_momentum(tiny_world):
    images, labels = pool(tiny_world)
    ends = []
    for _ in range(2):
        net = tiny_world["arch"].restore(tiny_world["net"].state_dict())
        epochs = PoolEpochs(images, labels, 2, 0.5, tiny_world["transform"], True, torch.Generator().manual_seed(1))
        before = set(_TRAINERS)
        fit_captured(net, epochs, SETTINGS, 1.0)
        ends.append(net.state_dict())
    assert set(_TRAINERS) == before
    assert all(torch.equal(ends[0][key], ends[1][key]) for key in ends[0])


def test_the_meter_hears_of_work_no_hook_sees(tiny_world):
    images, labels = pool(tiny_world)
    counted = []
    net = tiny_world["arch"].restore(tiny_world["net"].state_dict())
    net.count_training = counted.append
    epochs = PoolEpochs(images, labels, 2, 0.5, tiny_world["transform"], True, torch.Generator().manual_seed(1))
    fit_captured(net, epochs, SETTINGS, 1.0)
    assert counted == [3 * len(labels)]
