"""GLFC's mathematics: the two losses, the encoder, labels and pictures from gradients, L-BFGS row by row."""

import math

import pytest
import torch
import torch.nn.functional as F
from glfc_world import (
    QUICK_SEARCH,
    logit,
)

from rescene.core.record import num_bytes
from rescene.core.rng import seeded_generator
from rescene.functional.distillation import compensation_loss, compensation_weights, mean_entropy, relation_loss
from rescene.training.lbfgs import minimise
from rescene.training.reconstruction import (
    Inversion,
    encode,
    encoder_gradients,
    encoder_weights,
    labels_from_gradients,
    reconstruct,
)


def test_compensation_weights_by_hand():
    # probability of the true class -> gap g = 1 - p; old: .2 .6, mean .4; new: .1 .3 .5, mean .3
    true_p, old = [0.8, 0.4, 0.9, 0.7, 0.5], torch.tensor([True, True, False, False, False])
    labels = torch.tensor([0, 1, 2, 2, 3])
    z = torch.full((5, 4), 3.0)
    for n, p in enumerate(true_p):
        z[n, labels[n]] = logit(p)
    z.requires_grad_(True)
    w = compensation_weights(z, labels, old)
    assert torch.allclose(w, torch.tensor([0.5, 1.5, 1 / 3, 1.0, 5 / 3]), atol=1e-5)
    assert not w.requires_grad


def test_compensation_weights_have_mean_one_in_each_group():
    z = 4 * torch.randn(50, 6, generator=seeded_generator(0))
    labels, old = torch.arange(50) % 6, torch.arange(50) % 3 == 0
    w = compensation_weights(z, labels, old)
    assert torch.allclose(torch.stack([w[old].mean(), w[~old].mean()]), torch.ones(2), atol=1e-5)
    alone = compensation_weights(z[old], labels[old], old[old])  # the other group does not matter
    assert torch.allclose(w[old], alone, atol=1e-6)


def test_a_group_without_any_gap_keeps_weight_one():
    z = torch.tensor([[1e4, 0.0], [0.0, 0.0]])
    w = compensation_weights(z, torch.tensor([0, 0]), torch.tensor([True, False]))
    assert w.tolist() == [1.0, 1.0]


def test_compensation_loss_weighs_whole_samples():
    # z = 0 everywhere: each of the 2 outputs costs ln 2; weights 3 and 1 have mean 2
    z, labels, w = torch.zeros(2, 2), torch.tensor([0, 1]), torch.tensor([3.0, 1.0])
    assert compensation_loss(z, labels, w).item() == pytest.approx(2 * math.log(2))
    assert compensation_loss(z, labels, w, "sum").item() == pytest.approx(4 * math.log(2))


def test_relation_gradient_pulls_old_outputs_to_the_old_model_and_the_rest_to_the_label():
    generator = seeded_generator(3)
    z = torch.randn(4, 5, generator=generator, requires_grad=True)
    u, labels = torch.randn(4, 3, generator=generator), torch.tensor([0, 3, 4, 2])
    targets = torch.cat([torch.sigmoid(u), F.one_hot(labels, 5)[:, 3:]], dim=1)
    # d BCE(z, t) / dz = sigmoid(z) - t, over 4 * 5 terms
    (gradient,) = torch.autograd.grad(relation_loss(z, labels, u), z)
    assert torch.allclose(gradient, (torch.sigmoid(z) - targets) / 20, atol=1e-6)
    assert gradient[0, 0].item() != pytest.approx(((torch.sigmoid(z) - F.one_hot(labels, 5)) / 20)[0, 0].item())


def test_relation_gradient_is_zero_where_student_and_old_model_agree():
    z = torch.randn(3, 4, generator=seeded_generator(4), requires_grad=True)
    (gradient,) = torch.autograd.grad(relation_loss(z, torch.tensor([0, 1, 2]), z.detach().clone()), z)
    assert gradient.abs().max().item() < 1e-7  # all outputs are old: as in domain-incremental runs


def test_entropy_of_hand_made_outputs():
    assert mean_entropy(torch.zeros(3, 4)) == pytest.approx(math.log(4))
    assert mean_entropy(torch.tensor([[50.0, 0.0], [0.0, 0.0]])) == pytest.approx(math.log(2) / 2)
    assert mean_entropy(torch.zeros(0, 4)) == 0.0


@pytest.mark.parametrize(("side", "features"), [(32, 768), (64, 3072), (9, 12 * 9)])
def test_encoder_sizes(side, features):
    encoder = encoder_weights(0, 100, side, side)
    assert encoder["head.weight"].shape == (100, features)
    assert encode(encoder, torch.rand(2, 3, side, side)).shape == (2, 100)
    convolutions = (3 * 12 * 25 + 12) + 2 * (12 * 12 * 25 + 12)
    assert num_bytes(encoder) == 4 * (convolutions + 101 * features - features + 100)
    for name, values in encoder.items():  # uniform(-.5, .5) has standard deviation 1 / sqrt(12) = .289
        assert values.abs().max() <= 0.5 and 0.15 < values.std().item() < 0.4, name


def test_the_encoder_stays_the_same_while_classes_arrive():
    small, large, other = encoder_weights(5, 2, 8, 8), encoder_weights(5, 6, 8, 8), encoder_weights(6, 2, 8, 8)
    assert all(torch.equal(small[key], large[key][: len(small[key])]) for key in small)
    assert not torch.equal(small["conv0.weight"], other["conv0.weight"])


def test_gradients_of_many_pictures_are_those_of_each_one():
    encoder, images = encoder_weights(0, 3, 8, 8), torch.rand(4, 3, 8, 8, generator=seeded_generator(0))
    labels = torch.tensor([2, 0, 1, 2])
    together = encoder_gradients(encoder, images, labels)
    weights = {key: value.clone().requires_grad_(True) for key, value in encoder.items()}
    for i in range(4):
        loss = F.cross_entropy(encode(weights, images[i : i + 1]), labels[i : i + 1])
        alone = torch.autograd.grad(loss, list(weights.values()))
        assert all(torch.allclose(together[key][i], g, atol=1e-6) for key, g in zip(weights, alone, strict=True))


def test_label_from_the_gradient_of_a_linear_encoder():
    # gradient of the cross-entropy of W h at W = 0, C = 3: (1/3 - [c = y]) h
    h = torch.tensor([0.2, 0.9])
    gradients = torch.stack(
        [torch.outer(torch.full((3,), 1 / 3) - F.one_hot(torch.tensor(y), 3), h) for y in (2, 0, 1)]
    )
    assert labels_from_gradients({"head.weight": gradients}).tolist() == [2, 0, 1]


def test_labels_are_recovered_for_every_class():
    labels = torch.arange(7).repeat(3)
    images = torch.rand(21, 3, 8, 8, generator=seeded_generator(1))
    gradients = encoder_gradients(encoder_weights(2, 7, 8, 8), images, labels)
    assert torch.equal(labels_from_gradients(gradients), labels)


def one_layer_objective(weight, wanted, labels):
    """Distance between gradients of the cross-entropy of W x: (softmax(W x) - onehot) x^T."""

    def objective(points):
        x = points.detach().requires_grad_(True)
        error = (x @ weight.T).softmax(dim=1) - F.one_hot(labels, len(weight))
        values = (error.unsqueeze(2) * x.unsqueeze(1) - wanted).square().sum(dim=(1, 2))
        return values.detach(), torch.autograd.grad(values.sum(), x)[0]

    return objective


def test_inversion_recovers_the_input_of_a_one_layer_network():
    generator = seeded_generator(0)
    weight = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    x, labels = torch.rand(5, 4, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1])
    error = (x @ weight.T).softmax(dim=1) - F.one_hot(labels, 3)
    objective = one_layer_objective(weight, error.unsqueeze(2) * x.unsqueeze(1), labels)
    found, values = minimise(objective, torch.full_like(x, 0.5), lr=0.1, calls=100, steps=20, history=100, keep=3)
    assert found.shape == (5, 3, 4)
    assert values.max().item() < 1e-7
    assert (found[:, -1] - x).abs().max().item() < 0.01


def test_every_row_goes_the_way_of_torch_lbfgs():
    """A curved valley per row, some of which converge early; the history of 5 is overwritten many times."""
    tilt = torch.tensor([1.0, 3.0, 20.0, 0.5], dtype=torch.float64)

    def objective(points, rows=slice(None)):
        x = points.detach().requires_grad_(True)
        a, b = x[:, 0], x[:, 1]
        values = (1 - a) ** 2 + tilt[rows] * (b - a**2) ** 2 + x[:, 2:].square().sum(dim=1)
        return values.detach(), torch.autograd.grad(values.sum(), x)[0]

    start = torch.tensor([[-1.0, 1.0, 3.0], [0.5, 0.0, 1.0], [1.1, 1.3, 0.2], [1.0, 1.0, 0.0]], dtype=torch.float64)
    found, values = minimise(objective, start, lr=0.3, calls=6, steps=7, history=5, keep=6)
    for row in range(4):
        x = start[row].clone().requires_grad_(True)
        optimiser = torch.optim.LBFGS([x], lr=0.3, max_iter=7, history_size=5)
        for call in range(6):

            def closure(x=x, row=row):
                value, gradient = objective(x.unsqueeze(0), [row])
                x.grad = gradient[0]
                return value[0]

            optimiser.step(closure)
            assert torch.allclose(found[row, call], x.detach(), atol=1e-9), (row, call)
    assert torch.equal(found[3], start[3].expand(6, 3))  # it began at its minimum
    assert values[0].item() < 4


def test_reconstruction_gives_labels_and_pictures_back():
    encoder, labels = encoder_weights(3, 4, 8, 8), torch.tensor([3, 1])
    images = torch.rand(2, 3, 8, 8, generator=seeded_generator(4))
    gradients = encoder_gradients(encoder, images, labels)
    settings = Inversion(num_inversions=15, num_iterates=4)
    found = reconstruct(encoder, gradients, (8, 8), settings, seeded_generator(0))
    assert torch.equal(found.labels, labels) and found.images.shape == (2, 4, 3, 8, 8)
    assert found.images.min() >= 0 and found.images.max() <= 1
    rms = (found.images[:, -1] - images).square().mean(dim=(1, 2, 3)).sqrt()
    assert rms.max().item() < 0.02, "a recognisable copy: this is the point of the method and its privacy problem"


def test_a_search_without_a_finite_value_is_left_out():
    encoder, labels = encoder_weights(3, 3, 8, 8), torch.tensor([2, 1])
    gradients = encoder_gradients(encoder, torch.rand(2, 3, 8, 8, generator=seeded_generator(0)), labels)
    gradients["conv0.bias"][0, 0] = math.nan
    found = reconstruct(encoder, gradients, (8, 8), Inversion(**QUICK_SEARCH), seeded_generator(0))
    assert found.labels.tolist() == [1] and len(found.images) == len(found.losses) == 1
