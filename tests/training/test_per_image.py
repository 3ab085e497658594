"""Every image's own gradient from one backward pass: the same as differentiating image by image."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rescene.core.rng import seeded_generator
from rescene.nets import build
from rescene.training import per_image


def summed(logits, y):
    return F.cross_entropy(logits, y, reduction="sum")


def one_by_one(net, x, y):
    """name -> [n, *shape], by definition."""
    rows = [torch.autograd.grad(summed(net(x[i : i + 1]), y[i : i + 1]), list(net.parameters())) for i in range(len(x))]
    return {
        name: torch.stack(parts)
        for (name, _), parts in zip(net.named_parameters(), zip(*rows, strict=True), strict=True)
    }


def of(name, **more):
    net = build(name, num_classes=3, generator=seeded_generator(1), **more).double().eval()
    for module in net.modules():  # norms that are not the identity
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_(-0.5, 0.5, generator=seeded_generator(2))
            module.running_var.uniform_(0.5, 2, generator=seeded_generator(3))
        if isinstance(module, (nn.BatchNorm2d, nn.GroupNorm)):
            nn.init.uniform_(module.weight, 0.5, 1.5, generator=seeded_generator(4))
    return net


def pictures(n=5, side=16):
    source = seeded_generator(7)
    return torch.randn(n, 3, side, side, generator=source, dtype=torch.double), torch.randint(3, (n,), generator=source)


NETS = {
    "convnet": lambda: of("convnet", image_size=16, width=4),
    "group norm": lambda: of("convnet", image_size=16, width=4, norm="group"),
    "shortcuts, strides, 1x1": lambda: of("resnet18", image_size=16),
}


@pytest.mark.parametrize("name", NETS)
def test_gradients_are_those_of_single_images(name):
    net, (x, y), found = NETS[name](), pictures(), {}
    per_image.image_gradients(net, x, y, summed, found.__setitem__)
    wanted = one_by_one(net, x, y)
    assert set(found) == set(wanted)
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, msg=key)
    assert all(p.grad is None for p in net.parameters())
    assert not any(module._forward_hooks for module in net.modules())


class Tokens(nn.Module):
    """Linear layers and LayerNorm on several tokens, a bias-free layer, a plain vector."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.head = nn.Linear(16, 6, bias=False), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.norm(self.inner(x.flatten(1, 2))).tanh().mean(dim=1))


def test_layers_on_tokens():
    torch.manual_seed(0)
    net, (x, y), found = Tokens().double(), pictures(), {}
    per_image.image_gradients(net, x, y, summed, found.__setitem__)
    for key, value in one_by_one(net, x, y).items():
        torch.testing.assert_close(found[key], value, msg=key)


@pytest.mark.parametrize("room", [1, 2**20])
def test_norms_and_squares_do_not_depend_on_the_chunks(room, monkeypatch):
    monkeypatch.setattr(per_image, "GRADIENT_BYTES", {"cpu": room})
    net, (x, y) = NETS["convnet"](), pictures()
    single = one_by_one(net, x, y)
    squares = sum(value.flatten(1).square().sum(dim=1) for value in single.values())
    torch.testing.assert_close(per_image.gradient_norms(net, x, y), squares.sqrt())
    parts = per_image.chunks(net, len(x), x.device)
    assert len(parts) == (5 if room == 1 else 1)
    found = per_image.mean_squared_gradients(net, [(x[rows], y[rows]) for rows in parts], summed)
    for key, value in single.items():
        torch.testing.assert_close(found[key], value.square().mean(dim=0), msg=key)


def test_a_network_with_parameters_of_its_own_is_differentiated_image_by_image():
    net = build("vit-small", num_classes=3, image_size=16).eval()
    assert not per_image.is_layered(net)
    x, y = pictures(2)
    squares = sum(value.flatten(1).square().sum(dim=1) for value in one_by_one(net, x.float(), y).values())
    torch.testing.assert_close(per_image.gradient_norms(net, x.float(), y), squares.sqrt(), rtol=1e-4, atol=1e-5)


def test_no_images():
    net = NETS["convnet"]()
    assert per_image.gradient_norms(net, *pictures(0)).shape == (0,)
    assert all(value.abs().max() == 0 for value in per_image.mean_squared_gradients(net, [], summed).values())
