"""GLFC on a client: its loss, its prototypes and exemplars, how it notices a new task, clients that lack something."""

import math

import pytest
import torch
import torch.nn.functional as F
from glfc_world import (
    ARCH,
    GLFC,
    SIDE,
    TRANSFORM,
    empty,
    method,
    model,
    payload,
    shard,
    task,
)

from rescene.core.record import check_tree, pack, unpack
from rescene.core.rng import Rng, seeded_generator
from rescene.functional import herd
from rescene.functional.distillation import compensation_loss, compensation_weights, relation_loss
from rescene.methods.glfc import ClientState
from rescene.training import Batch, Training, embed
from rescene.training.reconstruction import (
    encoder_gradients,
    encoder_weights,
    labels_from_gradients,
    perturb,
)


def batch_of(mixed, num_current):
    index = torch.arange(len(mixed))
    x = TRANSFORM.normalise(mixed.images.pixels[mixed.index])
    assert num_current < len(mixed)
    return Batch(x, mixed.labels, index)


def test_the_clients_loss_is_half_compensation_half_relation_on_groups_by_origin():
    now = shard(task(1), {2: 4, 3: 3})
    everything = shard(task(1), {2: 4, 3: 3, 0: 2})  # the last two play exemplars
    net, old_model = ARCH.restore(model(4)).eval(), model(2, seed=9)
    batch = batch_of(everything, len(now))
    z, u = net(batch.x), ARCH.restore(old_model).eval()(batch.x)
    w = compensation_weights(z, batch.y, torch.tensor([False] * 7 + [True] * 2))
    gc, rd = compensation_loss(z, batch.y, w), relation_loss(z, batch.y, u)
    found = method()._loss(now, old_model, has_learned=True)(net, batch)
    assert found.item() == pytest.approx((0.5 * gc + 0.5 * rd).item(), rel=1e-5)
    other = method(compensation_weight=2.0, distillation_weight=0.25)._loss(now, old_model, has_learned=True)
    assert other(net, batch).item() == pytest.approx((2 * gc + 0.25 * rd).item(), rel=1e-5)
    alone = method()._loss(now, None, has_learned=True)(net, batch)
    assert alone.item() == pytest.approx(gc.item(), rel=1e-5)
    plain = method()._loss(now, None, has_learned=False)(net, batch)
    expected = F.binary_cross_entropy_with_logits(z, F.one_hot(batch.y, 4).float())
    assert plain.item() == pytest.approx(expected.item(), rel=1e-5)
    assert abs(plain.item() - alone.item()) > 1e-4


def test_the_old_model_is_not_trained_and_keeps_its_statistics():
    old_model, now = model(2), shard(task(1), {2: 4, 3: 3})
    before = {key: value.clone() for key, value in old_model.items()}
    state = ClientState(*empty(now), known_task=1, last_entropy=0.0, old_model=old_model, offered=None)
    _, after = method().client_round(payload(4), now, state, Rng(0))
    assert all(torch.equal(before[key], after.old_model[key]) for key in before)


@pytest.mark.parametrize("transform", [None, TRANSFORM])
def test_perturbation_is_plain_sgd_with_weight_decay_and_lowers_the_loss(transform):
    net = ARCH.restore(model(4)).eval()
    images, labels = torch.rand(3, 3, SIDE, SIDE, generator=seeded_generator(0)), torch.tensor([0, 3, 1])
    targets = F.one_hot(labels, 4).float()

    def losses(x):
        logits = net(x if transform is None else (x - 0.5) / 0.25)
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(dim=1)

    x = images.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(losses(x).sum(), x)
    once = perturb(net, images, labels, transform, num_steps=1, lr=0.5, weight_decay=0.1)
    assert torch.allclose(once, images - 0.5 * (slope + 0.1 * images), atol=1e-6)
    far = perturb(net, images, labels, transform, num_steps=20, lr=0.5, weight_decay=0.0)
    assert (losses(far) < losses(images)).all()
    assert torch.equal(perturb(net, images, labels, transform, num_steps=0, lr=0.5, weight_decay=0.1), images)


@pytest.mark.parametrize(("num_steps", "sees"), [(0, "pixels"), (3, "pixels"), (3, "normalised")])
def test_what_is_sent_is_the_gradient_of_the_perturbed_image_nearest_to_the_class_mean(num_steps, sees):
    now = shard(task(0), {0: 6, 1: 1})
    fast = Training(local_epochs=1, batch_size=8, lr=0.5)
    glfc = GLFC(train=fast, num_perturbations=num_steps, perturbation_decay=0.2, perturbation_input=sees)
    upload, _ = glfc.client_round(payload(2), now, None, Rng(0))
    trained = ARCH.restore(upload["model"])
    pixels = now.images.pixels[now.by_class()[0]]
    z = F.normalize(embed(trained, TRANSFORM.normalise(pixels)), dim=1)
    nearest = pixels[(z - z.mean(dim=0)).square().sum(dim=1).argmin()]
    images, labels = torch.stack([nearest, now.images.pixels[-1]]).float() / 255, torch.tensor([0, 1])
    transform = TRANSFORM if sees == "normalised" else None
    # one tenth of the local learning rate (App. A): 0.05
    images = perturb(trained, images, labels, transform, num_steps=num_steps, lr=0.05, weight_decay=0.2)
    expected = encoder_gradients(encoder_weights(7, 2, SIDE, SIDE), images, labels)
    sent = upload["prototypes"]["gradients"]
    assert all(torch.allclose(sent[key], expected[key], atol=1e-6) for key in expected)
    assert "images" not in upload and "labels" not in upload["prototypes"]


def test_prototypes_are_sent_at_the_first_contact_with_a_task_only():
    glfc, first, second = method(), shard(task(0), {0: 3, 1: 3}), shard(task(1), {2: 3}, seed=1)
    one, state = glfc.client_round(payload(2), first, None, Rng(0))
    two, state = glfc.client_round(payload(2), first, state, Rng(1))
    three, state = glfc.client_round(payload(4), second, state, Rng(2))
    assert "prototypes" in one and "prototypes" not in two
    assert three["prototypes"]["gradients"]["head.weight"].shape == (1, 4, 12 * 2 * 2)
    assert labels_from_gradients(three["prototypes"]["gradients"]).tolist() == [2]


def test_prototypes_of_the_previous_task_come_from_its_exemplars():
    glfc = method(prototype_classes="previous")
    first, second = shard(task(0), {0: 3, 1: 3}), shard(task(1), {2: 3}, seed=1)
    upload, state = glfc.client_round(payload(2), first, None, Rng(0))
    assert "prototypes" not in upload  # there is no task before the first
    _, state = glfc.keep_exemplars({"model": model(2)}, first, state, Rng(0))
    upload, _ = glfc.client_round(payload(4), second, state, Rng(0))
    assert labels_from_gradients(upload["prototypes"]["gradients"]).tolist() == [0, 1]


def test_exemplars_are_herded_per_class_and_add_up_over_tasks():
    glfc, first = method(), shard(task(0), {0: 30, 1: 4})
    weights = model(2)
    _, state = glfc.keep_exemplars({"model": weights}, first, None, Rng(0))
    assert torch.bincount(state.labels).tolist() == [20, 4]  # App. A: 20 per class; fewer where there are fewer
    members = first.images.pixels[first.by_class()[0]]
    z = F.normalize(embed(ARCH.restore(weights), TRANSFORM.normalise(members)), dim=1)
    assert torch.equal(state.pixels[state.labels == 0], members[herd(z, z.mean(dim=0), 20)])
    assert state.pixels.dtype == torch.uint8 and state.labels.dtype == state.tasks.dtype == torch.long
    _, later = glfc.keep_exemplars({"model": model(4)}, shard(task(1), {3: 25}), state, Rng(0))
    assert torch.bincount(later.labels).tolist() == [20, 4, 0, 20]
    assert torch.bincount(later.tasks).tolist() == [24, 20]
    assert len(state.labels) == 24  # the earlier state was not touched


def test_exemplars_of_a_domain_are_kept_beside_those_of_the_last_one():
    glfc = method(num_exemplars=2)
    _, state = glfc.keep_exemplars({"model": model(2)}, shard(task(0, domain=0), {0: 5, 1: 5}), None, Rng(0))
    now = shard(task(1, domain=1), {0: 5}, seed=2)
    upload, state = glfc.client_round(payload(2), now, state, Rng(0))
    assert upload["num_images"] == 5 + 4
    _, state = glfc.keep_exemplars({"model": model(2)}, now, state, Rng(0))
    assert torch.bincount(state.labels).tolist() == [4, 2]


def certain(num_classes):
    """A model that is sure of class 0 whatever it sees, and one that knows nothing."""
    weights = model(num_classes)
    zero = {key: torch.zeros_like(weights[key]) for key in ("head.weight", "head.bias")}
    sure = {**weights, **zero, "head.bias": F.one_hot(torch.tensor(0), num_classes) * 100.0}
    return sure, {**weights, **zero}


@pytest.mark.parametrize(("num_classes", "fires"), [(4, True), (3, False), (2, False)])
def test_entropy_trigger_needs_a_jump_above_the_threshold(num_classes, fires):
    # ln 4 = 1.386 > 1.2 > ln 3 = 1.099: below four outputs no jump can be large enough
    glfc, now = method(trigger="entropy"), shard(task(0), {0: 2, 1: 2})
    sure, clueless = certain(num_classes)
    one, state = glfc.client_round({"model": sure, "encoder_seed": 0}, now, None, Rng(0))
    two, state = glfc.client_round({"model": clueless, "encoder_seed": 0}, now, state, Rng(0))
    three, state = glfc.client_round({"model": clueless, "encoder_seed": 0}, now, state, Rng(0))
    assert [("prototypes" in upload) for upload in (one, two, three)] == [False, fires, False]
    assert state.last_entropy == pytest.approx(math.log(num_classes))


def test_with_the_entropy_trigger_exemplars_and_old_model_wait_for_the_jump():
    glfc, first, second = method(trigger="entropy"), shard(task(0), {0: 3, 1: 3}), shard(task(1), {2: 3, 3: 3})
    sure, clueless = certain(4)
    _, state = glfc.keep_exemplars({"model": model(2)}, first, None, Rng(0))
    _, state = glfc.receive_old_model({"old_model": model(2)}, second, state, Rng(0))
    upload, state = glfc.client_round({"model": sure, "encoder_seed": 0}, second, state, Rng(0))
    assert upload["num_images"] == 6 and state.old_model is None and state.known_task == -1
    upload, state = glfc.client_round({"model": clueless, "encoder_seed": 0}, second, state, Rng(0))
    assert upload["num_images"] == 12 and state.old_model is not None and state.offered is None


def test_with_the_task_trigger_the_old_model_counts_at_once():
    glfc, second = method(), shard(task(1), {2: 3, 3: 3})
    _, state = glfc.receive_old_model({"old_model": model(2)}, second, None, Rng(0))
    with_old, _ = glfc.client_round(payload(4), second, state, Rng(0))
    without, _ = glfc.client_round(payload(4), second, None, Rng(0))
    assert not torch.equal(with_old["model"]["head.weight"], without["model"]["head.weight"])


def test_clients_without_images():
    glfc, nobody = method(), shard(task(1), {})
    for trigger in ("task", "entropy"):
        upload, state = method(trigger=trigger).client_round(payload(4), nobody, None, Rng(0))
        assert upload == {"num_images": 0} and len(state.labels) == 0
    _, state = glfc.keep_exemplars({"model": model(4)}, nobody, None, Rng(0))
    assert state.pixels.shape == (0, 3, SIDE, SIDE)
    _, state = glfc.keep_exemplars({"model": model(2)}, shard(task(0), {1: 4}), None, Rng(0))
    upload, _ = glfc.client_round(payload(4), nobody, state, Rng(0))  # it still has its exemplars to train on
    assert upload["num_images"] == 4 and "prototypes" not in upload


def test_a_client_with_a_single_image():
    lonely = shard(task(0), {1: 1})
    upload, state = method().client_round(payload(2), lonely, None, Rng(0))
    assert upload["num_images"] == 1 and all(v.isfinite().all() for v in upload["model"].values())
    assert labels_from_gradients(upload["prototypes"]["gradients"]).tolist() == [1]
    _, state = method().keep_exemplars({"model": model(2)}, lonely, state, Rng(0))
    assert state.labels.tolist() == [1]


def test_what_travels_and_what_is_remembered_can_be_saved():
    glfc, now = method(), shard(task(0), {0: 4, 1: 4})
    upload, state = glfc.client_round(payload(2), now, None, Rng(0))
    _, state = glfc.keep_exemplars({"model": model(2)}, now, state, Rng(0))
    check_tree(upload)
    again = unpack(*pack(state))
    assert torch.equal(again.pixels, state.pixels) and again.known_task == 0 and again.old_model is None
