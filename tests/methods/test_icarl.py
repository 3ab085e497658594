"""iCaRL: herding order, the loss and the classifier by hand, the memory over tasks, and limits that are other methods."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import rescene
from rescene.core.rng import Rng
from rescene.data import Task
from rescene.functional.distillation import relation_loss
from rescene.functional.exemplars import class_sums, distilled_binary_loss, first_of_each, nearest_mean_head
from rescene.functional.herding import herding_order
from rescene.methods.base import weights_of
from rescene.methods.fedavg import FedAvg
from rescene.methods.fedlwf import FedLwF
from rescene.methods.icarl import ICaRL, Memory
from rescene.methods.upload_schema import Misfit, Place, check_form
from rescene.nets import grow_head
from rescene.privacy.accounting import Composition
from rescene.privacy.mechanism import Mechanism, SitePrivacy
from rescene.privacy.noise import Noise
from rescene.training import Training, embed

ONE_STEP = Training(local_epochs=1, batch_size=64, lr=0.1, momentum=0.0, weight_decay=0.0, augment=False)
PRIVATE = Mechanism("dp-sgd", 1.0, 1.0, Composition(2, 1, 0.5), typical_count=8.0)


@pytest.fixture
def z():
    return torch.randn(12, 4, generator=torch.Generator().manual_seed(0))


# mathematics


def test_herding_order_is_algorithm_4_written_out(z):
    """p_k = argmin over what is left of || mean - (sum of the picks + z) / k ||."""
    left, picks, total = list(range(12)), [], torch.zeros(4)
    for k in range(1, 13):
        best = min(left, key=lambda i: float((z.mean(0) - (total + z[i]) / k).norm()))
        left.remove(best)
        picks.append(best)
        total = total + z[best]
    assert herding_order(z).tolist() == picks
    assert [herding_order(z[:n]).tolist() for n in (0, 1)] == [[], [0]]


def test_the_loss_is_algorithm_3_written_out(z):
    logits, old, labels = z[:3], z[3:6, :2], torch.tensor([0, 3, 2])
    g, q = logits.sigmoid(), old.sigmoid()
    expected = 0.0
    for i in range(3):
        for c in range(4):
            target = q[i, c] if c < 2 else torch.tensor(float(labels[i] == c))
            expected -= target * g[i, c].log() + (1 - target) * (1 - g[i, c]).log()
    everybody = torch.ones(3, dtype=torch.bool)
    found = distilled_binary_loss(logits, labels, old, everybody)
    assert found.item() == pytest.approx(expected.item() / 3, rel=1e-5)
    mean = distilled_binary_loss(logits, labels, old, everybody, reduction="mean")
    assert mean.item() == pytest.approx(relation_loss(logits, labels, old).item(), rel=1e-5)


def test_who_does_not_hear_learns_the_label_and_the_weight_is_of_what_is_heard(z):
    logits, old, labels = z[:2], z[3:5, :2], torch.tensor([0, 1])
    only_first = torch.tensor([True, False])
    bce = F.binary_cross_entropy_with_logits(logits, F.one_hot(labels, 4).float(), reduction="none")
    found = distilled_binary_loss(logits, labels, old, only_first, weight=0.0)
    assert found.item() == pytest.approx(((bce[0, 2:].sum() + bce[1].sum()) / 2).item(), rel=1e-5)
    plain = distilled_binary_loss(logits, labels, None, only_first)
    assert plain.item() == pytest.approx((bce.sum() / 2).item(), rel=1e-5)


def test_the_head_answers_as_the_nearest_mean_of_unit_features_does(z):
    features, labels = z.abs() * torch.arange(1, 13).unsqueeze(1), torch.tensor([0, 1, 3] * 4)  # lengths differ
    sums, counts = class_sums(features, labels, torch.arange(4))
    assert counts.tolist() == [4, 4, 0, 4]
    weight, bias = nearest_mean_head(sums, counts)
    unit = F.normalize(features, dim=1)
    means = {c: F.normalize(unit[labels == c].mean(0), dim=0) for c in (0, 1, 3)}  # nobody has class 2
    new = torch.randn(200, 4, generator=torch.Generator().manual_seed(1)).abs() * 30
    for x, scores in zip(new, new @ weight.T + bias, strict=True):
        nearest = min(means, key=lambda c: float((F.normalize(x, dim=0) - means[c]).norm()))
        assert int(scores.argmax()) == nearest


def test_a_set_is_reduced_to_its_beginning():
    assert first_of_each(torch.tensor([4, 4, 9, 4, 9, 9]), 2).tolist() == [True, True, True, False, True, False]
    assert first_of_each(torch.zeros(0, dtype=torch.int64), 2).tolist() == []


# what a site remembers


def after_task(method, world, shard, state=None):
    return method.keep_exemplars({"model": weights_of(world["net"])}, shard, state, Rng(0))


def second_task(shard, domain=None):
    """All 60 images again, as classes 2 and 3 of a second task or as the same classes in a new domain."""
    if domain is not None:
        return replace(
            shard, index=torch.arange(60), task=Task(1, (0, 1), 2, domain, torch.arange(60), torch.arange(60))
        )
    images = replace(shard.images, labels=shard.images.labels + 2)
    task = Task(1, (2, 3), 4, None, torch.arange(60), torch.arange(60))
    return replace(shard, images=images, index=torch.arange(60), task=task)


def test_the_memory_holds_the_first_m_of_every_set_and_m_shrinks(tiny_world):
    """K = 20: ten of each of two classes, then five of each of four, and of the old ones the first five."""
    shard = replace(tiny_world["shards"][0], index=torch.arange(60))
    method = ICaRL(memory=20)
    _, first = after_task(method, tiny_world, shard)
    assert first.labels.tolist() == [0] * 10 + [1] * 10 and first.last_task == 0
    unit = F.normalize(embed(tiny_world["net"], shard.pictures(torch.arange(30))), dim=1)
    assert torch.equal(first.pixels[:10], shard.images.pixels[herding_order(unit)[:10]])
    _, both = after_task(method, tiny_world, second_task(shard), first)
    assert both.labels.tolist() == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5
    assert torch.equal(both.pixels[:5], first.pixels[:5]) and torch.equal(both.pixels[5:10], first.pixels[10:15])
    assert len(first.labels) == 20  # the argument is as it was
    _, domains = after_task(method, tiny_world, second_task(shard, domain=1), first)
    assert domains.labels.tolist() == [0] * 5 + [1] * 5 + [0] * 5 + [1] * 5
    assert domains.tasks.tolist() == [0] * 10 + [1] * 10


def test_a_small_class_leaves_room_and_a_memory_of_nothing_holds_nothing(tiny_world):
    shard = tiny_world["shards"][1]  # 13 and 3 images
    answer, memory = after_task(ICaRL(memory=20), tiny_world, shard)
    assert memory.labels.tolist() == [0] * 10 + [1] * 3
    assert answer["counts"].tolist() == [10, 3] and answer["labels"].tolist() == [0, 1]
    answer, memory = after_task(ICaRL(memory=0), tiny_world, shard)
    assert len(memory.labels) == 0 and len(answer["labels"]) == 0
    nobody = replace(shard, index=shard.index[:0])
    answer, memory = after_task(ICaRL(), tiny_world, nobody)
    assert len(memory.labels) == 0 and answer["sums"].shape == (0, tiny_world["net"].head.in_features)


def test_behind_a_mechanism_images_are_kept_by_coins_and_no_sum_is_sent(tiny_world):
    """typical_count 8 and two classes: a memory of 16 keeps everything, then half of it when there are four classes."""
    shard = replace(tiny_world["shards"][1], site=SitePrivacy(PRIVATE, Noise()))
    answer, memory = after_task(ICaRL(memory=16), tiny_world, shard)
    assert answer == {} and memory.chance == 1.0 and len(memory.labels) == len(shard)
    answer, later = after_task(ICaRL(memory=16), tiny_world, second_task(shard), memory)
    assert answer == {} and later.chance == 0.5
    assert 0 < int((later.tasks == 0).sum()) < len(shard) and 10 < int((later.tasks == 1).sum()) < 50


# training


def models(world):
    """The old model of two classes, and one of four that has moved away from it."""
    old = weights_of(world["net"])
    grown = grow_head(old, 4, torch.Generator().manual_seed(2))
    return old, {key: value * 1.1 if value.is_floating_point() else value for key, value in grown.items()}


def remembered(shard, old, index=slice(0, 4)):
    pixels = shard.images.pixels[index]
    zeros = torch.zeros(len(pixels), dtype=torch.int64)
    return Memory(pixels, zeros, zeros, old, last_task=0)


@pytest.mark.parametrize("domain", [None, 1])
def test_one_step_equals_the_formula(tiny_world, domain):
    """New classes: everybody hears the old network on outputs 0 and 1. New domains: exemplars alone do, on both."""
    shard = replace(second_task(tiny_world["shards"][1], domain), index=torch.arange(20, 40))
    old, model = models(tiny_world)
    model = model if domain is None else {k: v[:2] if k.startswith("head") else v for k, v in model.items()}
    memory = remembered(tiny_world["shards"][0], old)
    upload, _ = ICaRL(train=ONE_STEP).client_round({"model": model}, shard, memory, Rng(0))
    net, old_net = tiny_world["arch"].restore(model).train(), tiny_world["arch"].restore(old).eval()
    x = torch.cat([shard.pictures(shard.index), shard.transform.normalise(memory.pixels)])
    logits, labels = net(x), torch.cat([shard.labels, memory.labels])
    targets = F.one_hot(labels, logits.shape[1]).float()
    first_heard = 0 if domain is None else 20
    targets[first_heard:, :2] = old_net(x[first_heard:]).sigmoid().detach()
    F.binary_cross_entropy_with_logits(logits, targets, reduction="sum").div(24).backward()
    assert upload["num_images"] == 24
    for name, parameter in net.named_parameters():
        expected = parameter.detach() - 0.1 * parameter.grad
        torch.testing.assert_close(upload["model"][name], expected, rtol=1e-4, atol=1e-6)


def test_without_memory_and_distillation_it_is_fedavg_and_with_distillation_fedlwf(tiny_world):
    shard, train = second_task(tiny_world["shards"][1]), Training(local_epochs=2, batch_size=8)
    old, model = models(tiny_world)
    empty = remembered(shard, old, slice(0, 0))
    plain = ICaRL(objective="softmax", kd_weight=0, train=train).client_round({"model": model}, shard, empty, Rng(0))
    lwf = ICaRL(objective="softmax", kd_weight=3, train=train).client_round({"model": model}, shard, empty, Rng(0))
    fedavg = FedAvg(train=train).client_round({"model": model}, shard, None, Rng(0))
    fedlwf = FedLwF(train=train, local_ce="all").client_round({"model": model}, shard, {"teacher": old}, Rng(0))
    for ours, theirs in ((plain, fedavg), (lwf, fedlwf)):
        assert all(torch.equal(ours[0]["model"][key], value) for key, value in theirs[0]["model"].items())


def test_a_run_with_no_memory_and_no_distillation_ends_with_the_bits_of_fedavg(tmp_path, image_folder):
    data = {"data.path": str(image_folder), "model.width": 4}
    off = {"method.memory": 0, "method.kd_weight": 0, "method.objective": "softmax"}
    ours = rescene.run("smoke", out=tmp_path / "ours", method="icarl", **data, **off)  # nearest-mean: there is no mean
    plain = rescene.run("smoke", out=tmp_path / "plain", method="fedavg", **data)
    found, wanted = (load_file(run.folder / "model" / "final.safetensors") for run in (ours, plain))
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)


# between the tasks


class Answering:
    """A federation of three sites that asks the method itself."""

    clients = range(3)

    def __init__(self, method, world):
        self.method, self.shards = method, world["shards"]

    def ask(self, clients, verb, payload):
        return {k: getattr(self.method, verb)(payload, self.shards[k], None, Rng(0))[0] for k in clients}


def test_means_answer_between_tasks_and_the_trained_head_goes_on(tiny_world):
    method = ICaRL(memory=1000)
    state = method.init(tiny_world["net"], Rng(0))
    trained = state.model
    after = method.end_task(state, tiny_world["task"], Answering(method, tiny_world), Rng(0))
    shard = tiny_world["shards"][0]
    unit = F.normalize(embed(tiny_world["net"], shard.pictures(torch.arange(60))), dim=1)  # K holds all 55 images
    held = torch.cat([s.index for s in tiny_world["shards"]])
    for c in (0, 1):
        mean = unit[held[shard.images.labels[held] == c]].mean(0)
        torch.testing.assert_close(after.model["head.weight"][c], mean / mean.norm(), rtol=1e-4, atol=1e-5)
    assert after.model["head.bias"].tolist() == [0.0, 0.0]
    assert all(torch.equal(after.model[k], trained[k]) for k in trained if not k.startswith("head"))
    later = method.begin_task(after, second_task(shard).task, None, Rng(0))
    assert torch.equal(later.model["head.weight"][:2], trained["head.weight"]) and later.head is None
    head = ICaRL(memory=1000, classifier="head")
    assert head.end_task(state, tiny_world["task"], Answering(head, tiny_world), Rng(0)) is state


def test_sums_that_no_features_have_are_refused(tiny_world):
    payload, place = {"model": weights_of(tiny_world["net"])}, Place(tiny_world["task"], 16)
    form = ICaRL().expects("keep_exemplars", payload, place)
    answer, _ = after_task(ICaRL(), tiny_world, tiny_world["shards"][1])
    check_form(form, answer)
    with pytest.raises(Misfit, match="no such features"):
        check_form(form, answer | {"sums": answer["sums"] * 3})
    with pytest.raises(Misfit):
        check_form(form, answer | {"labels": answer["labels"] + 1})
