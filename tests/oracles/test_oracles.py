"""Ours against the outputs of published code on the same tensors, and each difference that ``fixtures/oracles.json`` states.

The fixtures were written by ``make_oracles.py``. Tolerances are stated beside each comparison; float32 throughout where it says 1e-5.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from rescene.core.rng import Rng
from rescene.data import Batch, Transform
from rescene.functional import group_means, herd, matching_loss, weighted_average
from rescene.functional.adapters import (
    change_of_output,
    contrastive_continual_loss,
    overlap,
    prototype_distances,
    prototype_loss,
    prototype_weights,
)
from rescene.functional.decomposed import composed, kept_outputs, mean_of_kept, pruned
from rescene.functional.discriminant import regularised_solve
from rescene.functional.distillation import (
    compensation_loss,
    compensation_weights,
    distillation_loss,
    mean_entropy,
    relation_loss,
)
from rescene.functional.fisher import fisher_diagonal, quadratic_penalty
from rescene.functional.herding import herding_order
from rescene.functional.image_losses import conditioned
from rescene.methods.afl import ridge_head
from rescene.methods.fedcgs import gaussian_head
from rescene.methods.fedcil import FedCIL, ServerState, SiteGenerators, agreement
from rescene.methods.fedcprompt import FedCPrompt
from rescene.methods.fedweit import FedWeIT, TaskPart
from rescene.methods.pilora import DECAY, PILoRA
from rescene.nets import Arch, Net, PromptPool, pool_state, prompted_features
from rescene.nets.vit import VisionTransformer, VitSize
from rescene.training import AdamSteps
from rescene.training.generator_training import AdversarialSteps, Gan
from rescene.training.reconstruction import Inversion, encoder_gradients, labels_from_gradients, perturb, reconstruct
from rescene.training.synthesis import Search, Synthesis

FIXTURES = Path(__file__).parent / "fixtures"
RECORDS = json.loads((FIXTURES / "oracles.json").read_text(encoding="utf-8"))


def stored(name):
    return load_file(FIXTURES / f"{name}.safetensors")


def part(tensors, prefix):
    return {key.removeprefix(f"{prefix}."): value for key, value in tensors.items() if key.startswith(f"{prefix}.")}


def close(ours, theirs, tolerance):
    return torch.allclose(ours.double(), theirs.double(), rtol=tolerance, atol=tolerance)


def gradient_of(loss, *inputs):
    leaves = [value.clone().requires_grad_() for value in inputs]
    return torch.autograd.grad(loss(*leaves), leaves)


def test_every_fixture_says_where_it_comes_from():
    assert set(RECORDS) == {path.stem for path in FIXTURES.glob("*.safetensors")}
    for record in RECORDS.values():
        assert re.fullmatch("[0-9a-f]{40}", record["commit"]) and re.search(r":\d+", record["place"])
        assert record["repository"].startswith("https://") and record["licence"] and record["difference"]
    assert sum(path.stat().st_size for path in FIXTURES.iterdir()) < 250_000


def test_every_oracle_stands_in_the_docs():
    table = (Path(__file__).parents[2] / "docs" / "deviations.md").read_text(encoding="utf-8")
    assert [name for name in RECORDS if f"| `{name}`:" not in table] == []


# --- GLFC


def glfc_loss(z, t, old):
    weights = compensation_weights(z, t["labels"], torch.isin(t["labels"], t["learned"]))
    compensation = compensation_loss(z, t["labels"], weights)
    return 0.5 * compensation + 0.5 * relation_loss(z, t["labels"], t["u"]) if old else compensation


def test_glfc_losses_and_their_gradients():
    t = stored("glfc_losses")
    old = torch.isin(t["labels"], t["learned"])
    assert close(compensation_weights(t["z"], t["labels"], old), t["weights"], 1e-5)
    for name, with_old in (("", True), ("_without_old", False)):
        assert close(glfc_loss(t["z"], t, with_old), t[f"loss{name}"], 1e-6)
        (gradient,) = gradient_of(lambda z, with_old=with_old: glfc_loss(z, t, with_old), t["z"])
        assert close(gradient, t[f"gradient{name}"], 1e-6)


def test_glfc_weights_stay_finite_where_the_published_ones_do_not():
    t = stored("glfc_losses")
    old = torch.isin(t["labels"], t["learned"])
    assert t["weights_fitted"].isnan().all()  # NaN in the old group's part is NaN in the sum of both
    ours = compensation_weights(t["fitted"], t["labels"], old)
    assert ours.isfinite().all() and close(ours[~old], t["weights"][~old], 1e-5)


def test_glfc_entropy_is_higher_than_the_published_one_by_less_than_its_epsilon():
    t = stored("glfc_losses")
    excess, num_classes = mean_entropy(t["z"]) - float(t["entropy"].mean()), t["z"].shape[1]
    rounding = 2 * torch.finfo(torch.float32).eps * math.log(num_classes)  # of two entropies in float32
    assert 0 < excess <= 1e-5 * num_classes + rounding


def test_glfc_herding_agrees_until_the_published_one_repeats_itself():
    t = stored("glfc_herding")
    assert herd(t["z"], t["z"].mean(dim=0), 5).tolist() == t["picks"].tolist()
    theirs = t["picks_near"].tolist()
    repeated = next(i for i, pick in enumerate(theirs) if pick in theirs[:i])
    ours = herd(t["near"], t["near"].mean(dim=0), 5).tolist()
    assert ours[:repeated] == theirs[:repeated] and len(set(ours)) == 5


def glfc_encoder(t):
    weights = {name: value / 256 for name, value in part(t, "encoder").items()}
    names = {"body.0": "conv0", "body.2": "conv1", "body.4": "conv2", "fc.0": "head"}
    return {f"{names[n.rpartition('.')[0]]}.{n.rpartition('.')[2]}": value for n, value in weights.items()}, names


def test_glfc_prototype_is_perturbed_encoded_and_found_again():
    t = stored("glfc_pictures")
    net = Arch("convnet", 32, "batch", 4).build(3, torch.Generator())
    net.load_state_dict(part(t, "net"))
    nearest = (t["features"] - t["features"].mean(dim=0)).norm(dim=1).argmin()
    picture = t["pictures"][nearest].permute(2, 0, 1).unsqueeze(0).float() / 255
    moved = perturb(net, picture, t["label"], None, num_steps=50, lr=0.2, weight_decay=1e-5)
    encoder, names = glfc_encoder(t)
    ours = encoder_gradients(encoder, moved, t["label"])
    for name, theirs in part(t, "gradient").items():
        layer, _, kind = name.rpartition(".")
        assert close(ours[f"{names[layer]}.{kind}"][0], theirs, 1e-4 * float(theirs.abs().max()))
    assert labels_from_gradients(ours).tolist() == t["label"].tolist() == [1]
    settings = Inversion(num_inversions=1, num_iterates=1)
    found = reconstruct(encoder, ours, (32, 32), settings, torch.Generator().manual_seed(9))
    # 20 steps of L-BFGS amplify the rounding of the gradients: 2e-4 of a value that is about 1
    assert close(found.images[0, 0], t["found"].clamp(0, 1), 2e-4)
    assert bool(((t["found"] < 0) | (t["found"] > 1)).any())  # what ours clamps


def test_glfc_average_is_ours_with_equal_weights():
    t = stored("glfc_average")
    states = [{key: t[f"{key}{i}"] for key in ("w", "num_batches_tracked")} for i in range(3)]
    ours = weighted_average(states, [1, 1, 1])
    assert close(ours["w"], t["average.w"], 1e-6)
    assert float(t["average.num_batches_tracked"]) == pytest.approx(10 / 3) and int(ours["num_batches_tracked"]) == 5


# --- TARGET


class Unmoved(Transform):
    """Normalises and neither crops nor mirrors: the fixture was made without either."""

    def augment(self, x, source):
        return x


class Streams:
    """Gives the search the seeds that the fixture used."""

    def at(self, *address):
        return Streams.Fixed(50 + address[1] if address[0] == "search" else 0)

    class Fixed:
        def __init__(self, seed):
            self.seed = seed

        def generator(self, device=None):
            return torch.Generator().manual_seed(self.seed)


def generator_state(tensors):
    names = {"l1.0": "first"}
    return {
        (names["l1.0"] + key[len("l1.0") :]) if key.startswith("l1.0") else key.replace("conv_blocks", "rest"): value
        for key, value in tensors.items()
    }


@pytest.mark.parametrize("meta", ["fomaml", "reptile"])
def test_target_search_finds_the_same_images_and_teaches_the_generator_the_same(meta):
    t = stored("target_search")
    teacher, student = (Arch("convnet", 8, "batch", 4).build(3, torch.Generator()) for _ in range(2))
    teacher.load_state_dict(part(t, "teacher"))
    student.load_state_dict(part(t, "student"))
    sizes = {"latent_size": 5, "generator_width": 3, "generator_steps": 3, "synthesis_batch": 4, "warmup_rounds": 2}
    transform = Unmoved(mean=(0.5, 0.4, 0.3), std=(0.25, 0.2, 0.3), pad=0)
    search = Search(teacher, student, 3, 8, transform, Synthesis(**sizes, meta_update=meta), Streams())
    search.generator.load_state_dict(generator_state(part(t, "before")))
    images = torch.stack([search.round(r)[0] for r in range(2)])
    assert close(images, t[f"{meta}.images"], 1e-5)
    after = generator_state(part(t, f"{meta}.after"))
    state = search.generator.state_dict()
    assert all(close(state[name], after[name], 1e-5) for name in after if "running" not in name)


def test_target_constants_never_train_the_student():
    t = stored("target_search")
    assert int(t["published.syn_round"]) < int(t["published.warmup"])
    ours = Synthesis()
    assert ours.synthesis_rounds > ours.warmup_rounds


def test_target_distillation():
    t = stored("target_distillation")
    z, u = t["student"], t["teacher"]
    assert close(distillation_loss(z, u, 2.0), t["client.loss"], 1e-6)
    assert close(gradient_of(lambda x: distillation_loss(x, u, 2.0), z)[0], t["client.gradient"], 1e-6)
    soft = (u.double() / 20).softmax(dim=1)
    entropy = -(soft * soft.log()).sum(dim=1).mean()
    ours = distillation_loss(z.double(), u.double(), 20.0, t2=True)
    assert float(ours - 400 * entropy) == pytest.approx(float(t["server.loss"]), rel=1e-3)
    assert close(gradient_of(lambda x: distillation_loss(x, u, 20.0, t2=True), z)[0], t["server.gradient"], 1e-5)


def linear(state, x):
    return F.linear(x, state["weight"], state["bias"])


def gradient_taken(t, decay):
    """The gradient of a first SGD step at rate 0.01, from the weights before and after it."""
    before, after = part(t, "before"), part(t, "after")
    return {name: (before[name] - after[name]) / 0.01 - decay * before[name] for name in before}


def test_fedlwf_takes_the_published_step():
    t = stored("lwf_step")
    targets = linear(part(t, "old"), t["x"])

    def loss(weight, bias):
        z = linear({"weight": weight, "bias": bias}, t["x"])
        distilled = distillation_loss(z, targets, float(t["temperature"]))
        return F.cross_entropy(z[:, 2:], t["labels"] - 2) + float(t["weight"]) * distilled

    before = part(t, "before")
    ours = gradient_of(loss, before["weight"], before["bias"])
    theirs = gradient_taken(t, 5e-4)
    # weights of about 1 are stored in float32 and their difference is divided by the rate: 1e-7 / 0.01
    assert close(ours[0], theirs["weight"], 3e-5) and close(ours[1], theirs["bias"], 3e-5)


def batches_of(t):
    return list(zip(t["x"].split(4), t["labels"].split(4), strict=True))


def mean_loss(theta, x, y):
    return F.cross_entropy(linear(theta, x), y)


def test_fedewc_fisher_and_penalty():
    t = stored("ewc_step")
    first, limit, theirs = part(t, "first"), float(t["limit"]), part(t, "fisher")
    of_batches = fisher_diagonal(mean_loss, first, batches_of(t), per_sample=False)
    cut = torch.cat([value.flatten() for value in theirs.values()]) == limit
    assert bool(cut.any()) and not bool(cut.all())
    assert all(close(of_batches[name].clamp(max=limit), theirs[name], 1e-6 * limit) for name in theirs)
    assert close(quadratic_penalty(part(t, "before"), theirs, first), t["penalty"], 1e-6)
    of_images = fisher_diagonal(mean_loss, first, batches_of(t))
    assert float(sum(v.sum() for v in of_images.values())) > float(sum(v.sum() for v in of_batches.values()))


def test_fedewc_penalty_moves_the_weights_and_the_published_one_does_not():
    t = stored("ewc_step")
    before, fisher, first = part(t, "before"), part(t, "fisher"), part(t, "first")

    def plain(weight, bias):
        return F.cross_entropy(linear({"weight": weight, "bias": bias}, t["x"])[:, 2:], t["labels"])

    def penalised(weight, bias):
        return plain(weight, bias) + 1000 * quadratic_penalty({"weight": weight, "bias": bias}, fisher, first)

    theirs = gradient_taken(t, 0.0)
    without, ours = (gradient_of(f, before["weight"], before["bias"]) for f in (plain, penalised))
    assert close(without[0], theirs["weight"], 3e-5) and close(without[1], theirs["bias"], 3e-5)
    assert float((ours[0] - theirs["weight"]).abs().max()) > 0.01


# --- closed forms


def sums_of(t):
    z, onehot = t["z"].double(), F.one_hot(t["y"], 3).double()
    return onehot.sum(dim=0), onehot.T @ z, z.T @ z


def ridge_for(t, penalty):
    """Our ridge is in units of the mean variance and of S / n."""
    return penalty / (len(t["z"]) * float(t["z"].double().var(dim=0, correction=0).mean()))


def test_afl_joined_sites_and_the_ridge_taken_out():
    t = stored("afl_aggregation")
    joined, _ = ridge_head(*sums_of(t), ridge=ridge_for(t, 3.0))  # three sites with a ridge of 1 each
    cleaned, _ = ridge_head(*sums_of(t), ridge=0.0)
    assert close(joined.T, t["joined"], 1e-5) and close(cleaned.T, t["cleaned"], 1e-5)


def test_acil_recursion():
    t = stored("acil_recursion")
    weight, _ = ridge_head(*sums_of(t), ridge=ridge_for(t, 0.5))
    assert close(weight.T, t["weight"], 1e-9)
    second = t["z"].double().T @ t["z"].double()
    eye = torch.eye(5, dtype=torch.float64)
    assert close(regularised_solve(second, eye, 0.5), t["inverse"], 1e-9)


def test_fedcgs_scores_differ_by_one_number_per_image():
    t = stored("fedcgs_head")
    weight, bias = gaussian_head(*sums_of(t), ridge=0.0)
    ours, theirs = t["z"].double() @ weight.T + bias, (t["z"] @ t["weight"].T + t["bias"]).double()
    shift = ours - theirs
    assert close(shift, shift[:, :1].expand_as(shift), 1e-4) and float(shift.abs().max()) > 0.1
    assert ours.argmax(dim=1).tolist() == theirs.argmax(dim=1).tolist()


# --- condensation and herding


def published_features(t, x):
    """ConvNet.embed in plain operations: twice conv, instance norm, ReLU, average pooling."""
    for i in (0, 4):
        x = F.conv2d(x, t[f"net.features.{i}.weight"], t[f"net.features.{i}.bias"], padding=1)
        x = F.group_norm(x, 4, t[f"net.features.{i + 1}.weight"], t[f"net.features.{i + 1}.bias"])
        x = F.avg_pool2d(F.relu(x), 2)
    return x.flatten(1)


def test_matching_loss_and_its_pixel_gradient():
    t = stored("matching")
    assert close(published_features(t, t["surrogates"]), t["features"], 1e-5)
    groups = torch.tensor([0, 0, 0, 1, 1, 1])
    real = group_means(published_features(t, t["real"].flatten(0, 1)), torch.arange(2).repeat_interleave(6), 2)

    def loss(x):
        return matching_loss(group_means(published_features(t, x), groups, 2), real).sum()

    assert close(loss(t["surrogates"]), t["loss"], 1e-5)
    assert close(gradient_of(loss, t["surrogates"])[0], t["gradient"], 1e-5)


def test_icarl_herding():
    t = stored("icarl_herding")
    z = F.normalize(t["z"], dim=1)
    rank = t["rank"]
    theirs = [int((rank == place).nonzero()) for place in range(1, 7)]
    assert herd(z, z.mean(dim=0), 6).tolist() == theirs
    assert herding_order(z)[:6].tolist() == theirs


# --- PILoRA


def both(tensors, letter):
    """A or B of queries and values of the second task."""
    return torch.stack([tensors[f"encoder.linear_{letter}_{kind}_1.weight"] for kind in "qv"])


def toy_features(t, x, a, b):
    """The features of the stand-in network that made the fixture."""
    before = part(t, "before")
    out = F.linear(x, before["encoder.qkv.weight"], before["encoder.qkv.bias"]) + change_of_output(x, a, b)
    queries, _, values = out.chunk(3, dim=-1)
    return (queries.tanh() + values).mean(dim=1)


def centers(tensors, *classes):
    return torch.stack([tensors[f"centers.{c}"].squeeze(1) for c in classes])


def test_pilora_loss_and_its_gradients():
    """One step of a site: distances, the loss with its penalties, gradients, Adam's step, mean features."""
    t, method = stored("pilora_step"), PILoRA()
    before, after, gradient = part(t, "before"), part(t, "after"), part(t, "gradient")
    a, b = (both(before, letter).requires_grad_() for letter in "ab")
    own = centers(before, 2, 3).requires_grad_()
    features = toy_features(t, t["x"], a, b)
    distances = prototype_distances(features, torch.cat([centers(before, 0, 1), own]))
    assert close(distances, t["distances"], 1e-5)
    loss = prototype_loss(distances, t["labels"], method.compact_weight)
    assert close(loss, t["loss"], 1e-5)
    earlier = [torch.stack([t["earlier.q"], t["earlier.v"]])]
    loss = loss + method.sparsity_weight * a.abs().sum() + method.overlap_weight * overlap(a, earlier)
    AdamSteps([([a, b], method.lora_lr), ([own], method.prototype_lr)], DECAY).step(loss)
    for ours, letter in ((a, "a"), (b, "b")):
        assert close(ours.grad, both(gradient, letter), 1e-5) and close(ours, both(after, letter), 1e-6)
    assert close(own.grad, centers(gradient, 2, 3), 1e-5) and close(own, centers(after, 2, 3), 1e-6)
    means = torch.stack([features[t["labels"] == label].mean(dim=0) for label in (2, 3)])
    assert close(means, torch.stack([t["mean.2"], t["mean.3"]]), 1e-5)


def test_pilora_server():
    t = stored("pilora_server")
    sites, average = [part(t, f"site{k}") for k in range(3)], part(t, "average")
    held, shares = t["held"].bool(), [0.5, 0.3, 0.2]
    ours = weighted_average([{"lora": site["lora"]} for site in sites], shares)["lora"]
    assert close(ours, average["lora"], 1e-6)
    for c in range(10):
        learned, theirs = torch.cat([centers(site, c) for site in sites]), centers(average, c)[0]
        weights = prototype_weights(learned, t["means"][held[:, c], c], PILoRA().temperature)
        if held[:, c].any():
            assert close(weights @ learned, theirs, 1e-5)
        else:  # theirs has the weight of ten sites for each of the three
            assert close(weights @ learned * 0.3, theirs, 1e-5)
    assert held[:, :9].any(dim=0).all() and not held[:, 9].any()


def test_pilora_published_global_model_keeps_the_pairs_of_the_first_task():
    t = stored("pilora_server")
    first, second = part(t, "global0"), part(t, "global1")
    assert all(bool(value.any()) for value in first.values())
    assert all(torch.equal(first[name], second[name]) for name in first)


# --- FedWeIT; its layers are [inputs, outputs], ours [outputs, inputs]

LEARNED = ("shared", "adaptive", "old.adaptive", "mask", "attention")


def test_fedweit_loss_and_its_gradients():
    """A site in its second task: weights of a layer, the loss with all penalties, gradients of all that learns."""
    t = stored("fedweit_site")
    leaf = {name: t[name].clone().requires_grad_() for name in LEARNED}
    base, adaptive, old = ({"w": leaf[name].mT} for name in ("shared", "adaptive", "old.adaptive"))
    mask, attention = {"w": leaf["mask"]}, {"w": leaf["attention"]}
    received = list(t["received"].permute(2, 1, 0))
    theta = composed(base["w"], leaf["mask"].sigmoid(), adaptive["w"], leaf["attention"], received)
    assert close(theta.mT, t["theta.training"], 1e-6)
    part = TaskPart(mask, adaptive, attention, {})
    earlier = TaskPart({"w": t["old.mask"]}, old, {}, {"w": t["anchor"].mT})
    logits = F.linear(t["x"], theta, t["bias"]).relu() @ t["head"]
    loss = F.cross_entropy(logits, t["labels"], reduction="none") + FedWeIT()._penalty(base, part, [earlier])
    assert close(loss, t["loss"], 1e-5)
    gradients = torch.autograd.grad(loss.mean(), list(leaf.values()))
    for name, ours in zip(leaf, gradients, strict=True):
        assert close(ours, t[f"gradient.{name}"], 1e-5), name


def test_fedweit_sends_and_answers_with_the_large_entries_of_a():
    t, threshold = stored("fedweit_site"), FedWeIT().sparsity_weight
    sent = pruned(t["adaptive"], threshold)
    assert torch.equal(sent, t["sent"]) and 0 < int((sent == 0).sum()) < sent.numel()
    received = list(t["received"].permute(2, 1, 0))
    theta = composed(t["shared"].mT, t["mask"].sigmoid(), sent.mT, t["attention"], received)
    assert close(theta.mT, t["theta.answering"], 1e-6)


def test_fedweit_keeps_one_output_more_than_the_published_code():
    """With v > 0 both rank outputs alike; the published comparison drops the first of those that should stay."""
    t = stored("fedweit_site")
    ours, theirs = kept_outputs(t["mask"].sigmoid(), FedWeIT().dropped_outputs), t["kept"].bool()
    assert int(ours.sum()) == int(theirs.sum()) + 1 == 7 and bool(ours[theirs].all())
    assert torch.equal(t["shared"] * theirs, t["rows"])


def test_fedweit_server_takes_the_mean_over_the_sites_that_sent_a_row():
    t = stored("fedweit_server")
    for layer in (0, 1):
        kept = [t[f"kept{k}.{layer}"].bool() for k in range(3)]
        rows = [t[f"sent{k}.{layer}"].mT[which] for k, which in enumerate(kept)]
        theirs, before = t[f"mean.{layer}"].mT, torch.full_like(t[f"mean.{layer}"].mT, 5.0)
        ours, sent = mean_of_kept(before, kept, rows, [1, 1, 1]), torch.stack(kept).any(dim=0)
        assert close(ours[sent], theirs[sent], 1e-6)
        assert bool((theirs[~sent] == 0).all() and (ours[~sent] == 5).all())
    assert not torch.stack([t[f"kept{k}.0"] for k in range(3)])[:, 1].any()


# --- FedCIL


class ToyNet(nn.Module):
    """The stand-in critic that made the fixture, without its score."""

    def __init__(self, tensors):
        super().__init__()
        self.body, self.head = nn.Linear(9, 5), nn.Linear(5, 3)
        for layer, name in ((self.body, "body"), (self.head, "fc_aux")):
            layer.load_state_dict(part(tensors, f"critic.{name}"))

    def features(self, x):
        return self.body(x.flatten(1)).tanh()


class StoredDraws:
    """A painter whose noise and labels are those that the published code drew, at these places one after the other."""

    def __init__(self, t, generator, places):
        self.t, self.generator, self.places = t, nn.Linear(7, 9), list(places)
        self.generator.load_state_dict(generator)

    def draw_labels(self, classes, num):
        labels = self.t["labels"][self.places[0]]
        assert len(labels) == num and set(labels.tolist()) <= set(classes)
        return labels

    def paint(self, labels, learns=False):
        place = self.places.pop(0)
        assert torch.equal(labels, self.t["labels"][place])
        with torch.set_grad_enabled(learns):
            return self.generator(self.t["noise"][place]).tanh().view(-1, 1, 3, 3)


def toy_gan(t, places):
    before = part(t, "before")
    realness = nn.Linear(5, 1)
    realness.load_state_dict(part(before, "critic.fc"))
    return Gan(ToyNet(before), realness, StoredDraws(t, part(before, "generator.fc"), places))


def toy_weights(gan, value=lambda parameter: parameter):
    """The toy's tensors under the names of the fixture."""
    layers = {"critic.body": gan.net.body, "critic.fc_aux": gan.net.head, "critic.fc": gan.realness}
    layers["generator.fc"] = gan.painter.generator
    return {f"{name}.{key}": value(p) for name, layer in layers.items() for key, p in layer.named_parameters()}


def assert_all_close(ours, theirs, tolerance):
    assert set(ours) == set(theirs)
    assert all(close(value, theirs[name], tolerance) for name, value in ours.items())


def test_fedcil_step_of_a_site():
    """The critic's loss on real and replayed images, both gradients, and what two steps of Adam make of the weights."""
    t, method = stored("fedcil_step"), FedCIL(synthetic_batch=6)
    gan = toy_gan(t, (0, 1, 5))
    replayed = SimpleNamespace(draw_labels=lambda classes, num: t["y_"], paint=lambda labels: t["x_"])
    batch = Batch(t["x"], t["y"], t["y"])
    loss = method._loss(gan, [0, 1, 2], [(replayed, [0, 1])], None)(gan.net, batch)
    assert close(loss, t["c_loss"], 1e-5)
    AdversarialSteps(gan, [0, 1, 2], method).step(loss)
    assert_all_close(toy_weights(gan, lambda parameter: parameter.grad), part(t, "gradient"), 1e-5)
    assert_all_close(toy_weights(gan), part(t, "after"), 1e-6)
    assert gan.painter.places == []


def test_fedcil_consistency():
    """The three terms, which the published step computes and multiplies by 0."""
    t = stored("fedcil_step")
    gan, server = toy_gan(t, (4,)), StoredDraws(t, part(part(t, "server"), "fc"), (2, 3))
    found = agreement(gan, server, gan.judge(t["x"])[1], t["y"], [0, 1, 2], 6)
    assert close(found, t["kd_loss_d"] + t["kd_loss_g"], 1e-5)
    assert float(t["kd_loss_d"]) > 0.01 and float(t["kd_loss_g"]) > 0.01


def test_fedcil_consolidation(monkeypatch):
    """Two steps of the server on the pictures that the published code drew from the sites' generators."""
    t, method = stored("fedcil_consolidation"), FedCIL(synthetic_batch=6, consolidation_steps=2)
    gan, batches = toy_gan(t, range(6)), iter(zip(t["x"], t["y"], strict=True))
    monkeypatch.setattr(FedCIL, "_gan", lambda self, parts, net, *place: gan)
    monkeypatch.setattr(FedCIL, "_painter", lambda self, weights, *place: None)
    monkeypatch.setattr(FedCIL, "_pooled", lambda self, sampled, source: next(batches))
    sites = [SiteGenerators(1, {}, [k, 2], {}, [1 - k]) for k in range(2)]
    task = SimpleNamespace(num_seen=3)
    federation = SimpleNamespace(task=task, device="cpu", transform=None, net=lambda model: gan.net)
    state = ServerState(model={}, realness={}, generator={}, image_size=3, sites={}, notes={})
    after = method._consolidated(state, sites, federation, Rng(0))
    assert_all_close(toy_weights(gan), part(t, "after"), 1e-6)
    assert close(after.generator["weight"], t["after.generator.fc.weight"], 1e-6)
    assert next(batches, None) is None and gan.painter.places == []


@pytest.mark.parametrize("name", ["fedcil_step", "fedcil_consolidation"])
def test_fedcil_has_the_published_input_with_the_class_behind_the_noise(name):
    t = stored(name)
    for z, labels in zip(t["noise"], t["labels"], strict=True):
        assert torch.equal(conditioned(z[:, 3:], labels, 3), z.roll(-3, dims=1))


# --- Fed-CPrompt


THEIR_NAMES = {
    "patch_embed.proj": "patches",
    "cls_token": "class_token",
    "pos_embed": "positions",
    "attn.qkv": "attention.qkv",
    "attn.proj": "attention.out",
    "mlp.fc1": "mlp.0",
    "mlp.fc2": "mlp.2",
}


def prompts_of(tensors, rows=slice(None)):
    """Their prompts, one tensor for each block, as ours."""
    return PromptPool(*(torch.stack([tensors[f"e_{kind}_{block}"] for block in (0, 1)])[:, rows] for kind in "kap"))


def their_network(tensors):
    renamed = {}
    for name, value in part(tensors, "received.feat").items():
        for theirs, ours in THEIR_NAMES.items():
            name = name.replace(theirs, ours)
        renamed[name] = value
    body = VisionTransformer(8, VitSize(width=4, depth=2, num_heads=2, mlp_width=8))
    body.load_state_dict(renamed)
    return Net(body, 4).requires_grad_(False)


def test_fedcprompt_step():
    """Adam, whose first step has the size of its rate, makes the tolerance of weights one percent of that step."""
    found = stored("fedcprompt_step")
    net, x, y, new = their_network(found), found["x"], found["labels"], slice(2, 4)
    received = prompts_of(part(found, "received.prompt"))
    old, own = PromptPool(*(p[:, :2] for p in received)), prompts_of(part(found, "before"))
    query = net.body(x)
    for name, pool in (("old", old), ("received", received), ("own", own)):
        assert close(prompted_features(net.body, x, query, pool), found[f"features.{name}"], 1e-5), name

    method = FedCPrompt(prompts_per_task=2, prompt_length=4, num_blocks=2)
    terms = method.pull, method.push, method.margin
    z, z_received, z_old = (found[f"features.{name}"] for name in ("own", "received", "old"))
    assert close(contrastive_continual_loss(z, z_received, z_old, *terms), found["contrast"], 1e-5)
    assert close(contrastive_continual_loss(z, z_received, None, *terms), found["first"], 1e-5)

    head = {f"head.{kind}": found[f"received.last.{kind}"] for kind in ("weight", "bias")}
    learned = pool_state(prompts_of(part(found, "before"), new)) | {name: rows[2:] for name, rows in head.items()}
    learned = {name: value.clone().requires_grad_() for name, value in learned.items()}
    loss = method._loss(pool_state(received) | head, learned, (2, 3))(net, Batch(x, y, y))
    assert close(loss.detach(), found["loss"], 1e-5)
    AdamSteps([(list(learned.values()), method.prompt_lr)]).step(loss)
    for kind, tolerance in (("gradient", 1e-4), ("after", 1e-6)):
        theirs = pool_state(prompts_of(part(found, f"{kind}.prompt"), new))
        theirs |= {name: found[f"{kind}.{name.replace('head', 'last')}"][2:] for name in head}
        for name, value in learned.items():
            assert close(value.grad if kind == "gradient" else value.detach(), theirs[name], tolerance), (kind, name)


def test_fedcprompt_learns_what_their_step_moves():
    """Their optimiser holds the prompts of all tasks and the whole head; only those of the task move."""
    found = stored("fedcprompt_step")
    before, after = prompts_of(part(found, "before")), prompts_of(part(found, "after.prompt"))
    assert all(torch.equal(a[:, :2], b[:, :2]) and not torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert all(torch.equal(found[f"after.last.{k}"][:2], found[f"received.last.{k}"][:2]) for k in ("weight", "bias"))


def test_fedcprompt_average():
    found = stored("fedcprompt_average")
    ours = weighted_average([part(found, f"site{k}") for k in range(3)], [5, 1, 2])
    assert all(close(ours[name], value, 1e-6) for name, value in part(found, "average").items())
