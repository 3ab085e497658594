"""Local and server training: what is sampled, what is scheduled, and the edge cases of tiny sets."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rescene.config import resolve
from rescene.core.errors import ConfigError
from rescene.data import Transform
from rescene.nets import Arch
from rescene.training import Batch, Training, fit, fit_pool, fit_shard, num_local_steps, with_replay
from rescene.training.sgd import FusedSgd, ShardEpochs

PLAIN = Training(local_epochs=2, server_epochs=3, batch_size=8, lr=0.1, momentum=0.0, weight_decay=0.0, augment=False)
LOOK = Transform((0.5, 0.5, 0.5), (0.25, 0.25, 0.25), 0)


def test_steps_of_gradient_descent_by_hand():
    """One weight w, loss (w x - y)^2 with x = 1, y = 0: w <- w (1 - 2 lr_e); cosine gives lr .1 then .05 over two epochs."""
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, 1.0)
    batch = Batch(torch.ones(2, 1), torch.zeros(2, 1), torch.arange(2))
    fit(
        net,
        lambda: torch.arange(2),
        lambda i: batch,
        lambda n, b: (n(b.x) - b.y).square().mean(),
        PLAIN,
        epochs=2,
        cosine=True,
    )
    assert abs(net.weight.item() - (1 - 0.2) * (1 - 0.1)) < 1e-6


def test_a_trailing_single_image_is_dropped_but_a_lonely_one_is_trained(tiny_world):
    seen = []

    def loss(net, batch):
        seen.append((len(batch.y), net.training))
        return F.cross_entropy(net(batch.x), batch.y)

    nine = replace(tiny_world["shards"][0], index=torch.arange(9))
    fit_shard(tiny_world["net"], nine, PLAIN, torch.Generator().manual_seed(0), loss)
    assert seen == [(8, True)] * 2
    seen.clear()
    one = replace(nine, index=torch.arange(1))
    fit_shard(tiny_world["net"], one, PLAIN, torch.Generator().manual_seed(0), loss)
    assert seen == [(1, False)] * 2  # BatchNorm cannot train on one image


@pytest.mark.parametrize(("smallest", "batches"), [(2, [8, 3]), (3, [8, 3]), (4, [8]), (8, [8]), (100, [8])])
def test_a_last_batch_of_too_few_images_is_left_out(tiny_world, smallest, batches):
    seen = []

    def loss(net, batch):
        seen.append(len(batch.y))
        return F.cross_entropy(net(batch.x), batch.y)

    settings = PLAIN.model_copy(update={"smallest_batch": smallest})
    eleven = replace(tiny_world["shards"][0], index=torch.arange(11))
    fit_shard(tiny_world["net"], eleven, settings, torch.Generator().manual_seed(0), loss)
    assert seen == batches * 2 and len(seen) == num_local_steps(11, settings)
    seen.clear()
    three = replace(eleven, index=torch.arange(3))  # the only batch stays, however small it is
    fit_shard(tiny_world["net"], three, settings, torch.Generator().manual_seed(0), loss)
    assert seen == [3, 3]


@pytest.mark.parametrize("key", ["train.batch_size", "train.smallest_batch"])
def test_a_batch_of_one_image_cannot_be_asked_for(key):
    with pytest.raises(ConfigError, match=f"{key} = 1 is not possible"):
        resolve("smoke", {key: 1})
    resolve("smoke", {key: 2})


def test_crops_are_drawn_for_the_batches_that_are_seen(tiny_world):
    settings = PLAIN.model_copy(update={"smallest_batch": 4, "augment": True})
    eleven = replace(tiny_world["shards"][0], index=torch.arange(11))
    order, crops = ShardEpochs(eleven, settings, torch.Generator().manual_seed(0)).draw()
    assert len(order) == 8 and crops.shape == (3, 8)


def counting(alpha, labels, epochs=40):
    counts = torch.zeros(3)

    class Probe(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

        def forward(self, x):
            counts.add_(torch.bincount(x[:, 0, 0, 0].long(), minlength=3).float())
            return self.weight.expand(len(x), 3)

    images = labels.reshape(-1, 1, 1, 1).float().expand(-1, 3, 2, 2)
    settings = PLAIN.model_copy(update={"server_epochs": epochs})
    fit_pool(Probe(), images, labels, LOOK, settings, torch.Generator().manual_seed(0), num_classes=3, alpha=alpha)
    return counts / counts.sum()


def test_classes_are_drawn_with_probability_n_to_the_alpha():
    labels = torch.tensor([0] * 10 + [1] * 90 + [2] * 160)
    # sqrt(10):sqrt(90):sqrt(160) = 1:3:4
    assert torch.allclose(counting(0.5, labels), torch.tensor([1, 3, 4]) / 8, atol=0.015)
    assert torch.allclose(counting(0.0, labels), torch.tensor([1, 1, 1]) / 3, atol=0.015)


def test_alpha_one_is_a_plain_shuffled_epoch():
    labels = torch.tensor([0] * 8 + [1] * 24 + [2] * 8)
    assert torch.equal(counting(1.0, labels, epochs=3), torch.tensor([8, 24, 8]) / 40)


def test_augmentation_can_be_switched_off_and_changes_training(tiny_world):
    results = []
    for augment in (False, True, True):
        net = tiny_world["arch"].restore(tiny_world["net"].state_dict())
        settings = PLAIN.model_copy(update={"augment": augment})
        fit_shard(net, tiny_world["shards"][2], settings, torch.Generator().manual_seed(0))
        results.append(net.head.weight.detach().clone())
    assert not torch.equal(results[0], results[1]) and torch.equal(results[1], results[2])


def test_remembered_pictures_can_stay_as_they_are(tiny_world):
    shard = tiny_world["shards"][2]
    mixed = with_replay(shard, shard.images.pixels[:5], shard.images.labels[:5])
    seen = {True: [], False: []}

    def loss(net, batch):
        for x, place in zip(batch.x, batch.index.tolist(), strict=True):
            plain = mixed.pictures(torch.tensor([place]))[0]
            seen[place >= len(shard)].append(torch.equal(x, plain))
        return F.cross_entropy(net(batch.x), batch.y)

    settings = PLAIN.model_copy(update={"augment": "new", "local_epochs": 4})
    net = tiny_world["arch"].restore(tiny_world["net"].state_dict())
    fit_shard(net, mixed, settings, torch.Generator().manual_seed(0), loss)
    assert all(seen[True]) and len(seen[True]) == 4 * 5
    assert not all(seen[False])
    order, crops = ShardEpochs(mixed, settings, torch.Generator().manual_seed(0)).draw()  # the same on a GPU
    pad = mixed.transform.pad
    assert crops[:, order >= len(shard)].T.tolist() == [[pad, pad, 0]] * 5
    assert crops[:, order < len(shard)].T.unique(dim=0).shape[0] > 1


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_fused_sgd_moves_as_torchs_own_class_does(momentum):
    settings = Training(lr=0.1, momentum=momentum, weight_decay=1e-3)
    nets = [Arch("convnet", 16, width=2).build(4) for _ in range(2)]
    ours = FusedSgd(nets[0], settings)
    torchs = torch.optim.SGD(nets[1].parameters(), 0.1, momentum=momentum, weight_decay=1e-3, fused=True)
    x, y = torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2, 3, 0, 1])
    for _ in range(3):
        ours.step(F.cross_entropy(nets[0](x), y))
        torchs.zero_grad()
        F.cross_entropy(nets[1](x), y).backward()
        torchs.step()
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(one, other)
