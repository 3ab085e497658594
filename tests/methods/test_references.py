"""The reference lines: joint (upper), local (lower), raw-upload (control of condensation)."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from pydantic import ValidationError
from safetensors.torch import load_file

import rescene
from rescene.api import execute
from rescene.config import resolve
from rescene.core.errors import ConfigError
from rescene.core.rng import Rng
from rescene.data import Images
from rescene.methods import method_class
from rescene.methods.base import weights_of
from rescene.methods.fedavg import FedAvg
from rescene.methods.joint import Joint
from rescene.methods.local import Local
from rescene.methods.raw_upload import RawUpload
from rescene.training import Training

SMALL = {"federation.num_clients": 4, "federation.per_round": 2, "federation.num_rounds": 2, "tasks.limit": 2,
         "train.server_epochs": 2, "tasks.count": 2, "tasks.per_task": None, "model.width": 8}  # fmt: skip


class Sites:
    """The server's view of a few shards, without an engine."""

    def __init__(self, world, method, participants=None):
        self.method, self.shards, self.task = method, world["shards"], world["task"]
        self.transform, self.net, self.device = world["transform"], world["arch"].restore, torch.device("cpu")
        self.clients, self.num_rounds, self.asked = range(len(self.shards)), 1, []
        self.participants = self.clients if participants is None else participants

    def ask(self, clients, verb, payload):
        self.asked.append((tuple(clients), verb))
        answers = {k: getattr(self.method, verb)(payload, self.shards[k], None, Rng(0).at(verb, k)) for k in clients}
        return {k: upload for k, (upload, _) in answers.items()}


def begun(method, world, seed=0):
    sites = Sites(world, method)
    state = method.begin_task(method.init(world["net"], Rng(seed)), world["task"], sites, Rng(seed).at("begin"))
    return state, sites


def run(folder, method, **more):
    return rescene.run("smoke", out=folder, method=method, **(SMALL | more))


def final(result):
    return load_file(result.folder / "model" / "final.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


# joint

ONE_STEP = Training(server_epochs=1, batch_size=1000, lr=0.1, momentum=0, weight_decay=0, augment=False)


def test_joint_holds_every_image_once_and_unchanged(tiny_world):
    state, sites = begun(Joint(), tiny_world)
    (collected,) = state.collected
    own = torch.cat([shard.index for shard in tiny_world["shards"]])
    images = tiny_world["shards"][0].images
    assert len(own) == 55 and sites.asked == [((0, 1, 2), "hand_over")]
    assert collected.pixels.dtype == torch.uint8 and torch.equal(collected.pixels, images.pixels[own])
    assert torch.equal(collected.labels, images.labels[own])


def test_joint_step_is_plain_gradient_descent_on_all_real_images(tiny_world):
    method = Joint(train=ONE_STEP)
    state, sites = begun(method, tiny_world)
    after = method.server_round(state, {}, 0, sites, Rng(0))
    net = tiny_world["arch"].restore(weights_of(tiny_world["net"])).train()
    own = torch.cat([shard.index for shard in tiny_world["shards"]])
    shard = tiny_world["shards"][0]
    F.cross_entropy(net(shard.pictures(own)), shard.images.labels[own]).backward()
    for name, p in net.named_parameters():
        assert torch.allclose(after.model[name], p.detach() - 0.1 * p.grad, atol=1e-6), name
    assert after.notes["pool_size"] == 55


def test_joint_does_not_care_how_the_images_are_split(tiny_world):
    whole = torch.cat([shard.index for shard in tiny_world["shards"]])
    one_site = {**tiny_world, "shards": [replace(tiny_world["shards"][0], index=whole.flip(0))]}
    models = []
    for world in (tiny_world, one_site):
        method = Joint(train=ONE_STEP)
        state, sites = begun(method, world)
        models.append(method.server_round(state, {}, 0, sites, Rng(0)).model)
    assert all(torch.allclose(models[0][key].float(), models[1][key].float(), atol=1e-5) for key in models[0])


def test_joint_keeps_earlier_tasks_and_survives_sites_without_images(tiny_world):
    method = Joint(train=ONE_STEP)
    state, sites = begun(method, tiny_world)
    twice = method.begin_task(state, tiny_world["task"], sites, Rng(1))
    assert method.server_round(twice, {}, 0, sites, Rng(0)).notes["pool_size"] == 110
    nobody = {**tiny_world, "shards": [replace(s, index=s.index[:0]) for s in tiny_world["shards"]]}
    later = method.begin_task(state, replace(tiny_world["task"], num_seen=4), Sites(nobody, method), Rng(1))
    assert later.collected == state.collected and len(later.model["head.weight"]) == 4
    assert method.server_round(later, {}, 0, sites, Rng(0)).notes["pool_size"] == 55
    empty, sites = begun(method, nobody)
    assert method.server_round(empty, {}, 0, sites, Rng(0)) is empty


def test_joint_run_is_reported_as_what_it_is(tmp_path, image_folder):
    result = run(tmp_path / "r", "joint", **{"data.path": str(image_folder), "train.server_epochs": 8})
    leakage, cost = result.values["leakage"], result.values["cost"]["measured"]
    assert leakage["num_images"] == leakage["exact_copies"] == 100  # five classes of 20, each image sent once
    assert result.values["privacy"]["private"] is False and "100 %" in result.values["privacy"]["statement"]
    assert cost["uplink_bytes"] == 100 * (3 * 32 * 32 * 4 + 8) and cost["downlink_bytes"] == 0
    assert result.matrix[1][0] > 50 and result.aa > 60  # five plain colours: what is kept is not forgotten


# local


def test_a_lone_site_trains_like_a_fedavg_client(tiny_world):
    shard, payload = tiny_world["shards"][1], {"model": weights_of(tiny_world["net"])}
    train = Training(local_epochs=2, lr=0.05)
    alone, _ = Local(train=train).train_alone(payload, shard, None, Rng(4))
    client, _ = FedAvg(train=train).client_round(payload, shard, None, Rng(4))
    assert same(alone["model"], client["model"]) and alone["notes"] == client["notes"]


def test_nothing_of_other_sites_reaches_the_reported_model(tiny_world):
    method = Local(site=1, train=Training(local_epochs=1))
    first, own, last = tiny_world["shards"]
    others = Images(255 - own.images.pixels, 1 - own.images.labels)  # everybody else's world upside down
    upside_down = [replace(first, images=others), own, replace(last, images=others)]
    models = []
    for world in (tiny_world, {**tiny_world, "shards": upside_down}):
        state, sites = begun(method, world)
        sites.participants = [0, 2]  # the site trains whether or not it was drawn for the round
        uploads = sites.ask(sites.participants, "client_round", method.broadcast(state, 0, sites, Rng(0)))
        assert uploads == {0: {}, 2: {}}
        models.append(method.server_round(state, uploads, 0, sites, Rng(0)).model)
        assert sites.asked[-1] == ((1,), "train_alone")
    assert same(*models) and not same(models[0], weights_of(tiny_world["net"]))


def test_site_is_drawn_by_the_seed_uniformly_and_stays(tiny_world):
    drawn = [begun(Local(), tiny_world, seed)[0].site for seed in range(300)]
    assert drawn == [begun(Local(), tiny_world, seed)[0].site for seed in range(300)]
    assert all(abs(drawn.count(k) - 100) < 35 for k in range(3))  # sd of a count is 8.2
    for seed in range(5):
        state, sites = begun(Local(), tiny_world, seed)
        assert Local().begin_task(state, tiny_world["task"], sites, Rng(seed + 99)).site == state.site


def test_site_can_be_chosen_and_must_exist(tiny_world):
    assert begun(Local(site=2), tiny_world)[0].site == 2
    with pytest.raises(ConfigError, match="method.site = 3"):
        begun(Local(site=3), tiny_world)
    with pytest.raises(ValidationError):
        Local(site=-1)


def test_a_site_without_images_keeps_its_model(tiny_world):
    shards = [replace(s, index=s.index[:0]) for s in tiny_world["shards"]]
    state, sites = begun(Local(site=0), {**tiny_world, "shards": shards})
    assert Local(site=0).server_round(state, {}, 0, sites, Rng(0)) is state


# raw upload


def test_raw_upload_is_rescene_without_condensation(tmp_path, image_folder):
    options = {"data.path": str(image_folder), "method.ipc": 3, "method.budget": 4, "train.server_epochs": 2}
    raw = run(tmp_path / "a", "raw-upload", **options)
    control = run(tmp_path / "b", "rescene", **options, **{"method.num_steps": 0, "method.guard": False})
    condensed = run(tmp_path / "c", "rescene", **options, **{"method.num_steps": 2})
    assert same(final(raw), final(control)) and not same(final(raw), final(condensed))
    assert all(raw.values[key] == control.values[key] for key in ("aa", "accuracy_matrix", "leakage"))
    assert raw.values["cost"]["measured"] == control.values["cost"]["measured"]
    leakage = raw.values["leakage"]
    assert leakage["exact_copies"] == leakage["num_images"] > 0 and raw.values["privacy"]["private"] is False


def test_raw_upload_hyperparameters_are_those_of_rescene():
    theirs = {row["name"]: row for row in method_class("rescene").table()}
    for row in RawUpload.table():
        assert row["default"] == theirs[row["name"]]["default"] and row["symbol"] == theirs[row["name"]]["symbol"]


# all of them


@pytest.fixture
def domain_folder(tmp_path):
    """<domain>/<class>/*.png: two domains of three classes."""
    random = np.random.default_rng(0)
    for d, domain in enumerate(("indoor", "outdoor")):
        for c, name in enumerate(("ant", "bee", "cat")):
            folder = tmp_path / "domains" / domain / name
            folder.mkdir(parents=True)
            for i in range(12):
                picture = random.integers(0, 50, (16, 16, 3)) + np.array([60 * c, 90 * d, 60])
                Image.fromarray(picture.astype("uint8")).save(folder / f"{i}.png")
    return tmp_path / "domains"


@pytest.mark.parametrize("name", ["fedaf", "joint", "local", "raw-upload"])
def test_runs_when_tasks_are_domains(tmp_path, domain_folder, name):
    options = {"data.path": str(domain_folder), "tasks.scenario": "domain", "tasks.count": None}
    condensing = {"method.ipc": 2, "method.num_steps": 1} if name == "fedaf" else {}
    result = run(tmp_path / "r", name, **(options | condensing))
    assert len(result.matrix) == 2 and all(0 <= v <= 100 for v in result.matrix[1])
    assert final(result)["head.weight"].shape[0] == 3
    assert result.values["events_summary"]["client_failures"] == 0


@pytest.mark.parametrize("name", ["fedaf", "joint", "local", "raw-upload"])
def test_an_interrupted_run_ends_as_the_uninterrupted_one(tmp_path, image_folder, name):
    condensing = {"method.ipc": 2, "method.num_steps": 1} if name == "fedaf" else {}
    options = SMALL | {"data.path": str(image_folder), "method": name} | condensing

    def stop_in_the_second_task(event):
        if event["event"] == "phase" and event["place"] == (1, 1) and event["phase"] == "server":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute(resolve("smoke", options), tmp_path / "b", stop_in_the_second_task)
    resumed = rescene.run("smoke", out=tmp_path / "b", **options)
    whole = rescene.run("smoke", out=tmp_path / "a", **options)
    assert same(final(whole), final(resumed)) and whole.values == resumed.values
