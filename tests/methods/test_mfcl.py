"""MFCL: the generator's losses and a site's step by hand, what travels, and where it is FedAvg."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rescene.core.errors import RunError
from rescene.core.rng import Rng
from rescene.data import Task
from rescene.functional.distillation import feature_distillation_loss
from rescene.functional.image_losses import channel_moments, divergence_loss, evenness_loss, roughness_loss
from rescene.methods.base import weights_of
from rescene.methods.fedavg import FedAvg
from rescene.methods.mfcl import MFCL
from rescene.nets import grow_head
from rescene.training import Training
from rescene.training.generator import fresh_generator, generator_parameters, restored_generator
from rescene.training.generator_training import DataFree, generator_loss, train_generator
from rescene.training.synthesis import Statistics

ONE_STEP = Training(local_epochs=1, batch_size=64, lr=0.1, momentum=0.0, weight_decay=0.0, augment=False)
SMALL = {"generator_steps": 3, "generator_batch": 8, "latent_size": 8, "generator_width": 4, "synthetic_batch": 6}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# mathematics


def test_the_divergence_is_that_of_gaussians():
    """KL(N(1, 4) || N(3, 9)) = ln(3/2) + (4 + (1 - 3)^2) / 18 - 1/2, and torch's own."""
    batch, running = (
        (torch.tensor([3.0, 0.5]), torch.tensor([9.0, 2.0])),
        (torch.tensor([1.0, 0.0]), torch.tensor([4.0, 1.0])),
    )
    first = math.log(1.5) + 8 / 18 - 0.5
    normal = torch.distributions.Normal
    pairs = [normal(m, v.sqrt()) for m, v in (running, batch)]
    both = torch.distributions.kl_divergence(*pairs)
    assert both[0].item() == pytest.approx(first, rel=1e-5)
    assert divergence_loss(batch, running).item() == pytest.approx(both.mean().item(), rel=1e-5)


def test_evenness_is_zero_for_equal_shares_and_one_for_a_single_class():
    sure = 60.0 * torch.eye(4)
    assert evenness_loss(sure).item() == pytest.approx(0.0, abs=1e-6)
    assert evenness_loss(sure[:1].repeat(5, 1)).item() == pytest.approx(1.0, abs=1e-6)
    half = evenness_loss(sure[:2])  # two of four classes: 1 - ln 2 / ln 4
    assert half.item() == pytest.approx(0.5, abs=1e-6)
    assert evenness_loss(torch.ones(3, 1)).item() == 0.0


def test_roughness_is_zero_on_a_flat_picture_and_right_on_a_dot():
    assert roughness_loss(torch.full((1, 3, 8, 8), 2.0)).item() == pytest.approx(0.0, abs=1e-10)
    dot = torch.zeros(1, 1, 9, 9)
    dot[0, 0, 4, 4] = 1.0
    line = [math.exp(-(d**2) / 2) for d in range(-2, 3)]
    kernel = [[a * b / sum(line) ** 2 for a in line] for b in line]
    expected = sum(k * k for row in kernel for k in row) - kernel[2][2] ** 2 + (1 - kernel[2][2]) ** 2
    assert roughness_loss(dot).item() == pytest.approx(expected / 81, rel=1e-5)


def test_features_may_move_where_the_old_head_does_not_look():
    f, u, w = random(5, 3), random(5, 3, seed=1), random(2, 3, seed=2)
    expected = sum(float((w @ (f[i] - u[i])).square().sum()) for i in range(5)) / 5 / 2
    assert feature_distillation_loss(f, u, w).item() == pytest.approx(expected, rel=1e-5)
    unseen = torch.linalg.cross(w[0], w[1])
    assert feature_distillation_loss(u + unseen, u, w).item() == pytest.approx(0.0, abs=1e-10)


# the generator


def test_the_generators_loss_is_the_weighted_sum(tiny_world):
    net, x = tiny_world["net"].eval(), random(6, 3, 16, 16)
    settings = DataFree(certainty_weight=2, evenness_weight=3, statistics_weight=5, roughness_weight=7)
    found = generator_loss(x, Statistics(net, 0.0, divergence_loss), settings)
    inputs, layers = [], [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    handles = [layer.register_forward_pre_hook(lambda m, args: inputs.append(args[0])) for layer in layers]
    logits = net(x)
    [handle.remove() for handle in handles]
    divergences = [
        divergence_loss(channel_moments(seen), (layer.running_mean, layer.running_var))
        for seen, layer in zip(inputs, layers, strict=True)
    ]
    certainty = F.cross_entropy(logits / 1000, logits.argmax(1))
    expected = 2 * certainty + 3 * evenness_loss(logits) + 5 * sum(divergences) / len(layers) + 7 * roughness_loss(x)
    assert len(layers) > 0 and found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_training_lowers_the_loss_and_leaves_the_teacher_alone(tiny_world):
    net, settings = tiny_world["net"], DataFree(**{k: v for k, v in SMALL.items() if k != "synthetic_batch"})
    before = weights_of(net)
    losses = []
    for steps in (1, 30):
        generator = fresh_generator(8, 4, 16, torch.Generator().manual_seed(1))
        source, longer = torch.Generator().manual_seed(2), settings.model_copy(update={"generator_steps": steps})
        losses.append(train_generator(generator, net, tiny_world["transform"], longer, source))
    assert losses[1] < losses[0]
    assert all(torch.equal(value, before[key]) for key, value in weights_of(net).items())
    broken = tiny_world["arch"].restore(
        {key: value * float("nan") for key, value in before.items() if value.dtype == torch.float32}
        | {k: v for k, v in before.items() if v.dtype != torch.float32}
    )
    with pytest.raises(RunError, match="E330"):
        train_generator(generator, broken, tiny_world["transform"], settings, torch.Generator().manual_seed(2))


def test_a_restored_generator_paints_the_same():
    made = fresh_generator(8, 4, 16, torch.Generator().manual_seed(1)).eval()
    again, z = restored_generator(weights_of(made), 8, 4, 16), random(3, 8)
    assert torch.equal(made(z), again(z))
    assert generator_parameters(8, 4, 16) == sum(p.numel() for p in made.parameters())


# a site


def second_task(shard, domain=None):
    task = Task(1, (2, 3), 4, None, shard.index, shard.index)
    if domain is not None:
        return replace(shard, task=replace(task, classes=(0, 1), num_seen=2, domain=domain))
    return replace(shard, task=task, images=replace(shard.images, labels=shard.images.labels + 2))


@pytest.fixture
def past(tiny_world):
    generator = fresh_generator(8, 4, 16, torch.Generator().manual_seed(1)).eval()
    return {"teacher": weights_of(tiny_world["net"]), "generator": weights_of(generator)}


@pytest.mark.parametrize(("domain", "num_images"), [(None, 16), (1, 16), (None, 1)])
def test_one_step_equals_the_formula(tiny_world, past, domain, num_images):
    """With BatchNorm in training mode even for a single image, as there are painted ones beside it."""
    shard = second_task(tiny_world["shards"][1], domain)
    shard = replace(shard, index=shard.index[:num_images])
    model = grow_head(past["teacher"], shard.task.num_seen, torch.Generator().manual_seed(2))
    model = {key: value * 1.1 if value.is_floating_point() else value for key, value in model.items()}
    method = MFCL(**SMALL, train=ONE_STEP)
    painted = method._painted(past["generator"], shard, Rng(0).at("latents"))()
    upload, _ = method.client_round({"model": model}, shard, past, Rng(0))

    net, old = tiny_world["arch"].restore(model).train(), tiny_world["arch"].restore(past["teacher"]).eval()
    x, y = torch.cat([shard.pictures(shard.index), painted]), shard.labels
    first = 2 if domain is None else 0
    features, old_features = net.features(x), old.features(x).detach()
    learned = F.cross_entropy(net.head(features[: len(y)])[:, first:], y - first)
    labels = torch.cat([y, old.head(old_features[len(y) :]).argmax(1)])
    balanced = F.cross_entropy(features.detach() @ net.head.weight.T + net.head.bias, labels)
    kept = ((features - old_features) @ past["teacher"]["head.weight"].T).square().sum(1).mean() / 2
    (learned + 1.0 * balanced + 0.1 * kept).backward()
    assert upload["num_images"] == len(y) and painted.shape == (6, 3, 16, 16)
    for name, parameter in net.named_parameters():
        expected = parameter.detach() - 0.1 * parameter.grad
        torch.testing.assert_close(upload["model"][name], expected, rtol=1e-3, atol=1e-6)


def test_without_a_past_it_is_fedavg(tiny_world):
    """The first task, a site that joined late, and one without images."""
    train, shard, model = Training(local_epochs=2, batch_size=8), tiny_world["shards"][1], weights_of(tiny_world["net"])
    ours, state = MFCL(**SMALL, train=train).client_round({"model": model}, shard, None, Rng(0))
    plain, _ = FedAvg(train=train).client_round({"model": model}, shard, None, Rng(0))
    assert state is None and all(torch.equal(ours["model"][key], value) for key, value in plain["model"].items())
    empty, _ = MFCL(**SMALL).client_round({"model": model}, replace(shard, index=shard.index[:0]), None, Rng(0))
    assert empty == {"num_images": 0}


# between tasks


class Asked:
    """A federation that only writes down what it is asked."""

    clients = range(3)

    def __init__(self, world):
        self.calls, self.net = [], world["arch"].restore
        self.transform, self.device = world["transform"], torch.device("cpu")

    def ask(self, clients, verb, payload):
        self.calls.append((verb, payload))
        return {client: {"image_size": 16} for client in clients}


def test_generator_and_teacher_go_to_everybody_once_per_later_task_and_the_generator_goes_on(tiny_world):
    method, world = MFCL(**SMALL), Asked(tiny_world)
    state = method.begin_task(method.init(tiny_world["net"], Rng(0)), tiny_world["task"], world, Rng(0))
    assert world.calls == [] and state.generator is None
    second = second_task(tiny_world["shards"][0]).task
    after = method.begin_task(state, second, world, Rng(0))
    assert [verb for verb, _ in world.calls] == ["picture_size", "receive_generator"]
    payload = world.calls[1][1]
    assert len(payload["teacher"]["head.weight"]) == 2 and len(after.model["head.weight"]) == 4
    assert math.isfinite(after.notes["generator_loss"])
    kept = {key: value.clone() for key, value in after.generator.items()}
    later = method.begin_task(after, replace(second, index=2), world, Rng(1))
    assert all(torch.equal(after.generator[key], kept[key]) for key in kept)
    moved = max(float((later.generator[k] - kept[k]).abs().max()) for k in kept if k.endswith("weight"))
    assert 0 < moved < 0.1, "Adam moved it a few small steps from where it was; it did not start again"
