"""FedCIL: its losses and a site's step by hand, what is replayed and when, what travels, consolidation."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rescene.core.errors import RunError
from rescene.core.rng import Rng
from rescene.data import Task
from rescene.functional import weighted_average
from rescene.functional.image_losses import acgan_loss, agreement_loss, balanced_picks
from rescene.methods.base import weights_of
from rescene.methods.fedcil import FedCIL, SiteGenerators, _after, _before, agreement
from rescene.methods.upload_schema import Misfit, Place, check_form
from rescene.training import Training
from rescene.training.generator import fresh_generator, grow_inputs, restored_generator
from rescene.training.generator_training import BETAS, DECAY, Gan, Painter

ONE_STEP = Training(local_epochs=1, batch_size=64, augment=False)
SMALL = {"consolidation_steps": 2, "latent_size": 8, "generator_width": 4, "synthetic_batch": 6, "gan_lr": 0.01}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# mathematics


def test_the_losses_of_a_gan_by_hand():
    scores, logits, labels = torch.tensor([0.0, math.log(3)]), torch.zeros(2, 4), torch.tensor([1, 2])
    real = (math.log(2) + math.log(4 / 3)) / 2 + math.log(4)  # sigmoid: 1/2 and 3/4
    fake = (math.log(2) + math.log(4)) / 2 + math.log(4)
    assert acgan_loss(scores, logits, labels, is_real=True).item() == pytest.approx(real, rel=1e-6)
    assert acgan_loss(scores, logits, labels, is_real=False).item() == pytest.approx(fake, rel=1e-6)


def test_agreement_is_a_divergence_in_which_both_sides_learn():
    """KL((3/4, 1/4) || (1/2, 1/2)) = 3/4 ln(3/2) + 1/4 ln(1/2)."""
    logits = torch.zeros(1, 2, requires_grad=True)
    target = torch.tensor([[math.log(3), 0.0]], requires_grad=True)
    loss = agreement_loss(logits, target)
    assert loss.item() == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-5)
    loss.backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5 - 0.75, 0.5 - 0.25]]))
    slope = 0.75 * (math.log(1.5) - loss.item())  # d KL / d u_c = p_c (ln(p_c / q_c) - KL)
    torch.testing.assert_close(target.grad, torch.tensor([[slope, -slope]]))


def test_every_class_of_a_pool_is_drawn_as_often():
    labels = torch.tensor([5] * 30 + [2] * 10 + [7] * 2)
    picks = balanced_picks(labels, 6000, torch.Generator().manual_seed(0))
    counts = labels[picks].bincount(minlength=8)
    assert counts.sum() == 6000 and set(counts.nonzero().flatten().tolist()) == {2, 5, 7}
    assert (counts[[2, 5, 7]] - 2000).abs().max() < 5 * (6000 * 2 / 9) ** 0.5
    assert (picks == 40).sum() == pytest.approx(1000, abs=150)  # one of two sevens


def test_more_classes_leave_pictures_of_old_ones_as_they_are():
    """A new class is a new column of the first layer, and old labels do not look there."""
    old = weights_of(fresh_generator(8 + 2, 4, 16, torch.Generator().manual_seed(1)))
    grown = grow_inputs(old, 8 + 5, torch.Generator().manual_seed(2))
    before, after = restored_generator(old, 10, 4, 16), restored_generator(grown, 13, 4, 16)
    z = random(3, 10)
    torch.testing.assert_close(after(F.pad(z, (0, 3))), before(z))
    new = grown["first.weight"][:, 10:]
    assert 0 < new.abs().max() <= 13**-0.5 and new.std() == pytest.approx(13**-0.5 / 3**0.5, rel=0.1)
    assert torch.equal(grow_inputs(old, 10, torch.Generator())["first.weight"], old["first.weight"])


# a site


def second_task(shard):
    task = Task(1, (2, 3), 4, None, shard.index, shard.index)
    return replace(shard, task=task, images=replace(shard.images, labels=shard.images.labels + 2))


def payload_of(world, num_classes=2, is_consistent=False):
    model = weights_of(world["arch"].build(num_classes, torch.Generator().manual_seed(3)))
    realness = {"weight": random(1, model["head.weight"].shape[1], seed=4), "bias": torch.zeros(1)}
    generator = weights_of(fresh_generator(8 + num_classes, 4, 16, torch.Generator().manual_seed(5)))
    return {"model": model, "realness": realness, "generator": generator, "is_consistent": is_consistent}


def by_hand(world, payload, shard, method, past=None, past_classes=()):
    """One step of a site, written out; draws are in the method's order."""
    source = Rng(0).at("latents").generator()
    net, generator = world["arch"].restore(payload["model"]).train(), None
    size = (payload["generator"]["first.weight"].shape[1], 4, 16)
    generator = restored_generator(payload["generator"], *size).train()
    held = sorted(set(shard.labels.tolist()))
    known = sorted({*held, *past_classes})
    r = {key: value.clone().requires_grad_() for key, value in payload["realness"].items()}

    def judged(x):
        features = net.features(x)
        return F.linear(features, r["weight"], r["bias"]).squeeze(1), net.head(features)

    def labels_of(classes):
        return torch.tensor(classes)[torch.randint(len(classes), (6,), generator=source)]

    def painted(painter, labels):
        noise = torch.randn(len(labels), 8, generator=source)
        classes = F.one_hot(labels, painter.first.in_features - 8).float()
        return (painter(torch.cat([noise, classes], dim=1)) - 0.5) / 0.25  # the world's mean and deviation

    def loss_of(x, y, is_real):
        scores, logits = judged(x)
        target = torch.full_like(scores, float(is_real))
        return F.binary_cross_entropy(scores.sigmoid(), target) + F.cross_entropy(logits, y)

    order = torch.randperm(len(shard), generator=Rng(0).at("sgd").generator())
    loss = loss_of(shard.pictures(shard.index[order]), shard.labels[order], True)
    fakes = labels_of(known)
    loss = loss + loss_of(painted(generator, fakes).detach(), fakes, False)
    if past is not None:
        old_labels = labels_of(past_classes)
        painter = restored_generator(past, past["first.weight"].shape[1], 4, 16)
        old = loss_of(painted(painter, old_labels).detach(), old_labels, True)
        fakes = labels_of(known)
        old = old + loss_of(painted(generator, fakes).detach(), fakes, False)
        loss = method.new_weight * loss + (1 - method.new_weight) * old
    options = {"lr": method.gan_lr, "betas": BETAS, "weight_decay": DECAY}
    critic = torch.optim.Adam([*net.parameters(), *r.values()], **options)
    loss.backward()
    critic.step()
    moving = torch.optim.Adam(generator.parameters(), **options)
    moving.zero_grad()
    fakes = labels_of(known)
    loss_of(painted(generator, fakes), fakes, True).backward()
    moving.step()
    return {"model": weights_of(net), "realness": r, "generator": weights_of(generator)}, loss.item()


def assert_same_weights(found, expected):
    for part, weights in expected.items():
        assert set(found[part]) == set(weights)
        for name, value in weights.items():
            torch.testing.assert_close(found[part][name], value.detach(), rtol=1e-3, atol=1e-4)


def test_one_step_equals_the_formula(tiny_world):
    shard, payload, method = tiny_world["shards"][1], payload_of(tiny_world), FedCIL(**SMALL, train=ONE_STEP)
    upload, kept = method.client_round(payload, shard, None, Rng(0))
    expected, loss = by_hand(tiny_world, payload, shard, method)
    assert_same_weights(upload, expected)
    assert upload["notes"]["local_loss"] == pytest.approx(loss, rel=1e-4)
    assert upload["num_images"] == 16 and upload["labels"].tolist() == [0, 1]
    assert (kept.task, kept.classes, kept.past_generator, kept.past_classes) == (0, [0, 1], None, [])
    assert all(torch.equal(kept.generator[name], value) for name, value in upload["generator"].items())


def test_a_later_task_replays_the_sites_own_generator_of_the_task_before(tiny_world):
    """It is not the one that the server sends."""
    shard, payload = second_task(tiny_world["shards"][1]), payload_of(tiny_world, 4)
    method = FedCIL(**SMALL, new_weight=0.3, train=ONE_STEP)
    past = weights_of(fresh_generator(8 + 2, 4, 16, torch.Generator().manual_seed(9)))
    upload, kept = method.client_round(payload, shard, SiteGenerators(0, past, [1], None, []), Rng(0))
    expected, loss = by_hand(tiny_world, payload, shard, method, past, [1])
    assert_same_weights(upload, expected)
    assert upload["notes"]["local_loss"] == pytest.approx(loss, rel=1e-4)
    assert upload["labels"].tolist() == [2, 3], "labels of this task alone"
    assert (kept.task, kept.classes, kept.past_classes) == (1, [2, 3], [1])
    assert all(torch.equal(kept.past_generator[name], value) for name, value in past.items())
    again, _ = method.client_round(payload, shard, kept, Rng(0))  # the second round still replays the same past
    assert all(torch.equal(again["generator"][name], value) for name, value in upload["generator"].items())


def test_a_past_begins_with_the_next_task_and_classes_add_up():
    first, second, third = ({"first.weight": torch.full((1, 1), float(i))} for i in range(3))
    site = _after(None, 0, first, [0, 1])
    assert _before(None, 3) == (None, []) and _before(site, 0) == (None, []) and _before(site, 1) == (first, [0, 1])
    site = _after(site, 0, second, [0, 1])  # another round of the same task: the newer generator counts
    assert _before(site, 2) == (second, [0, 1])
    site = _after(_after(site, 2, third, [1, 4]), 2, first, [1, 4])  # it missed task 1
    assert _before(site, 2) == (second, [0, 1]) and _before(site, 3) == (first, [0, 1, 4])


def test_a_site_without_images_says_so(tiny_world):
    shard = tiny_world["shards"][0]
    empty = replace(shard, index=shard.index[:0])
    assert FedCIL(**SMALL).client_round(payload_of(tiny_world), empty, None, Rng(0)) == ({"num_images": 0}, None)


def test_consistency_compares_pictures_with_the_same_labels(tiny_world):
    """KL of the server's pictures against real ones and own ones, and the labels of the server's, written out."""
    net, shard = tiny_world["net"].eval(), tiny_world["shards"][1]
    pictures = {key: random(6, 3, 16, 16, seed=seed) for key, seed in (("like real", 1), ("server", 2), ("own", 3))}
    y, labels, x = shard.labels[:6], torch.tensor([0, 1, 1, 0, 1, 1]), random(6, 3, 16, 16, seed=4)
    painted = iter([(y, pictures["like real"]), (labels, pictures["server"]), (labels, pictures["own"])])

    def paint(asked):
        wanted, made = next(painted)
        assert torch.equal(asked, wanted)
        return made

    painter = SimpleNamespace(paint=paint, draw_labels=lambda classes, num: labels)
    found = agreement(Gan(net, nn.Linear(net.feature_size, 1), painter), painter, net(x), y, [0, 1], 6)
    log_p = {key: net(value).log_softmax(1) for key, value in pictures.items()} | {"real": net(x).log_softmax(1)}

    def kl(p, q):
        return (log_p[p].exp() * (log_p[p] - log_p[q])).sum(1).mean()

    right = -log_p["server"][torch.arange(6), labels].mean()
    torch.testing.assert_close(found, kl("like real", "real") + kl("server", "own") + right)


def test_a_teacher_is_the_global_model_on_the_servers_pictures(tiny_world):
    """At the start of a round student and teacher are one; the loss is the entropy of their answers."""
    shard, payload = tiny_world["shards"][1], payload_of(tiny_world, is_consistent=True)
    method = FedCIL(**SMALL, consistency="teacher", train=ONE_STEP)
    net = shard.net(payload["model"]).eval()
    gan = method._gan(payload, net, shard.transform, 16, torch.Generator().manual_seed(0))
    taught = method._consistency(gan, payload, shard, torch.Generator().manual_seed(7))
    found = taught(torch.zeros(0), torch.zeros(0))
    painter = method._painter(payload["generator"], shard.transform, 16, torch.Generator().manual_seed(7))
    p = net(painter.paint(painter.draw_labels([0, 1], 6))).softmax(1)
    torch.testing.assert_close(found, -(p * p.log()).sum(1).mean())


def test_without_a_weight_or_in_the_first_round_nothing_need_agree(tiny_world):
    shard, steps = tiny_world["shards"][1], []
    for weight, is_consistent in ((1.0, False), (0.0, True), (1.0, True)):
        method = FedCIL(**SMALL, consistency_weight=weight, train=ONE_STEP)
        payload = payload_of(tiny_world, is_consistent=is_consistent)
        steps.append(method.client_round(payload, shard, None, Rng(0))[0]["notes"]["local_loss"])
    assert steps[0] == steps[1] != steps[2]


def test_painted_pictures_are_cropped_and_mirrored_like_real_ones(tiny_world):
    generator = fresh_generator(8 + 2, 4, 16, torch.Generator().manual_seed(1)).eval()
    made = [
        Painter(generator, 8, tiny_world["transform"], 16, augment, torch.Generator().manual_seed(2)).paint(
            torch.ones(9).long()
        )
        for augment in (False, True)
    ]
    black = torch.tensor(tiny_world["transform"].fill).min()
    assert not torch.equal(*made) and (made[1] == black).sum() > 0 == (made[0] == black).sum()


# the server


class Asked:
    """A federation that answers nothing but the size of pictures."""

    clients, task, num_rounds = range(3), None, 2

    def __init__(self, world):
        self.verbs, self.net, self.task = [], world["arch"].restore, world["task"]
        self.transform, self.device = world["transform"], torch.device("cpu")

    def ask(self, clients, verb, payload):
        self.verbs.append(verb)
        return {client: {"image_size": 16} for client in clients}


@pytest.fixture
def round_of(tiny_world):
    """(method -> state after a first round, its uploads, the federation)."""

    def hold(method):
        world = Asked(tiny_world)
        state = method.begin_task(method.init(tiny_world["net"], Rng(0)), tiny_world["task"], world, Rng(0))
        payload = method.broadcast(state, 0, world, Rng(0))
        uploads = {k: method.client_round(payload, tiny_world["shards"][k], None, Rng(k))[0] for k in (0, 2)}
        return method.server_round(state, uploads, 0, world, Rng(0)), uploads, world

    return hold


def test_without_consolidation_the_server_averages_three_parts(round_of):
    method = FedCIL(**SMALL | {"consolidation_steps": 0}, train=ONE_STEP)
    state, uploads, world = round_of(method)
    for part in ("model", "realness", "generator"):
        expected = weighted_average([upload[part] for upload in uploads.values()], [12, 27])
        assert all(torch.equal(getattr(state, part)[name], value) for name, value in expected.items())
    assert world.verbs == ["picture_size"]
    assert sorted(state.sites) == ["0", "2"]
    for client, upload in uploads.items():
        site = state.sites[str(client)]
        assert site.classes == upload["labels"].tolist() and site.past_generator is None
        assert torch.equal(site.generator["first.weight"], upload["generator"]["first.weight"])


def test_consolidation_moves_all_three_parts_and_leaves_the_sites_generators(round_of):
    plain, _, _ = round_of(FedCIL(**SMALL | {"consolidation_steps": 0}, train=ONE_STEP))
    state, uploads, _ = round_of(FedCIL(**SMALL, train=ONE_STEP))
    assert math.isfinite(state.notes["consolidation_loss"])
    for part, name in (("model", "head.weight"), ("realness", "weight"), ("generator", "first.weight")):
        moved = (getattr(state, part)[name] - getattr(plain, part)[name]).abs().max()
        assert 0 < moved < 3 * SMALL["consolidation_steps"] * SMALL["gan_lr"], part
    for client, upload in uploads.items():
        stored = state.sites[str(client)].generator
        assert all(torch.equal(stored[name], value) for name, value in upload["generator"].items())


def test_a_pool_has_pictures_of_every_painter_and_no_class_that_none_of_them_had():
    method, source = FedCIL(**SMALL | {"synthetic_batch": 32}), torch.Generator().manual_seed(0)
    asked = []

    def painter(level):
        def paint(labels):
            asked.append(labels)
            return torch.full((len(labels), 3, 2, 2), float(level)) + labels.reshape(-1, 1, 1, 1) / 10

        return SimpleNamespace(
            paint=paint, draw_labels=lambda c, n: torch.tensor(c)[torch.randint(len(c), (n,), generator=source)]
        )

    x, y = method._pooled([(painter(1), [0, 3]), (painter(2), [5])], source)
    assert x.shape == (32, 3, 2, 2) and [len(labels) for labels in asked] == [32, 32]
    assert set(asked[0].tolist()) <= {0, 3} and set(asked[1].tolist()) == {5} and 5 in y.tolist()
    torch.testing.assert_close(x[:, 0, 0, 0], torch.where(y == 5, 2.0, 1.0) + y / 10)  # each kept its own label


def test_a_loss_that_is_not_finite_ends_the_run(tiny_world, round_of):
    method = FedCIL(**SMALL, train=ONE_STEP)
    state, uploads, world = round_of(method)
    broken = {name: value * float("nan") for name, value in uploads[0]["model"].items() if value.is_floating_point()}
    bad = {0: uploads[0] | {"model": uploads[0]["model"] | broken}}
    with pytest.raises(RunError, match="E330"):
        method.server_round(state, bad, 1, world, Rng(0))
    assert method.server_round(state, {1: {"num_images": 0}}, 1, world, Rng(0)) is state


def test_the_generator_goes_on_in_the_next_task_and_only_later_rounds_are_consistent(tiny_world, round_of):
    method = FedCIL(**SMALL, train=ONE_STEP)
    state, _, world = round_of(method)
    second = second_task(tiny_world["shards"][0]).task
    after = method.begin_task(state, second, world, Rng(1))
    assert len(after.model["head.weight"]) == 4 and after.generator["first.weight"].shape[1] == 8 + 4
    assert torch.equal(after.generator["first.weight"][:, :10], state.generator["first.weight"])
    assert [method.broadcast(after, r, world, Rng(0))["is_consistent"] for r in range(3)] == [False, True, True]


def test_an_upload_has_every_part_and_labels_that_exist(tiny_world):
    method, payload, shard = FedCIL(**SMALL, train=ONE_STEP), payload_of(tiny_world), tiny_world["shards"][1]
    upload, _ = method.client_round(payload, shard, None, Rng(0))
    form = method.expects("client_round", payload, Place(shard.task, 16))
    check_form(form, upload)
    check_form(form, {"num_images": 0})
    for wrong in ({"labels": torch.tensor([0, 2])}, {"labels": torch.tensor([1, 1])}, {"realness": payload["model"]}):
        with pytest.raises(Misfit):
            check_form(form, upload | wrong)
    with pytest.raises(Misfit):
        check_form(form, {key: value for key, value in upload.items() if key != "generator"})
