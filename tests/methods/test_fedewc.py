"""FedEWC: Fisher and penalty against closed forms, one step by hand, what clients remember, and FedAvg at weight zero."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from safetensors.torch import load_file
from second_tasks import second_task

import rescene
from rescene.functional.fisher import blend_fisher, fisher_diagonal, quadratic_penalty
from rescene.methods.base import weights_of
from rescene.methods.fedavg import FedAvg
from rescene.methods.fedewc import FedEWC, Memory
from rescene.nets import grow_head
from rescene.training import Training

ONE_STEP = Training(local_epochs=1, batch_size=64, lr=0.1, weight_decay=0.01, augment=False)


# ---- the mathematics


def linear_loss(parameters, x, y):
    return F.cross_entropy(x @ parameters["w"].T, y)


def points(n=12, d=3, num_classes=2):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return x, torch.randint(num_classes, (n,), generator=generator)


def test_fisher_of_logistic_regression_in_closed_form():
    # d CE / d w_cd = (p_c - [y = c]) x_d. At w = 0 both classes have p = 1/2, so the square is p (1 - p) x_d^2 for any y.
    x, y = points()
    at_zero = fisher_diagonal(linear_loss, {"w": torch.zeros(2, 3, dtype=torch.float64)}, [(x, y)])["w"]
    assert torch.allclose(at_zero, (0.25 * x.square()).mean(0).expand(2, 3), atol=1e-14)
    # elsewhere the labels of the data count: the mean of (p_c - [y = c])^2 x_d^2
    w = torch.tensor([[0.3, -1.0, 0.2], [1.0, 0.5, -0.4]], dtype=torch.float64)
    p = (x @ w.T).softmax(1)
    expected = torch.einsum("nc,nd->cd", (p - F.one_hot(y, 2)).square(), x.square()) / len(x)
    assert torch.allclose(fisher_diagonal(linear_loss, {"w": w}, [(x, y)])["w"], expected, atol=1e-14)


def test_opposite_gradients_do_not_cancel():
    # one point with both labels: at w = 0 the two gradients are +x/2 and -x/2, their mean is 0, each square is x^2/4
    x, y = torch.tensor([[2.0], [2.0]]), torch.tensor([0, 1])
    w = {"w": torch.zeros(2, 1)}
    assert fisher_diagonal(linear_loss, w, [(x, y)])["w"].tolist() == [[1.0], [1.0]]
    assert fisher_diagonal(linear_loss, w, [(x, y)], per_sample=False)["w"].abs().max() < 1e-12


def test_batches_do_not_matter_per_sample_and_are_averaged_otherwise():
    x, y = points(n=11)
    w = {"w": torch.full((2, 3), 0.1, dtype=torch.float64).cumsum(1)}
    cut = list(zip(x.split([4, 4, 3]), y.split([4, 4, 3]), strict=True))
    whole = fisher_diagonal(linear_loss, w, [(x, y)])["w"]
    assert fisher_diagonal(linear_loss, w, [])["w"].abs().max() == 0  # no images, no information
    assert torch.allclose(fisher_diagonal(linear_loss, w, cut)["w"], whole, atol=1e-14)
    squares = []
    for part, labels in cut:
        variable = w["w"].clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(linear_loss({"w": variable}, part, labels), variable)
        squares.append(gradient.square())
    assert torch.allclose(fisher_diagonal(linear_loss, w, cut, per_sample=False)["w"], sum(squares) / 3, atol=1e-14)


def test_penalty_has_the_factor_one_half_and_leaves_new_rows_free():
    head = torch.tensor([[1.0, 2.0], [3.0, 4.0], [9.0, 9.0]], requires_grad=True)  # the third row is new
    bias = torch.tensor([1.0], requires_grad=True)
    fisher = {"head": torch.tensor([[1.0, 0.5], [0.0, 2.0]]), "bias": torch.tensor([4.0])}
    anchor = {"head": torch.tensor([[0.0, 0.0], [0.0, 1.0]]), "bias": torch.tensor([0.5])}
    penalty = quadratic_penalty({"head": head, "bias": bias}, fisher, anchor)
    assert penalty.item() == 0.5 * (1 * 1 + 0.5 * 4 + 0 * 9 + 2 * 9 + 4 * 0.25)
    penalty.backward()
    assert head.grad.tolist() == [[1.0, 1.0], [0.0, 6.0], [0.0, 0.0]]  # F (theta - a)
    assert bias.grad.tolist() == [2.0]


def test_penalty_and_its_gradient_vanish_at_the_anchor_and_without_one():
    theta = {"w": torch.ones(3, requires_grad=True)}
    at_anchor = quadratic_penalty(theta, {"w": torch.ones(3)}, {"w": torch.ones(3)})
    at_anchor.backward()
    assert at_anchor.item() == 0 and theta["w"].grad.abs().max() == 0
    assert quadratic_penalty(theta, {}, {}).item() == 0


def test_blending_keeps_the_rows_of_new_classes_and_its_inputs():
    old, new = {"head": torch.tensor([[1.0], [2.0]])}, {"head": torch.tensor([[10.0], [20.0], [30.0]])}
    assert blend_fisher(old, new, 0.5, 1.0)["head"].tolist() == [[10.5], [21.0], [30.0]]
    assert new["head"].tolist() == [[10.0], [20.0], [30.0]]
    assert blend_fisher({}, new, 0.5, 0.25)["head"].tolist() == new["head"].tolist()


# ---- one client


def parameters_of(world, model):
    return {name: value.detach().clone() for name, value in world["arch"].restore(model).named_parameters()}


def history(world, model, importance=0.5):
    """A client that finished the first task: an anchor a little beside the model, everything of the same importance."""
    anchor = {
        name: value[:2] - 0.1 if "head" in name else value - 0.1 for name, value in parameters_of(world, model).items()
    }
    return Memory(fisher={n: torch.full_like(v, importance) for n, v in anchor.items()}, anchor=anchor, pending={})


def grown_model(world):
    return grow_head(weights_of(world["net"]), 4, torch.Generator().manual_seed(2))


def differences(a, b):
    return max((a[key] - b[key]).abs().max().item() for key in a if a[key].is_floating_point())


def test_one_step_equals_the_formula(tiny_world):
    """theta - lr (g + wd theta + lambda F (theta - a)), g the gradient of CE over all four outputs; new rows unpenalised."""
    shard, model = second_task(tiny_world)[1], grown_model(tiny_world)
    memory = history(tiny_world, model)
    method = FedEWC(train=ONE_STEP, ewc_weight=3.0)
    upload, kept = method.client_round({"model": model}, shard, memory, tiny_world["rng"])

    net = tiny_world["arch"].restore(model).train()
    F.cross_entropy(net(shard.pictures(shard.index)), shard.labels).backward()
    expected = {}
    for name, p in net.named_parameters():
        theta, pull = p.detach(), torch.zeros_like(p)
        rows = len(memory.anchor[name])
        pull[:rows] = 3.0 * 0.5 * (theta[:rows] - memory.anchor[name])
        expected[name] = theta - 0.1 * (p.grad + 0.01 * theta + pull)
    assert differences(expected, upload["model"]) < 1e-6
    assert kept.anchor is memory.anchor and kept.fisher is memory.fisher and kept.pending  # until the task ends


@pytest.mark.parametrize("case", ["newcomer", "first task", "weight 0"])
@pytest.mark.parametrize("anchor", ["task_end", "last_round"])
def test_where_there_is_nothing_to_hold_a_client_does_what_fedavg_does(tiny_world, case, anchor):
    shard, model = second_task(tiny_world)[1], grown_model(tiny_world)
    if case == "first task":
        shard = replace(shard, task=replace(shard.task, index=0))
    memory = None if case == "newcomer" else history(tiny_world, model)
    train = Training(local_epochs=2, batch_size=8)
    method = FedEWC(train=train, anchor=anchor, ewc_weight=0.0 if case == "weight 0" else 100.0)
    ours, kept = method.client_round({"model": model}, shard, memory, tiny_world["rng"])
    plain, _ = FedAvg(train=train).client_round({"model": model}, shard, None, tiny_world["rng"])
    assert all(torch.equal(ours["model"][key], plain["model"][key]) for key in plain["model"])
    assert ours["notes"]["penalty"] == 0 and isinstance(kept, Memory)


def test_the_penalty_holds_the_model_that_is_trained(tiny_world):
    """The usual mistake computes the penalty on another copy of the network, where it moves nothing."""
    shard, model = second_task(tiny_world)[1], grown_model(tiny_world)
    start = parameters_of(tiny_world, model)
    anchor = {name: value[:2] if "head" in name else value for name, value in start.items()}
    memory = Memory({n: torch.ones_like(v) for n, v in anchor.items()}, anchor, {})
    train = Training(local_epochs=5, batch_size=8, lr=0.05)

    def moved(weight):
        upload, _ = FedEWC(train=train, ewc_weight=weight).client_round(
            {"model": model}, shard, memory, tiny_world["rng"]
        )
        held = sum((upload["model"][n][: len(a)] - a).square().sum() for n, a in anchor.items())
        return held.item(), (upload["model"]["head.weight"][2:] - start["head.weight"][2:]).abs().max().item()

    (free, _), (held, new_rows) = moved(0.0), moved(10.0)
    assert held < 0.05 * free
    assert new_rows > 0.01  # while the new classes' outputs learn


def test_fisher_is_that_of_the_sent_model_in_eval_mode_and_clipped(tiny_world):
    """Recomputed image by image with plain autograd; BatchNorm's statistics are neither used from the batch nor moved."""
    shard = tiny_world["shards"][1]
    train = Training(local_epochs=1, batch_size=8)
    exact, clipped = (FedEWC(train=train, fisher_clip=clip) for clip in (None, 1e-4))
    payload = {"model": weights_of(tiny_world["net"])}
    upload, state = exact.client_round(payload, shard, None, tiny_world["rng"])
    net = tiny_world["arch"].restore(upload["model"]).eval()
    expected = {name: torch.zeros_like(value) for name, value in net.named_parameters()}
    for i in range(len(shard)):
        loss = F.cross_entropy(net(shard.pictures(shard.index[i : i + 1])), shard.labels[i : i + 1])
        for (name, _), g in zip(net.named_parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True):
            expected[name] += g.square() / len(shard)
    largest = max(value.max() for value in expected.values())
    assert differences(expected, state.pending) < 1e-5 * largest and largest > 1e-3
    plain, _ = FedAvg(train=train).client_round(payload, shard, None, tiny_world["rng"])
    # running statistics too
    assert all(torch.equal(plain["model"][key], upload["model"][key]) for key in plain["model"])
    _, bounded = clipped.client_round(payload, shard, None, tiny_world["rng"])
    assert max(value.max().item() for value in bounded.pending.values()) == pytest.approx(1e-4)
    assert differences({n: v.clamp(max=1e-4) for n, v in state.pending.items()}, bounded.pending) == 0


@pytest.mark.parametrize(
    ("batch_size", "smallest", "sizes"),
    [(64, 2, [16]), (6, 4, [6, 6, 4]), (6, 5, [6, 6]), (5, 2, [5, 5, 5])],
)
def test_batch_mean_squares_the_gradient_of_each_batch_of_an_epoch(tiny_world, batch_size, smallest, sizes):
    shard, rng = tiny_world["shards"][1], tiny_world["rng"]  # 16 images
    train = Training(local_epochs=1, batch_size=batch_size, smallest_batch=smallest)
    method = FedEWC(train=train, fisher="batch_mean", fisher_clip=None)
    upload, state = method.client_round({"model": weights_of(tiny_world["net"])}, shard, None, rng)
    net = tiny_world["arch"].restore(upload["model"]).eval()
    expected = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    order = torch.randperm(16, generator=rng.at("fisher").generator())
    for rows in order[: sum(sizes)].split(sizes):
        loss = F.cross_entropy(net(shard.pictures(shard.index[rows])), shard.labels[rows])
        for (name, _), g in zip(net.named_parameters(), torch.autograd.grad(loss, list(net.parameters())), strict=True):
            expected[name] += g.square() / len(sizes)
    assert differences(expected, state.pending) < 1e-5 * max(v.max() for v in expected.values())


def test_consolidation_adds_the_finished_tasks_fisher_and_takes_the_global_model(tiny_world):
    method, world = FedEWC(fisher_decay=0.5), tiny_world
    anchor = {"head.weight": torch.zeros(3, 1)}
    memory = Memory(
        {"head.weight": torch.ones(2, 1)}, {"head.weight": torch.ones(2, 1)}, {"head.weight": torch.ones(3, 1)}
    )

    def consolidated(state):
        upload, after = method.consolidate({"anchor": anchor}, world["shards"][0], state, world["rng"])
        assert upload == {}
        return after

    after = consolidated(memory)
    assert after.fisher["head.weight"].flatten().tolist() == [1.5, 1.5, 1.0]
    assert after.anchor is anchor and after.pending == {}
    # took no part in the task: the Fisher stays, the anchor moves on
    absent = consolidated(replace(memory, pending={}))
    assert absent.fisher is memory.fisher and absent.anchor is anchor
    assert consolidated(None) is None  # never took part
    late = consolidated(Memory({}, {}, memory.pending))  # took part for the first time
    assert late.fisher["head.weight"].flatten().tolist() == [1.0, 1.0, 1.0]


def test_rows_that_an_absent_client_knows_nothing_about_are_free(tiny_world):
    """F has two rows, the newer anchor four. One step pulls the first two by lr lambda F 0.1 and leaves the others to CE."""
    shard, model = second_task(tiny_world)[1], grown_model(tiny_world)
    anchor = {name: value - 0.1 for name, value in parameters_of(tiny_world, model).items()}
    method, old = FedEWC(train=ONE_STEP, ewc_weight=2.0), history(tiny_world, model, importance=0.5)
    _, state = method.consolidate({"anchor": anchor}, shard, old, tiny_world["rng"])
    upload, _ = method.client_round({"model": model}, shard, state, tiny_world["rng"])
    plain, _ = FedAvg(train=ONE_STEP).client_round({"model": model}, shard, None, tiny_world["rng"])
    pulled = plain["model"]["head.weight"] - upload["model"]["head.weight"]
    assert torch.allclose(pulled[:2], torch.full_like(pulled[:2], 0.1 * 2.0 * 0.5 * 0.1), atol=1e-6)
    assert pulled[2:].abs().max() == 0


@pytest.mark.parametrize("domain, share", [(None, 0.5), (1, 0.5)])
def test_last_round_anchors_at_the_clients_own_model_and_mixes_by_share(tiny_world, domain, share):
    shard = second_task(tiny_world, domain)[1]
    model = grown_model(tiny_world) if domain is None else weights_of(tiny_world["net"])
    memory = history(tiny_world, model)
    settings = {"train": ONE_STEP, "ewc_weight": 0.0}
    _, pending = FedEWC(**settings).client_round({"model": model}, shard, None, tiny_world["rng"])
    upload, state = FedEWC(**settings, anchor="last_round").client_round(
        {"model": model}, shard, memory, tiny_world["rng"]
    )
    for name, value in state.fisher.items():
        rows = len(memory.fisher[name])
        expected = pending.pending[name].clone()
        expected[:rows] = share * memory.fisher[name] + (1 - share) * expected[:rows]
        assert torch.allclose(value, expected, atol=1e-9)
        assert torch.equal(state.anchor[name], upload["model"][name])
    assert state.pending == {}


def test_clients_without_images_and_with_one(tiny_world):
    shard, model = second_task(tiny_world)[1], grown_model(tiny_world)
    memory, method = history(tiny_world, model), FedEWC(train=Training(local_epochs=1))
    upload, kept = method.client_round(
        {"model": model}, replace(shard, index=shard.index[:0]), memory, tiny_world["rng"]
    )
    assert upload == {"num_images": 0} and kept is memory
    upload, kept = method.client_round(
        {"model": model}, replace(shard, index=shard.index[:1]), memory, tiny_world["rng"]
    )
    assert upload["num_images"] == 1 and all(v.isfinite().all() for v in kept.pending.values())


# ---- the server


@pytest.mark.parametrize("anchor, exchanges", [("task_end", 1), ("last_round", 0)])
def test_the_anchor_goes_to_everybody_once_per_later_task_before_the_head_grows(tiny_world, anchor, exchanges):
    asked = []

    class World:
        clients = range(3)
        participants = range(2)
        net = staticmethod(tiny_world["arch"].restore)

        def ask(self, clients, verb, payload):
            asked.append((list(clients), verb, payload))
            return {}

    method, rng = FedEWC(anchor=anchor), tiny_world["rng"]
    state = method.begin_task(method.init(tiny_world["net"], rng), tiny_world["task"], World(), rng)
    assert asked == []
    after = method.begin_task(state, second_task(tiny_world)[0].task, World(), rng)
    assert len(asked) == exchanges and len(after.model["head.weight"]) == 4
    for clients, verb, payload in asked:
        assert clients == [0, 1, 2] and verb == "consolidate"
        assert payload["anchor"].keys() == dict(tiny_world["net"].named_parameters()).keys()  # trainable ones only
        assert all(torch.equal(value, state.model[name]) for name, value in payload["anchor"].items())


def test_if_nobody_answers_the_model_stays(tiny_world):
    method = FedEWC()
    state = method.init(tiny_world["net"], tiny_world["rng"])
    assert method.server_round(state, {0: {"num_images": 0}}, 0, None, tiny_world["rng"]) is state


@pytest.mark.parametrize("wrong", [{"ewc_weight": -1}, {"fisher_clip": 0}, {"fisher_decay": 1.5}, {"anchor": "first"}])
def test_bad_hyperparameters_are_refused(wrong):
    with pytest.raises(ValidationError):
        FedEWC(**wrong)


# ---- whole runs


def final_model(result):
    return load_file(result.folder / "model" / "final.safetensors")


@pytest.mark.slow
def test_runs_and_at_weight_zero_ends_with_the_bits_of_fedavg(tmp_path, image_folder):
    def run(name, method, **options):
        settings = {"data.path": str(image_folder)} | {f"method.{key}": value for key, value in options.items()}
        return final_model(rescene.run("smoke", out=tmp_path / name, method=method, **settings))

    plain = run("plain", "fedavg")
    for anchor in ("task_end", "last_round"):
        zero = run(f"{anchor}-zero", "fedewc", ewc_weight=0, anchor=anchor)
        assert all(torch.equal(plain[key], zero[key]) for key in plain)
        assert differences(plain, run(anchor, "fedewc", anchor=anchor)) > 0
