"""PILoRA: each formula by hand, a site's step, the server's averages, what travels, and which networks it takes."""

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import rescene
from rescene.core.errors import ConfigError
from rescene.core.rng import Rng
from rescene.data import Task
from rescene.functional.adapters import (
    change_of_output,
    changed_layer,
    nearest_prototype_head,
    overlap,
    prototype_distances,
    prototype_loss,
    prototype_weights,
)
from rescene.methods.base import weights_of
from rescene.methods.pilora import PILoRA, TaskStart, add_pair
from rescene.nets import Arch, attention_weights
from rescene.sweeps.grid import grid
from rescene.testing.conformance import drive, federation_of, world_for
from rescene.training import Training

ONE_STEP = Training(local_epochs=1, batch_size=64, augment=False)
ARCH = Arch("vit-mini", 16, width=8)
SETTINGS = {"rank": 2, "num_blocks": 2, "lora_lr": 0.01, "prototype_lr": 0.1}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# mathematics


def test_a_pair_changes_queries_and_values_and_no_keys():
    weight, a, b, x = random(12, 4), random(2, 3, 4, seed=1), random(2, 4, 3, seed=2), random(5, 4, seed=3)
    whole = x @ changed_layer(weight, [(a, b)]).T
    added = x @ weight.T + change_of_output(x, a, b)
    assert torch.allclose(whole, added, atol=1e-5)
    expected = torch.cat([weight[:4] + b[0] @ a[0], weight[4:8], weight[8:] + b[1] @ a[1]])
    assert torch.allclose(changed_layer(weight, [(a, b)]), expected)
    twice = changed_layer(changed_layer(weight, [(a, b)]), [(2 * a, b)])
    assert torch.allclose(changed_layer(weight, [(a, b), (2 * a, b)]), twice, atol=1e-6)


def test_the_overlap_is_the_sum_of_all_inner_products_of_rows():
    a, one, two = random(2, 3, 4), random(2, 3, 4, seed=1), random(2, 3, 4, seed=2)
    expected = sum(
        abs(float(old[kind, i] @ a[kind, j]))
        for old in (one, two)
        for kind in (0, 1)
        for i in range(3)
        for j in range(3)
    )
    assert overlap(a, [one, two]).item() == pytest.approx(expected, rel=1e-5)
    assert overlap(a, []).item() == 0.0
    rows = torch.linalg.qr(random(4, 4))[0]
    assert overlap(rows[:2], [rows[2:]]).item() == pytest.approx(0, abs=1e-5)


def test_distances_and_their_loss():
    f, m = torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[1.0, 0.0], [3.0, 2.0]])
    expected = torch.tensor([[math.sqrt(4 / 2), math.sqrt(4 / 2)], [math.sqrt(1 / 2), math.sqrt(13 / 2)]])
    distances = prototype_distances(f, m)
    assert torch.allclose(distances, expected)
    first = math.log(2)  # as near to both
    second = math.log1p(math.exp(expected[1, 1].item() - expected[1, 0].item()))
    own = (expected[0, 0] + expected[1, 1]).item() / 2
    found = prototype_loss(distances, torch.tensor([0, 1]), 0.5).item()
    assert found == pytest.approx((first + second) / 2 + 0.5 * own, rel=1e-6)


def test_a_feature_that_meets_its_prototype_has_a_finite_gradient():
    f = torch.ones(1, 3, requires_grad=True)
    prototype_loss(prototype_distances(f, torch.ones(2, 3)), torch.tensor([0]), 1.0).backward()
    assert bool(f.grad.isfinite().all())


def test_the_nearest_prototype_is_the_largest_output():
    f, m = random(50, 6), random(7, 6, seed=1)
    weight, bias = nearest_prototype_head(m)
    logits, squared = f @ weight.T + bias, torch.cdist(f, m).square() / 6
    assert torch.equal(logits.argmax(1), squared.argmin(1))
    assert torch.allclose(logits - f.square().sum(1, keepdim=True) / 6, -squared, atol=1e-5)


def test_prototypes_near_the_mean_features_count_more():
    """Distances 3, 5 and 9 to two means: 1/3, 1/5, 1/9 become 1, 0.4 and 0."""
    means, prototypes = torch.tensor([[0.0], [1.0]]), torch.tensor([[2.0], [3.0], [5.0]])
    near = [1 / 3, 1 / 5, 1 / 9]
    scores = torch.tensor([(value - 1 / 9) / (1 / 3 - 1 / 9) for value in near])
    assert scores.tolist() == pytest.approx([1, 0.4, 0], abs=1e-6)
    assert torch.allclose(prototype_weights(prototypes, means, 0.2), (scores / 0.2).softmax(0))


@pytest.mark.parametrize("means", [torch.zeros(0, 2), torch.zeros(3, 2)], ids=["no site has the class", "as far away"])
def test_prototypes_count_the_same_where_nothing_tells_them_apart(means):
    assert prototype_weights(torch.eye(2), means, 0.2).tolist() == [0.5, 0.5]
    assert prototype_weights(torch.ones(1, 2), means, 0.2).tolist() == [1.0]


# a site


def pair_of(seed=0):
    return {"a": random(2, 2, 2, 8, seed=seed), "b": 0.3 * random(2, 2, 8, 2, seed=seed + 1)}


@pytest.fixture
def site(tiny_world):
    """A site in its second task, with what it received."""
    shard = tiny_world["shards"][1]
    task = Task(1, (2, 3), 4, None, shard.index, shard.index)
    images = replace(shard.images, labels=shard.images.labels + 2)
    shard = replace(shard, images=images, task=task, net=ARCH.restore)
    model = weights_of(ARCH.build(4, torch.Generator().manual_seed(3)))
    memory = TaskStart(model, [pair_of(7)["a"]], 1)
    return shard, memory, {"pair": pair_of(), "prototypes": random(4, 8, seed=5), "rate": 0.5}


@pytest.mark.parametrize("domain", [None, 1])
def test_one_step_equals_the_formula(site, domain):
    """Adam's first step goes by its rate against the sign of the gradient, which is that of the formula by hand."""
    shard, memory, payload = site
    if domain is not None:  # all four classes are of the task, and all prototypes learn
        shard = replace(shard, task=replace(shard.task, classes=(0, 1, 2, 3), domain=domain))
    method = PILoRA(**SETTINGS, compact_weight=0.3, overlap_weight=0.2, sparsity_weight=0.1, train=ONE_STEP)
    upload, kept = method.client_round(payload, shard, memory, Rng(0))

    pair = {key: value.clone().requires_grad_() for key, value in payload["pair"].items()}
    m = payload["prototypes"].clone().requires_grad_()
    changed = {
        name: changed_layer(memory.model[name], [(pair["a"][i], pair["b"][i])])
        for i, name in enumerate(attention_weights(memory.model)[:2])
    }
    net, x, y = ARCH.restore(memory.model), shard.pictures(shard.index), shard.labels
    features = torch.func.functional_call(net.body, {k.removeprefix("body."): v for k, v in changed.items()}, (x,))
    d = ((features.unsqueeze(1) - m).square().mean(2)).sqrt()
    loss = (d.gather(1, y[:, None]).squeeze(1) + torch.logsumexp(-d, 1)).mean() + 0.3 * d.gather(1, y[:, None]).mean()
    loss = loss + 0.1 * pair["a"].abs().sum()
    for kind in range(2):
        for block in range(2):
            loss = loss + 0.2 * (memory.earlier[0][block, kind] @ pair["a"][block, kind].T).abs().sum()
    loss.backward()

    def moved(value, rate):
        gradient = value.grad + 1e-5 * value  # its decay
        return (value - rate * gradient / (gradient.abs() + 1e-8)).detach()

    for key, value in pair.items():
        assert torch.allclose(upload["pair"][key], moved(value, 0.005), atol=1e-5), key
    classes = list(shard.task.classes)
    assert torch.allclose(upload["prototypes"], moved(m, 0.05)[classes], atol=1e-5)
    assert upload["notes"]["local_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert upload["labels"].tolist() == y.unique().tolist()
    expected = torch.stack([features[y == c].mean(0) for c in upload["labels"]])
    assert torch.allclose(upload["means"], expected, atol=1e-5) and kept is memory


def test_the_network_itself_does_not_learn_and_old_prototypes_stay(site):
    shard, memory, payload = site
    before = {key: value.clone() for key, value in memory.model.items()}
    method = PILoRA(**SETTINGS, train=Training(local_epochs=3, batch_size=8))
    upload, _ = method.client_round(payload, shard, memory, Rng(0))
    assert all(torch.equal(memory.model[key], value) for key, value in before.items())
    assert upload["prototypes"].shape == (2, 8) and set(upload) == {
        *("pair", "prototypes", "labels", "means", "num_images", "notes")
    }


@pytest.mark.parametrize("case", ["no images", "no network", "the network of another task"])
def test_a_site_that_cannot_train_says_so(site, case):
    shard, memory, payload = site
    shard = replace(shard, index=shard.index[:0]) if case == "no images" else shard
    memory = {"no network": None, "the network of another task": replace(memory, task=0)}.get(case, memory)
    upload, kept = PILoRA(**SETTINGS, train=ONE_STEP).client_round(payload, shard, memory, Rng(0))
    assert upload == {"num_images": 0} and kept is memory


# the server


def started(**settings):
    method = PILoRA(**SETTINGS | settings, train=ONE_STEP)
    world = world_for(method)
    federation = federation_of(method, world)
    state = method.init(world.arch.build(2, torch.Generator().manual_seed(0)), Rng(0))
    return method, world, federation, state


def test_a_round_averages_pairs_by_images_and_prototypes_by_nearness():
    method, world, federation, state = started()
    federation.move(world.tasks[0], 0)
    state = method.begin_task(state, world.tasks[0], federation, Rng(0))
    uploads = {
        k: {
            "pair": pair_of(10 + k),
            "prototypes": random(2, 8, seed=20 + k),
            "labels": torch.tensor([k]),
            "means": random(1, 8, seed=30 + k),
            "num_images": k + 1,
        }
        for k in range(2)
    } | {2: {"num_images": 0}}
    after = method.server_round(state, uploads, 0, federation, Rng(0))
    for key, value in after.pairs[0].items():
        assert torch.allclose(value, (uploads[0]["pair"][key] + 2 * uploads[1]["pair"][key]) / 3, atol=1e-6)
    for c in range(2):  # only site c has class c, and both learned a prototype of it
        learned = torch.stack([uploads[k]["prototypes"][c] for k in range(2)])
        far = torch.stack([(m - uploads[c]["means"][0]).norm() for m in learned])
        nearest = int(far.argmin())
        share = torch.tensor([5.0, 0.0]).softmax(0)
        expected = share[0] * learned[nearest] + share[1] * learned[1 - nearest]
        assert torch.allclose(after.prototypes[c], expected, atol=1e-5)
    name = attention_weights(state.model)[1]
    pair = after.pairs[0]
    assert torch.allclose(after.model[name], changed_layer(state.frozen[name], [(pair["a"][1], pair["b"][1])]))
    assert torch.equal(after.model["head.weight"], nearest_prototype_head(after.prototypes)[0])
    assert method.server_round(state, {2: {"num_images": 0}}, 0, federation, Rng(0)) is state


def test_a_new_task_changes_no_answer_about_old_classes():
    method, world, federation, state = started()
    state = drive(method, replace(world, tasks=world.tasks[:1], shards=world.shards[:1]), federation)
    federation.move(world.tasks[1], None)
    later = method.begin_task(state, world.tasks[1], federation, Rng(1))
    x = world.dataset.transform.normalise(world.dataset.train.pixels[:20].float())
    old, new = (world.arch.restore(one.model).eval()(x) for one in (state, later))
    assert torch.equal(new[:, :2], old) and new.shape == (20, 4)
    assert len(later.pairs) == 2 and not later.pairs[1]["b"].any()
    bound = 8**-0.5
    assert later.pairs[1]["a"].abs().max() <= bound and later.pairs[1]["a"].abs().max() > 0.8 * bound


@pytest.mark.parametrize("trains_with", ["all", "new"])
def test_sites_get_the_network_once_per_task_and_small_messages_in_rounds(trains_with):
    method, world, federation, _ = started(trains_with=trains_with)
    asked = []
    ask = federation.ask

    def watched(clients, verb, payload, late=False):
        asked.append((verb, list(clients), payload))
        return ask(clients, verb, payload, late)

    federation.ask = watched
    state = drive(method, world, federation)
    starts = [(clients, payload) for verb, clients, payload in asked if verb == "receive_network"]
    rounds = [payload for verb, _, payload in asked if verb == "client_round"]
    assert [clients for clients, _ in starts] == [list(range(5))] * 2 and len(rounds) == 4
    assert all(set(payload) == {"pair", "prototypes", "rate"} for payload in rounds)
    assert [len(payload["earlier"]) for _, payload in starts] == [0, 1]
    name = attention_weights(state.model)[0]
    first = state.pairs[0]["a"][0], state.pairs[0]["b"][0]
    expected = changed_layer(state.frozen[name], [first] if trains_with == "all" else [])
    assert torch.allclose(starts[1][1]["model"][name], expected)
    both = changed_layer(state.frozen[name], [(pair["a"][0], pair["b"][0]) for pair in state.pairs])
    assert torch.allclose(state.model[name], both)


def test_rates_fall_along_a_cosine_that_begins_a_round_late():
    method, _, federation, state = started()
    federation.num_rounds = 4
    state = replace(state, pairs=[pair_of()])
    rates = [method.broadcast(state, r, federation, Rng(0))["rate"] for r in range(4)]
    assert rates == pytest.approx([1, 1, (1 + math.cos(math.pi / 4)) / 2, 0.5])


# networks


@pytest.mark.parametrize("name", ["convnet", "resnet18", "mlp", "linear"])
def test_a_network_without_attention_is_refused_before_the_run(name, tmp_path):
    with pytest.raises(ConfigError) as caught:
        rescene.run("smoke", method="pilora", model=name, out=tmp_path / "run")
    assert caught.value.code == "E580" and "vit-mini" in caught.value.fix and not (tmp_path / "run").exists()


def test_more_blocks_than_the_network_has_are_refused():
    PILoRA(num_blocks=4).check_network(ARCH)
    with pytest.raises(ConfigError) as caught:
        PILoRA(num_blocks=5).check_network(ARCH)
    assert caught.value.code == "E581"


class OtherVit(nn.Module):
    """A transformer of the user's own, whose layers have timm's names."""

    def __init__(self, width=6):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(OtherBlock(width), OtherBlock(width))
        self.fc = nn.Linear(width, 4)

    def forward(self, x):
        return self.fc(self.blocks(self.patch_embed(x).flatten(2).transpose(1, 2)).mean(1))


class OtherBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attn = nn.Module()
        self.attn.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        return x + nn.functional.scaled_dot_product_attention(*self.attn.qkv(x).chunk(3, dim=-1))


def test_it_runs_with_a_transformer_of_the_users_own(tmp_path):
    small = {"federation.num_rounds": 1, "federation.num_clients": 2, "tasks.limit": 2, "method.num_blocks": 2}
    found = rescene.run("smoke", method="pilora", model=OtherVit, out=tmp_path / "run", **small)
    assert found.values["events_summary"]["client_failures"] == 0 and len(found.matrix) == 2


def test_from_the_weights_of_an_earlier_run_only_the_changed_layers_differ(tmp_path):
    small = {"federation.num_rounds": 1, "tasks.limit": 1, "model.name": "vit-mini", "model.width": 8}
    first = rescene.run("smoke", method="fedavg", out=tmp_path / "first", **small)
    file = first.folder / "model" / "final.safetensors"
    again = rescene.run("smoke", method="pilora", out=tmp_path / "again", **small, **{"model.init": str(file)})
    one, other = (load_file(run.folder / "model" / "final.safetensors") for run in (first, again))
    differing = {name for name in one if not torch.equal(one[name], other[name])}
    assert differing == {attention_weights(one)[0], "head.weight", "head.bias"}


def test_a_sweep_over_all_methods_leaves_out_what_cannot_use_the_network(tmp_path):
    with pytest.warns(match="W580"):
        cells = grid("smoke", ["method=all"], "0", tmp_path)
    assert not any("method=pilora" in cell.overrides for cell in cells)
    assert any(
        "method=pilora" in cell.overrides for cell in grid("smoke", ["method=all", "model=vit-mini"], "0", tmp_path)
    )


def test_the_change_reaches_the_output_of_the_layer():
    net, pair, x = ARCH.build(2).eval(), pair_of(), random(3, 3, 16, 16)
    before = net(x)
    add_pair(net, attention_weights(net.state_dict()), pair)
    assert not torch.allclose(net(x), before, atol=1e-3)
