"""Work on networks that no hook of the ledger sees: its size by hand, and that it is told."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from rescene.nets import flops_to, tell_flops
from rescene.training.generator import generator_flops
from rescene.training.reconstruction import (
    GRADIENT_PASSES,
    INVERSION_PASSES,
    Inversion,
    encode,
    encoder_flops,
    encoder_gradients,
    encoder_weights,
    reconstruct,
)


def test_generator_by_hand():
    # z of 8 -> 8 channels of 2x2; 3x3 convolutions 8 -> 8 at 4x4, 8 -> 4 at 8x8, 4 -> 3 at 8x8
    macs = 8 * 8 * 4 + 9 * (8 * 8 * 16 + 8 * 4 * 64 + 4 * 3 * 64)
    assert generator_flops(8, 4, 8) == 2 * macs


def test_encoder_by_hand():
    # 5x5 convolutions of 12 channels at 4x4, 2x2, 2x2; a linear layer from 48 to 10
    macs = 25 * (3 * 12 * 16 + 12 * 12 * 4 + 12 * 12 * 4) + 48 * 10
    assert encoder_flops(10, 8, 8) == 2 * macs


def test_passes_of_an_inversion_step():
    encoder = encoder_weights(0, 10, 32, 32)

    def gradients(x, **more):
        weights = {name: value.clone().requires_grad_() for name, value in encoder.items()}
        loss = F.cross_entropy(encode(weights, x), torch.tensor([1]))
        return torch.autograd.grad(loss, list(weights.values()), **more)

    x = torch.rand(1, 3, 32, 32, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        distance = sum(g.square().sum() for g in gradients(x, create_graph=True))
        torch.autograd.grad(distance, x)
    assert counter.get_total_flops() == pytest.approx(INVERSION_PASSES * encoder_flops(10, 32, 32), rel=0.03)


def test_a_reconstruction_tells_every_evaluation():
    encoder = encoder_weights(0, 4, 8, 8)
    images, labels = torch.rand(3, 3, 8, 8), torch.tensor([0, 1, 2])
    heard: list[int] = []
    with flops_to(heard.append):
        wanted = encoder_gradients(encoder, images, labels)
    assert sum(heard) == 3 * GRADIENT_PASSES * encoder_flops(4, 8, 8)
    heard.clear()
    with flops_to(heard.append):
        settings = Inversion(num_inversions=1, inversion_steps=1)
        reconstruct(encoder, wanted, (8, 8), settings, torch.Generator().manual_seed(0))
    assert sum(heard) == 2 * 3 * INVERSION_PASSES * encoder_flops(4, 8, 8)  # one step, and the value where it ends


def test_nobody_need_listen():
    tell_flops(1)
