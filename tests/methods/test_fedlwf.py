"""FedLwF: one step by hand, who gets the teacher and when, and what it equals when the teacher has no say."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from pydantic import ValidationError
from safetensors.torch import load_file
from second_tasks import second_task

import rescene
from rescene.methods.base import weights_of
from rescene.methods.fedavg import FedAvg
from rescene.methods.fedlwf import FedLwF
from rescene.nets import grow_head
from rescene.training import Training

ONE_STEP = Training(local_epochs=1, batch_size=64, lr=0.1, weight_decay=0.01, augment=False)


def models(world):
    """The teacher of two classes, and a model of four that has moved away from it."""
    teacher = weights_of(world["net"])
    grown = grow_head(teacher, 4, torch.Generator().manual_seed(2))
    noise = torch.Generator().manual_seed(3)
    moved = {
        k: v + 0.1 * torch.randn(v.shape, generator=noise) if v.dtype == torch.float32 else v for k, v in grown.items()
    }
    return teacher, moved | {k: v for k, v in grown.items() if "running" in k}


def differences(a, b):
    return max((a[key] - b[key]).abs().max().item() for key in a if a[key].is_floating_point())


@pytest.mark.parametrize("local_ce, first", [("new", 2), ("all", 0)])
def test_one_step_equals_the_formula(tiny_world, local_ce, first):
    """theta - lr (g + wd theta), g the gradient of CE over the slice + 3 KD at T = 2, written out with log-softmaxes."""
    shard, (teacher, model) = second_task(tiny_world)[1], models(tiny_world)
    method = FedLwF(train=ONE_STEP, local_ce=local_ce)
    upload, _ = method.client_round({"model": model}, shard, {"teacher": teacher}, tiny_world["rng"])

    net, old = tiny_world["arch"].restore(model).train(), tiny_world["arch"].restore(teacher).eval()
    x, y = shard.pictures(shard.index), shard.labels
    logits = net(x)
    new = logits[:, first:].log_softmax(dim=1)
    ce = -new[torch.arange(len(y)), y - first].mean()
    kd = -((old(x) / 2).softmax(1).detach() * (logits[:, :2] / 2).log_softmax(1)).sum(1).mean()
    (ce + 3 * kd).backward()
    expected = {n: p.detach() - 0.1 * (p.grad + 0.01 * p.detach()) for n, p in net.named_parameters()}
    assert differences(expected, upload["model"]) < 1e-6
    assert upload["num_images"] == len(shard)


def test_teacher_sees_the_students_augmented_images_in_eval_mode(tiny_world):
    shard, (teacher, model) = second_task(tiny_world)[0], models(tiny_world)
    seen = {2: [], 4: []}

    def watched(weights):
        net = tiny_world["arch"].restore(weights)
        outputs = len(weights["head.weight"])
        net.register_forward_pre_hook(lambda net, args: seen[outputs].append((args[0].clone(), net.training)))
        return net

    before = {key: value.clone() for key, value in teacher.items()}
    method = FedLwF(train=Training(local_epochs=2, batch_size=6))
    _, state = method.client_round(
        {"model": model}, replace(shard, net=watched), {"teacher": teacher}, tiny_world["rng"]
    )
    assert len(seen[2]) == len(seen[4]) == 2 * 2  # two epochs of two batches, one look of the teacher at each
    for (x, training), (x_old, training_old) in zip(seen[4], seen[2], strict=True):
        assert torch.equal(x, x_old) and training and not training_old
    assert all(torch.equal(before[key], state["teacher"][key]) for key in before)


@pytest.mark.parametrize("state", [None, "teacher"])
def test_without_a_teacher_or_without_weight_a_client_does_what_fedavg_does(tiny_world, state):
    shard, (teacher, model) = second_task(tiny_world)[1], models(tiny_world)
    client_state = {"teacher": teacher} if state else None
    train = Training(local_epochs=2, batch_size=8)
    weight = 0.0 if state else 3.0
    ours, kept = FedLwF(train=train, kd_weight=weight).client_round(
        {"model": model}, shard, client_state, tiny_world["rng"]
    )
    plain, _ = FedAvg(train=train, local_ce="new").client_round({"model": model}, shard, None, tiny_world["rng"])
    assert all(torch.equal(ours["model"][key], plain["model"][key]) for key in plain["model"])
    assert (kept is None) == (state is None)


@pytest.mark.parametrize(("reduction", "weight"), [("sum", 3), ("mean", 3 / 2)])
def test_domains_distil_all_outputs_and_train_on_all_labels(tiny_world, reduction, weight):
    shard, (teacher, _) = second_task(tiny_world, domain=1)[1], models(tiny_world)
    model = {key: value * 1.1 if value.is_floating_point() else value for key, value in teacher.items()}
    method = FedLwF(train=ONE_STEP, kd_reduction=reduction)
    upload, _ = method.client_round({"model": model}, shard, {"teacher": teacher}, tiny_world["rng"])
    net, old = tiny_world["arch"].restore(model).train(), tiny_world["arch"].restore(teacher).eval()
    x = shard.pictures(shard.index)
    logits = net(x)
    assert logits.shape[1] == 2
    kd = -((old(x) / 2).softmax(1).detach() * (logits / 2).log_softmax(1)).sum(1).mean()
    (F.cross_entropy(logits, shard.labels) + weight * kd).backward()
    expected = {n: p.detach() - 0.1 * (p.grad + 0.01 * p.detach()) for n, p in net.named_parameters()}
    assert differences(expected, upload["model"]) < 1e-6


def test_a_client_without_images_sends_nothing_and_one_image_is_enough(tiny_world):
    shard, (teacher, model) = second_task(tiny_world)[0], models(tiny_world)
    state = {"teacher": teacher}
    method = FedLwF(train=Training(local_epochs=1))
    upload, kept = method.client_round(
        {"model": model}, replace(shard, index=shard.index[:0]), state, tiny_world["rng"]
    )
    assert upload == {"num_images": 0} and kept is state
    upload, _ = method.client_round({"model": model}, replace(shard, index=shard.index[:1]), state, tiny_world["rng"])
    assert upload["num_images"] == 1 and all(v.isfinite().all() for v in upload["model"].values())


def test_the_teacher_goes_to_everybody_once_per_later_task_before_the_head_grows(tiny_world):
    asked = []

    class World:
        clients = range(3)
        participants = range(2)

        def ask(self, clients, verb, payload):
            asked.append((list(clients), verb, payload))
            return {}

    method, rng = FedLwF(), tiny_world["rng"]
    state = method.init(tiny_world["net"], rng)
    state = method.begin_task(state, tiny_world["task"], World(), rng)
    assert asked == []
    trained = state.model
    state = method.begin_task(state, second_task(tiny_world)[0].task, World(), rng)
    ((clients, verb, payload),) = asked
    assert clients == [0, 1, 2] and len(state.model["head.weight"]) == 4
    assert all(torch.equal(payload["teacher"][key], trained[key]) for key in trained)
    _, kept = getattr(method, verb)(payload, tiny_world["shards"][0], None, rng)
    assert kept["teacher"] is payload["teacher"]


def test_if_nobody_answers_the_model_stays(tiny_world):
    method = FedLwF()
    state = method.init(tiny_world["net"], tiny_world["rng"])
    assert method.server_round(state, {0: {"num_images": 0}}, 0, None, tiny_world["rng"]) is state


@pytest.mark.parametrize("wrong", [{"kd_weight": -1}, {"kd_temperature": 0}, {"local_ce": "old"}, {"kd_wieght": 1}])
def test_bad_hyperparameters_are_refused(wrong):
    with pytest.raises(ValidationError):
        FedLwF(**wrong)


@pytest.fixture
def domain_folder(tmp_path):
    """Two domains, dark and light, of the same two classes: <domain>/<class>/*.png."""
    random = np.random.default_rng(0)
    for domain, base in (("dark", 20), ("light", 150)):
        for c, name in enumerate(("ant", "bee")):
            folder = tmp_path / "pictures" / domain / name
            folder.mkdir(parents=True)
            for i in range(12):
                picture = random.integers(0, 30, (32, 32, 3)) + base + np.array([60 * c, 0, 60 - 60 * c])
                Image.fromarray(picture.astype("uint8")).save(folder / f"{i}.png")
    return tmp_path / "pictures"


def final_model(result):
    return load_file(result.folder / "model" / "final.safetensors")


def test_runs_and_at_weight_zero_ends_with_the_bits_of_fedavg(tmp_path, image_folder):
    data = {"data.path": str(image_folder)}
    usual = rescene.run("smoke", out=tmp_path / "usual", method="fedlwf", **data)
    zero = rescene.run("smoke", out=tmp_path / "zero", method="fedlwf", **data, **{"method.kd_weight": 0})
    plain = rescene.run("smoke", out=tmp_path / "plain", method="fedavg", **data, **{"method.local_ce": "new"})
    weights, same = final_model(plain), final_model(zero)
    assert all(torch.equal(weights[key], same[key]) for key in weights)
    assert differences(weights, final_model(usual)) > 1e-6
    # two tasks: the teacher went down once, to all 4 sites, beside the 2 tasks x 2 rounds x 2 models
    cost, less = usual.values["cost"]["measured"], plain.values["cost"]["measured"]
    teacher_bytes = sum(4 * v.numel() for k, v in weights.items() if "tracked" not in k) - 2 * (128 + 1) * 4
    counters = 8 * sum("tracked" in key for key in weights)
    assert cost["downlink_bytes"] - less["downlink_bytes"] == 4 * (teacher_bytes + counters)


def test_runs_on_domains(tmp_path, domain_folder):
    domains = {"data.path": str(domain_folder), "tasks.scenario": "domain", "tasks.per_task": None}
    result = rescene.run("smoke", out=tmp_path / "r", method="fedlwf", **domains)
    assert len(result.matrix) == 2 and 0 <= result.aa <= 100
