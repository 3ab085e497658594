"""Re-Fed: gradient norms, the personalised informative model by hand, the size of the cache, and whole runs."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.func import functional_call

import rescene
from rescene.config import resolve
from rescene.core.errors import ConfigError
from rescene.core.rng import Rng
from rescene.data import Images, Task
from rescene.functional import importance as importance_module
from rescene.functional.importance import (
    gradient_norms,
    last_layer_gradient_norms,
    most_important,
    proximal_coefficient,
    proximal_penalty,
)
from rescene.methods import ModelState
from rescene.methods.base import Client, weights_of
from rescene.methods.fedavg import FedAvg
from rescene.methods.refed import ReFed
from rescene.nets import Arch
from rescene.training import Training

QUICK = Training(local_epochs=2, batch_size=8, lr=0.05)
STILL = Training(augment=False)


def one_by_one(net, x, y):
    """The definition: a backward pass for every image on its own, over all parameters."""
    norms = []
    for i in range(len(x)):
        gradients = torch.autograd.grad(F.cross_entropy(net(x[i : i + 1]), y[i : i + 1]), list(net.parameters()))
        norms.append(torch.sqrt(sum(g.square().sum() for g in gradients)))
    return torch.stack(norms)


def own_norms(net, x, y):
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    return gradient_norms(lambda v, x: functional_call(net, v, (x,)), parameters, x, y)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(7, 3, 16, 16, generator=generator), torch.tensor([0, 1, 2, 0, 1, 2, 2])


# mathematics


def test_proximal_coefficient_by_hand():
    assert [proximal_coefficient(v) for v in (0.5, 1.0, 0.2)] == pytest.approx([0.5, 0.0, 2.0])


def test_the_gradient_of_the_proximal_term_is_q_times_the_distance():
    v = [torch.tensor([3.0, 1.0], requires_grad=True), torch.tensor([[2.0]], requires_grad=True)]
    w = [torch.tensor([1.0, 1.0]), torch.tensor([[5.0]])]
    penalty = proximal_penalty(v, w, 0.5)
    assert penalty.item() == pytest.approx(0.25 * (4 + 0 + 9))
    penalty.backward()
    assert v[0].grad.tolist() == [1.0, 0.0] and v[1].grad.tolist() == [[-1.5]]  # .5 * (v - w), not twice that


def test_gradient_norm_of_a_linear_model_by_hand():
    # z = W x with W = 0 and two classes: softmax - y = (-.5, .5), gradient = (softmax - y) x^T, norm = ||x|| / sqrt 2
    x = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0]])
    norms = gradient_norms(lambda v, x: x @ v["W"].T, {"W": torch.zeros(2, 2)}, x, torch.tensor([0, 1, 0]))
    torch.testing.assert_close(norms, torch.tensor([5.0, 1.0, 0.0]) / math.sqrt(2))


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("chunk_bytes", [2**29, 1, 60_000])
def test_gradient_norms_are_those_of_single_images_however_they_are_chunked(batch, norm, chunk_bytes, monkeypatch):
    monkeypatch.setattr(importance_module, "GRADIENT_BYTES", chunk_bytes)
    net = Arch("convnet", 16, norm, 4).build(3, torch.Generator().manual_seed(1))
    net(batch[0])  # so that the running statistics are not those of a fresh network
    net.eval()
    before = weights_of(net)
    torch.testing.assert_close(own_norms(net, *batch), one_by_one(net, *batch), rtol=1e-5, atol=1e-6)
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    assert own_norms(net, batch[0][:0], batch[1][:0]).shape == (0,)


def test_the_last_layer_form_is_exact_for_the_head_and_a_lower_bound_for_all(batch):
    net = Arch("convnet", 16, "batch", 4).build(3, torch.Generator().manual_seed(1)).eval()
    x, y = batch
    features = net.features(x).detach()
    expected = one_by_one(net.head, features, y)
    torch.testing.assert_close(last_layer_gradient_norms(features, net.head(features).detach(), y), expected)
    assert (expected < one_by_one(net, x, y)).all()


def test_the_most_important_ignore_classes_and_break_ties_by_position():
    scores = torch.tensor([2.0, 5.0, 2.0, 9.0, 2.0])
    assert [most_important(scores, room).tolist() for room in (0, 2, 3, 9)] == [[], [1, 3], [0, 1, 3], [0, 1, 2, 3, 4]]


# the personalised informative model


@pytest.fixture
def pool(tiny_world):
    """All 60 images as one pool, and a network without batch statistics, so that everything can be computed by hand."""
    arch = Arch("convnet", 16, "group", 4)
    shard = replace(tiny_world["shards"][0], index=torch.arange(60), net=arch.restore)
    return shard, arch.build(2, torch.Generator().manual_seed(1))


def test_importance_follows_the_update_rule_and_the_weights_one_over_p(pool):
    shard, net = pool
    method = ReFed(train=STILL, pim_epochs=3, pim_lr=0.2, pim_batch_size=60, locality=0.2)  # q = 2, one step per epoch
    found = method._importance(weights_of(net), shard, Rng(0))
    x, y = shard.pictures(shard.index), shard.labels
    v, w = shard.net(weights_of(net)), [p.detach().clone() for p in net.parameters()]
    expected = torch.zeros(60)
    for p in (1, 2, 3):
        gradients = torch.autograd.grad(F.cross_entropy(v(x), y), list(v.parameters()))
        with torch.no_grad():
            for parameter, gradient, anchor in zip(v.parameters(), gradients, w, strict=True):
                parameter -= 0.2 * (gradient + 2.0 * (parameter - anchor))
        expected += one_by_one(v, x, y) / p
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_a_model_that_stands_still_gives_the_harmonic_sum(pool):
    shard, net = pool
    still = one_by_one(net, shard.pictures(shard.index), shard.labels)
    for option, norms in (("gradient", still), ("last-layer", None)):
        method = ReFed(train=STILL, pim_epochs=4, pim_lr=1e-12, importance=option)
        once = ReFed(train=STILL, pim_epochs=1, pim_lr=1e-12, importance=option)
        four = method._importance(weights_of(net), shard, Rng(0))
        one = once._importance(weights_of(net), shard, Rng(0))
        torch.testing.assert_close(four, one * (1 + 1 / 2 + 1 / 3 + 1 / 4), rtol=1e-4, atol=1e-6)
        if norms is not None:
            torch.testing.assert_close(one, norms, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("smallest_batch", "batches"), [(2, [25, 25, 10]), (11, [25, 25])])
def test_the_model_is_trained_with_augmented_pictures_but_judged_on_plain_ones(
    pool, monkeypatch, smallest_batch, batches
):
    shard, net = pool
    seen = []
    monkeypatch.setattr(type(shard.transform), "apply", lambda self, x, draws: seen.append(len(x)) or x)
    method = ReFed(train=Training(smallest_batch=smallest_batch), pim_epochs=2, pim_batch_size=25)
    method._importance(weights_of(net), shard, Rng(0))
    assert seen == batches * 2  # the steps of two epochs, nothing for the scores


# the cache


def memory_of(method, shard):
    return method.set_aside({}, shard, None, Rng(0))[1]


def refused(model):
    raise AssertionError("no network is needed when nothing has to be ranked")


@pytest.mark.parametrize("storage", [0, 16, 17, 22, 28, 43, 1000])
def test_storage_covers_current_images_and_cache_together(tiny_world, storage):
    method = ReFed(storage=storage, pim_epochs=1, importance="last-layer")
    memory = memory_of(method, tiny_world["shards"][2])  # 27 images
    room = max(0, storage - 16)
    # |D_t| = 16
    shard = replace(tiny_world["shards"][1], net=tiny_world["shards"][1].net if 0 < room < 27 else refused)
    upload, cache = method.refresh_cache({"model": weights_of(tiny_world["net"])}, shard, memory, Rng(0))
    assert upload == {} and len(cache.labels) == len(cache.pixels) == min(27, room)
    assert len(memory.labels) == 27  # the argument is as it was


def test_a_cache_drawn_at_random_needs_no_network_and_prefers_no_image(tiny_world):
    method = ReFed(storage=36, importance="random")
    memory = memory_of(method, tiny_world["shards"][2])  # 27 images
    shard = replace(tiny_world["shards"][1], net=refused)  # 16 images, so there is room for 20
    times = torch.zeros(27)
    for seed in range(200):
        _, cache = method.refresh_cache({"model": {}}, shard, memory, Rng(seed))
        found = (cache.pixels.unsqueeze(1) == memory.pixels).flatten(2).all(dim=2)
        assert found.sum() == 20
        times += found.sum(dim=0)
    assert times.min() > 120 and times.max() < 176  # 200 * 20 / 27 = 148, with a deviation of 6.2


def test_the_cache_holds_the_images_with_the_largest_gradients_whatever_their_class(tiny_world):
    """A head that always says 0 has no gradient left on class 0 and a large one on class 1."""
    model = weights_of(tiny_world["net"]) | {"head.bias": torch.tensor([20.0, -20.0])}
    method = ReFed(storage=25, pim_epochs=2, pim_lr=1e-6)
    pool = replace(tiny_world["shards"][0], index=torch.arange(20, 40))  # ten of each class
    shard = replace(tiny_world["shards"][0], index=torch.arange(15))
    _, cache = method.refresh_cache({"model": model}, shard, memory_of(method, pool), Rng(0))
    assert cache.labels.tolist() == [1] * 10
    assert torch.equal(cache.pixels, pool.images.pixels[30:40])


def test_a_client_without_history_keeps_nothing_and_one_without_images_ranks_its_pool(tiny_world):
    method = ReFed(storage=5, pim_epochs=1)
    payload = {"model": weights_of(tiny_world["net"])}
    _, empty = method.refresh_cache(payload, replace(tiny_world["shards"][0], net=refused), None, Rng(0))
    assert len(empty.labels) == 0
    nothing = replace(tiny_world["shards"][0], index=tiny_world["shards"][0].index[:0])
    _, cache = method.refresh_cache(payload, nothing, memory_of(method, tiny_world["shards"][1]), Rng(0))
    assert len(cache.labels) == 5
    upload, state = method.client_round(payload, nothing, None, Rng(0))
    assert upload == {"num_images": 0} and state is None


class Asked:
    """A federation that only writes down what it is asked."""

    clients = range(5)
    participants = (1, 3)

    def __init__(self):
        self.calls = []

    def ask(self, clients, verb, payload):
        self.calls.append((list(clients), verb, payload))
        return {}


def test_every_client_refreshes_under_the_model_of_the_finished_task(tiny_world):
    state = ModelState(model=weights_of(tiny_world["net"]), notes={})
    none = torch.zeros(0, dtype=torch.long)
    federation = Asked()
    ReFed().begin_task(state, Task(0, (0, 1), 2, None, none, none), federation, Rng(0))
    assert federation.calls == []
    grown = ReFed().begin_task(state, Task(1, (2, 3), 4, None, none, none), federation, Rng(0))
    ((clients, verb, payload),) = federation.calls
    assert clients == [0, 1, 2, 3, 4] and verb == "refresh_cache"
    assert payload["model"]["head.weight"].shape[0] == 2 and grown.model["head.weight"].shape[0] == 4
    ReFed().end_task(grown, Task(1, (2, 3), 4, None, none, none), federation, Rng(0))
    assert federation.calls[1] == ([0, 1, 2, 3, 4], "set_aside", {})


# rounds


def test_a_round_is_fedavg_on_current_and_cached_images(tiny_world):
    model = weights_of(tiny_world["net"])
    current, previous = tiny_world["shards"][1], tiny_world["shards"][2]
    method = ReFed(train=QUICK)
    cache = memory_of(method, previous)
    ours, after = method.client_round({"model": model}, current, cache, Rng(3))
    both = torch.cat([current.index, previous.index])
    images = Images(current.images.pixels[both], current.images.labels[both])
    joined = Client(images, torch.arange(len(both)), current.task, current.transform, current.net)
    theirs, _ = FedAvg(train=QUICK).client_round({"model": model}, joined, None, Rng(3))
    assert after is cache and ours["num_images"] == theirs["num_images"] == 43
    assert all(torch.equal(ours["model"][key], value) for key, value in theirs["model"].items())
    alone, _ = method.client_round({"model": model}, current, None, Rng(3))
    plain, _ = FedAvg(train=QUICK).client_round({"model": model}, current, None, Rng(3))
    assert torch.equal(alone["model"]["head.weight"], plain["model"]["head.weight"])


def test_the_average_weighs_clients_by_what_they_trained_on():
    uploads = {
        0: {"model": {"a": torch.tensor([0.0])}, "num_images": 3},
        1: {"model": {"a": torch.tensor([4.0])}, "num_images": 1},
        2: {"num_images": 0},
    }
    state = ModelState(model={"a": torch.tensor([9.0])}, notes={})
    assert ReFed().server_round(state, uploads, 0, None, Rng(0)).model["a"].item() == 1.0
    assert ReFed(weighting="uniform").server_round(state, uploads, 0, None, Rng(0)).model["a"].item() == 2.0
    assert ReFed().server_round(state, {}, 0, None, Rng(0)) is state


@pytest.mark.parametrize(
    "bad", [{"storage": -1}, {"locality": 0}, {"locality": 1.1}, {"pim_lr": 0}, {"importance": "loss"}]
)
def test_impossible_settings_are_refused(bad):
    with pytest.raises(ValueError):
        ReFed(**bad)


def test_a_batch_of_one_image_is_refused_with_the_recipe():
    with pytest.raises(ConfigError, match="method.pim_batch_size = 1 is not possible"):
        resolve("smoke", {"method": "refed", "method.pim_batch_size": 1})


# whole runs


def run(folder, data, **more):
    overrides = {"data.path": str(data), "method.pim_epochs": 2, "method.storage": 14, "federation.engine": "debug"}
    return rescene.run("smoke", out=folder, method="refed", **{**overrides, **more})


def replayed(result):
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    return [row["notes"]["replay_size"] for row in rows if row["kind"] == "round"]


def test_a_small_run_respects_the_storage(tmp_path, image_folder):
    # 40 images per task on four sites, so 14 of storage force a choice
    result = run(tmp_path / "r", image_folder, **{"federation.partition": "iid"})
    assert len(result.matrix) == 2 and replayed(result) == [0, 0, 4, 4]  # 10 current images leave room for 4
    roomy = run(tmp_path / "all", image_folder, **{"federation.partition": "iid", "method.storage": 100})
    assert replayed(roomy) == [0, 0, 10, 10]


def test_a_small_run_over_domains(tmp_path):
    random, root = np.random.default_rng(0), tmp_path / "pictures"
    for domain, light in (("bright", 120), ("dark", 0)):
        for c, name in enumerate(["ant", "bee", "cat"]):
            (root / domain / name).mkdir(parents=True)
            for i in range(8):
                picture = random.integers(0, 60, (16, 16, 3)) + light + np.array([30 * c, 0, 60 - 30 * c])
                Image.fromarray(picture.clip(0, 255).astype("uint8")).save(root / domain / name / f"{i}.png")
    more = {"tasks.scenario": "domain", "tasks.per_task": None, "federation.min_size": 0, "method.storage": 6}
    result = run(tmp_path / "r", root, **more)
    assert len(result.matrix) == 2 and max(replayed(result)[2:]) <= 6
