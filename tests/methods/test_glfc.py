"""GLFC on the server: averaging, the proxy's best-model rule, who gets which old model, whole runs."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from glfc_world import (
    ARCH,
    GLFC,
    QUICK,
    SIDE,
    TRANSFORM,
    Site,
    method,
    model,
    shard,
    task,
)
from pydantic import ValidationError

import rescene
from rescene.core.rng import Rng, seeded_generator
from rescene.functional import weighted_average
from rescene.methods.glfc import Monitor, ServerState
from rescene.nets import grow_head
from rescene.training.reconstruction import (
    encoder_gradients,
    encoder_weights,
)


def constant(num_classes, label):
    """A model that answers ``label`` to everything."""
    weights = model(num_classes)
    bias = F.one_hot(torch.tensor(label), num_classes) * 10.0
    return {**weights, "head.weight": torch.zeros_like(weights["head.weight"]), "head.bias": bias}


def proxy_state(best, score, labels, of_task=0, num_classes=2):
    pixels = torch.zeros(len(labels), 3, SIDE, SIDE, dtype=torch.uint8)
    monitor = Monitor(pixels, torch.tensor(labels), of_task)
    return ServerState(model(num_classes), 7, monitor, best, score, {})


def answer(weights, **more):
    return {"model": weights, "num_images": 4, **more}


def test_the_best_model_is_the_latest_that_is_not_worse_on_the_monitor_set():
    glfc = method()
    site = SimpleNamespace(task=task(0), transform=TRANSFORM, device=torch.device("cpu"), net=ARCH.restore)
    state = proxy_state(constant(2, 1), 25.0, [0, 0, 0, 1])
    worse = glfc.server_round(state, {0: answer(constant(2, 1))}, 0, site, Rng(0))  # 25 %: as good as the best
    assert worse.best is worse.model and worse.best_score == 25.0
    better = glfc.server_round(worse, {0: answer(constant(2, 0))}, 1, site, Rng(0))
    assert better.best_score == 75.0 and better.best["head.bias"].argmax() == 0
    back = glfc.server_round(better, {0: answer(constant(2, 1))}, 2, site, Rng(0))
    assert back.model["head.bias"].argmax() == 1 and back.best["head.bias"].argmax() == 0
    assert back.best_score == 75.0 and back.notes["monitor_accuracy"] == 25.0


def prototypes_of(labels, num_classes):
    images = torch.rand(len(labels), 3, SIDE, SIDE, generator=seeded_generator(0))
    encoder = encoder_weights(7, num_classes, SIDE, SIDE)
    gradients = encoder_gradients(encoder, images, torch.tensor(labels))
    return {"gradients": gradients, "height": SIDE, "width": SIDE}


def test_new_prototypes_of_a_new_task_replace_the_monitor_set_and_reset_the_score():
    glfc = method()
    site = SimpleNamespace(task=task(1), transform=TRANSFORM, device=torch.device("cpu"), net=ARCH.restore)
    state = proxy_state(constant(2, 0), 100.0, [0, 0])
    uploads = {
        0: answer(constant(4, 0), prototypes=prototypes_of([2], 4)),
        1: answer(constant(4, 0), prototypes=prototypes_of([3, 2], 4)),
    }
    after = glfc.server_round(state, uploads, 0, site, Rng(0))
    assert after.monitor.task == 1 and after.monitor.labels.tolist() == [2, 2, 3, 3, 2, 2]  # two iterates of each
    assert after.monitor.pixels.dtype == torch.uint8 and after.monitor.pixels.shape == (6, 3, SIDE, SIDE)
    assert after.best is after.model and after.best_score == 0.0  # useless, but the first of its task
    assert after.notes["num_prototypes"] == 3


def test_late_prototypes_of_the_same_task_extend_the_monitor_set_and_measure_the_best_again():
    glfc = method()
    site = SimpleNamespace(task=task(1), transform=TRANSFORM, device=torch.device("cpu"), net=ARCH.restore)
    state = proxy_state(constant(4, 2), 100.0, [2, 2], of_task=1, num_classes=4)
    uploads = {0: answer(constant(4, 0), prototypes=prototypes_of([3, 3, 3], 4))}
    after = glfc.server_round(state, uploads, 1, site, Rng(0))
    assert after.monitor.labels.tolist() == [2] * 2 + [3] * 6
    assert after.best["head.bias"].argmax() == 2 and after.best_score == 25.0  # 2 of 8


def test_without_prototypes_there_is_no_best_model_and_without_answers_nothing_changes():
    glfc = method()
    site = SimpleNamespace(task=task(0), transform=TRANSFORM, device=torch.device("cpu"), net=ARCH.restore)
    state = glfc.init(ARCH.restore(model(2)), Rng(0))
    assert glfc.server_round(state, {}, 0, site, Rng(0)) is state
    assert glfc.server_round(state, {3: {"num_images": 0}}, 0, site, Rng(0)) is state
    after = glfc.server_round(state, {0: answer(constant(2, 0))}, 0, site, Rng(0))
    assert after.best is None and after.monitor is None


@pytest.mark.parametrize(("weighting", "shares"), [("size", [1, 3]), ("uniform", [1, 1])])
def test_averaging(weighting, shares):
    site = SimpleNamespace(task=task(0), transform=TRANSFORM, device=torch.device("cpu"), net=ARCH.restore)
    glfc, a, b = method(weighting=weighting), model(2, 1), model(2, 2)
    uploads = {0: {"model": a, "num_images": 10}, 1: {"model": b, "num_images": 30}, 2: {"num_images": 0}}
    state = glfc.server_round(glfc.init(ARCH.restore(a), Rng(0)), uploads, 0, site, Rng(0))
    expected = weighted_average([a, b], shares)
    assert all(torch.equal(state.model[key], expected[key]) for key in expected)


def rounds(glfc, site, state, num_rounds):
    for r in range(num_rounds):
        message = glfc.broadcast(state, r, site, Rng(0))
        uploads = site.ask(site.participants, "client_round", message)
        state = glfc.server_round(state, uploads, r, site, Rng(0).at(r))
    return state


def test_every_client_gets_the_best_model_of_the_finished_task_for_the_whole_next_task():
    glfc = method()
    site = Site(glfc, [shard(task(0), {0: 4, 1: 3}, k) for k in range(3)], task(0))
    state = glfc.begin_task(glfc.init(ARCH.restore(model(2)), Rng(0)), site.task, site, Rng(0))
    assert site.asked == []  # before any best model exists nothing is sent
    state = glfc.end_task(rounds(glfc, site, state, 2), site.task, site, Rng(0))
    best_of_first = state.best
    site.shards, site.task, site.participants = [shard(task(1), {2: 3, 3: 4}, k + 9) for k in range(3)], task(1), [0, 2]
    state = glfc.begin_task(state, site.task, site, Rng(0))
    assert site.asked[-1][:2] == ("receive_old_model", [0, 1, 2])
    assert len(state.model["head.bias"]) == 4 and len(site.states[1].old_model["head.bias"]) == 2
    state = rounds(glfc, site, state, 1)
    site.participants = [1]  # a late first contact: the proxy's best model is of this task by now
    state = rounds(glfc, site, state, 1)
    assert len(state.best["head.bias"]) == 4
    for client in site.clients:
        old = site.states[client].old_model
        assert all(torch.equal(old[key], best_of_first[key]) for key in best_of_first)
    assert site.states[1].known_task == 1 and torch.bincount(state.monitor.labels).tolist() == [0, 0, 6, 6]


def test_the_proxy_sees_the_private_image():
    """From the client's image to the monitor set: the method's privacy problem, stated as a fact."""
    glfc = method(num_inversions=15, inversion_steps=20, num_perturbations=0)
    site = Site(glfc, [shard(task(0), {1: 1})], task(0))
    state = rounds(glfc, site, glfc.init(ARCH.restore(model(2)), Rng(0)), 1)
    assert state.monitor.labels.tolist() == [1, 1]
    private = site.shards[0].images.pixels[-1].float()
    assert (state.monitor.pixels[-1].float() - private).square().mean().sqrt().item() < 5  # of 255 grey levels


@pytest.mark.parametrize(
    "bad",
    [
        {"num_exemplars": 0},
        {"trigger": "guess"},
        {"inversion_lr": 0},
        {"num_inversions": 0},
        {"distillation_weight": -1},
    ],
)
def test_bad_values_are_refused(bad):
    with pytest.raises(ValidationError):
        GLFC(**bad)


def test_defaults_are_the_papers():
    glfc = GLFC()
    assert (glfc.compensation_weight, glfc.distillation_weight, glfc.num_exemplars) == (0.5, 0.5, 20)
    assert (glfc.num_perturbations, glfc.perturbation_lr_scale, glfc.perturbation_decay) == (50, 0.1, 1e-5)
    assert (glfc.num_inversions, glfc.inversion_lr, glfc.trigger) == (250, 0.1, "task")


def overrides(**more):
    tiny = {"tasks.limit": 2, "federation.num_rounds": 2, "train.local_epochs": 1, "model.width": 4, "device": "cpu"}
    return {**tiny, **{f"method.{key}": value for key, value in QUICK.items()}, **more}


def test_a_small_run_from_beginning_to_end(tmp_path):
    result = rescene.run("smoke", out=tmp_path / "r", method="glfc", **overrides(**{"federation.engine": "debug"}))
    assert 0 <= result.aa <= 100 and math.isnan(result.matrix[0][1])
    assert "monitor_accuracy" in (tmp_path / "r" / "metrics.jsonl").read_text()


def test_a_small_run_with_the_other_options(tmp_path):
    options = {"trigger": "entropy", "entropy_threshold": 0.1, "prototype_classes": "previous", "reduction": "sum"}
    given = overrides(**{f"method.{key}": value for key, value in options.items()})
    given |= {"method.perturbation_input": "normalised", "federation.engine": "debug"}
    result = rescene.run("smoke", out=tmp_path / "r", method="glfc", **given)
    assert 0 <= result.aia <= 100


def test_a_small_run_over_domains(tmp_path):
    from PIL import Image

    for d, domain in enumerate(("photo", "sketch")):
        for c, name in enumerate(("cup", "key")):
            folder = tmp_path / "pictures" / domain / name
            folder.mkdir(parents=True)
            for i in range(10):
                Image.new("RGB", (SIDE, SIDE), (20 * i, 200 * c, 100 * d)).save(folder / f"{i}.png")
    given = overrides(**{"tasks.scenario": "domain", "tasks.per_task": None, "federation.engine": "debug"})
    given |= {"data.path": str(tmp_path / "pictures"), "federation.num_clients": 3}
    result = rescene.run("smoke", out=tmp_path / "r", method="glfc", **given)
    assert len(result.matrix) == 2 and result.matrix[1][0] >= 0


def test_head_growth_keeps_the_state_whole():
    glfc = method()
    state = proxy_state(None, -1.0, [0, 1])
    grown = glfc.begin_task(state, task(2), Site(glfc, [], task(2)), Rng(0))
    assert len(grown.model["head.bias"]) == 6 and grown.monitor is state.monitor
    assert torch.equal(grown.model["head.weight"][:2], state.model["head.weight"])
    same = grow_head(state.model, 6, Rng(0).at("head").generator())
    assert torch.equal(grown.model["head.weight"], same["head.weight"])
    assert grown.encoder_seed == 7
