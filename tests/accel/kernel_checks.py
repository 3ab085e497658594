"""The Triton kernels against torch's own operations. ``test_kernels.py`` runs this file in Triton's interpreter.

TRITON_INTERPRET=1 python -m pytest tests/accel/kernel_checks.py        (set before torch is imported)
"""

import pytest
import torch
import torch.nn.functional as F

from rescene.accel import fused_layers as fused
from rescene.accel import triton_kernels as K
from rescene.data import Transform


@pytest.mark.parametrize("valid", [3, 2])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(("channels", "relu", "add"), [(64, True, True), (128, True, False), (32, False, False)])
def test_norm_and_what_follows_it(channels, relu, add, train, valid):
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randn(3, channels, 5, 5, generator=generator).to(memory_format=torch.channels_last)  # noqa: E731
    x, r = draw().requires_grad_(), draw().requires_grad_()
    norm = torch.nn.BatchNorm2d(channels).train(train)
    norm.weight.data.normal_(generator=generator)
    norm.bias.data.normal_(generator=generator)
    weight, bias = norm.weight.detach().clone().requires_grad_(), norm.bias.detach().clone().requires_grad_()
    place = {
        "running_mean": norm.running_mean.clone(),
        "running_var": norm.running_var.clone(),
        "sums": torch.zeros(2, 2, channels, dtype=torch.int64),
        "valid": torch.tensor(valid, dtype=torch.int32),
        "momentum": 0.1,
        "eps": 1e-5,
    }
    count = valid if train else 3
    outer = draw()
    outer[count:] = 0
    y = K.NormAct.apply(x, weight, bias, r if add else None, relu, train, place)
    expected = norm(x[:count])
    expected = expected + r[:count] if add else expected
    expected = F.relu(expected) if relu else expected
    assert torch.allclose(y[:count], expected, atol=1e-5)
    assert torch.allclose(place["running_mean"], norm.running_mean, atol=1e-6)
    assert torch.allclose(place["running_var"], norm.running_var, atol=1e-5)
    inputs = [x] + [r] * add + [weight, bias] * train
    found = torch.autograd.grad(y, inputs, outer)
    wanted = torch.autograd.grad(expected, [x] + [r] * add + [norm.weight, norm.bias] * train, outer[:count])
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("kind", ["bytes", "floats", "uncropped"])
def test_the_next_batch_of_an_epoch(kind):
    look, generator = Transform((0.49, 0.48, 0.45), (0.25, 0.24, 0.26), 2), torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (20, 3, 8, 8), dtype=torch.uint8, generator=generator)
    labels, order = torch.randint(10, (20,), generator=generator), torch.randperm(20, generator=generator)
    crops = None if kind == "uncropped" else look.draw(20, generator)
    pictures = look.normalise(pixels) if kind == "floats" else pixels
    outcomes = []
    for form in (K.look, fused.look):
        x = torch.empty(5, 3, 8, 8).to(memory_format=torch.channels_last)
        y, valid = torch.empty(5, dtype=torch.long), torch.zeros((), dtype=torch.int32)
        form(pictures, labels, order, (torch.tensor(7), torch.tensor(10)), crops, x, y, valid, look)
        outcomes.append((x, y, int(valid)))
    (x, y, valid), (x2, y2, valid2) = outcomes
    assert torch.equal(x, x2)
    assert torch.equal(y, y2)
    assert valid == valid2 == 3


def test_update_and_loss():
    generator = torch.Generator().manual_seed(0)
    theta, velocity = torch.randn(5000, generator=generator), torch.randn(5000, generator=generator)
    gradient, low = torch.randn(5000, generator=generator).bfloat16(), torch.empty(5000, dtype=torch.bfloat16)
    copies = theta.clone(), velocity.clone(), gradient, low.clone()
    K.sgd_(theta, velocity, gradient, low, torch.tensor(0.1), 0.9, 5e-4)
    fused.sgd_(*copies, torch.tensor(0.1), 0.9, 5e-4)
    for one, other in zip((theta, velocity, low), (copies[0], copies[1], copies[3]), strict=True):
        assert torch.allclose(one.float(), other.float(), rtol=2**-7 if one is low else 1e-6, atol=1e-6)
    logits, y = torch.randn(6, 40, generator=generator), torch.randint(40, (6,), generator=generator)
    given = logits, torch.randn(40, generator=generator), y, torch.tensor(4, dtype=torch.int32)
    for one, other in zip(K.loss_and_gradient(*given), fused.loss_and_gradient(*given), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
