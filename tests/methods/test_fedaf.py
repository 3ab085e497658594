"""FedAF: its two exchanges, its server, and FedDM as the corner where its weights vanish."""

import json
import math
from dataclasses import replace
from importlib import import_module

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from safetensors.torch import load_file

import rescene
from rescene.core.rng import Rng, seeded_generator
from rescene.methods import ModelState
from rescene.methods.base import weights_of
from rescene.methods.fedaf import FedAF
from rescene.training import Training

SMALL = {"federation.num_clients": 4, "federation.per_round": 2, "federation.num_rounds": 2, "tasks.limit": 2, "method.ipc": 3,
         "method.num_steps": 2, "method.real_batch": 16, "train.server_epochs": 2, "model.width": 8}  # fmt: skip


class World:
    """The server's view of a few shards, without an engine: every ``ask`` is remembered."""

    def __init__(self, world, method, missing=()):
        self.method, self.shards, self.missing = method, world["shards"], missing
        self.task, self.transform, self.net = world["task"], world["transform"], world["arch"].restore
        self.clients = self.participants = range(len(self.shards))
        self.num_rounds, self.device = 1, torch.device("cpu")
        self.states, self.asked = {}, []

    def ask(self, clients, verb, payload):
        self.asked.append((verb, payload))
        answers = {}
        for k in clients:
            if k not in self.missing:
                place = Rng(0).at(verb, k)
                answers[k], self.states[k] = getattr(self.method, verb)(
                    payload, self.shards[k], self.states.get(k), place
                )
        return answers

    def round(self, state):
        payload = self.method.broadcast(state, 0, self, Rng(0).at("broadcast"))
        uploads = self.ask(self.participants, "client_round", payload)
        return uploads, self.method.server_round(state, uploads, 0, self, Rng(0).at("round"))


def state_of(world):
    return ModelState(weights_of(world["net"]), {})


def moved_net(world, method, seed):
    """theta~ built here, tensor by tensor."""
    net = world["arch"].restore(weights_of(world["net"])).eval()
    noise = seeded_generator(seed)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(
                method.mixing * p + (1 - method.mixing) * p.std(correction=0) * torch.randn(p.shape, generator=noise)
            )
    return net


def changed(world, **fields):
    """The same world with another task or other shards."""
    shards = [replace(shard, task=fields.get("task", shard.task)) for shard in fields.get("shards", world["shards"])]
    return {**world, **fields, "shards": shards}


# the two exchanges


def test_first_exchange_sends_class_means_under_the_mixed_model(tiny_world):
    method, shard = FedAF(), tiny_world["shards"][1]  # 13 images of class 0, 3 of class 1
    payload = {"model": weights_of(tiny_world["net"]), "noise_seed": 5}
    upload, kept = method.class_logits(payload, shard, None, Rng(0))
    found = upload["class_logits"]
    with torch.no_grad():
        logits = moved_net(tiny_world, method, 5)(shard.pictures(shard.index))
    assert found["labels"].tolist() == [0, 1] and found["weights"].tolist() == [13, 3]
    assert torch.allclose(found["rows"], torch.stack([logits[:13].mean(dim=0), logits[13:].mean(dim=0)]), atol=1e-5)
    assert kept["noise_seed"] == 5 and kept["model"] is payload["model"]


def test_server_sends_the_average_over_owners_and_the_model_only_once(tiny_world):
    method = FedAF(ipc=2, num_steps=1, train=Training(server_epochs=1))
    world = World(tiny_world, method)
    uploads, _ = world.round(state_of(tiny_world))
    (first, opening), (second, payload) = world.asked
    assert (first, second) == ("class_logits", "client_round") and "model" in opening and "model" not in payload
    logits = moved_net(tiny_world, method, opening["noise_seed"])(
        torch.cat([s.pictures(s.index) for s in tiny_world["shards"]])
    )
    labels = torch.cat([s.labels for s in tiny_world["shards"]])
    # weighted by n_kc the average over owners is the mean over all images of the class
    expected = torch.stack([logits[labels == c].mean(dim=0) for c in (0, 1)])
    assert payload["labels"].tolist() == [0, 1] and torch.allclose(payload["class_logits"], expected, atol=1e-5)
    assert set(world.states.values()) == {None}  # forgotten after the round
    assert all({"images", "labels", "soft_labels", "notes"} == set(upload) for upload in uploads.values())


def test_distance_to_the_others_moves_the_pixels_by_its_gradient(tiny_world):
    """One step without clip: x(weight) - x(0) = -lr * weight * d SWD / dx, the term that must not be cut from autograd."""
    settings = {"ipc": 4, "num_steps": 1, "clip": None, "lgkm_weight": 0.0, "image_lr": 0.5}
    shard, target = tiny_world["shards"][0], torch.tensor([[0.3, -0.7]])  # class 0 only
    model = weights_of(tiny_world["net"])
    payload = {"noise_seed": 5, "labels": torch.tensor([0]), "class_logits": target}
    kept = {"model": model, "noise_seed": 5}
    with_term, _ = FedAF(cdc_weight=10.0, **settings).client_round(payload, shard, kept, Rng(3))
    without, _ = FedAF(cdc_weight=0.0, **settings).client_round({"model": model, "noise_seed": 5}, shard, None, Rng(3))
    chosen = torch.randperm(len(shard), generator=Rng(3).at("condense", 0).generator())[:4]
    x = shard.pictures(shard.index[chosen]).requires_grad_(True)
    net = moved_net(tiny_world, FedAF(), 5)
    (2 / math.pi * (net(x).mean(dim=0) - target[0]).norm()).backward()
    assert x.grad.abs().max() > 1e-4
    assert torch.allclose(with_term["images"] - without["images"], -0.5 * 10.0 * x.grad, atol=1e-6)


def test_first_exchange_alone_changes_nothing(tiny_world):
    # a vanishing weight takes the road of two exchanges, weight 0 that of one
    made = []
    for weight in (0.0, 1e-30):
        world = World(tiny_world, FedAF(ipc=3, num_steps=3, cdc_weight=weight, train=Training(server_epochs=1)))
        uploads, state = world.round(state_of(tiny_world))
        made.append((len(world.asked), torch.cat([u["images"] for u in uploads.values()]), state.model))
    assert [m[0] for m in made] == [1, 2] and torch.equal(made[0][1], made[1][1])
    assert all(torch.equal(made[0][2][key], made[1][2][key]) for key in made[0][2])


def test_noise_of_the_round_is_drawn_once_or_for_every_step(tiny_world):
    shard = tiny_world["shards"][0]
    payload = {"model": weights_of(tiny_world["net"]), "noise_seed": 5}

    def images(draw, num_steps):
        method = FedAF(ipc=3, num_steps=num_steps, cdc_weight=0.0, draw=draw)
        return method.client_round(payload, shard, None, Rng(0))[0]["images"]

    assert torch.allclose(images("round", 1), images("step", 1), atol=1e-6)  # the first draw is the same
    assert not torch.allclose(images("round", 3), images("step", 3), atol=1e-6)


def test_every_chunk_of_groups_is_measured_against_its_own_class(tiny_world, monkeypatch):
    method = FedAF(ipc=3, num_steps=2, cdc_weight=5.0, lgkm_weight=0.0, clip=None)
    kept = {"model": weights_of(tiny_world["net"]), "noise_seed": 9}
    payload = {"noise_seed": 9, "labels": torch.tensor([0, 1]), "class_logits": torch.tensor([[4.0, 0.0], [0.0, 4.0]])}

    def images():
        rngs = [Rng(0).at(k) for k in range(3)]
        answers = method.client_round_batched(payload, tiny_world["shards"], [kept] * 3, rngs)
        return torch.cat([upload["images"] for upload, _ in answers])

    whole = images()
    # chunks of 3, 3 + 1 and 3 images; the last one begins with class 1
    monkeypatch.setattr(import_module("rescene.training.condensation"), "CHUNK", {"cpu": 4})
    assert torch.allclose(images(), whole, atol=1e-5)


@pytest.mark.parametrize("draw", ["round", "step"])
def test_all_clients_at_once_agree_with_one_at_a_time(tiny_world, draw):
    method, shards = FedAF(ipc=3, num_steps=4, real_batch=5, draw=draw, cdc_weight=1.0), tiny_world["shards"]
    kept = {"model": weights_of(tiny_world["net"]), "noise_seed": 9}
    payload = {"noise_seed": 9, "labels": torch.tensor([0, 1]), "class_logits": torch.tensor([[1.0, 0.0], [0.0, 1.0]])}
    rngs = [Rng(0).at(k) for k in range(3)]
    together = method.client_round_batched(payload, shards, [kept] * 3, rngs)
    for (upload, state), shard, rng in zip(together, shards, rngs, strict=True):
        alone, _ = method.client_round(payload, shard, kept, rng)
        assert state is None and torch.equal(upload["labels"], alone["labels"])
        assert torch.allclose(upload["images"], alone["images"], atol=1e-5)
        assert torch.allclose(upload["soft_labels"]["rows"], alone["soft_labels"]["rows"], atol=1e-6)


@pytest.mark.parametrize("source", ["real", "condensed"])
def test_soft_labels_are_means_of_tempered_softmax_under_the_plain_model(tiny_world, source):
    shard, net = tiny_world["shards"][1], tiny_world["net"].eval()
    payload = {"model": weights_of(net), "noise_seed": 5}
    method = FedAF(ipc=2, num_steps=1, cdc_weight=0.0, soft_labels=source, temperature=3.0)
    upload, _ = method.client_round(payload, shard, None, Rng(0))
    images, labels = (
        (shard.pictures(shard.index), shard.labels) if source == "real" else (upload["images"], upload["labels"])
    )
    with torch.no_grad():
        soft = (net(images) / 3.0).softmax(dim=1)
    expected = torch.stack([soft[labels == c].mean(dim=0) for c in (0, 1)])
    assert torch.allclose(upload["soft_labels"]["rows"], expected, atol=1e-6)
    # min(2, 13) and min(2, 3)
    assert upload["soft_labels"]["weights"].tolist() == ([13, 3] if source == "real" else [2, 2])


def test_uniform_weights_do_not_tell_how_many_images_there_are(tiny_world):
    payload = {"model": weights_of(tiny_world["net"]), "noise_seed": 5}
    upload, _ = FedAF(weighting="uniform").class_logits(payload, tiny_world["shards"][1], None, Rng(0))
    assert upload["class_logits"]["weights"].tolist() == [1, 1]


# the server


def test_one_server_step_follows_ce_plus_knowledge_matching(tiny_world):
    """theta - lr * d/dtheta (CE + lambda * 1/2 sum_c [KL(R||T) + KL(T||R)]), computed here from the formula."""
    generator = torch.Generator().manual_seed(3)
    images, labels = torch.randn(6, 3, 16, 16, generator=generator), torch.tensor([0, 0, 0, 1, 1, 1])
    r = torch.tensor([[0.8, 0.2], [0.1, 0.9]])
    soft = [
        {"labels": torch.tensor([0, 1]), "weights": torch.tensor([1, 1]), "rows": r + shift} for shift in (0.05, -0.05)
    ]
    nothing = {
        "images": images[:0],
        "labels": labels[:0],
        "soft_labels": soft[1],
    }  # n = 1: soft labels but no surrogates
    uploads = {0: {"images": images, "labels": labels, "soft_labels": soft[0]}, 1: nothing}
    train = Training(server_epochs=1, lr=0.1, momentum=0, weight_decay=0, augment=False)
    method = FedAF(lgkm_weight=0.5, temperature=2.0, train=train)
    found = method.server_round(state_of(tiny_world), uploads, 0, World(tiny_world, method), Rng(0)).model
    net = tiny_world["arch"].restore(weights_of(tiny_world["net"])).train()
    logits = net(images)
    p = (logits / 2.0).softmax(dim=1)
    t = torch.stack([p[:3].mean(dim=0), p[3:].mean(dim=0)])
    both = F.kl_div(t.log(), r, reduction="sum") + F.kl_div(r.log(), t, reduction="sum")
    (F.cross_entropy(logits, labels) + 0.5 * 0.5 * both).backward()
    for name, value in net.named_parameters():
        assert torch.allclose(found[name], value.detach() - 0.1 * value.grad, atol=1e-6), name


def test_a_class_without_a_soft_label_is_left_out_of_the_matching(tiny_world):
    images, labels = torch.zeros(4, 3, 16, 16), torch.tensor([0, 0, 1, 1])
    rows = {"labels": torch.tensor([0]), "weights": torch.tensor([1]), "rows": torch.tensor([[0.5, 0.5]])}
    train = Training(server_epochs=1)
    method = FedAF(lgkm_weight=1.0, train=train)
    uploads = {0: {"images": images, "labels": labels, "soft_labels": rows}}
    state = method.server_round(state_of(tiny_world), uploads, 0, World(tiny_world, method), Rng(0))
    assert state.notes["server_loss"] < 5.0  # a made-up row of zeros would cost 1/2 log(1e12) = 14


def test_no_upload_leaves_the_model_alone(tiny_world):
    method, state = FedAF(), state_of(tiny_world)
    assert method.server_round(state, {}, 0, World(tiny_world, method), Rng(0)) is state
    empty = {"images": torch.zeros(0, 3, 16, 16), "labels": torch.zeros(0, dtype=torch.long)}
    assert method.server_round(state, {0: empty}, 0, World(tiny_world, method), Rng(0)) is state


def test_nobody_in_the_first_exchange_falls_back_to_one(tiny_world):
    world = World(tiny_world, FedAF(), missing=(0, 1, 2))
    assert "model" in world.method.broadcast(state_of(tiny_world), 0, world, Rng(0))


# edges


@pytest.mark.parametrize("size, expected", [(0, 0), (1, 1), (2, 2)])
def test_clients_with_next_to_nothing(tiny_world, size, expected):
    shards = [replace(tiny_world["shards"][0], index=tiny_world["shards"][0].index[:size]), *tiny_world["shards"][1:]]
    method = FedAF(ipc=2, num_steps=1, guard=False, train=Training(server_epochs=1))
    uploads, state = World(changed(tiny_world, shards=shards), method).round(state_of(tiny_world))
    assert len(uploads[0]["labels"]) == expected and len(uploads[0]["soft_labels"]["labels"]) == (size > 0)
    assert all(torch.isfinite(value).all() for value in state.model.values())


def test_a_site_that_missed_the_first_exchange_fails_in_the_second(tiny_world):
    payload = {"noise_seed": 5, "labels": torch.tensor([0]), "class_logits": torch.zeros(1, 2)}
    stale = {"model": weights_of(tiny_world["net"]), "noise_seed": 4}
    for kept in (None, stale):
        with pytest.raises(LookupError, match="missed the first exchange"):
            FedAF().client_round(payload, tiny_world["shards"][0], kept, Rng(0))


def test_a_grown_head_is_matched_over_all_seen_classes(tiny_world):
    task = replace(tiny_world["task"], index=1, num_seen=5)
    world = changed(tiny_world, task=task)
    method = FedAF(ipc=2, num_steps=1, train=Training(server_epochs=1))
    state = method.begin_task(state_of(world), task, World(world, method), Rng(0))
    federation = World(world, method)
    uploads, after = federation.round(state)
    assert federation.asked[1][1]["class_logits"].shape == (2, 5) and uploads[2]["soft_labels"]["rows"].shape == (1, 5)
    assert len(after.model["head.weight"]) == 5


@pytest.mark.parametrize(
    "bad",
    [{"cdc_weight": -1}, {"lgkm_weight": -0.1}, {"temperature": 0}, {"mixing": 1.5}, {"draw": "never"}, {"ipc": 0}],
)
def test_bad_values_are_refused(bad):
    with pytest.raises(ValidationError):
        FedAF(**bad)


# whole runs


def final(result):
    return load_file(result.folder / "model" / "final.safetensors")


def test_fedaf_without_its_terms_is_feddm(tmp_path, image_folder):
    """methods.md 20.4: both weights 0, the ball drawn per step, and features only in FedDM."""
    common = {**SMALL, "data.path": str(image_folder), "tasks.count": 2, "tasks.per_task": None, "train.batch_size": 4}
    corner = {"method.cdc_weight": 0, "method.lgkm_weight": 0, "method.perturbation": "ball", "method.draw": "step"}
    ours = rescene.run("smoke", out=tmp_path / "a", method="fedaf", **common, **corner)
    theirs = rescene.run("smoke", out=tmp_path / "b", method="feddm", **common, **{"method.match_logits": False})
    default = rescene.run("smoke", out=tmp_path / "c", method="fedaf", **common)
    a, b, c = final(ours), final(theirs), final(default)
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    assert ours.matrix[-1] == theirs.matrix[-1] and ours.values["cost"]["measured"] == theirs.values["cost"]["measured"]
    assert not torch.equal(a["head.weight"], c["head.weight"])


def test_a_whole_run(tmp_path, image_folder):
    options = {**SMALL, "data.path": str(image_folder), "tasks.count": 2, "tasks.per_task": None}
    result = rescene.run("smoke", out=tmp_path / "r", method="fedaf", **options)
    cost = result.values["cost"]["measured"]
    model_bytes = sum(v.numel() * 4 for key, v in final(result).items() if not key.endswith("num_batches_tracked"))
    assert cost["client_state_bytes"] == model_bytes  # nothing is remembered between rounds
    # 2 tasks, 2 rounds, 2 sites: the model once each, in the first of two exchanges
    assert 8 * model_bytes * 0.9 < cost["downlink_bytes"] < 8 * model_bytes * 1.1
    for way in ("uplink", "downlink"):
        assert 8 * cost[f"{way}_bytes_per_message"] == pytest.approx(cost[f"{way}_bytes"])
    summary = result.values["events_summary"]
    assert summary["client_failures"] == summary["image_fallbacks"] == summary["uploads_declined"] == 0
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    assert all(row["notes"]["server_loss"] > 0 for row in rows if row["kind"] == "round")


def test_one_by_one_agrees_with_batched_in_a_run(tmp_path, image_folder):
    options = {**SMALL, "data.path": str(image_folder), "tasks.count": 2, "tasks.per_task": None, "tasks.limit": 1}
    batched = rescene.run("smoke", out=tmp_path / "a", method="fedaf", **options)
    single = rescene.run("smoke", out=tmp_path / "b", method="fedaf", **options, **{"federation.engine": "one-by-one"})
    a, b = final(batched), final(single)
    assert all(torch.allclose(a[key].float(), b[key].float(), atol=1e-4) for key in a)
