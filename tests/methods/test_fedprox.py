"""FedProx: two steps by hand, the spring behind a mechanism, and FedAvg at mu = 0."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from safetensors.torch import load_file

import rescene
from rescene.core.rng import Rng
from rescene.functional.model_average import proximal_term
from rescene.methods.base import weights_of
from rescene.methods.fedavg import FedAvg
from rescene.methods.fedprox import FedProx
from rescene.nets import Arch
from rescene.privacy.accounting import Composition
from rescene.privacy.mechanism import Mechanism, SitePrivacy
from rescene.privacy.noise import Noise
from rescene.training import Training

TWO_STEPS = Training(local_epochs=2, batch_size=64, lr=0.1, momentum=0.9, weight_decay=0.01, augment=False)


def differences(a, b):
    return max((a[key] - b[key]).abs().max().item() for key in a if a[key].is_floating_point())


def test_the_term_and_its_gradient_by_hand():
    w = {"a": torch.tensor([[1.0, 2.0]], requires_grad=True), "b": torch.tensor([5.0], requires_grad=True)}
    start = {"a": torch.tensor([[0.0, 4.0]]), "b": torch.tensor([2.0]), "running_mean": torch.tensor([9.0])}
    term = proximal_term(w, start, mu=0.5)
    assert term.item() == 0.25 * (1 + 4 + 9)  # statistics that nobody trains are not part of it
    term.backward()
    assert w["a"].grad.tolist() == [[0.5, -1.0]] and w["b"].grad.tolist() == [1.5]


def test_two_steps_equal_the_formula(tiny_world):
    """The first step starts at w^t, where the spring is slack; the second feels mu (w - w^t), before momentum."""
    shard, model, mu = tiny_world["shards"][1], weights_of(tiny_world["net"]), 0.7
    upload, kept = FedProx(train=TWO_STEPS, mu=mu).client_round({"model": model}, shard, None, tiny_world["rng"])

    net = tiny_world["arch"].restore(model).train()
    velocity = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for _ in range(2):
        net.zero_grad()
        F.cross_entropy(net(shard.pictures(shard.index)), shard.labels).backward()
        with torch.no_grad():
            for name, p in net.named_parameters():
                gradient = p.grad + 0.01 * p + mu * (p - model[name])
                velocity[name] = 0.9 * velocity[name] + gradient
                p -= 0.1 * velocity[name]
    assert differences(weights_of(net), upload["model"]) < 1e-6
    assert upload["num_images"] == len(shard) and kept is None


@pytest.mark.parametrize("local_ce", ["all", "new"])
def test_at_mu_zero_a_site_does_what_fedavg_does(tiny_world, local_ce):
    shard, payload = tiny_world["shards"][1], {"model": weights_of(tiny_world["net"])}
    train = Training(local_epochs=2, batch_size=8)
    ours, _ = FedProx(train=train, mu=0, local_ce=local_ce).client_round(payload, shard, None, tiny_world["rng"])
    plain, _ = FedAvg(train=train, local_ce=local_ce).client_round(payload, shard, None, tiny_world["rng"])
    assert all(torch.equal(ours["model"][key], plain["model"][key]) for key in plain["model"])
    assert ours["notes"] == plain["notes"]


def test_a_stiff_spring_keeps_a_site_near_the_server(tiny_world):
    """Where the loss + mu/2 d^2 is below its value at the start, where d = 0, mu/2 d^2 is below the loss at the start."""
    shard, model = tiny_world["shards"][0], weights_of(tiny_world["net"])
    train = Training(local_epochs=20, batch_size=64, lr=0.01, weight_decay=0, augment=False)

    def moved(mu):
        upload, _ = FedProx(train=train, mu=mu).client_round({"model": model}, shard, None, tiny_world["rng"])
        names = dict(tiny_world["net"].named_parameters())
        return sum((upload["model"][name] - model[name]).square().sum() for name in names).item()

    assert moved(10.0) < moved(1.0) < moved(0.0)
    assert 10.0 / 2 * moved(10.0) < F.cross_entropy(tiny_world["net"](shard.pictures(shard.index)), shard.labels).item()


def test_behind_dp_sgd_the_spring_acts_after_the_noise(tiny_world):
    """Without any image every clipped gradient is 0. From noise alone both start; only the second step feels the spring."""
    pytest.importorskip("opacus", reason="rescene[privacy]")
    arch = Arch("convnet", 16, "group", 4)
    model = weights_of(arch.build(2, torch.Generator().manual_seed(1)))
    mechanism = Mechanism("dp-sgd", 1.0, 1.0, Composition(2, 1), typical_count=8.0)
    train = Training(local_epochs=2, lr=0.1, momentum=0, weight_decay=0, augment=False)

    def end(mu):
        site = SitePrivacy(mechanism, Noise(Rng(5).generator()))
        empty = replace(tiny_world["shards"][0], index=torch.zeros(0, dtype=torch.int64), net=arch.restore, site=site)
        upload, _ = FedProx(train=train, mu=mu).client_round({"model": model}, empty, None, tiny_world["rng"])
        assert upload["num_images"] == 1 and "notes" not in upload  # how many images there are stays at home
        return upload["model"]

    free, held, one_step = end(0.0), end(2.0), Training(local_epochs=1, lr=0.1, momentum=0, weight_decay=0)
    site = SitePrivacy(replace(mechanism, composition=Composition(1, 1)), Noise(Rng(5).generator()))
    empty = replace(tiny_world["shards"][0], index=torch.zeros(0, dtype=torch.int64), net=arch.restore, site=site)
    first = FedAvg(train=one_step).client_round({"model": model}, empty, None, tiny_world["rng"])[0]["model"]
    # the noises n1, n2 are the same: free = w - .1 (n1 + n2), held = free - .1 * 2 (w1 - w), where w1 = w - .1 n1
    expected = {key: free[key] - 0.2 * (first[key] - model[key]) for key in free}
    assert differences(expected, held) < 1e-5 < differences(free, held)


def test_a_site_without_images_sends_nothing(tiny_world):
    empty = replace(tiny_world["shards"][0], index=torch.zeros(0, dtype=torch.int64))
    payload = {"model": weights_of(tiny_world["net"])}
    assert FedProx().client_round(payload, empty, None, tiny_world["rng"]) == ({"num_images": 0}, None)


@pytest.mark.parametrize("wrong", [{"mu": -0.1}, {"mu": float("inf")}, {"local_ce": "old"}, {"nu": 1}])
def test_bad_hyperparameters_are_refused(wrong):
    with pytest.raises(ValidationError):
        FedProx(**wrong)


def test_a_run_at_mu_zero_ends_with_the_bits_of_fedavg(tmp_path, image_folder):
    data = {"data.path": str(image_folder), "model.width": 4, "train.batch_size": 8}

    def final(name, method, **more):
        folder = rescene.run("smoke", out=tmp_path / name, method=method, **data, **more).folder
        return load_file(folder / "model" / "final.safetensors")

    plain, zero = final("plain", "fedavg"), final("zero", "fedprox", **{"method.mu": 0})
    assert all(torch.equal(plain[key], zero[key]) for key in plain)
    assert differences(plain, final("held", "fedprox", **{"method.mu": 1.0})) > 1e-6
