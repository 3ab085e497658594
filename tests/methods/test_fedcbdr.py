"""FedCBDR: leverage under masks, budgets, what leaves a site, rounds, and whole runs (mathematics: test_leverage.py)."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

import rescene
from rescene.core.record import num_bytes
from rescene.core.rng import Rng
from rescene.data import Images, Task, Transform
from rescene.engine.cost_ledger import CostLedger
from rescene.engine.federation import RunFederation
from rescene.engine.transport import FederationSettings
from rescene.functional.exemplars import gram_inverse
from rescene.methods import ModelState
from rescene.methods.base import Client, weights_of
from rescene.methods.fedavg import FedAvg
from rescene.methods.fedcbdr import FedCBDR, Memory
from rescene.nets.cost import FlopMeter
from rescene.training import Training

QUICK = Training(local_epochs=2, batch_size=8, lr=0.05)
TRANSFORM = Transform((0.5, 0.5, 0.5), (0.25, 0.25, 0.25), 1)


def matrix(n, d, seed=0):
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Flat(nn.Module):
    """A 'network' whose features are float64, to see whether masking changes anything at all."""

    def __init__(self):
        super().__init__()
        self.feature_size = 7
        self.register_buffer("mix", matrix(3 * 8 * 8, 7, seed=5))

    def features(self, x):
        return x.flatten(1).double() @ self.mix


def world(method, sizes=(12, 0, 1, 20), num_classes=2, net=None):
    """Clients of these sizes with random images, in an in-process federation that also records every exchange."""
    generator = torch.Generator().manual_seed(3)
    n = sum(sizes)
    labels = torch.randint(num_classes, (n,), generator=generator)
    images = Images(torch.randint(256, (n, 3, 8, 8), generator=generator, dtype=torch.uint8), labels)
    task = Task(0, tuple(range(num_classes)), num_classes, None, torch.arange(n), torch.arange(n))
    arch = rescene.nets.Arch("convnet", 8, "batch", 4)
    parts = torch.arange(n).split(list(sizes))
    settings = FederationSettings(
        method,
        arch,
        lambda task, k: Client(images, parts[k], task, TRANSFORM, net or arch.restore),
        CostLedger(FlopMeter(arch)),
        lambda *args, **more: None,
        num_clients=len(sizes),
        num_rounds=1,
        transform=TRANSFORM,
        device=torch.device("cpu"),
        rng=Rng(0),
        form="debug",
    )
    federation = RunFederation(settings)
    federation.move(task, None)
    federation.exchanges = []
    ask = federation.ask

    def recorded(clients, verb, payload):
        uploads = ask(clients, verb, payload)
        federation.exchanges.append((verb, list(clients), payload, uploads))
        return uploads

    federation.ask = recorded
    state = ModelState(model=weights_of(arch.build(num_classes)), notes={})
    return federation, task, images, state


@pytest.mark.parametrize("form", ["gram", "svd"])
def test_the_masked_federated_pipeline_gives_the_leverage_of_the_concatenated_features(form):
    method, net = FedCBDR(form=form, budget_scope="global"), Flat()
    federation, task, images, state = world(method, net=lambda model: net)
    assert method.end_task(state, task, federation, Rng(7)) is state
    uploads = {}
    for verb, _, _, answers in federation.exchanges:
        if verb == "score_images":
            uploads |= answers
    scores = torch.cat([uploads[k]["scores"] for k in sorted(uploads)])
    x = net.features(TRANSFORM.normalise(images.pixels))  # all features in one place
    hat = x @ torch.linalg.pinv(x.T @ x) @ x.T
    assert sorted(uploads) == [0, 1, 2, 3] and len(scores) == 33
    assert scores.std() > 0.01  # a constant would mean the full U
    torch.testing.assert_close(scores, hat.diagonal(), rtol=0, atol=1e-10)


def shared(form, net):
    method = FedCBDR(form=form)
    federation, task, images, state = world(method, net=lambda model: net)
    method.end_task(state, task, federation, Rng(7))
    return images, federation.exchanges[0][3]


def test_what_is_sent_is_masked_on_both_sides_and_the_two_forms_hold_the_same_moments():
    net = Flat()
    images, features = shared("svd", net)
    _, moments = shared("gram", net)
    x = net.features(TRANSFORM.normalise(images.pixels[:12]))  # client 0
    sent = features[0]["features"]
    assert sent.shape == x.shape and not torch.allclose(sent.norm(dim=1), x.norm(dim=1), rtol=0.05)  # P mixes rows
    torch.testing.assert_close(sent.norm(), x.norm(), rtol=1e-12, atol=0)  # rotations keep the length of the whole
    assert not torch.allclose(sent.T @ sent, x.T @ x, rtol=0.05)  # Q hides the axes
    for k in features:  # P has no effect on second moments, so both forms tell the server the same
        rows = features[k]["features"]
        torch.testing.assert_close(rows.T @ rows, moments[k]["moments"], rtol=1e-10, atol=1e-8)


def test_all_clients_share_one_rotation_per_task_and_get_another_in_the_next():
    method = FedCBDR()
    federation, task, _, state = world(method)
    method.end_task(state, task, federation, Rng(7).at(0))
    method.end_task(state, task, federation, Rng(7).at(1))
    seeds = [payload["rotation_seed"] for verb, _, payload, _ in federation.exchanges if verb == "share_features"]
    asked = [clients for verb, clients, _, _ in federation.exchanges if verb == "share_features"]
    assert len(seeds) == len(set(seeds)) == 2 and asked == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("scope", ["client", "global"])
def test_the_budget_holds_per_client_or_for_all_together(scope):
    method = FedCBDR(budget=4, budget_scope=scope)
    federation, task, images, state = world(method)
    method.end_task(state, task, federation, Rng(7))
    memories = federation.client_states
    sizes = (12, 0, 1, 20)
    own = images.labels.split(list(sizes))
    for c in task.classes:
        kept = [int((memories[k].labels == c).sum()) for k in range(4)]
        held = [int((own[k] == c).sum()) for k in range(4)]
        assert kept == [min(4, n) for n in held] if scope == "client" else sum(kept) == min(4, sum(held))
    for k, pixels in enumerate(images.pixels.split(list(sizes))):
        rows = {picture.numpy().tobytes() for picture in pixels}
        stored = [picture.numpy().tobytes() for picture in memories[k].pixels]
        assert set(stored) <= rows and len(set(stored)) == len(stored)  # its own images, each at most once
        assert memories[k].desk == {} and num_bytes(memories[k].desk) == 0


def test_independent_draws_are_one_lottery_over_the_images_of_all_clients():
    method = FedCBDR(budget=4, budget_scope="independent")
    federation, task, images, state = world(method)
    method.end_task(state, task, federation, Rng(7))
    drawn = [payload["drawn"] for verb, _, payload, _ in federation.exchanges if verb == "keep_images"]
    kept = torch.cat([federation.client_states[k].pixels for k in range(4)])
    assert [len(part) for part in drawn] == [12, 0, 1, 20]
    assert torch.equal(kept, images.pixels[torch.cat(drawn)]) and 1 < len(kept) <= 4 * len(task.classes)


def test_a_share_of_the_budget_is_drawn_at_every_client_and_nothing_is_sent():
    method = FedCBDR(budget=3, budget_scope="share")
    federation, task, images, state = world(method, num_classes=3)
    assert method.end_task(state, task, federation, Rng(7)) is state
    [(verb, asked, payload, uploads)] = federation.exchanges
    assert (verb, asked, payload["share"]) == (
        "draw_share",
        [0, 1, 2, 3],
        3,
    )  # 3 of each of 3 classes, at 4 clients: 2.25
    assert all(upload == {} for upload in uploads.values())
    own = [{picture.numpy().tobytes() for picture in part} for part in images.pixels.split([12, 0, 1, 20])]
    stored = [[picture.numpy().tobytes() for picture in federation.client_states[k].pixels] for k in range(4)]
    assert all(set(kept) <= held for kept, held in zip(stored, own, strict=True))
    assert [len(kept) for kept in stored[1:3]] == [0, 1] and all(0 < len(stored[k]) <= 3 for k in (0, 3))


def test_a_share_is_not_weighted():
    with pytest.raises(ValueError, match="a share is not drawn class by class"):
        FedCBDR(budget_scope="share", reweight=True)


def test_a_share_goes_by_the_leverage_of_the_clients_own_features():
    """Nineteen copies of one image share a leverage of 1, which the other image has alone: it comes up in half of all draws."""
    net, images = Flat(), torch.zeros(20, 3, 8, 8, dtype=torch.uint8)
    images[:19], images[19] = 200, torch.arange(192).reshape(3, 8, 8)
    task = Task(0, (0,), 1, None, torch.arange(20), torch.arange(20))
    shard = Client(
        Images(images, torch.zeros(20, dtype=torch.int64)), torch.arange(20), task, TRANSFORM, lambda model: net
    )
    method, payload = FedCBDR(budget_scope="share"), {"model": {}, "share": 8}
    found = []
    for seed in range(40):
        upload, memory = method.draw_share(payload, shard, None, Rng(seed))
        found.append(bool((memory.pixels == images[19]).flatten(1).all(dim=1).any()))
        again = method.draw_share(payload, shard, memory, Rng(seed + 1))[1]
        assert upload == {} and torch.equal(again.pixels, memory.pixels), "asked again, it keeps what it has"
    assert sum(found) >= 38  # 1 - 2^-8 each; uniform draws would find it in 34 of 100


def test_both_forms_choose_the_same_images():
    chosen = []
    for form in ("gram", "svd"):
        method = FedCBDR(form=form, budget=3)
        federation, task, _, state = world(method)
        method.end_task(state, task, federation, Rng(7))
        chosen.append([federation.client_states[k].pixels for k in range(4)])
    assert all(torch.equal(a, b) for a, b in zip(*chosen, strict=True))
    assert sum(len(pixels) for pixels in chosen[0]) > 6


def test_without_a_global_budget_neither_labels_nor_scores_leave_the_site():
    method = FedCBDR(budget=4)
    federation, task, _, state = world(method)
    method.end_task(state, task, federation, Rng(7))
    sent = [(verb, set(u)) for verb, _, _, uploads in federation.exchanges for u in uploads.values()]
    assert sent == [("share_features", {"moments"})] * 4 + [("score_images", set())] * 4


def grown(world, num_classes=4):
    """The tiny world one task later: the same images are classes 2 and 3 now, the head has four outputs."""
    task = Task(1, (2, 3), num_classes, None, world["task"].train, world["task"].test)
    old = world["shards"][2]
    images = Images(old.images.pixels, old.images.labels + 2)
    model = rescene.nets.grow_head(weights_of(world["net"]), num_classes, torch.Generator().manual_seed(2))
    return [replace(s, images=images, task=task) for s in world["shards"]], model


def test_the_first_task_is_fedavg_bit_for_bit(tiny_world):
    payload = {"model": weights_of(tiny_world["net"])}
    for k, shard in enumerate(tiny_world["shards"]):
        ours, state = FedCBDR(train=QUICK).client_round(payload, shard, None, Rng(1).at(k))
        theirs, _ = FedAvg(train=QUICK).client_round(payload, shard, None, Rng(1).at(k))
        assert ours["num_images"] == theirs["num_images"] and state is None
        assert all(torch.equal(ours["model"][key], value) for key, value in theirs["model"].items())


@pytest.mark.parametrize("temperatures", ["classes", "both"])
def test_one_step_of_a_later_task_by_hand(tiny_world, temperatures):
    """Full batch, plain SGD, no batch statistics: w - lr * gradient of Eq. 7, written out once more."""
    arch = rescene.nets.Arch("convnet", 16, "group", 4)
    shards, _ = grown(tiny_world)
    current = replace(shards[1], net=arch.restore)  # 16 images of the new classes
    model = weights_of(arch.build(4, torch.Generator().manual_seed(1)))
    pixels, labels = tiny_world["shards"][0].images.pixels[20:40], tiny_world["shards"][0].images.labels[20:40]
    memory = Memory(pixels, labels, torch.linspace(0.5, 2.0, 20), {})
    settings = Training(local_epochs=1, batch_size=64, lr=0.5, momentum=0.0, weight_decay=0.0, augment=False)
    method = FedCBDR(train=settings, temperatures=temperatures)
    upload, _ = method.client_round({"model": model}, current, memory, Rng(0))
    net = arch.restore(model)
    scale = torch.tensor([0.8, 0.8, 1.2, 1.2])  # two old and two new outputs
    again = (0.8, 1.2) if temperatures == "both" else (1.0, 1.0)
    new = F.cross_entropy(net(current.pictures(current.index)) / scale / again[1], current.labels, reduction="none")
    old = F.cross_entropy(net(TRANSFORM.normalise(pixels)) / scale / again[0], labels, reduction="none")
    if temperatures == "classes":
        (1.2 * (memory.weights * old).mean() + 0.8 * new.mean()).backward()
    else:  # one mean over the 20 exemplars and 16 current images
        ((1.2 * (memory.weights * old).sum() + 0.8 * new.sum()) / 36).backward()
    for name, parameter in net.named_parameters():
        expected = parameter.detach() - 0.5 * parameter.grad
        torch.testing.assert_close(upload["model"][name], expected, rtol=1e-4, atol=1e-6)


def test_later_tasks_train_on_exemplars_too_and_the_temperatures_matter(tiny_world):
    method = FedCBDR(train=QUICK, budget=3)
    first = tiny_world["shards"][1]
    rng = Rng(4)
    _, memory = method.share_features(
        {"model": weights_of(tiny_world["net"]), "rotation_seed": 1}, first, None, rng.at("share")
    )
    inverse = gram_inverse(memory.desk["features"].T @ memory.desk["features"])
    _, memory = method.score_images({"inverse": inverse}, first, memory, rng.at("score"))
    assert len(memory.labels) == 6
    shards, model = grown(tiny_world)
    before = memory.pixels.clone()
    upload, after = method.client_round({"model": model}, shards[1], memory, rng.at("round"))
    assert upload["num_images"] == len(shards[1]) + 6 and upload["notes"]["replay_size"] == 6
    assert after is memory and torch.equal(memory.pixels, before)
    plain = FedCBDR(train=QUICK, budget=3, old_temperature=1.0, new_temperature=1.0)
    other, _ = plain.client_round({"model": model}, shards[1], memory, rng.at("round"))
    assert not torch.equal(upload["model"]["head.weight"], other["model"]["head.weight"])
    assert upload["model"]["head.weight"].shape == (4, 16)


def test_temperatures_are_not_used_when_tasks_are_domains(tiny_world):
    shard = tiny_world["shards"][1]
    shard = replace(shard, task=Task(1, (0, 1), 2, 1, shard.task.train, shard.task.test))
    memory, *models = None, weights_of(tiny_world["net"])
    for old, new, of in ((0.8, 1.2, "classes"), (0.5, 3.0, "both")):
        method = FedCBDR(train=QUICK, old_temperature=old, new_temperature=new, temperatures=of)
        _, memory = method.share_features({"model": models[0], "rotation_seed": 1}, shard, None, Rng(0))
        _, memory = method.score_images({"inverse": torch.eye(16).double()}, shard, memory, Rng(0))
        models.append(method.client_round({"model": models[0]}, shard, memory, Rng(0))[0]["model"])
    assert len(memory.labels) == len(shard)
    assert torch.equal(models[1]["head.weight"], models[2]["head.weight"])
    other = FedCBDR(train=QUICK, old_weight=0.0).client_round({"model": models[0]}, shard, memory, Rng(0))[0]["model"]
    assert not torch.equal(models[1]["head.weight"], other["head.weight"])  # exemplars and current images still differ


@pytest.mark.parametrize("num_images", [0, 1])
def test_clients_with_hardly_any_image(tiny_world, num_images):
    shards, model = grown(tiny_world)
    shard = replace(shards[0], index=shards[0].index[:num_images])
    method = FedCBDR(train=QUICK)
    upload, state = method.client_round({"model": model}, shard, None, Rng(0))
    assert upload["num_images"] == num_images and ("model" in upload) == (num_images > 0)
    shared, state = method.share_features({"model": model, "rotation_seed": 0}, shard, state, Rng(0))
    assert shared["moments"].shape == (16, 16)
    _, state = method.score_images({"inverse": gram_inverse(shared["moments"])}, shard, state, Rng(0))
    assert len(state.labels) == num_images


def test_nobody_answering_leaves_the_model_alone():
    state = ModelState(model={"a": torch.ones(2)}, notes={})
    assert FedCBDR().server_round(state, {}, 0, None, Rng(0)) is state
    assert FedCBDR().server_round(state, {0: {"num_images": 0}}, 0, None, Rng(0)) is state


def test_the_average_counts_exemplars_or_clients():
    uploads = {
        0: {"model": {"a": torch.tensor([0.0])}, "num_images": 3},
        1: {"model": {"a": torch.tensor([4.0])}, "num_images": 1},
    }
    state = ModelState(model={"a": torch.tensor([9.0])}, notes={})
    assert FedCBDR().server_round(state, uploads, 0, None, Rng(0)).model["a"].item() == 1.0
    assert FedCBDR(weighting="uniform").server_round(state, uploads, 0, None, Rng(0)).model["a"].item() == 2.0


@pytest.mark.parametrize(
    "bad", [{"budget": 0}, {"old_temperature": 0}, {"new_weight": -1}, {"form": "full"}, {"tau": 1}]
)
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ValueError):
        FedCBDR(**bad)


# ---- whole runs ----------------------------------------------------------------------------------------------------


def run(folder, data, **more):
    overrides = {
        "data.path": str(data),
        "method.budget": 2,
        "tasks.per_task": 2,
        "train.batch_size": 16,
        "federation.engine": "debug",
    }
    return rescene.run("smoke", out=folder, method="fedcbdr", **{**overrides, **more})


def test_a_small_run_in_both_forms_and_with_a_global_budget(tmp_path, image_folder):
    models = []
    for form in ("gram", "svd"):
        result = run(tmp_path / form, image_folder, **{"method.form": form})
        models.append(load_file(result.folder / "model" / "final.safetensors"))
        assert len(result.matrix) == 2 and models[-1]["head.weight"].shape[0] == 4
    assert all(torch.equal(models[0][key], models[1][key]) for key in models[0])  # the same images were kept
    shared = run(tmp_path / "global", image_folder, **{"method.budget_scope": "global", "method.reweight": True})
    rows = [json.loads(line) for line in (shared.folder / "metrics.jsonl").read_text().splitlines()]
    replayed = [row["notes"]["replay_size"] for row in rows if row["kind"] == "round"]
    assert replayed[:2] == [0, 0] and 0 < max(replayed[2:]) <= 4  # at most two of each of two classes, on all sites
    share = run(tmp_path / "share", image_folder, **{"method.budget_scope": "share", "method.temperatures": "both"})
    rows = [json.loads(line) for line in (share.folder / "metrics.jsonl").read_text().splitlines()]
    replayed = [row["notes"]["replay_size"] for row in rows if row["kind"] == "round"]
    assert replayed[:2] == [0, 0] and 0 < max(replayed[2:]) <= 4


def test_a_small_run_over_domains(tmp_path):
    root = domain_folder(tmp_path / "pictures")
    more = {"tasks.scenario": "domain", "tasks.per_task": None, "federation.min_size": 0}
    result = run(tmp_path / "r", root, **more)
    assert len(result.matrix) == 2


def domain_folder(root):
    """Two domains (bright, dark) of three classes, eight pictures each."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    for domain, light in (("bright", 120), ("dark", 0)):
        for c, name in enumerate(["ant", "bee", "cat"]):
            folder = root / domain / name
            folder.mkdir(parents=True)
            for i in range(8):
                picture = random.integers(0, 60, (16, 16, 3)) + light + np.array([30 * c, 0, 60 - 30 * c])
                Image.fromarray(picture.clip(0, 255).astype("uint8")).save(folder / f"{i}.png")
    return root
