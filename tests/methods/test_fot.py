"""FOT: sketches against the SVD of the pooled inputs, updates that leave old inputs alone, and what is held beside them."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from rescene.config import resolve
from rescene.core.errors import ConfigError
from rescene.core.rng import Rng
from rescene.data import Images, Task
from rescene.functional.subspace import extended_subspace, orthogonal_update, sketch
from rescene.methods.base import weights_of
from rescene.methods.fedavg import FedAvg
from rescene.methods.fot import FOT, FotState
from rescene.testing.conformance import drive, federation_of, make_world
from rescene.training import Training
from rescene.training.layer_inputs import input_columns, input_grams, input_layers

TRAIN = Training(local_epochs=3, batch_size=8, lr=0.1, augment=False)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def projector(basis):
    return basis @ basis.T


def nothing(d):
    return torch.zeros(d, 0, dtype=torch.float64)


# ---- the subspace


@pytest.mark.parametrize("energy", [0.5, 0.8, 0.95, 0.999])
def test_complete_sketches_give_the_svd_of_the_pooled_inputs(energy):
    """Omega = [Omega_1; Omega_2] orthogonal: (sum A_i)(sum A_i)^T = X X^T, so both have the same leading vectors."""
    scales = torch.tensor([5.0, 3.0, 2.0, 1.0, 0.5, 0.1], dtype=torch.float64)[:, None]
    parts = [scales * normal(6, 40, seed=1), scales.flip(0) * normal(6, 25, seed=2)]
    omega, _ = torch.linalg.qr(normal(12, 12, seed=3))
    total = sum(sketch(x @ x.T, own) for x, own in zip(parts, omega.split(6), strict=True))
    pooled = torch.cat(parts, dim=1)
    assert torch.allclose(total @ total.T, pooled @ pooled.T, atol=1e-9)
    u, sigma, _ = torch.linalg.svd(pooled, full_matrices=False)
    share = sigma.square().cumsum(0) / sigma.square().sum()
    k = next(i + 1 for i, held in enumerate(share.tolist()) if held >= energy)
    found = extended_subspace(nothing(6), total, energy)
    assert found.shape == (6, k)
    assert torch.allclose(projector(found), projector(u[:, :k]), atol=1e-8)


def test_random_sketches_span_inputs_of_low_rank():
    """Inputs of rank 3 in 10 dimensions at two sites, rank 2 and 1: m = 4 columns are more than enough."""
    parts = [normal(10, 2, seed=1) @ normal(2, 30, seed=2), normal(10, 1, seed=3) @ normal(1, 9, seed=4)]
    total = sum(sketch(x @ x.T, normal(10, 4, seed=5 + i)) for i, x in enumerate(parts))
    basis = extended_subspace(nothing(10), total, energy=1.0)
    pooled = torch.cat(parts, dim=1)
    assert basis.shape == (10, 3) and torch.allclose(projector(basis) @ pooled, pooled, atol=1e-6)


def test_the_law_of_a_sketch_is_that_of_inputs_times_a_normal_matrix():
    x, m = normal(3, 7), 40000
    found = sketch(x @ x.T, normal(3, m, seed=9))
    wanted = x @ x.T
    assert (found @ found.T / m - wanted).abs().max() < 0.05 * wanted.abs().max()  # deviations of 1 / sqrt(m) = 0.005


def test_directions_that_are_known_count_and_stay():
    """Energies 9, 4, 2, 1 on the axes, the first known: .55 asks for nothing, .75 for the second, .9 for two, 1 for all."""
    total = torch.diag(torch.tensor([3.0, 2.0, 2**0.5, 1.0], dtype=torch.float64))
    known = torch.eye(4, dtype=torch.float64)[:, :1]
    for energy, axes in [(0.55, 1), (0.75, 2), (0.9, 3), (1.0, 4)]:
        found = extended_subspace(known, total, energy)
        wanted = torch.diag((torch.arange(4) < axes).double())
        assert torch.allclose(projector(found), wanted, atol=1e-12)


# ---- layers


@pytest.mark.parametrize(
    "options", [{"padding": 1, "stride": 2}, {"dilation": 2}, {"padding": (0, 2), "stride": (2, 1)}]
)
def test_a_convolution_is_its_weights_times_its_columns(options):
    layer = nn.Conv2d(3, 5, 3, bias=False, **options)
    x = normal(4, 3, 9, 8).float()
    outputs = layer(x)
    found = layer.weight.flatten(1) @ input_columns(layer, x)
    assert torch.allclose(found, outputs.transpose(0, 1).flatten(1), atol=1e-5)


def test_grams_are_those_of_all_inputs_of_a_layer(tiny_world):
    net, shard = tiny_world["net"], tiny_world["shards"][0]
    layers, pictures = input_layers(net), shard.pictures(shard.index)
    grams = input_grams(net, layers, pictures.split(5))
    assert set(grams) == {"body.stage1.0.weight", "body.stage2.0.weight", "body.stage3.0.weight", "head.weight"}
    first, features = input_columns(net.body.stage1[0], pictures), net.eval().features(pictures)
    assert torch.allclose(grams["body.stage1.0.weight"], (first @ first.T).double(), rtol=1e-4)
    assert torch.allclose(grams["head.weight"], (features.T @ features).double().detach(), rtol=1e-4)


def test_layers_that_are_no_plain_product_are_left_out():
    net = nn.Sequential(nn.Conv2d(4, 4, 3, groups=2), nn.Conv2d(4, 4, 3, padding="same"), nn.Linear(4, 2))
    assert set(input_layers(net)) == {"2.weight"}


def test_a_projected_update_moves_no_output_of_an_old_input():
    layer, x = nn.Conv2d(3, 5, 3, bias=False), normal(1, 3, 5, 5).float()  # nine patches, of 27 dimensions
    columns = input_columns(layer, x).double()
    basis = extended_subspace(nothing(27), columns, energy=1.0)
    update = orthogonal_update(normal(5, 3, 3, 3, seed=4).float(), basis)
    before = layer(x).detach()
    with torch.no_grad():
        layer.weight += update
    assert basis.shape == (27, 9) and update.norm() > 5
    assert torch.allclose(layer(x), before, atol=1e-4)
    assert (layer(normal(1, 3, 5, 5, seed=6).float()) - before).abs().max() > 1


# ---- the method


def fresh(model):
    return FotState(model=model, subspace={}, notes={})


class Server:
    """A federation of the shards it is given, all asked in this process."""

    def __init__(self, shards, arch, method):
        self.shards, self.clients, self.arch, self.method = shards, range(len(shards)), arch, method
        self.task = shards[0].task

    def net(self, model):
        return self.arch.restore(model)

    def ask(self, clients, verb, payload):
        return {k: getattr(self.method, verb)(payload, self.shards[k], None, Rng(0).at(k))[0] for k in clients}


def two_tasks(world, domain):
    """Old task: eight pictures of one colour each, at two sites. New task: noise, new classes or a second domain."""
    colours = torch.tensor([[40, 90, 200], [220, 80, 30], [90, 90, 90], [10, 250, 120]], dtype=torch.uint8)
    flat = colours.repeat(2, 1).reshape(8, 3, 1, 1).expand(8, 3, 16, 16)
    noise = torch.randint(256, (16, 3, 16, 16), generator=torch.Generator().manual_seed(5)).to(torch.uint8)
    labels = torch.tensor([0, 1] * 4 + [0, 1] * 8)
    if not domain:
        labels[8:] += 2
    images = Images(torch.cat([flat, noise]), labels)
    tasks = [
        Task(0, (0, 1), 2, 0 if domain else None, torch.arange(8), torch.arange(8)),
        Task(1, (0, 1), 2, 1, torch.arange(8, 24), torch.arange(8, 24))
        if domain
        else Task(1, (2, 3), 4, None, torch.arange(8, 24), torch.arange(8, 24)),
    ]
    parts = [[torch.arange(5), torch.arange(5, 8)], [torch.arange(8, 16), torch.arange(16, 24)]]
    shard = world["shards"][0]
    return [[replace(shard, images=images, index=i, task=t) for i in p] for t, p in zip(tasks, parts, strict=True)]


def learned(world, method, domain):
    """The states after the old and after the new task, one round each, and the shards."""
    states, shards = [], two_tasks(world, domain)
    state = method.init(world["net"], Rng(0))
    for own in shards:
        server, rng = Server(own, world["arch"], method), Rng(1)
        state = method.begin_task(state, own[0].task, server, rng)
        payload = method.broadcast(state, 0, server, rng)
        uploads = {k: method.client_round(payload, shard, None, Rng(k))[0] for k, shard in enumerate(own)}
        state = method.end_task(method.server_round(state, uploads, 0, server, rng), own[0].task, server, rng)
        states.append(state)
    return states, shards


@pytest.mark.parametrize("domain", [False, True], ids=["classes", "domains"])
def test_old_pictures_get_the_same_answers_after_the_next_task(tiny_world, domain):
    """With all of the energy the subspace holds every old input. New weights move, and no old logit does."""
    method = FOT(train=TRAIN, energy=1.0)
    (old, new), shards = learned(tiny_world, method, domain)
    pictures = torch.cat([shard.pictures(shard.index) for shard in shards[0]])

    def logits(model):
        return tiny_world["arch"].restore(model).eval()(pictures)[:, :2]

    assert torch.allclose(logits(old.model), logits(new.model), atol=1e-4)
    weights = [name for name in old.model if name.endswith("0.weight")]
    assert len(weights) == 3 and max((new.model[n] - old.model[n]).norm() for n in weights) > 0.01
    assert ("head.weight" in old.subspace) == domain
    free, _ = learned(tiny_world, FOT(train=TRAIN, energy=1e-9, others="free"), domain)
    assert (logits(free[0].model) - logits(free[1].model)).abs().max() > 0.1  # nothing but the method keeps them


def test_what_no_projection_covers_is_held(tiny_world):
    (old, new), _ = learned(tiny_world, FOT(train=TRAIN, energy=0.5), False)
    for name, value in old.model.items():
        same = torch.equal(new.model[name][: len(value)] if value.ndim else new.model[name], value)
        assert same == (name not in old.subspace), name
    assert new.model["head.bias"][2:].abs().min() > 0  # new rows learn, bias included
    (_, free), _ = learned(tiny_world, FOT(train=TRAIN, energy=0.5, others="free"), False)
    assert not torch.equal(free.model["body.stage1.1.weight"], old.model["body.stage1.1.weight"])
    assert not torch.equal(free.model["body.stage1.1.running_mean"], old.model["body.stage1.1.running_mean"])


def test_the_update_is_the_projected_update_of_the_average(tiny_world):
    method = FOT(train=TRAIN, energy=0.7, others="free", local_ce="all")
    (old, new), shards = learned(tiny_world, method, False)
    plain = FedAvg(train=TRAIN)
    grown = method.begin_task(old, shards[1][0].task, None, Rng(1)).model
    theirs = {k: plain.client_round({"model": grown}, s, None, Rng(k))[0] for k, s in enumerate(shards[1])}
    average = plain.server_round(fresh(grown), theirs, 0, None, Rng(0)).model
    for name, basis in old.subspace.items():
        rows = (average[name] - grown[name]).flatten(1).double()
        wanted = grown[name].flatten(1) + (rows @ (torch.eye(len(basis)).double() - projector(basis))).float()
        assert torch.allclose(new.model[name].flatten(1), wanted, atol=1e-5), name
    assert torch.equal(new.model["head.weight"], average["head.weight"])


def test_in_the_first_task_it_is_fedavg_to_the_bit(tiny_world):
    payload, shards = {"model": weights_of(tiny_world["net"])}, tiny_world["shards"]
    ours, plain = FOT(train=TRAIN), FedAvg(train=TRAIN, local_ce="new")
    answers = [{k: m.client_round(payload, s, None, Rng(k))[0] for k, s in enumerate(shards)} for m in (ours, plain)]
    server = SimpleNamespace(task=tiny_world["task"])
    ends = [m.server_round(fresh(payload["model"]), a, 0, server, Rng(0)) for m, a in zip((ours, plain), answers, strict=True)]  # fmt: skip
    assert all(torch.equal(ends[0].model[key], ends[1].model[key]) for key in payload["model"])


def test_every_site_with_images_sends_one_sketch_a_layer(tiny_world):
    method = FOT(sketch_columns=20)
    shapes = {"body.stage1.0.weight": [27, 20], "body.stage2.0.weight": [36, 20], "body.stage3.0.weight": [72, 20]}
    payload = {"model": weights_of(tiny_world["net"]), "shapes": shapes}
    shard = tiny_world["shards"][0]
    upload, memory = method.sketch_inputs(payload, shard, None, Rng(0))
    assert {name: list(value.shape) for name, value in upload["sketches"].items()} == shapes and memory is None
    assert method.sketch_inputs(payload, replace(shard, index=shard.index[:0]), None, Rng(0)) == ({}, None)
    other, _ = method.sketch_inputs(payload, shard, None, Rng(1))
    assert not torch.equal(upload["sketches"]["body.stage1.0.weight"], other["sketches"]["body.stage1.0.weight"])


def test_subspaces_grow_with_the_tasks_and_a_larger_share():
    world, train = make_world(), Training(local_epochs=1, batch_size=8, lr=0.05)

    def share(energy):
        method, seen = FOT(train=train, energy=energy), []

        def keep(state):
            seen.append(state)
            return state

        drive(method, world, federation_of(method, world), keep)
        sizes = [{name: o.shape[1] for name, o in s.subspace.items()} for s in seen if s.subspace]
        assert all(a[name] <= b[name] for a, b in zip(sizes, sizes[1:], strict=False) for name in a)
        return seen[-1].notes["subspace_share"]

    assert 0 < share(0.6) < share(0.95) <= 1


def test_a_mechanism_is_refused_before_the_run():
    with pytest.raises(ConfigError) as caught:
        resolve("smoke", {"method": "fot", "privacy.mechanism": "dp-sgd", "privacy.noise_multiplier": 1.0})
    assert "fot" in str(caught.value).lower()


@pytest.mark.parametrize("wrong", [{"energy": 0}, {"energy": 1.1}, {"sketch_columns": 0}, {"others": "some"}])
def test_bad_hyperparameters_are_refused(wrong):
    with pytest.raises(ValidationError):
        FOT(**wrong)
