"""Fed-CPrompt: each formula by hand, a site's step, the server's averages, late answers, what travels, and which networks it takes."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import rescene
from rescene.core.errors import ConfigError
from rescene.core.rng import Rng
from rescene.data import Task
from rescene.functional.adapters import (
    contrastive_continual_loss,
    mixed_prompts,
    orthogonal_rows,
    prompt_weights,
)
from rescene.methods.base import Client, LateAnswer, weights_of
from rescene.methods.fedcprompt import FedCPrompt, annealed
from rescene.nets import Arch, PromptPool, attention_weights, check_fits, pool_of, pool_state, prompted_features
from rescene.nets.vit import Attention, prefixed
from rescene.sweeps.grid import grid
from rescene.testing.conformance import federation_of, world_for
from rescene.training import Training
from rescene.use import export

ONE_STEP = Training(local_epochs=1, batch_size=64, augment=False)
ARCH = Arch("vit-mini", 16, width=8)
SETTINGS = {"prompts_per_task": 3, "prompt_length": 4, "num_blocks": 2, "prompt_lr": 0.01}
PARTS = ("prompts.keys", "prompts.attention", "prompts.values")


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pool(num, seed=0, blocks=2):
    shapes = ((blocks, num, 8), (blocks, num, 8), (blocks, num, 4, 8))
    return PromptPool(*(random(*shape, seed=seed + i) for i, shape in enumerate(shapes)))


# mathematics


def test_the_weight_of_a_prompt_is_a_cosine_of_what_its_attention_lets_through():
    q, a, k = random(3, 5), random(2, 4, 5, seed=1), random(2, 4, 5, seed=2)
    found = prompt_weights(q, a, k)
    assert found.shape == (2, 3, 4)
    for block in range(2):
        for n in range(3):
            for m in range(4):
                attended = q[n] * a[block, m].exp() / a[block, m].exp().sum()
                expected = attended @ k[block, m] / (attended.norm() * k[block, m].norm())
                assert found[block, n, m].item() == pytest.approx(expected.item(), abs=1e-6)


def test_an_image_without_features_has_no_prompt_and_a_finite_gradient():
    q = torch.zeros(1, 3, requires_grad=True)
    weights = prompt_weights(q, random(2, 3), random(2, 3, seed=1))
    weights.sum().backward()
    assert not weights.any() and bool(q.grad.isfinite().all())


def test_prompts_are_added_up_by_their_weights():
    w, p = random(2, 3, 4), random(2, 4, 6, 5, seed=1)
    expected = sum(w[:, :, m, None, None] * p[:, m].unsqueeze(1) for m in range(4))
    assert torch.allclose(mixed_prompts(w, p), expected, atol=1e-6)


@pytest.mark.parametrize(("num", "size"), [(3, 7), (7, 3)])
def test_new_rows_are_orthogonal_as_far_as_there_is_room(num, size):
    rows = orthogonal_rows(num, size, torch.Generator().manual_seed(0))
    product = rows @ rows.T if num <= size else rows.T @ rows
    assert torch.allclose(product, torch.eye(min(num, size)), atol=1e-5)


def test_the_contrastive_loss_pulls_to_the_received_and_pushes_from_the_earlier_features():
    z, received, earlier = (random(3, 4, seed=i).requires_grad_(i == 0) for i in range(3))
    near, far = (sum((z - other)[i].norm().item() ** 2 for i in range(3)) for other in (received, earlier))
    loss = contrastive_continual_loss(z, received, earlier, 2.0, 0.5, 0.25)
    assert loss.item() == pytest.approx(2 * near - 0.5 * far + 0.25, rel=1e-5) and loss.item() > 0
    slope = torch.autograd.grad(loss, z)[0]
    assert torch.allclose(slope, (4 * (z - received) - (z - earlier)).detach(), atol=1e-5)
    assert contrastive_continual_loss(z, received, None, 2.0, 0.5, 0.25).item() == pytest.approx(2 * near, rel=1e-5)
    assert contrastive_continual_loss(z, received, earlier, 0.0, 1.0, 0.25).item() == 0.0


def test_rates_fall_along_a_cosine_within_a_round():
    assert [annealed(2.0, epoch, 5) for epoch in range(5)] == pytest.approx(
        [2 * math.cos(99 * math.pi * epoch / (200 * 4)) for epoch in range(5)]
    )


# networks with prompts


def attended_by_hand(layer, x, keys, values):
    """Tokens [m, d] of one image: softmax(q [K_prompt; K]^T / sqrt(size)) [V_prompt; V] in each head."""
    q, k, v = (x @ w.T + b for w, b in zip(layer.qkv.weight.chunk(3), layer.qkv.bias.chunk(3), strict=True))
    k, v, size = torch.cat([keys, k]), torch.cat([values, v]), x.shape[1] // layer.num_heads
    heads = [slice(h * size, (h + 1) * size) for h in range(layer.num_heads)]
    mixed = [(q[:, h] @ k[:, h].T / math.sqrt(size)).softmax(dim=1) @ v[:, h] for h in heads]
    return layer.out(torch.cat(mixed, dim=1))


def test_prompts_are_keys_and_values_in_front_of_those_of_the_tokens():
    torch.manual_seed(0)
    body = nn.Sequential(Attention(6, 2), Attention(6, 3))
    x, prompts = random(3, 5, 6), random(1, 3, 4, 6, seed=1)  # the first layer alone sees prompts
    plain = body(x)
    with prefixed(body, prompts):
        found = body(x)
    for n in range(3):
        first = attended_by_hand(body[0], x[n], prompts[0, n, :2], prompts[0, n, 2:])
        expected = attended_by_hand(body[1], first, torch.zeros(0, 6), torch.zeros(0, 6))
        assert torch.allclose(found[n], expected, atol=1e-6)
    assert torch.equal(body(x), plain), "afterwards the layers are what they were"


def test_a_model_with_prompts_looks_twice_and_comes_back_from_its_weights():
    net = ARCH.build(3, torch.Generator().manual_seed(0))
    state = weights_of(net) | pool_state(pool(5))
    check_fits(ARCH, state)
    restored, x = ARCH.restore(state).eval(), random(4, 3, 16, 16)
    assert list(restored.state_dict()) == [*net.state_dict(), *PARTS]
    expected = prompted_features(net.body, x, net.body(x), pool(5))
    assert torch.allclose(restored.features(x), expected, atol=1e-6)
    assert not torch.allclose(restored.features(x), net.features(x), atol=1e-2)
    assert pool_of(weights_of(net)) is None
    with pytest.raises(ConfigError, match="prompts.keys"):
        ARCH.restore({name: value for name, value in state.items() if name != "prompts.keys"})


# a site


@pytest.fixture
def site(tiny_world):
    """A site in its second task, with what it keeps and what it received."""
    shard = tiny_world["shards"][1]
    task = Task(1, (2, 3), 4, None, shard.index, shard.index)
    images = replace(shard.images, labels=shard.images.labels + 2)
    shard = replace(shard, images=images, task=task, net=ARCH.restore)
    model = weights_of(ARCH.build(4, torch.Generator().manual_seed(3))) | pool_state(pool(6))
    network = {name: value for name, value in model.items() if name.startswith("body.")}
    return shard, network, {"model": {n: v for n, v in model.items() if n not in network}, "task": 1}


def first_task(shard, payload):
    """The same images in a first task: no prompts of earlier ones."""
    shard = replace(shard, task=Task(0, (2, 3), 4, None, shard.index, shard.index))
    return shard, {"model": payload["model"] | {n: payload["model"][n][:, 3:] for n in PARTS}, "task": 0}


@pytest.mark.parametrize("task", [0, 1])
def test_one_step_equals_the_formula(site, task):
    """Adam's first step goes by its rate against the sign of the gradient, which is that of the formula by hand."""
    shard, network, payload = site
    shard, payload = first_task(shard, payload) if task == 0 else (shard, payload)
    upload, kept = FedCPrompt(**SETTINGS, push=2.0, train=ONE_STEP).client_round(payload, shard, network, Rng(0))

    received = payload["model"]
    learned = {name: value[:, -3:] if name in PARTS else value[2:] for name, value in received.items()}
    learned = {name: value.clone().requires_grad_() for name, value in learned.items()}
    body, x, y = ARCH.restore(network | received).body, shard.pictures(shard.index), shard.labels
    query = body(x).detach()
    pools = [PromptPool(*(torch.cat([received[n][:, :-3], learned[n]], dim=1) for n in PARTS)), pool_of(received)]
    pools += [PromptPool(*(received[n][:, :-3] for n in PARTS))] if task else []
    z, *others = (prompted_features(body, x, query, own) for own in pools)
    logits = z @ learned["head.weight"].T + learned["head.bias"]
    loss = (logits.logsumexp(1) - logits.gather(1, (y - 2)[:, None]).squeeze(1)).mean()
    contrast = 1000 * (z - others[0].detach()).square().sum()
    if task:
        contrast = F.relu(contrast - 2 * (z - others[1].detach()).square().sum() + 1)
    (loss + contrast).backward()

    assert set(upload) == {"model", "task", "num_images", "notes"} and kept is network
    assert upload["num_images"] == len(shard) and upload["task"] == task
    assert upload["notes"]["local_loss"] == pytest.approx((loss + contrast).item(), rel=1e-4)
    assert list(upload["model"]) == list(received)
    for name, value in learned.items():
        expected = (value - 0.01 * value.grad / (value.grad.abs() + 1e-8)).detach()
        sure = value.grad.abs() > 1e-6  # elsewhere the sign is a matter of rounding
        assert torch.allclose(upload["model"][name][sure], expected[sure], atol=1e-5), name
        assert sure.float().mean() > 0.5, name


def test_neither_the_network_nor_prompts_of_earlier_tasks_learn(site):
    shard, network, payload = site
    before = {name: value.clone() for name, value in (network | payload["model"]).items()}
    method = FedCPrompt(**SETTINGS, train=Training(local_epochs=3, batch_size=8))
    upload, _ = method.client_round(payload, shard, network, Rng(0))
    assert all(torch.equal(value, before[name]) for name, value in (network | payload["model"]).items())
    assert {name: tuple(value.shape) for name, value in upload["model"].items()} == {
        "head.weight": (2, 8),
        "head.bias": (2,),
        "prompts.keys": (2, 3, 8),
        "prompts.attention": (2, 3, 8),
        "prompts.values": (2, 3, 4, 8),
    }


def test_contrast_holds_a_site_near_what_it_received(site):
    """With more pull its features move less in the same steps."""
    shard, network, payload = site
    shard, payload = first_task(shard, payload)
    body, x = ARCH.restore(network | payload["model"]).body, shard.pictures(shard.index)
    moved = []
    for pull in (0.0, 1000.0):
        method = FedCPrompt(**SETTINGS, pull=pull, train=Training(local_epochs=5, batch_size=8, augment=False))
        upload, _ = method.client_round(payload, shard, network, Rng(0))
        z, received = (prompted_features(body, x, body(x), pool_of(m)) for m in (upload["model"], payload["model"]))
        moved.append((z - received).square().sum().item())
    assert moved[1] < 0.2 * moved[0]


@pytest.mark.parametrize("case", ["no images", "no network"])
def test_a_site_that_cannot_train_says_so(site, case):
    shard, network, payload = site
    shard = replace(shard, index=shard.index[:0]) if case == "no images" else shard
    network = None if case == "no network" else network
    upload, kept = FedCPrompt(**SETTINGS, train=ONE_STEP).client_round(payload, shard, network, Rng(0))
    assert upload == {"num_images": 0} and kept is network


# the server


def started(**settings):
    method = FedCPrompt(**SETTINGS | settings, train=ONE_STEP)
    world = world_for(method)
    federation = federation_of(method, world)
    state = method.init(world.arch.build(2, torch.Generator().manual_seed(0)), Rng(0))
    for task in world.tasks:
        federation.move(task, 0)
        state = method.begin_task(state, task, federation, Rng(task.index))
    return method, world, federation, state


def answer(seed, task, num_images):
    model = {"head.weight": random(2, 8, seed=seed + 5), "head.bias": random(2, seed=seed + 6)}
    return {"model": model | pool_state(pool(3, seed)), "task": task, "num_images": num_images}


@pytest.mark.parametrize("weighting", ["size", "uniform"])
def test_a_round_averages_what_the_task_learned_and_nothing_else(weighting):
    method, _, federation, state = started(weighting=weighting)
    uploads = {0: answer(10, 1, 1), 1: answer(20, 1, 3), 2: {"num_images": 0}}
    after = method.server_round(state, uploads, 0, federation, Rng(0)).model
    share = 0.75 if weighting == "size" else 0.5
    for name, value in state.model.items():
        if name.startswith("body."):
            assert torch.equal(after[name], value)
            continue
        new = (slice(None), slice(3, 6)) if name in PARTS else slice(2, 4)
        old = (slice(None), slice(0, 3)) if name in PARTS else slice(0, 2)
        expected = (1 - share) * uploads[0]["model"][name] + share * uploads[1]["model"][name]
        assert torch.allclose(after[name][new], expected, atol=1e-6), name
        assert torch.equal(after[name][old], value[old]), name
    nobody = method.server_round(state, {2: {"num_images": 0}}, 0, federation, Rng(0))
    assert all(torch.equal(nobody.model[name], value) for name, value in state.model.items())


def test_a_late_answer_changes_the_prompts_of_its_own_task_alone():
    """Asynchronous prompt learning: the change since the question, times its weight, goes to where the task's prompts are today."""
    method, _, federation, state = started()
    today = method.broadcast(state, 0, federation, Rng(0))
    sent = {name: value[:, :3] if name in PARTS else value[:2] + 1 for name, value in today["model"].items()}
    question = {"model": {name: value + 0.5 for name, value in sent.items()}, "task": 0}
    late = LateAnswer(answer(30, 0, 4), question, (0, 1), 3, 0.5)
    read = method.late(late, today)
    after = method.server_round(state, {0: read, 1: answer(20, 1, 3)}, 0, federation, Rng(0)).model
    for name, value in today["model"].items():
        old = (slice(None), slice(0, 3)) if name in PARTS else slice(0, 2)
        new = (slice(None), slice(3, 6)) if name in PARTS else slice(2, 4)
        change = late.upload["model"][name] - question["model"][name]
        assert torch.allclose(after[name][old], value[old] + 0.5 * change, atol=1e-5), name
        assert torch.allclose(after[name][new], answer(20, 1, 3)["model"][name]), name
    nothing = LateAnswer({"num_images": 0}, question, (0, 1), 3, 0.5)
    assert method.late(nothing, today) == {"num_images": 0}


def test_sites_get_the_network_once_and_small_messages_in_rounds():
    method, world, federation, _ = started()
    asked, absent, ask = [], [2], federation.ask

    def watched(clients, verb, payload, late=False):
        asked.append((verb, list(clients), payload))
        return ask([k for k in clients if k not in absent], verb, payload, late)

    federation.ask = watched
    state = method.init(world.arch.build(2, torch.Generator().manual_seed(0)), Rng(0))
    for task in world.tasks:
        federation.move(task, None)
        state = method.begin_task(state, task, federation, Rng(0))
        absent = []
    assert [(verb, clients) for verb, clients, _ in asked] == [
        ("receive_network", [0, 1, 2, 3, 4]),
        ("receive_network", [2]),
    ]
    assert all(name.startswith("body.") for name in asked[0][2]["network"]) and state.holders == [0, 1, 2, 3, 4]
    payload = method.broadcast(state, 0, federation, Rng(0))
    assert list(payload["model"]) == ["head.weight", "head.bias", *PARTS] and payload["task"] == 1
    assert payload["model"]["prompts.values"].shape == (2, 6, 4, 8)


def test_a_new_task_adds_prompts_and_changes_no_other():
    method, _, _, state = started()
    values, keys = state.model["prompts.values"], state.model["prompts.keys"]
    assert values.shape == (2, 6, 4, 8) and keys.shape == (2, 6, 8)
    for block in range(2):
        for rows in (keys[block, :3], keys[block, 3:], values[block, :3].flatten(1), values[block, 3:].flatten(1)):
            assert torch.allclose(rows @ rows.T, torch.eye(3), atol=1e-5)
    first = started()[3].model
    assert all(torch.equal(state.model[name], first[name]) for name in PARTS), "drawn from the addressed stream"
    again = method.init(ARCH.restore(state.model), Rng(0)).model
    assert again.keys() == state.model.keys(), "a model with prompts may be a start"
    with pytest.raises(ConfigError) as caught:
        FedCPrompt(**SETTINGS | {"prompt_length": 6}).init(ARCH.restore(state.model), Rng(0))
    assert caught.value.code == "E587" and "method.prompt_length=4" in caught.value.fix


# networks


@pytest.mark.parametrize("name", ["convnet", "resnet18", "mlp", "linear"])
def test_a_network_without_attention_is_refused_before_the_run(name, tmp_path):
    with pytest.raises(ConfigError) as caught:
        rescene.run("smoke", method="fedcprompt", model=name, out=tmp_path / "run")
    assert caught.value.code == "E586" and "vit-mini" in caught.value.fix and not (tmp_path / "run").exists()


def test_more_blocks_than_the_network_has_are_refused():
    FedCPrompt(num_blocks=4).check_network(ARCH)
    with pytest.raises(ConfigError) as caught:
        FedCPrompt().check_network(ARCH)
    assert caught.value.code == "E587" and caught.value.fix == "method.num_blocks=4"


class OtherVit(nn.Module):
    """A transformer of the user's own, whose layers have timm's names. ``whole``: its attention is one module, as timm's is."""

    def __init__(self, whole=True, width=6):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(OtherBlock(width, whole), OtherBlock(width, whole))
        self.fc = nn.Linear(width, 4)

    def forward(self, x):
        return self.fc(self.blocks(self.patch_embed(x).flatten(2).transpose(1, 2)).mean(1))


class OtherAttention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x):
        return F.scaled_dot_product_attention(*self.qkv(x).chunk(3, dim=-1))


class OtherBlock(nn.Module):
    def __init__(self, width, whole):
        super().__init__()
        self.attn, self.whole = OtherAttention(width), whole

    def forward(self, x):
        return x + (self.attn(x) if self.whole else F.scaled_dot_product_attention(*self.attn.qkv(x).chunk(3, -1)))


SMALL = {"federation.num_rounds": 1, "federation.num_clients": 2, "tasks.limit": 2, "method.num_blocks": 2}


def test_it_runs_with_a_transformer_of_the_users_own(tmp_path):
    found = rescene.run("smoke", method="fedcprompt", model=OtherVit, out=tmp_path / "run", **SMALL)
    assert found.values["events_summary"]["client_failures"] == 0 and len(found.matrix) == 2


def test_a_transformer_that_calls_its_layers_another_way_is_refused(tmp_path):
    with pytest.raises(ConfigError) as caught:
        rescene.run("smoke", method="fedcprompt", model=lambda: OtherVit(whole=False), out=tmp_path / "run", **SMALL)
    assert caught.value.code == "E586" and "in front of its tokens" in caught.value.why


def test_the_network_of_a_run_stays_and_its_model_can_be_used(tmp_path):
    small = {"federation.num_rounds": 1, "tasks.limit": 2, "model.name": "vit-mini", "model.width": 8}
    first = rescene.run("smoke", method="fedavg", out=tmp_path / "first", **small)
    file = first.folder / "model" / "final.safetensors"
    again = rescene.run("smoke", method="fedcprompt", out=tmp_path / "again", **small, **{"model.init": str(file)})
    one, other = (load_file(run.folder / "model" / "final.safetensors") for run in (first, again))
    assert all(torch.equal(value, other[name]) for name, value in one.items() if name.startswith("body."))
    assert set(other) - set(one) == set(PARTS) and attention_weights(one)
    # each is compared with the model
    assert len(export(again.folder, ["safetensors", "pt2"], tmp_path / "exported")) == 2


def test_a_sweep_over_all_methods_leaves_out_what_cannot_use_the_network(tmp_path):
    with pytest.warns(match="W580"):
        cells = grid("smoke", ["method=all"], "0", tmp_path)
    assert not any("method=fedcprompt" in cell.overrides for cell in cells)


def test_a_site_learns_two_colours():
    """From the features of a random transformer, with the images of both classes in one place."""
    method, world, federation, _ = started()
    method = FedCPrompt(**SETTINGS, pull=0.1, train=Training(local_epochs=30, batch_size=16, augment=False))
    state = method.init(world.arch.build(2, torch.Generator().manual_seed(0)), Rng(0))
    federation.move(world.tasks[0], 0)
    state = method.begin_task(state, world.tasks[0], federation, Rng(0))
    both = Client(world.dataset.train, torch.arange(48), world.tasks[0], world.dataset.transform, world.arch.restore)
    network = {name: value for name, value in state.model.items() if name.startswith("body.")}
    upload, _ = method.client_round(method.broadcast(state, 0, federation, Rng(0)), both, network, Rng(0))
    after = method.server_round(state, {0: upload}, 0, federation, Rng(0)).model

    def right(model):
        return (world.arch.restore(model).eval()(both.pictures(both.index)).argmax(1) == both.labels).float().mean()

    assert right(state.model) < 0.6 and right(after) > 0.9
