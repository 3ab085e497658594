"""SCAFFOLD: two rounds against a plain reading of its Algorithm 1, what momentum, tasks and new classes do, and FedAvg at c = 0."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from rescene.core.rng import Rng
from rescene.data import Task
from rescene.functional.model_average import control_variate, effective_steps, grown_rows
from rescene.methods.base import weights_of
from rescene.methods.fedavg import FedAvg
from rescene.methods.scaffold import ControlVariate, Scaffold
from rescene.nets import Arch
from rescene.privacy.accounting import Composition
from rescene.privacy.mechanism import Mechanism, SitePrivacy
from rescene.privacy.noise import Noise
from rescene.testing.conformance import drive, federation_of, make_world
from rescene.training import Training, num_local_steps

PLAIN = Training(local_epochs=3, batch_size=64, lr=0.1, momentum=0, weight_decay=0, augment=False)
SERVER = SimpleNamespace(clients=range(3))


def differences(a, b):
    return max((a[key] - b[key]).abs().max().item() for key in a if a[key].is_floating_point())


def parameters_of(net):
    return {name: value.detach().clone() for name, value in net.named_parameters()}


def second_task(shard, classes=(2, 3)):
    images = replace(shard.images, labels=shard.images.labels + 2)
    return replace(shard, images=images, task=Task(1, classes, 4, None, shard.index, shard.index))


# ---- the mathematics


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_the_worth_of_steps_with_momentum_is_that_of_the_steps_themselves(momentum, steps):
    gradient, moved, velocity = 3.0, 0.0, 0.0
    for _ in range(steps):
        velocity = momentum * velocity + gradient
        moved += velocity
    assert effective_steps(steps, momentum) == pytest.approx(moved / gradient, rel=1e-12)


def test_option_two_recovers_a_constant_gradient():
    """Steps of .1 along g - c_i + c with g = 2, c_i = 1, c = 4, so 5: x - y = 4 * .1 * 5 and c_i+ = 1 - 4 + 5 = g."""
    x, y = {"w": torch.tensor([7.0])}, {"w": torch.tensor([5.0])}
    found = control_variate(x, y, {"w": torch.tensor([1.0])}, {"w": torch.tensor([4.0])}, reach=4 * 0.1)
    assert found["w"].item() == pytest.approx(2.0, rel=1e-6)


def test_new_rows_are_zero():
    grown = grown_rows({"head": torch.tensor([[1.0, 2.0]])}, {"head": torch.ones(2, 2), "bias": torch.ones(2)})
    assert grown["head"].tolist() == [[1.0, 2.0], [0.0, 0.0]] and grown["bias"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("n", [1, 4, 5, 9, 12])
def test_the_number_of_local_steps_is_that_of_the_loop(tiny_world, n):
    seen, settings = [], Training(local_epochs=2, batch_size=4, augment=False)

    def watched(model):
        net = tiny_world["arch"].restore(model)
        net.register_forward_hook(lambda *_: seen.append(1))
        return net

    shard = replace(tiny_world["shards"][0], index=torch.arange(n), net=watched)
    FedAvg(train=settings).client_round({"model": weights_of(tiny_world["net"])}, shard, None, tiny_world["rng"])
    assert len(seen) == num_local_steps(n, settings)


# ---- the algorithm


def plain_site(arch, x, c, own, shard, settings):
    """Lines 7 to 13 of Algorithm 1, one full batch a step, with nothing of the method's code; statistics are BatchNorm's."""
    net = arch.restore(x).train()
    for _ in range(settings.local_epochs):
        net.zero_grad()
        F.cross_entropy(net(shard.pictures(shard.index)), shard.labels).backward()
        with torch.no_grad():
            for name, p in net.named_parameters():
                p -= settings.lr * (p.grad - own[name] + c[name])
    y = weights_of(net)
    new = {n: own[n] - c[n] + (x[n] - y[n]) / (settings.local_epochs * settings.lr) for n in own}
    return y, new


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_two_rounds_equal_algorithm_1(tiny_world, server_lr):
    """Sites 0 and 2 of three, twice; in the second round all control variates are at work."""
    method, shards, arch = Scaffold(train=PLAIN, server_lr=server_lr), tiny_world["shards"], tiny_world["arch"]
    state, memories = method.init(tiny_world["net"], Rng(0)), {0: None, 2: None}
    x = weights_of(tiny_world["net"])
    c = {n: torch.zeros_like(p) for n, p in parameters_of(tiny_world["net"]).items()}
    own = {k: dict(c) for k in memories}
    for number in range(2):
        uploads, payload = {}, method.broadcast(state, number, SERVER, Rng(0))
        for k in memories:
            uploads[k], memories[k] = method.client_round(payload, shards[k], memories[k], Rng(k))
        state = method.server_round(state, uploads, number, SERVER, Rng(0))
        answers = {k: plain_site(arch, x, c, own[k], shards[k], PLAIN) for k in memories}
        c = {n: c[n] + sum(answers[k][1][n] - own[k][n] for k in answers) / 3 for n in c}
        x = {n: v + server_lr * sum(answers[k][0][n] - v for k in answers) / 2 if n in c else v for n, v in x.items()}
        own = {k: new for k, (_, new) in answers.items()}
        x |= {n: state.model[n] for n in x if n not in c}  # statistics: averaged, as FedAvg does
        assert differences(c, state.control) < 2e-5 and differences({n: x[n] for n in c}, state.model) < 2e-6
        assert all(differences(own[k], memories[k].own) < 2e-5 for k in own)
    assert max(v.abs().max() for v in c.values()) > 0.01  # they were not nothing


def test_with_control_variates_of_zero_the_round_is_fedavgs_to_the_bit(tiny_world):
    train = Training(local_epochs=2, batch_size=8)  # with momentum, weight decay and crops
    ours, plain = Scaffold(train=train), FedAvg(train=train, weighting="uniform")
    state, other = ours.init(tiny_world["net"], Rng(0)), plain.init(tiny_world["net"], Rng(0))
    sent = ours.broadcast(state, 0, SERVER, Rng(0))
    answers = {k: ours.client_round(sent, s, None, Rng(k))[0] for k, s in enumerate(tiny_world["shards"])}
    theirs = {
        k: plain.client_round({"model": other.model}, s, None, Rng(k))[0] for k, s in enumerate(tiny_world["shards"])
    }
    one, two = (m.server_round(s, a, 0, SERVER, Rng(0)) for m, s, a in ((ours, state, answers), (plain, other, theirs)))
    assert all(torch.equal(one.model[key], two.model[key]) for key in two.model)


def test_the_servers_control_variate_is_the_mean_over_all_sites():
    """With two of five sites in a round, sites without images, and a new task in between."""
    world = make_world()
    method = Scaffold(train=Training(local_epochs=1, batch_size=8, lr=0.05))
    federation = federation_of(method, world)
    state = drive(method, world, federation)
    told = [m.own for m in federation.client_states.values() if m is not None and m.task == 1]
    assert len(told) == 3  # sites 0 and 4, then 1 and 3 take part in the second task; site 0 has no image
    mean = {name: sum(own[name] for own in told) / 5 for name in state.control}
    assert differences(mean, state.control) < 1e-5 and max(v.abs().max() for v in mean.values()) > 1e-3


# ---- momentum, tasks, classes


def test_momentum_does_not_inflate_the_control_variate(tiny_world):
    """A tiny learning rate leaves the gradient g as it is over the steps, and then c_i+ must be g."""
    shard, net = tiny_world["shards"][1], tiny_world["net"]
    small = Training(local_epochs=10, batch_size=64, lr=1e-5, momentum=0.9, weight_decay=0, augment=False)
    F.cross_entropy(tiny_world["net"].train()(shard.pictures(shard.index)), shard.labels).backward()
    g = {name: p.grad for name, p in net.named_parameters()}
    payload = {"model": weights_of(net), "control": {n: torch.zeros_like(v) for n, v in g.items()}}

    def ratio(**more):
        upload, _ = Scaffold(train=small, **more).client_round(payload, shard, None, Rng(0))
        found, wanted = (torch.cat([v[n].flatten() for n in g]) for v in (upload["control_change"], g))
        return (torch.dot(found, wanted) / wanted.square().sum()).item()

    assert ratio() == pytest.approx(1.0, abs=0.02)
    assert ratio(momentum_steps="plain") == pytest.approx(effective_steps(10, 0.9) / 10, abs=0.1)  # 4.1 times too large


@pytest.mark.parametrize("new_task", ["reset", "keep"])
def test_a_new_task_with_new_classes(tiny_world, new_task):
    """The server's c: zero again, or as it was with new rows of zeros. A site's c_i: the same, without a message."""
    method, rng = Scaffold(train=PLAIN, new_task=new_task), Rng(0)
    state = method.init(tiny_world["net"], rng)
    state = replace(state, control={n: torch.full_like(v, 0.3) for n, v in state.control.items()})
    shard = second_task(tiny_world["shards"][1])
    memory = ControlVariate({n: torch.full_like(v, 0.1) for n, v in state.control.items()}, task=0)
    after = method.begin_task(state, shard.task, SERVER, rng)
    assert {n: v.shape for n, v in after.control.items()} == {n: after.model[n].shape for n in after.control}
    kept, old_rows = (0.3, 0.1) if new_task == "keep" else (0.0, 0.0), 2
    assert after.control["head.weight"][:old_rows].unique().tolist() == pytest.approx([kept[0]])
    assert not after.control["head.weight"][old_rows:].any() and not after.control["head.bias"][old_rows:].any()

    payload = method.broadcast(after, 0, SERVER, rng)
    upload, now = method.client_round(payload, shard, memory, rng)
    own = {n: torch.full_like(v, kept[1]) for n, v in after.control.items()}
    for name in ("head.weight", "head.bias"):
        own[name][old_rows:] = 0
    y, new = plain_site(tiny_world["arch"], after.model, after.control, own, shard, PLAIN)
    assert differences(new, now.own) < 2e-5 and now.task == 1
    assert differences({n: y[n] for n in own}, upload["model"]) < 2e-6
    assert differences({n: new[n] - own[n] for n in own}, upload["control_change"]) < 2e-5


def test_a_site_without_images_keeps_what_it_knows(tiny_world):
    method = Scaffold(train=PLAIN)
    state = method.init(tiny_world["net"], Rng(0))
    empty = replace(tiny_world["shards"][0], index=torch.zeros(0, dtype=torch.int64))
    memory = ControlVariate(state.control, 0)
    upload, kept = method.client_round(method.broadcast(state, 0, SERVER, Rng(0)), empty, memory, Rng(0))
    assert upload == {"num_images": 0} and kept is memory
    assert method.server_round(state, {0: upload}, 0, SERVER, Rng(0)) is state


def test_behind_dp_sgd_the_correction_acts_after_the_noise_and_control_follows_from_the_release(tiny_world):
    """Without images, one step: y = x - eta (noise + c - c_i). So c_i+ = c_i - c + (x - y) / eta is the noise alone."""
    pytest.importorskip("opacus", reason="rescene[privacy]")
    arch = Arch("convnet", 16, "group", 4)
    net = arch.build(2, torch.Generator().manual_seed(1))
    mechanism = Mechanism("dp-sgd", 1.0, 1.0, Composition(1, 1), typical_count=8.0)
    method = Scaffold(train=Training(local_epochs=1, lr=0.1, momentum=0.9, weight_decay=0, augment=False))
    state = method.init(net, Rng(0))

    def answer(control, own):
        site = SitePrivacy(mechanism, Noise(Rng(5).generator()))
        empty = replace(tiny_world["shards"][0], index=torch.zeros(0, dtype=torch.int64), net=arch.restore, site=site)
        told = {n: torch.full_like(v, control) for n, v in state.control.items()}
        memory = ControlVariate({n: torch.full_like(v, own) for n, v in told.items()}, 0)
        return method.client_round({"model": state.model, "control": told}, empty, memory, Rng(0))

    (free, noise), (held, same) = answer(0.0, 0.0), answer(0.7, 0.2)
    assert set(held) == {"model", "num_images", "control_change"} and held["num_images"] == 1
    assert differences({n: free["model"][n] - 0.1 * 0.5 for n in state.control}, held["model"]) < 1e-6
    assert differences(noise.own, same.own) < 1e-4 and max(v.abs().max() for v in noise.own.values()) > 0.01


@pytest.mark.parametrize("wrong", [{"server_lr": 0}, {"new_task": "forget"}, {"momentum_steps": 3}, {"eta": 1}])
def test_bad_hyperparameters_are_refused(wrong):
    with pytest.raises(ValidationError):
        Scaffold(**wrong)
