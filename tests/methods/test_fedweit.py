"""FedWeIT: each formula by hand, a site's step in its second task, a round of the server, what travels, and what a site keeps."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import rescene
from rescene.core.errors import ConfigError
from rescene.core.record import num_bytes
from rescene.core.rng import Rng
from rescene.data import Task
from rescene.functional.decomposed import composed, drift, from_bits, kept_outputs, mean_of_kept, scattered, to_bits
from rescene.methods.base import weights_of
from rescene.methods.fedweit import NOBODY, FedWeIT, FedWeitState, TaskMemory, TaskPart, dense, layer_weights
from rescene.methods.upload_schema import Misfit, Place, check_form
from rescene.nets import Arch
from rescene.testing.conformance import drive, federation_of, world_for
from rescene.training import Training

ONE_STEP = Training(local_epochs=1, batch_size=64, augment=False)
RATE = 0.01
WEIGHTS = {"sparsity_weight": 0.02, "mask_weight": 0.03, "drift_weight": 5.0, "decay": 0.04}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# mathematics


def test_weights_of_a_layer_by_hand():
    """Two outputs with two inputs: B * m + A + 2 K_1 - K_2."""
    base, mask = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0.5, 0.25])
    adaptive = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    received = [torch.eye(2), torch.ones(2, 2)]
    found = composed(base, mask, adaptive, torch.tensor([2.0, -1.0]), received)
    assert found.tolist() == [[0.5 + 2 - 1, 1 + 1 - 1], [0.75 - 1, 1 + 2 - 1]]
    assert composed(base, mask, adaptive, torch.zeros(0), []).tolist() == [[0.5, 2.0], [0.75, 1.0]]


def test_the_mask_of_a_convolution_is_one_number_for_each_output():
    base, mask = random(3, 2, 5, 5), torch.tensor([0.0, 1.0, 0.5])
    theta = composed(base, mask, torch.zeros_like(base), torch.zeros(0), [])
    assert torch.equal(theta, torch.stack([0 * base[0], base[1], base[2] / 2]))


def test_drift_is_that_of_the_change_of_base_and_adaptive_weights():
    """||dB * m + dA||^2 / 2, and nothing where A takes up what B has changed."""
    base, mask, adaptive = random(3, 4), torch.rand(3, generator=torch.Generator().manual_seed(1)), random(3, 4, seed=2)
    anchor, moved, added = base * mask[:, None] + adaptive, random(3, 4, seed=3), random(3, 4, seed=4)
    expected = (moved * mask[:, None] + added).square().sum() / 2
    assert drift(base + moved, mask, adaptive + added, anchor).item() == pytest.approx(expected.item(), rel=1e-5)
    assert drift(base + moved, mask, adaptive - moved * mask[:, None], anchor).item() == pytest.approx(0, abs=1e-9)


def test_the_outputs_with_the_least_mask_are_dropped():
    mask = torch.tensor([0.9, 0.1, 0.5, 0.2, 0.8, 0.3, 0.7, 0.4, 0.6, 0.05])
    assert kept_outputs(mask, 0.3).nonzero().flatten().tolist() == [0, 2, 4, 5, 6, 7, 8]
    assert kept_outputs(mask, 0.0).all() and kept_outputs(torch.tensor([0.5]), 0.99).all()


def test_rows_are_averaged_over_those_who_sent_them():
    before = torch.tensor([[9.0, 9.0]] * 3)
    kept = [torch.tensor([True, True, False]), torch.tensor([False, True, False])]
    rows = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[7.0, 8.0]])]
    assert mean_of_kept(before, kept, rows, [1, 3]).tolist() == [[1, 2], [(3 + 21) / 4, (4 + 24) / 4], [9, 9]]


@pytest.mark.parametrize("shape", [(1,), (8,), (3, 5), (4, 3, 3, 3)])
def test_bits_and_values_give_the_tensor_back(shape):
    value = random(*shape, seed=len(shape)).relu()
    bits = to_bits(value != 0)
    assert bits.dtype == torch.uint8 and len(bits) == -(-value.numel() // 8)
    assert torch.equal(from_bits(bits, shape), value != 0)
    assert torch.equal(scattered(from_bits(bits, shape), value[value != 0]), value)


# a site


def part_of(base, seed, attention=0, anchor=None):
    names = list(base)
    return TaskPart(
        mask={n: random(len(base[n]), seed=seed + i) for i, n in enumerate(names)},
        adaptive={n: 0.1 * random(*base[n].shape, seed=seed + 10 + i) for i, n in enumerate(names)},
        attention={n: random(attention, seed=seed + 20 + i) for i, n in enumerate(names)} if attention else {},
        anchor={n: random(*base[n].shape, seed=seed + 30 + i) for i, n in enumerate(names)} if anchor else {},
    )


def sent_of(base, seed, tag):
    values = {n: random(*v.shape, seed=seed + i).relu() for i, (n, v) in enumerate(base.items())}
    present = {n: to_bits(v != 0) for n, v in values.items()}
    return {"tag": tag, "present": present, "values": {n: v[v != 0] for n, v in values.items()}}


@pytest.fixture
def site(tiny_world):
    """A site in a round of its second task: one earlier task, two weights of others, one of its own among the received."""
    shard, arch = tiny_world["shards"][1], tiny_world["arch"]
    task = Task(1, (2, 3), 4, None, shard.index, shard.index)
    shard = replace(shard, images=replace(shard.images, labels=shard.images.labels + 2), task=task)
    net = arch.build(4, torch.Generator().manual_seed(3))
    model = weights_of(net)
    base = {name: model[name] for name in layer_weights(net)}
    others = {name: value for name, value in model.items() if name not in base}
    received = [sent_of(base, 40, 7), sent_of(base, 50, 99), sent_of(base, 60, 8)]
    current = part_of(base, 100, attention=3)
    current = replace(current, attention={n: v * torch.tensor([1.0, 0, 1]) for n, v in current.attention.items()})
    memory = TaskMemory(1, base, current, [part_of(base, 200, anchor=True)], received, [99, 5])
    return shard, memory, {"base": base, "others": others, "num_received": 3}


@pytest.mark.parametrize("old_adaptive", ["trained", "fixed"])
@pytest.mark.parametrize("local_ce", ["new", "all"])
def test_one_step_equals_the_formula(site, tiny_world, old_adaptive, local_ce):
    """Adam's first step goes by its rate against the sign of the gradient, which is that of the formula by hand."""
    shard, memory, payload = site
    method = FedWeIT(
        adam_lr=RATE, old_adaptive=old_adaptive, local_ce=local_ce, dropped_outputs=0, train=ONE_STEP, **WEIGHTS
    )
    upload, kept = method.client_round(payload, shard, memory, Rng(0))

    names, (old,) = list(payload["base"]), memory.earlier
    b, v, a, alpha, old_a = (
        {n: t.clone().requires_grad_() for n, t in held.items()}
        for held in (
            payload["base"],
            memory.current.mask,
            memory.current.adaptive,
            memory.current.attention,
            old.adaptive,
        )
    )
    theta, penalty, wide = {}, 0.0, lambda m, w: torch.sigmoid(m).view(-1, *[1] * (w.ndim - 1))
    for n in names:
        first, third = (dense(memory.received[i], payload["base"])[n] for i in (0, 2))  # the second is its own
        theta[n] = b[n] * wide(v[n], b[n]) + a[n] + alpha[n][0] * first + alpha[n][2] * third
        penalty = penalty + 0.02 * (a[n].abs().sum() + old_a[n].abs().sum()) + 0.03 * torch.sigmoid(v[n]).sum()
        penalty = penalty + 0.02 * (a[n].square().sum() + v[n].square().sum())
        penalty = penalty + 2.5 * (b[n] * wide(old.mask[n], b[n]) + old_a[n] - old.anchor[n]).square().sum()
    net = tiny_world["arch"].restore(payload["base"] | payload["others"]).train()
    logits = torch.func.functional_call(net, theta, (shard.pictures(shard.index),))
    start = 2 if local_ce == "new" else 0
    loss = F.cross_entropy(logits[:, start:], shard.labels - start) + penalty
    loss.backward()

    def moved(value):
        return (value - RATE * value.grad / (value.grad.abs() + 1e-8)).detach()

    assert upload["notes"]["local_loss"] == pytest.approx(loss.item(), rel=1e-5)
    for n in names:
        assert torch.allclose(upload["rows"][n], moved(b[n]), atol=1e-5), n
        assert torch.allclose(upload["mask"][n], moved(v[n]).sigmoid(), atol=1e-5), n
        assert torch.allclose(kept.current.adaptive[n], moved(a[n]), atol=1e-5), n
        assert torch.allclose(upload["attention"][n][[0, 2]], moved(alpha[n])[[0, 2]], atol=1e-5), n
        assert upload["attention"][n][1] == 0 and torch.equal(kept.base[n], upload["rows"][n])
        expected = moved(old_a[n]) if old_adaptive == "trained" else old.adaptive[n]
        assert torch.allclose(kept.earlier[0].adaptive[n], expected, atol=1e-5), n
        large = moved(a[n]) * (moved(a[n]).abs() > 0.02)
        assert torch.allclose(dense(upload, payload["base"])[n], large, atol=1e-5), n
    for name, value in net.named_parameters():
        if name not in names:
            expected = value if value.grad is None else moved(value)
            assert torch.allclose(upload["others"][name], expected, atol=1e-4), name
    assert upload["tag"] == 5 and upload["num_images"] == len(shard)


def test_in_the_first_task_the_base_decays_and_nothing_drifts(site):
    _, memory, payload = site
    method, base = FedWeIT(**WEIGHTS), payload["base"]
    found = [method._penalty(base, memory.current, earlier).item() for earlier in ([], memory.earlier)]
    (old,) = memory.earlier
    squares = 0.02 * sum(value.square().sum().item() for value in base.values())
    drifted = sum(drift(base[n], old.mask[n].sigmoid(), old.adaptive[n], old.anchor[n]).item() for n in base)
    sparse = 0.02 * sum(value.abs().sum().item() for value in old.adaptive.values())
    assert found[1] - found[0] == pytest.approx(5 * drifted + sparse - squares, rel=1e-4)


def test_a_new_task_closes_the_last_one_with_the_weights_that_it_had(site):
    shard, memory, payload = site
    later = replace(shard, task=replace(shard.task, index=2))
    method = FedWeIT(train=ONE_STEP)
    _, entered = method.receive_adaptives({"adaptives": memory.received[:1]}, later, memory, Rng(0))
    assert entered.task == 2 and entered.current is None and entered.base is memory.base
    assert [part.attention for part in entered.earlier] == [{}, {}] and entered.tags[:2] == [99, 5]
    for part, before in zip(entered.earlier, (memory.earlier[0], memory.current), strict=True):
        assert part.adaptive is before.adaptive
        for n, b in memory.base.items():
            expected = b * before.mask[n].sigmoid().view(-1, *[1] * (b.ndim - 1)) + before.adaptive[n]
            assert torch.allclose(part.anchor[n], expected)
    _, after = method.client_round(payload | {"num_received": 1}, later, entered, Rng(0))
    assert after.task == 2 and len(after.earlier) == 2 and len(after.tags) == 3


def test_a_task_starts_with_a_third_of_the_base_and_ignores_its_own_weights(site):
    _, memory, payload = site
    part = FedWeIT()._fresh_part(payload, replace(memory, current=None), Rng(0))
    for n, b in payload["base"].items():
        assert torch.allclose(3 * part.adaptive[n], b)
        assert part.attention[n][1] == 0 and part.attention[n][[0, 2]].abs().min() > 0
    drawn = torch.cat([value * len(value) ** 0.5 for value in part.mask.values()])
    assert 0.7 < drawn.std() < 1.3  # 28 draws of deviation 1
    nothing = FedWeIT()._fresh_part(payload, NOBODY, Rng(0))
    assert all(not value.any() and len(value) == 3 for value in nothing.attention.values())


def test_a_site_that_missed_the_start_of_a_task_learns_without_others(site):
    shard, memory, payload = site
    late = replace(memory, task=0)
    upload, kept = FedWeIT(train=ONE_STEP).client_round(payload, shard, late, Rng(0))
    assert not any(value.any() for value in upload["attention"].values())
    assert kept.task == 1 and len(kept.earlier) == 2
    check_form(FedWeIT().expects("client_round", payload, Place(shard.task, 16)), upload)


def test_a_site_without_images_says_so(site):
    shard, memory, payload = site
    empty = replace(shard, index=shard.index[:0])
    upload, kept = FedWeIT(train=ONE_STEP).client_round(payload, empty, memory, Rng(0))
    assert upload == {"num_images": 0} and kept is memory


def test_bytes_of_an_upload_are_those_of_its_parts(site):
    """70 % of the rows, one bit for each entry of A and four bytes for each that is not 0."""
    shard, memory, payload = site
    upload, _ = FedWeIT(train=ONE_STEP, sparsity_weight=0.1).client_round(payload, shard, memory, Rng(0))
    expected = 0
    for n, b in payload["base"].items():
        outputs = len(b)
        rows = outputs - int(0.3 * outputs)
        entries = int((dense(upload, payload["base"])[n] != 0).sum())
        assert 0 < entries < b.numel() and len(upload["rows"][n]) == rows
        expected += -(-outputs // 8) + 4 * rows * b[0].numel() + 4 * outputs  # which rows, the rows, m
        expected += -(-b.numel() // 8) + 4 * entries + 4 * 3  # which entries, A, alpha
    plain = {key: upload[key] for key in ("others", "tag", "num_images", "notes")}
    assert num_bytes(upload) == expected + num_bytes(plain)


@pytest.mark.parametrize("wrong", ["present", "kept", "mask", "others", "tag"])
def test_an_upload_whose_parts_do_not_fit_is_refused(site, wrong):
    shard, memory, payload = site
    method = FedWeIT(train=ONE_STEP)
    upload, _ = method.client_round(payload, shard, memory, Rng(0))
    form, name = method.expects("client_round", payload, Place(shard.task, 16)), next(iter(payload["base"]))
    check_form(form, upload)
    forged = {
        "present": upload["present"] | {name: upload["present"][name] * 0},
        "kept": upload["kept"] | {name: upload["kept"][name] * 0 + 255},
        "mask": upload["mask"] | {name: upload["mask"][name] + 1},
        "others": {},
        "tag": -1,
    }[wrong]
    with pytest.raises(Misfit):
        check_form(form, upload | {wrong: forged})


# the server


def test_a_round_of_the_server_by_hand():
    """Two sites with 1 and 3 images, one layer of two outputs with one input, one received weight."""
    layer, one = "body.w", torch.ones(1, dtype=torch.uint8)
    model = {layer: torch.zeros(2, 1), "body.b": torch.zeros(2), "head.weight": torch.zeros(1, 2)}
    sample = [{"tag": 1, "present": {layer: 2 * one}, "values": {layer: torch.tensor([10.0])}}]  # K = [0, 10]

    def upload(kept, row, mask, bits, values, alpha, other, num):
        others = {"body.b": torch.tensor(other), "head.weight": torch.zeros(1, 2)}
        sent = {"kept": kept * one, "rows": torch.tensor([[row]]), "mask": torch.tensor(mask), "present": bits * one}
        sent |= {"values": torch.tensor(values), "attention": torch.tensor([alpha])}
        return {key: {layer: value} for key, value in sent.items()} | {"others": others, "tag": num, "num_images": num}

    uploads = {
        0: upload(1, 4.0, [1.0, 0.0], 3, [8.0, 4.0], 1.0, [4.0, 0.0], 1),
        1: upload(1, 8.0, [0.6, 0.4], 1, [4.0], 0.2, [0.0, 4.0], 3),
        2: {"num_images": 0},
    }
    method = FedWeIT(dropped_outputs=0.5)
    state = FedWeitState(model, {layer: torch.tensor([[1.0], [2.0]])}, [], sample, {"4": sample[0]}, {})
    after = method.server_round(state, uploads, 0, None, Rng(0))
    assert after.base[layer].flatten().tolist() == [7.0, 2.0]  # (4 + 3 * 8) / 4; nobody sent the second
    # m = (0.7, 0.3), A = ((8 + 12) / 4, 4 / 4), alpha = 0.4
    assert after.model[layer].flatten().tolist() == pytest.approx([7 * 0.7 + 5, 2 * 0.3 + 1 + 0.4 * 10], rel=1e-6)
    assert after.model["body.b"].tolist() == [1.0, 3.0] and list(after.model) == list(model)
    assert set(after.latest) == {"4", "0", "1"} and set(after.latest["0"]) == {"tag", "present", "values"}
    uniform = (
        replace(state, sample=[]),
        {k: u | {"attention": {layer: torch.zeros(0)}} for k, u in uploads.items() if k < 2},
    )
    plain = FedWeIT(weighting="uniform", dropped_outputs=0.5).server_round(*uniform, 0, None, Rng(0))
    assert plain.base[layer].flatten().tolist() == [6.0, 2.0]
    assert plain.model[layer].flatten().tolist() == pytest.approx([6 * 0.8 + 6, 2 * 0.2 + 2], rel=1e-6)
    assert method.server_round(state, {2: uploads[2]}, 0, None, Rng(0)) is state


def test_sites_receive_a_sample_of_what_others_sent_in_earlier_tasks():
    method = FedWeIT(train=ONE_STEP, adam_lr=RATE, num_received=2)
    world = world_for(method)
    federation, asked = federation_of(method, world), []
    ask = federation.ask

    def watched(clients, verb, payload, late=False):
        asked.append((verb, list(clients), payload))
        return ask(clients, verb, payload, late)

    federation.ask = watched
    state = drive(method, world, federation)
    (start,) = [(clients, payload) for verb, clients, payload in asked if verb == "receive_adaptives"]
    assert start[0] == list(range(5)) and len(start[1]["adaptives"]) == 2
    rounds = [payload for verb, _, payload in asked if verb == "client_round"]
    assert [payload["num_received"] for payload in rounds] == [0, 0, 2, 2]
    first = state.known[:3]  # sites 2, 3 and 4 took part in the first task
    assert all(one["tag"] in [held["tag"] for held in first] for one in start[1]["adaptives"])
    tags = [tag for memory in federation.client_states.values() for tag in memory.tags]
    assert len(set(tags)) == len(tags) and {one["tag"] for one in state.known} <= set(tags)


def test_the_shared_model_is_the_model_of_a_lone_site():
    """With one site that sends all rows the shared model is that site's, up to entries of A that count as 0."""
    method = FedWeIT(train=ONE_STEP, adam_lr=RATE, dropped_outputs=0, sparsity_weight=0)
    world = world_for(method)
    federation = federation_of(method, world)
    federation.move(world.tasks[0], 0, [3])
    state = method.begin_task(method.init(world.arch.build(2), Rng(0)), world.tasks[0], federation, Rng(0))
    uploads = federation.ask([3], "client_round", method.broadcast(state, 0, federation, Rng(0)))
    after, memory = method.server_round(state, uploads, 0, federation, Rng(0)), federation.client_states[3]
    for n, b in memory.base.items():
        own = composed(b, memory.current.mask[n].sigmoid(), memory.current.adaptive[n], torch.zeros(0), [])
        assert torch.allclose(after.model[n], own, atol=1e-6)


# networks and runs


def test_a_network_without_layers_is_refused_before_the_run(tmp_path):
    with pytest.raises(ConfigError) as caught:
        rescene.run("smoke", method="fedweit", model="linear", out=tmp_path / "run")
    assert caught.value.code == "E584" and "mlp" in caught.value.fix and not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["convnet", "resnet18", "mlp", "vit-mini"])
def test_every_layer_below_the_head_has_a_base(name):
    net = Arch(name, 16, "batch", 8 if name != "resnet18" else None).build(2)
    wanted = [n for n, p in net.named_parameters() if p.ndim > 1 and not n.startswith("head.") and n.endswith("weight")]
    assert layer_weights(net) == wanted and len(wanted) > 0


def test_a_run_that_was_interrupted_has_the_same_bits(tmp_path):
    small = {"federation.num_rounds": 2, "federation.num_clients": 3, "tasks.limit": 2, "model.width": 4}

    class Stop(rescene.Observer):
        def end_round(self, run):
            if (run.task.index, run.round) == (1, 0):
                raise KeyboardInterrupt

    whole = rescene.run("smoke", method="fedweit", out=tmp_path / "whole", **small)
    with pytest.raises(KeyboardInterrupt):
        rescene.run("smoke", method="fedweit", out=tmp_path / "broken", callbacks=[Stop()], **small)
    again = rescene.run("smoke", method="fedweit", out=tmp_path / "broken", **small)
    assert again.matrix == whole.matrix
    files = [run.folder / "model" / "final.safetensors" for run in (whole, again)]
    assert files[0].read_bytes() == files[1].read_bytes()
