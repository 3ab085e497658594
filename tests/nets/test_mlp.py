"""The network behind a lens: its size, its layers, what it counts, and that one image has a gradient of its own."""

import pytest
import torch

from reference import counted_flops
from rescene.core.errors import ConfigError
from rescene.core.rng import seeded_generator
from rescene.nets import Arch, forward_flops
from rescene.training.per_image import is_layered


def test_one_hidden_layer_over_all_values():
    arch = Arch("mlp", 4, channels=19, width=32)
    net, x = arch.build(5), torch.randn(3, 19, 4, 4, generator=seeded_generator(0))
    weight, bias = (net.state_dict()[f"body.1.{key}"] for key in ("weight", "bias"))
    assert weight.shape == (32, 19 * 16) and not bias.any()
    hidden = (x.flatten(1) @ weight.T + bias).relu()
    assert torch.allclose(net(x), hidden @ net.head.weight.T + net.head.bias, atol=1e-5)
    assert Arch("mlp", 4, channels=19).build(5).feature_size == 256


def test_fresh_weights_keep_the_scale_of_their_input():
    """Kaiming: the mean square of the hidden units is that of the values."""
    net = Arch("mlp", 4, channels=19, width=2000).build(2, seeded_generator(3))
    x = torch.randn(200, 19, 4, 4, generator=seeded_generator(1))
    assert net.features(x).square().mean().item() == pytest.approx(1.0, rel=0.05)


def test_it_is_counted_and_restored_like_the_others():
    arch = Arch("mlp", 4, channels=19, width=8)
    assert forward_flops(arch, 7) == counted_flops(arch.skeleton(7).eval(), torch.empty(1, 19, 4, 4, device="meta"))
    net, x = arch.build(7, seeded_generator(1)), torch.randn(2, 19, 4, 4)
    assert torch.equal(arch.restore(net.state_dict())(x), net(x)) and is_layered(net)


def test_an_arch_of_before_lenses_has_three_channels():
    assert Arch(**{"name": "mlp", "image_size": 8, "norm": "batch", "width": None}).channels == 3


@pytest.mark.parametrize(("settings", "code"), [
    ({"name": "mlp", "image_size": 0}, "E132"),
    ({"name": "mlp", "image_size": 4, "width": 0}, "E131"),
    ({"name": "resnet18", "image_size": 4, "channels": 19}, "E130"),
    ({"name": "resnet18", "image_size": 4}, "E132"),
])  # fmt: skip
def test_what_cannot_be_built_is_refused(settings, code):
    with pytest.raises(ConfigError) as error:
        Arch(**settings)
    assert error.value.code == code
