"""One round of FedAvg, FedDM and ReSCENE computed by hand: a linear network, pictures of three values, plain arithmetic."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rescene.core.rng import Rng
from rescene.data import Images, Task, Transform
from rescene.methods import method_class
from rescene.methods.base import Client
from rescene.methods.rescene import Collected
from rescene.nets import Arch
from rescene.training import Training

ARCH = Arch("linear", 1)  # the features of a picture are its three values
LOOK = Transform((0.0,) * 3, (1.0,) * 3, 0)
# values 0..1 of five pictures; sites hold the first three and the last two
PIXELS = np.array([[255, 0, 0], [0, 255, 51], [51, 102, 0], [204, 51, 102], [0, 0, 0]])
LABELS = np.array([0, 1, 1, 0, 1])
SITES = {0: [0, 1, 2], 1: [3, 4]}
WEIGHT, BIAS = np.array([[0.5, -0.25, 1.5], [0.125, 1.0, -0.5]]), np.array([0.0, 0.25])
PLAIN = {"lr": 0.5, "momentum": 0.0, "weight_decay": 0.0, "augment": False, "batch_size": 8}


class Sites:
    """A federation of nothing but what a server round looks at."""

    mechanism, device, num_rounds, transform = None, torch.device("cpu"), 2, LOOK
    task = Task(0, (0, 1), 2, None, torch.arange(5), torch.arange(5))
    clients = participants = (0, 1)

    def net(self, model):
        return ARCH.restore(model)

    def shard(self, client):
        pixels = torch.tensor(PIXELS, dtype=torch.uint8).reshape(-1, 3, 1, 1)
        index = torch.tensor(SITES[client])
        return Client(Images(pixels, torch.tensor(LABELS)), index, self.task, LOOK, self.net)


def model():
    return {"head.weight": torch.tensor(WEIGHT).float(), "head.bias": torch.tensor(BIAS).float()}


def softmax(scores):
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def one_step(weight, bias, x, labels, lr, shift=0.0):
    """Gradient descent on the mean of -log softmax(W x + b + shift)[label], by its formula."""
    error = (softmax(x @ weight.T + bias + shift) - np.eye(2)[labels]) / len(x)
    return weight - lr * error.T @ x, bias - lr * error.sum(axis=0)


def state_of(method):
    return replace(method.init(ARCH.restore(model()), Rng(0)), model=model())


def close(found, expected):
    return np.allclose(found.numpy(), expected, atol=1e-6)


def test_a_round_of_fedavg():
    method, sites = method_class("fedavg")(train=Training(local_epochs=2, **PLAIN)), Sites()
    uploads, expected = {}, []
    for k, own in SITES.items():
        uploads[k], _ = method.client_round({"model": model()}, sites.shard(k), None, Rng(k))
        weight, bias = WEIGHT, BIAS
        for _ in range(2):  # epochs of one batch
            weight, bias = one_step(weight, bias, PIXELS[own] / 255, LABELS[own], 0.5)
        assert close(uploads[k]["model"]["head.weight"], weight) and close(uploads[k]["model"]["head.bias"], bias)
        expected.append((weight, bias))
    after = method.server_round(state_of(method), uploads, 0, sites, Rng(0))
    for place, key in enumerate(("head.weight", "head.bias")):  # three images against two
        assert close(after.model[key], (3 * expected[0][place] + 2 * expected[1][place]) / 5)


def condensed_by_hand(x, start, lr):
    """One step of Eq. 1 without noise and clip: the gradient of ||mean s - mean x||^2 + ||W (mean s - mean x)||^2 in each s."""
    apart = start.mean(axis=0) - x.mean(axis=0)
    return start - lr * 2 / len(start) * (apart + WEIGHT.T @ (WEIGHT @ apart))


CONDENSE = {"num_steps": 1, "radius": 0.0, "clip": None, "image_lr": 0.25, "guard": False, "ipc": 1}


def test_a_client_condenses_by_equation_one():
    """Site 0 has one image of class 0 and two of class 1; min(IPC, n) makes one surrogate of each."""
    method = method_class("rescene")(step="fixed", surrogates_per_class="min", **CONDENSE)
    upload, _ = method.client_round({"model": model(), "noise_seed": 3}, Sites().shard(0), None, Rng(5))
    assert upload["labels"].tolist() == [0, 1]
    x = PIXELS[[1, 2]] / 255  # class 1
    possible = [condensed_by_hand(x, x[[chosen]], 0.25) for chosen in (0, 1)]  # the start is drawn among the two
    assert any(close(upload["images"][1].flatten(), s[0]) for s in possible)
    assert close(upload["images"][0].flatten(), [1.0, 0.0, 0.0])  # the mean of one image is the image: nothing moves


def pictures(values, labels):
    return {"images": torch.tensor(values).float().reshape(-1, 3, 1, 1), "labels": torch.tensor(labels), "notes": {}}


UPLOADS = {0: ([[1.0, 0.0, 0.0], [0.0, 1.0, 0.5]], [0, 1]), 1: ([[0.5, 0.5, 1.0]], [1])}
X, Y = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.5], [0.5, 0.5, 1.0]]), np.array([0, 1, 1])


def test_a_server_round_of_feddm_trains_on_the_uploads_alone():
    method = method_class("feddm")(train=Training(server_epochs=1, **PLAIN))
    uploads = {k: pictures(*sent) for k, sent in UPLOADS.items()}
    after = method.server_round(state_of(method), uploads, 0, Sites(), Rng(0))
    weight, bias = one_step(WEIGHT, BIAS, X, Y, 0.5)
    assert close(after.model["head.weight"], weight) and close(after.model["head.bias"], bias)


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_a_server_round_of_rescene_trains_on_buffers_and_pool(tau):
    """alpha = 1 makes an epoch of every picture once; tau adds the log of each class's share to its output."""
    method = method_class("rescene")(train=Training(server_epochs=1, **PLAIN), alpha=1.0, tau=tau)
    kept = Collected(torch.tensor([[0.25, 1.0, 0.5]]).reshape(1, 3, 1, 1), *(torch.zeros(1).long() for _ in range(3)))
    state = replace(state_of(method), buffers=(kept,))
    after = method.server_round(state, {k: pictures(*sent) for k, sent in UPLOADS.items()}, 0, Sites(), Rng(0))
    x, labels = np.vstack([[0.25, 1.0, 0.5], X]), np.array([0, *Y])
    shift = tau * np.array([math.log(2 / 4), math.log(2 / 4)])  # two pictures of each class
    weight, bias = one_step(WEIGHT, BIAS, x, labels, 0.5, shift)
    assert close(after.model["head.weight"], weight) and close(after.model["head.bias"], bias)
    (added,) = after.pool
    assert (
        added.labels.tolist() == [0, 1, 1] and added.clients.tolist() == [0, 0, 1] and added.rounds.tolist() == [1] * 3
    )
    again = method.server_round(after, {0: pictures([[0.0, 0.0, 0.0]], [0])}, 1, Sites(), Rng(0))
    assert [part.rounds.tolist() for part in again.pool] == [[1] * 3, [2]]


def test_logit_adjustment_by_hand():
    """Three pictures of class 1 against one of class 0: the shares are 1/4 and 3/4."""
    method = method_class("rescene")(train=Training(server_epochs=1, **PLAIN), alpha=1.0, tau=2.0)
    sent = pictures([[1.0, 0.0, 0.0], [0.0, 1.0, 0.5], [0.5, 0.5, 1.0], [0.0, 0.25, 0.0]], [0, 1, 1, 1])
    after = method.server_round(state_of(method), {0: sent}, 0, Sites(), Rng(0))
    x = np.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.5], [0.5, 0.5, 1.0], [0.0, 0.25, 0.0]])
    shift = 2.0 * np.array([math.log(1 / 4), math.log(3 / 4)])
    weight, bias = one_step(WEIGHT, BIAS, x, np.array([0, 1, 1, 1]), 0.5, shift)
    assert close(after.model["head.weight"], weight) and close(after.model["head.bias"], bias)


def test_herding_at_the_end_of_a_task():
    """Eq. 2 by trying every candidate: B = 2 of four unit vectors towards the mean of the last of two rounds."""
    method = method_class("rescene")(budget=2, recent_fraction=0.5)
    angles, rounds = [0.0, 1.5, 0.4, 0.9], [1, 1, 2, 2]
    z = np.array([[math.cos(a), math.sin(a), 0.0] for a in angles])
    pool = Collected(
        torch.tensor(3 * z).float().reshape(-1, 3, 1, 1),  # their length does not matter
        torch.zeros(4).long(),
        torch.tensor(rounds),
        torch.arange(4),
    )
    target, picks = z[2:].mean(axis=0), []
    for size in (1, 2):
        left = [i for i in range(4) if i not in picks]
        picks.append(min(left, key=lambda i: np.linalg.norm(target - z[[*picks, i]].sum(axis=0) / size)))
    state = replace(state_of(method), pool=(pool,))
    after = method.end_task(state, Sites.task, Sites(), Rng(0))
    assert after.pool == () and sorted(after.buffers[0].clients.tolist()) == sorted(picks)
