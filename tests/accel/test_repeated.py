"""Training with a recorded loss is plain training. (Here without a GPU: run, not recorded.)"""

import itertools

import pytest
import torch
import torch.nn.functional as F

from rescene.accel.sgd_graph import Repeated, fit_repeated
from rescene.functional.importance import proximal_penalty
from rescene.nets import build
from rescene.training import Training, fit, frozen, repeatable
from rescene.training.sgd import Batch, cosine_rate, cross_entropy

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


@pytest.mark.parametrize(("cosine", "smallest_batch"), [(False, 2), (True, 2), (False, 4)])
def test_it_agrees_with_the_plain_loop(tiny_world, cosine, smallest_batch):
    teacher = tiny_world["arch"].build(2, torch.Generator().manual_seed(9)).eval()

    @repeatable
    def loss(net, batch):
        with torch.no_grad():
            targets = teacher(batch.x).softmax(dim=1)
        return F.cross_entropy(net(batch.x), batch.y) + 0.5 * F.cross_entropy(net.features(batch.x)[:, :2], targets)

    assert_agree(tiny_world, loss, cosine=cosine, smallest_batch=smallest_batch)


def test_it_agrees_where_the_loss_looks_beside_the_batch(tiny_world):
    @repeatable
    def loss(net, batch):
        return F.cross_entropy(net(batch.x), batch.y) + net(batch.beside).square().mean()

    assert_agree(tiny_world, loss, beside=[3, 5])  # sizes that do not follow the batch's


def test_a_penalty_on_the_weights_themselves_is_part_of_the_loss(tiny_world):
    anchors = [torch.zeros_like(p) for p in tiny_world["net"].parameters()]

    @repeatable
    def loss(net, batch):
        return F.cross_entropy(net(batch.x), batch.y) + proximal_penalty(net.parameters(), anchors, 0.5)

    assert_agree(tiny_world, loss)


def test_in_bfloat16_the_weights_stay_in_float32_and_the_loss_near(tiny_world):
    anchors = [torch.zeros_like(p) for p in tiny_world["net"].parameters()]

    @repeatable
    def loss(net, batch):  # two looks and a penalty, so that everything is added up in both precisions
        penalty = proximal_penalty(net.parameters(), anchors, 0.1)
        return F.cross_entropy(net(batch.x), batch.y) + net(batch.x.flip(3)).square().mean() + penalty

    found = []
    for precision in ("float32", "bfloat16"):
        net = tiny_world["arch"].restore(tiny_world["net"].state_dict())
        settings = SETTINGS.model_copy(update={"precision": precision})
        found.append(fit_repeated(net, *parts(tiny_world, 1), loss, settings, [SETTINGS.lr] * 3))
        assert all(p.dtype == torch.float32 for p in net.parameters())
    assert found[1] == pytest.approx(found[0], rel=0.05)
    assert found[0] != found[1]


def test_a_single_image_is_learned_with_the_running_statistics(tiny_world):
    shard = tiny_world["shards"][2]

    def learned(fit):
        net = tiny_world["arch"].restore(tiny_world["net"].state_dict())
        batch = Batch(shard.pictures(shard.index[:1]), shard.labels[:1], shard.index[:1])
        fit(net, lambda: torch.zeros(1, dtype=torch.long), lambda index: batch)
        return net.state_dict()

    plain = learned(lambda net, plan, fetch: fit(net, plan, fetch, cross_entropy, SETTINGS, epochs=3))
    fast = learned(lambda net, plan, fetch: fit_repeated(net, plan, fetch, cross_entropy, SETTINGS, [SETTINGS.lr] * 3))
    for key, value in plain.items():
        assert torch.allclose(value.float(), fast[key].float(), atol=1e-4), key


def test_afterwards_the_network_has_weights_of_its_own(tiny_world):
    net = tiny_world["arch"].restore(tiny_world["net"].state_dict())
    fit_repeated(net, *parts(tiny_world, 1), cross_entropy, SETTINGS, [SETTINGS.lr])
    assert all(p.is_contiguous() and p.untyped_storage().nbytes() == p.nbytes for p in net.parameters())


def test_all_passes_of_the_network_are_told(tiny_world):
    net, told = tiny_world["arch"].restore(tiny_world["net"].state_dict()), []
    net.count_passes = told.append

    def loss(net, batch):
        with torch.no_grad():
            net(batch.x)
        return F.cross_entropy(net(batch.x), batch.y)

    plan, fetch = parts(tiny_world, 1)
    fit_repeated(net, plan, fetch, loss, SETTINGS, [SETTINGS.lr])
    assert sum(told) == 4 * len(tiny_world["shards"][2])


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_teacher_answers_as_the_network_does(norm):
    net = build("resnet18", num_classes=5, image_size=8, norm=norm, generator=torch.Generator().manual_seed(3)).eval()
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(generator=torch.Generator().manual_seed(4)).mul_(0.1)
            module.running_var.uniform_(0.5, 2, generator=torch.Generator().manual_seed(5))
    x = torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        expected = net(x)
    told = []
    net.count_passes = told.append
    answers = frozen(net, Training(precision="bfloat16"))
    found = answers(x)
    assert found.dtype == torch.float32
    assert not found.requires_grad
    assert float((found - expected).norm() / expected.norm()) < 0.03
    assert told == [3]
    assert not any(p.requires_grad for p in answers.parameters())
    assert frozen(net, Training(precision="float32")) is net


def assert_agree(world, loss, *, cosine=False, beside=None, smallest_batch=2):
    """Loss, weights, and what is seen after each epoch, of three epochs of both. The last batch of an epoch has 3 images."""
    settings = SETTINGS.model_copy(update={"smallest_batch": smallest_batch})
    plain, fast = (world["arch"].restore(world["net"].state_dict()) for _ in range(2))
    seen = {True: [], False: []}

    def look(net):
        return lambda epoch: seen[net is fast].append((epoch, net.training, net.head.bias.detach().clone()))

    a = fit(plain, *parts(world, 1, beside), loss, settings, epochs=3, cosine=cosine, after_epoch=look(plain))
    rates = [cosine_rate(SETTINGS.lr, epoch, 3) if cosine else SETTINGS.lr for epoch in range(3)]
    b = fit_repeated(fast, *parts(world, 1, beside), loss, settings, rates, look(fast))
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


@pytest.mark.parametrize("clip", [0.3, 1e6])
def test_a_long_gradient_is_cut_to_the_norm_asked_for(tiny_world, clip):
    plain, net = (tiny_world["arch"].restore(tiny_world["net"].state_dict()) for _ in range(2))
    steps = Repeated(net, cross_entropy, SETTINGS, clip)
    steps.lr.fill_(SETTINGS.lr)
    optimiser = torch.optim.SGD(plain.parameters(), SETTINGS.lr, SETTINGS.momentum, weight_decay=SETTINGS.weight_decay)
    shard = tiny_world["shards"][2]
    index = shard.index[:8]
    batch = Batch(shard.pictures(index), shard.images.labels[index], index)
    for _ in range(3):
        steps.train(batch)
        optimiser.zero_grad()
        cross_entropy(plain, batch).backward()
        before = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip)
        optimiser.step()
        assert 0.3 < before < 1e6
    for own, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(own, other, atol=1e-6)
