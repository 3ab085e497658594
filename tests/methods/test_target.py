"""TARGET's clients and server: the past that is sent once, distillation beside learning, averaging, whole runs.

Synthesis itself has its own tests beside these.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from target_world import SIZE, TINY, TRANSFORM, same, seeded, small_net

import rescene
from rescene.core.errors import ConfigError
from rescene.core.record import num_bytes
from rescene.core.rng import Rng
from rescene.data import Images, Task
from rescene.methods.base import Client, ModelState, weights_of
from rescene.methods.fedavg import FedAvg
from rescene.methods.target import TARGET
from rescene.nets import Arch, grow_head, state_bytes
from rescene.training import Training


def make_shard(labels, *, task: Task, norm: str = "batch", seed: int = 0) -> Client:
    labels = torch.tensor(labels, dtype=torch.long)
    pixels = torch.randint(256, (len(labels), 3, SIZE, SIZE), generator=seeded(seed)).to(torch.uint8)
    return Client(
        Images(pixels, labels), torch.arange(len(labels)), task, TRANSFORM, Arch("convnet", SIZE, norm, 4).restore
    )


def make_task(index: int, classes: tuple[int, ...], num_seen: int, domain: int | None = None) -> Task:
    nothing = torch.zeros(0, dtype=torch.long)
    return Task(index, classes, num_seen, domain, nothing, nothing)


SECOND = make_task(1, (2, 3), 4)
PLAIN = Training(local_epochs=1, batch_size=4, lr=0.1, momentum=0.0, weight_decay=0.0, augment=False)


def past(num_images: int = 6, num_classes: int = 2, norm: str = "batch"):
    pixels = torch.randint(256, (num_images, 3, SIZE, SIZE), generator=seeded(8)).to(torch.uint8)
    return {"teacher": weights_of(small_net(num_classes, norm=norm, seed=5)), "pixels": pixels}


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_client_step_by_hand(norm):
    # One real batch, one synthetic batch, plain SGD. The bias of an old class feels KD only (cross-entropy is over the new
    # slice): -lr * 25 / T * mean(p_T(student) - p_T(teacher)) with T = 2 and no T^2; a new class feels CE only.
    # The student normalises by the batch, the teacher by what it remembers.
    payload, state = {"model": weights_of(small_net(4, norm=norm))}, past(norm=norm)
    shard = make_shard([2, 3, 3], task=SECOND, norm=norm)
    upload, kept = TARGET(train=PLAIN).client_round(payload, shard, state, Rng(0))
    net, teacher = shard.net(payload["model"]).train(), shard.net(state["teacher"]).eval()
    x = TRANSFORM.normalise(state["pixels"])
    gap = (net(x)[:, :2] / 2).softmax(1) - (teacher(x) / 2).softmax(1)
    wrong = net(shard.pictures(shard.index))[:, 2:].softmax(1) - F.one_hot(shard.labels - 2, 2)
    step = torch.cat([25 / 2 * gap.mean(0), wrong.mean(0)]).detach()
    moved = upload["model"]["head.bias"] - payload["model"]["head.bias"]
    assert step.abs().min() > 1e-3
    assert torch.allclose(moved, -0.1 * step, atol=1e-5)
    assert upload["num_images"] == 3
    assert kept is state
    squared, _ = TARGET(train=PLAIN, kd_t2=True).client_round(payload, shard, state, Rng(0))
    moved = squared["model"]["head.bias"] - payload["model"]["head.bias"]
    assert torch.allclose(moved[:2], -0.1 * 4 * step[:2], atol=1e-5)
    averaged, _ = TARGET(train=PLAIN, kd_reduction="mean").client_round(payload, shard, state, Rng(0))
    moved = averaged["model"]["head.bias"] - payload["model"]["head.bias"]
    assert torch.allclose(moved[:2], -0.1 * step[:2] / 2, atol=1e-5)  # over two old classes


def test_a_single_real_image_does_not_take_batch_statistics_from_the_synthetic_batch():
    # The image is learned with running statistics (BatchNorm needs two), the synthetic batch with its own.
    payload, state, shard = {"model": weights_of(small_net(4))}, past(), make_shard([3], task=SECOND)
    upload, _ = TARGET(train=PLAIN).client_round(payload, shard, state, Rng(0))
    x, net = TRANSFORM.normalise(state["pixels"]), shard.net(payload["model"])
    wrong = net.eval()(shard.pictures(shard.index))[0, 2:].softmax(0) - torch.tensor([0.0, 1.0])
    gap = (net.train()(x)[:, :2] / 2).softmax(1) - (shard.net(state["teacher"]).eval()(x) / 2).softmax(1)
    moved = upload["model"]["head.bias"] - payload["model"]["head.bias"]
    assert torch.allclose(moved, -0.1 * torch.cat([25 / 2 * gap.mean(0), wrong]).detach(), atol=1e-5)


def test_every_real_batch_meets_one_synthetic_batch(monkeypatch):
    sizes = []
    original = TARGET._reminder

    def counted(self, net, teacher, x):
        sizes.append(len(x))
        return original(self, net, teacher, x)

    monkeypatch.setattr(TARGET, "_reminder", counted)
    method = TARGET(train=PLAIN.model_copy(update={"local_epochs": 2}), synthetic_batch=5)
    shard = make_shard([2] * 5 + [3] * 5, task=SECOND)
    method.client_round({"model": weights_of(small_net(4))}, shard, past(num_images=9), Rng(0))
    # 10 real images in batches of 4 are 3 steps an epoch; 9 synthetic ones come as 5, 4, 5, 4, ...: none is exhausted
    assert sizes == [5, 4, 5, 4, 5, 4]


@pytest.mark.parametrize("history", [None, "past"])
def test_without_distillation_it_is_fedavg_on_the_new_classes(history):
    payload, shard = {"model": weights_of(small_net(4))}, make_shard([2, 3, 3, 2, 2], task=SECOND)
    train = Training(local_epochs=2, batch_size=2, lr=0.05)
    state = past() if history else None
    method = TARGET(train=train, kd_weight=0.0) if history else TARGET(train=train)  # joined late: nothing to distil
    mine, _ = method.client_round(payload, shard, state, Rng(3))
    theirs, _ = FedAvg(train=train, local_ce="new").client_round(payload, shard, None, Rng(3))
    assert same(mine["model"], theirs["model"])
    assert mine["num_images"] == theirs["num_images"]


def test_old_rows_of_the_head_feel_no_cross_entropy_unless_asked():
    payload, shard = {"model": weights_of(small_net(4))}, make_shard([2, 3, 3], task=SECOND)
    sliced, _ = TARGET(train=PLAIN).client_round(payload, shard, None, Rng(0))
    full, _ = TARGET(train=PLAIN, local_ce="all").client_round(payload, shard, None, Rng(0))
    before = payload["model"]["head.weight"]
    assert torch.equal(sliced["model"]["head.weight"][:2], before[:2])
    assert not torch.equal(full["model"]["head.weight"][:2], before[:2])
    assert not torch.equal(sliced["model"]["head.weight"][2:], before[2:])


def test_domain_tasks_distil_and_learn_all_outputs():
    task = make_task(1, (0, 1, 2), 3, domain=1)
    payload, shard = {"model": weights_of(small_net(3, norm="group"))}, make_shard([0, 2], task=task, norm="group")
    net = shard.net(payload["model"])
    wrong = net(shard.pictures(shard.index)).softmax(1) - F.one_hot(shard.labels, 3)
    upload, _ = TARGET(train=PLAIN).client_round(payload, shard, None, Rng(0))
    moved = upload["model"]["head.bias"] - payload["model"]["head.bias"]
    assert torch.allclose(moved, -0.1 * wrong.mean(0).detach(), atol=1e-6)
    state = past(num_classes=3, norm="group")
    x = TRANSFORM.normalise(state["pixels"])
    gap = (net(x) / 2).softmax(1) - (shard.net(state["teacher"])(x) / 2).softmax(1)
    upload, _ = TARGET(train=PLAIN).client_round(payload, shard, state, Rng(0))
    moved = upload["model"]["head.bias"] - payload["model"]["head.bias"]
    assert torch.allclose(moved, -0.1 * (wrong.mean(0) + 25 / 2 * gap.mean(0)).detach(), atol=1e-5)


@pytest.mark.parametrize("labels", [[], [2], [3, 3]])
def test_clients_with_no_image_one_image_or_one_class(labels):
    payload, state = {"model": weights_of(small_net(4))}, past()
    upload, kept = TARGET(train=PLAIN).client_round(payload, make_shard(labels, task=SECOND), state, Rng(0))
    assert upload["num_images"] == len(labels)
    assert ("model" in upload) == bool(labels)
    assert kept is state
    if labels:
        assert all(value.isfinite().all() for value in upload["model"].values())
        assert not same(upload["model"], payload["model"])


def test_receiving_the_past_keeps_all_or_an_own_random_part():
    payload, shard = past(num_images=40), make_shard([], task=SECOND)
    upload, state = TARGET().receive_past(payload, shard, {"teacher": {}, "pixels": torch.zeros(3)}, Rng(0))
    assert upload == {}
    assert state["pixels"] is payload["pixels"] and state["teacher"] is payload["teacher"]
    matched = TARGET(images_per_client=5)
    parts = [matched.receive_past(payload, shard, None, Rng(0).at(k))[1]["pixels"] for k in (0, 1, 0)]
    chosen = [[int((payload["pixels"] == image).flatten(1).all(1).nonzero()) for image in part] for part in parts]
    assert len(set(chosen[0])) == 5
    assert chosen[0] == chosen[2] != chosen[1]
    assert len(TARGET(images_per_client=99).receive_past(payload, shard, None, Rng(0))[1]["pixels"]) == 40


class Sites:
    """A federation of three sites in a few lines; remembers what was asked."""

    def __init__(self, method, task):
        self.method, self.task, self.asked, self.states = method, task, [], {}
        self.clients = self.participants = [0, 1, 2]
        self.num_rounds, self.transform, self.device = 1, TRANSFORM, torch.device("cpu")
        self.shard = make_shard([], task=task)

    def net(self, model):
        return self.shard.net(model)

    def ask(self, clients, verb, payload):
        self.asked.append((verb, list(clients), payload))
        answers = {k: getattr(self.method, verb)(payload, self.shard, self.states.get(k), Rng(k)) for k in clients}
        self.states |= {k: state for k, (_, state) in answers.items()}
        return {k: upload for k, (upload, _) in answers.items()}


def test_the_past_is_sent_once_per_task_to_everybody_and_before_the_head_grows():
    method, model = TARGET(**TINY), weights_of(small_net(2))
    sites = Sites(method, SECOND)
    state = method.begin_task(ModelState(model, {}), SECOND, sites, Rng(0))
    assert [(verb, clients) for verb, clients, _ in sites.asked] == [
        ("picture_size", [0, 1, 2]),
        ("receive_past", [0, 1, 2]),
    ]
    sent = sites.asked[1][2]
    assert same(sent["teacher"], model)
    assert sent["pixels"].dtype == torch.uint8 and sent["pixels"].shape == (18, 3, SIZE, SIZE)
    assert state.model["head.weight"].shape[0] == 4 and torch.equal(
        state.model["head.weight"][:2], model["head.weight"]
    )
    assert same(state.model, grow_head(model, 4, Rng(0).at("head").generator()))
    assert method.broadcast(state, 0, sites, Rng(0)) == {"model": state.model}


def test_the_first_task_has_no_past():
    method, task = TARGET(**TINY), make_task(0, (0, 1), 2)
    model = weights_of(small_net(2))
    sites = Sites(method, task)
    state = method.begin_task(ModelState(model, {}), task, sites, Rng(0))
    assert sites.asked == [] and same(state.model, model)


def test_server_averages_by_images_and_survives_silence():
    method, state = TARGET(), ModelState({"w": torch.tensor([9.0])}, {})
    uploads = {
        0: {"model": {"w": torch.tensor([0.0])}, "num_images": 3},
        1: {"num_images": 0},
        2: {"model": {"w": torch.tensor([4.0])}, "num_images": 1},
    }
    assert method.server_round(state, uploads, 0, SimpleNamespace(), Rng(0)).model["w"].item() == 1.0
    uniform = TARGET(weighting="uniform").server_round(state, uploads, 0, SimpleNamespace(), Rng(0))
    assert uniform.model["w"].item() == 2.0
    assert method.server_round(state, {}, 0, SimpleNamespace(), Rng(0)) is state
    assert method.server_round(state, {1: {"num_images": 0}}, 0, SimpleNamespace(), Rng(0)) is state


def test_bad_values_are_refused():
    for bad in ({"synthesis_batch": 1}, {"images_per_client": 1}, {"kd_weight": -1}, {"meta_update": "maml"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            TARGET(**bad)
    with pytest.raises(ConfigError, match="synthesis_rounds"):
        rescene.run("smoke", method="target", **{"method.synthesis_rounds": 0})


# --- whole runs

SMOKE = {f"method.{key}": value for key, value in TINY.items()} | {
    "data.image_size": SIZE,
    "model.width": 4,
    "federation.evaluate_every": 0,
}


@pytest.mark.parametrize(
    "changes", [{}, {"model.norm": "group", "method.images_per_client": 4, "method.meta_update": "reptile"}]
)
def test_a_whole_run(tmp_path, changes):
    result = rescene.run("smoke", out=tmp_path / "r", method="target", **SMOKE | changes)
    assert len(result.matrix) == 2 and 0 <= result.aa <= 100
    measured = result.values["cost"]["measured"]
    # four sites, two rounds of two sites, two tasks: 8 messages. Everything else that went down is the past, once.
    arch = Arch("convnet", SIZE, changes.get("model.norm", "batch"), 4)
    teacher = weights_of(arch.build(2))
    images = torch.zeros(18, 3, SIZE, SIZE, dtype=torch.uint8)
    extra = measured["downlink_bytes"] - 8 * measured["downlink_bytes_per_message"]
    assert extra == 4 * (num_bytes(teacher) + num_bytes(images))
    kept = changes.get("method.images_per_client", 18)
    remembered = num_bytes(teacher) + kept * 3 * SIZE * SIZE
    assert measured["client_state_bytes"] == remembered + state_bytes(weights_of(arch.build(4)))


def test_a_whole_run_on_domains(tmp_path):
    for domain, shade in (("day", 180), ("night", 40)):
        for label in range(2):
            folder = tmp_path / "images" / domain / f"kind{label}"
            folder.mkdir(parents=True)
            for i in range(12):
                level = torch.full((SIZE, SIZE, 3), shade + 20 * label + i, dtype=torch.uint8)
                Image.fromarray(level.numpy()).save(folder / f"{i}.png")
    where = {"data.path": str(tmp_path / "images"), "tasks.scenario": "domain", "tasks.per_task": None}
    result = rescene.run("smoke", out=tmp_path / "r", method="target", **SMOKE | where)
    assert len(result.matrix) == 2 and all(0 <= value <= 100 for value in result.matrix[1])
