"""FedSSI: the surrogate model's path by hand, what its contributions add up to, one penalised step, and FedAvg at weight zero."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError

from rescene.config import resolve
from rescene.core.errors import ConfigError
from rescene.core.rng import Rng
from rescene.data import Task
from rescene.functional.synaptic import surrogate_step, synaptic_importance
from rescene.methods.base import weights_of
from rescene.methods.fedavg import FedAvg
from rescene.methods.fedssi import FedSSI, Synapses
from rescene.nets import grow_head
from rescene.training import Training
from rescene.training.surrogate_model import contributions

FULL = Training(local_epochs=3, batch_size=64, lr=0.05, weight_decay=0.01, augment=False)


def differences(a, b):
    return max((a[key] - b[key]).abs().max().item() for key in a if a[key].is_floating_point())


def parameters_of(net):
    return {name: value.detach().clone() for name, value in net.named_parameters()}


def moved_model(world, by=0.02):
    """A global model that ended the task: weights a little beside those that began it."""
    noise = torch.Generator().manual_seed(3)
    names = dict(world["net"].named_parameters())
    return {
        k: v + by * torch.randn(v.shape, generator=noise) if k in names else v
        for k, v in weights_of(world["net"]).items()
    }


def second_task(world, domain=None):
    shard = world["shards"][1]
    if domain is not None:
        return replace(shard, task=Task(1, (0, 1), 2, domain, shard.index, shard.index))
    images = replace(shard.images, labels=shard.images.labels + 2)
    return replace(shard, images=images, task=Task(1, (2, 3), 4, None, shard.index, shard.index))


# ---- the mathematics


def test_two_steps_of_a_parabola_by_hand():
    """L = 2 v^2, so g = 4 v; w = 1, eta = .1, q = .5: v goes 2 -> 2 - .1 (8 + .5) = 1.15 -> 1.15 - .1 (4.6 + .075) = .6825."""
    v, s, w = torch.tensor(2.0), 0.0, torch.tensor(1.0)
    for wanted in (1.15, 0.6825):
        g = 4 * v
        step = surrogate_step(v, g, w, eta=0.1, q=0.5)
        s, v = s - (g * step).item(), v + step
        assert v.item() == pytest.approx(wanted, rel=1e-6)
    assert s == pytest.approx(8 * 0.85 + 4.6 * 0.4675, rel=1e-6)  # 8.9505 beside a drop of 8 - .93: steps are coarse
    importance = synaptic_importance({"v": torch.tensor([s])}, {"v": v - 2}, damping=0.1)["v"].item()
    assert importance == pytest.approx(8.9505 / (1.3175**2 + 0.1), rel=1e-6)


def test_a_strong_pull_ends_at_the_global_model_and_not_beyond():
    step = surrogate_step(torch.tensor(3.0), torch.tensor(0.0), torch.tensor(1.0), eta=0.1, q=50.0)
    assert step.item() == -2.0  # eta q = 5 would overshoot to -7


def test_contributions_add_up_to_the_drop_of_the_loss(tiny_world):
    """Sum of -g dv is the path integral of the gradient: with small steps, L(start) - L(end), whatever pulls v."""
    shard, net = tiny_world["shards"][1], tiny_world["arch"].restore(weights_of(tiny_world["net"]))
    w = {name: value for name, value in moved_model(tiny_world).items() if name in dict(net.named_parameters())}

    def loss():
        copy = tiny_world["arch"].restore(weights_of(net)).train()  # batch statistics, as on the way
        return F.cross_entropy(copy(shard.pictures(shard.index)), shard.labels).item()

    before, fine = loss(), Training(batch_size=64, lr=0.002, augment=False)
    s = contributions(net, w, shard, fine, torch.Generator().manual_seed(0), epochs=60, q=0.5)
    drop = before - loss()
    assert drop > 0.05 and sum(v.sum().item() for v in s.values()) == pytest.approx(drop, rel=0.05)


# ---- a site


def test_the_surrogate_model_leaves_out_last_batches_of_too_few_images(tiny_world):
    shard, seen = tiny_world["shards"][1], []  # 16 images

    def watched(weights):
        net = tiny_world["arch"].restore(weights)
        net.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
        return net

    method = FedSSI(train=FULL.model_copy(update={"batch_size": 6, "smallest_batch": 5}), psm_epochs=2)
    model = weights_of(tiny_world["net"])
    method.consolidate({"model": model, "start": model}, replace(shard, net=watched), None, Rng(0))
    assert seen == [6, 6] * 2


@pytest.mark.parametrize("psm_start", ["task_start", "task_end"])
@pytest.mark.parametrize("locality", [1.0, 0.4])
def test_importance_is_that_of_the_written_out_path(tiny_world, psm_start, locality):
    shard, begun, ended = tiny_world["shards"][1], weights_of(tiny_world["net"]), moved_model(tiny_world)
    method = FedSSI(train=FULL, locality=locality, damping=0.01, psm_start=psm_start)
    payload = {"model": ended} | ({"start": begun} if psm_start == "task_start" else {})
    answer, memory = method.consolidate(payload, shard, None, Rng(0))

    first = begun if psm_start == "task_start" else ended
    net = tiny_world["arch"].restore(first).train()
    q, s = (1 - locality) / (2 * locality), {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for _ in range(3):
        net.zero_grad()
        F.cross_entropy(net(shard.pictures(shard.index)), shard.labels).backward()
        with torch.no_grad():
            for name, p in net.named_parameters():
                step = -0.05 * (p.grad + q * (p - ended[name]))  # no momentum, no decay
                s[name] -= p.grad * step
                p += step
    wanted = {
        name: s[name].clamp(min=0) / ((p.detach() - first[name]) ** 2 + 0.01) for name, p in net.named_parameters()
    }
    assert answer == {} and differences(wanted, memory.importance) < 1e-5
    assert max(v.max() for v in wanted.values()) > 1e-3
    assert all(torch.equal(memory.anchor[name], ended[name]) for name in wanted)


def test_one_penalised_step_equals_the_formula(tiny_world):
    """w - lr (g + wd w + 2 alpha Omega (w - a)); rows of new classes are free."""
    shard = second_task(tiny_world)
    model = grow_head(weights_of(tiny_world["net"]), 4, torch.Generator().manual_seed(2))
    anchor = {n: v - 0.1 for n, v in parameters_of(tiny_world["net"]).items()}
    memory = Synapses({n: torch.full_like(v, 0.5) for n, v in anchor.items()}, anchor)
    one = FULL.model_copy(update={"local_epochs": 1})
    upload, kept = FedSSI(train=one, si_weight=3.0).client_round({"model": model}, shard, memory, Rng(0))
    net = tiny_world["arch"].restore(model).train()
    F.cross_entropy(net(shard.pictures(shard.index)), shard.labels).backward()
    expected = {}
    for name, p in net.named_parameters():
        pull, rows = torch.zeros_like(p), len(anchor[name])
        pull[:rows] = 2 * 3.0 * 0.5 * (p.detach()[:rows] - anchor[name])
        expected[name] = p.detach() - 0.05 * (p.grad + 0.01 * p.detach() + pull)
    assert differences(expected, upload["model"]) < 1e-6 and kept is memory
    assert upload["notes"]["penalty"] > 0


def test_importance_of_tasks_adds_up_and_new_classes_join(tiny_world):
    """The second task is measured on its own and added; a site without images in it only moves its anchor."""
    method, shard = FedSSI(train=FULL), second_task(tiny_world)
    model = grow_head(weights_of(tiny_world["net"]), 4, torch.Generator().manual_seed(2))
    old = {n: torch.full_like(v, 0.25) for n, v in parameters_of(tiny_world["net"]).items()}
    payload = {"model": model, "start": model}
    _, alone = method.consolidate(payload, shard, None, Rng(0))
    _, both = method.consolidate(payload, shard, Synapses(old, {}), Rng(0))
    assert torch.allclose(both.importance["head.weight"][:2], alone.importance["head.weight"][:2] + 0.25)
    assert torch.equal(both.importance["head.weight"][2:], alone.importance["head.weight"][2:])
    empty = replace(shard, index=shard.index[:0])
    _, idle = method.consolidate(payload, empty, Synapses(old, {}), Rng(0))
    assert idle.importance is old and torch.equal(idle.anchor["head.weight"], model["head.weight"])
    _, newcomer = method.consolidate(payload, empty, None, Rng(0))
    assert newcomer.importance == {}
    assert method.client_round({"model": model}, empty, idle, Rng(0)) == ({"num_images": 0}, idle)


@pytest.mark.parametrize("case", ["newcomer", "idle", "weight 0"])
def test_without_importance_or_weight_a_site_does_what_fedavg_does(tiny_world, case):
    shard, payload = second_task(tiny_world, domain=1), {"model": weights_of(tiny_world["net"])}
    anchor = parameters_of(tiny_world["net"])
    memory = {"newcomer": None, "idle": Synapses({}, anchor), "weight 0": Synapses(anchor, anchor)}[case]
    train = Training(local_epochs=2, batch_size=8)
    ours, _ = FedSSI(train=train, si_weight=0.0 if case == "weight 0" else 5.0).client_round(
        payload, shard, memory, Rng(0)
    )
    plain, _ = FedAvg(train=train).client_round(payload, shard, None, Rng(0))
    assert all(torch.equal(ours["model"][key], plain["model"][key]) for key in plain["model"])


def test_the_server_sends_where_the_task_began_and_ended(tiny_world):
    asked = []

    class Server:
        clients = range(3)

        def ask(self, clients, verb, payload):
            asked.append((list(clients), verb, payload))
            return {}

    for psm_start, keys in (("task_start", ["model", "start"]), ("task_end", ["model"])):
        method, task = FedSSI(psm_start=psm_start), tiny_world["task"]
        state = method.begin_task(method.init(tiny_world["net"], Rng(0)), task, Server(), Rng(0))
        begun = state.model
        state = method.end_task(replace(state, model=moved_model(tiny_world)), task, Server(), Rng(0))
        clients, verb, payload = asked.pop()
        assert (clients, verb, list(payload)) == ([0, 1, 2], "consolidate", keys)
        assert payload["model"] is state.model and payload.get("start", begun) is begun


def test_a_mechanism_is_refused_before_the_run():
    with pytest.raises(ConfigError) as caught:
        resolve("smoke", {"method": "fedssi", "privacy.mechanism": "dp-sgd", "privacy.noise_multiplier": 1.0})
    assert "importance of weights" in str(caught.value)


@pytest.mark.parametrize("wrong", [{"si_weight": -1}, {"locality": 0}, {"damping": 0}, {"psm_epochs": 0}])
def test_bad_hyperparameters_are_refused(wrong):
    with pytest.raises(ValidationError):
        FedSSI(**wrong)
