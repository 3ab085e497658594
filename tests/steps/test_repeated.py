"""Training with a recorded loss is plain training. (Here without a GPU: run, not recorded.)"""

import itertools

import pytest
import torch
import torch.nn.functional as F

from rescene.steps import Training, fit, repeatable
from rescene.steps.repeated import fit_repeated
from rescene.steps.sgd import Batch, cosine_rate, cross_entropy

SETTINGS = Training(batch_size=8, lr=0.05, precision="float32")


def parts(world, seed, beside=None):
    shard, generator = world["shards"][2], torch.Generator().manual_seed(seed)
    sizes = itertools.cycle(beside or [0])

    def plan():
        return shard.index[torch.randperm(len(shard), generator=generator)]

    def fetch(index):
        x = shard.transform.augment(shard.pictures(index), generator)
        other = torch.randn(next(sizes), *x.shape[1:], generator=generator) if beside else None
        return Batch(x, shard.images.labels[index], index, other)

    return plan, fetch


@pytest.mark.parametrize("cosine", [False, True])
def test_it_agrees_with_the_plain_loop(tiny_world, cosine):
    teacher = tiny_world["arch"].build(2, torch.Generator().manual_seed(9)).eval()

    @repeatable
    def loss(net, batch):
        with torch.no_grad():
            targets = teacher(batch.x).softmax(dim=1)
        return F.cross_entropy(net(batch.x), batch.y) + 0.5 * F.cross_entropy(net.features(batch.x)[:, :2], targets)

    assert_agree(tiny_world, loss, cosine=cosine)


def test_it_agrees_where_the_loss_looks_beside_the_batch(tiny_world):
    @repeatable
    def loss(net, batch):
        return F.cross_entropy(net(batch.x), batch.y) + net(batch.beside).square().mean()

    assert_agree(tiny_world, loss, beside=[3, 5])  # sizes that do not follow the batch's


def assert_agree(world, loss, *, cosine=False, beside=None):
    """Loss, weights, and what is seen after each epoch, of three epochs of both."""
    plain, fast = (world["arch"].restore(world["net"].state_dict()) for _ in range(2))
    seen = {True: [], False: []}

    def look(net):
        return lambda epoch: seen[net is fast].append((epoch, net.training, net.head.bias.detach().clone()))

    a = fit(plain, *parts(world, 1, beside), loss, SETTINGS, epochs=3, cosine=cosine, after_epoch=look(plain))
    rates = [cosine_rate(SETTINGS.lr, epoch, 3) if cosine else SETTINGS.lr for epoch in range(3)]
    b = fit_repeated(fast, *parts(world, 1, beside), loss, SETTINGS, rates, look(fast))
    assert abs(a - b) < 1e-4
    for key, value in plain.state_dict().items():
        assert torch.allclose(value.float(), fast.state_dict()[key].float(), atol=1e-4), key
    for (epoch, training, bias), other in zip(seen[False], seen[True], strict=True):
        assert (epoch, training) == other[:2]
        assert torch.allclose(bias, other[2], atol=1e-4)
    assert [epoch for epoch, *_ in seen[False]] == [1, 2, 3]
    assert not any(training for _, training, _ in seen[False])


def test_plain_cross_entropy_is_repeatable():
    assert cross_entropy.is_repeatable
