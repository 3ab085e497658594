"""What the networks compute: shapes, normalisation, learning; and what they cost."""

import pytest
import torch
from torch import nn

from reference import counted_flops
from rescene.core.rng import seeded_generator
from rescene.nets import NAMES, Arch, build, forward_flops, state_bytes
from rescene.nets.bodies import norm_layer


def images(n, size=32, seed=0):
    return torch.randn(n, 3, size, size, generator=seeded_generator(seed))


@pytest.mark.parametrize(
    ("name", "size", "dim"),
    [
        ("resnet18", 32, 512),
        ("resnet18", 64, 512),
        ("resnet50", 16, 2048),
        ("vit-small", 64, 384),
        ("vit-mini", 32, 128),
        ("convnet", 32, 128),
    ],
)
def test_logits_are_the_head_on_the_features(name, size, dim):
    net = build(name, num_classes=7, image_size=size).eval()
    with torch.no_grad():
        features = net.features(images(2, size))
        assert features.shape == (2, dim) and net.feature_size == dim
        logits = net(images(2, size))
    assert logits.shape == (2, 7)
    assert torch.allclose(logits, features @ net.head.weight.T + net.head.bias, atol=1e-6)


@pytest.mark.parametrize(("name", "classes", "size", "num_bytes"), [
    ("resnet18", 10, 32, 44_734_248),
    ("resnet18", 100, 32, 44_918_928),
    ("resnet18", 200, 64, 45_124_128),
    ("resnet50", 100, 32, 95_033_488),
    ("vit-small", 100, 32, 4 * 21_376_996),
])  # fmt: skip
def test_state_has_the_papers_size(name, classes, size, num_bytes):
    assert state_bytes(Arch(name, size).skeleton(classes).state_dict()) == num_bytes


@pytest.mark.parametrize("name", NAMES)
def test_hooks_count_what_the_counter_of_torch_counts(name):
    arch = Arch(name, 32)
    image = torch.empty(1, 3, 32, 32, device="meta")
    assert forward_flops(arch, 7) == counted_flops(arch.skeleton(7).eval(), image)


@pytest.mark.parametrize(("name", "classes", "size", "flops"), [
    ("resnet18", 10, 32, 1.1108e9),
    ("resnet18", 200, 64, 1.1215e9),
    ("resnet50", 100, 32, 2.596e9),
    ("vit-small", 100, 32, 2.763e9),
])  # fmt: skip
def test_forward_flops_match_the_paper(name, classes, size, flops):
    assert forward_flops(Arch(name, size), classes) == pytest.approx(flops, rel=0.002)


def test_convnet_cost_by_hand():
    # Convolutions of 3x3 at 16, 8 and 4 pixels, 3 -> 8 -> 16 -> 32 channels, then 32 features to 5 classes.
    macs = 9 * (16 * 16 * 3 * 8 + 8 * 8 * 8 * 16 + 4 * 4 * 16 * 32) + 32 * 5
    arch = Arch("convnet", 32, width=8)
    assert forward_flops(arch, 5) == 2 * macs
    # Weights, then scale, shift, mean and variance of 8 + 16 + 32 channels, then the head.
    num_values = 9 * (3 * 8 + 8 * 16 + 16 * 32) + 4 * (8 + 16 + 32) + 32 * 5 + 5
    state = arch.build(5).state_dict()
    assert state_bytes(state) == 4 * num_values
    assert state_bytes({key: value.half() for key, value in state.items()}) == 2 * num_values


def test_vit_mini_cost_by_hand():
    # 16 patches of 4 x 4 x 3 values and a class token of 8 numbers; four blocks: q, k, v, out, and an MLP of 32.
    each = 4 * 8 * 8 + 2 * 8 * 32
    macs = 16 * 48 * 8 + 4 * 17 * each + 8 * 5
    arch = Arch("vit-mini", 16, width=8)
    assert forward_flops(arch, 5) == 2 * macs
    biases = 4 * (3 * 8 + 8 + 32 + 8) + 8 + 5
    num_values = 48 * 8 + 4 * each + 8 * 5 + biases + 8 + 17 * 8 + 2 * 8 * (2 * 4 + 1)  # class token, positions, norms
    assert state_bytes(arch.build(5).state_dict()) == 4 * num_values


@pytest.mark.parametrize(
    ("name", "norm"), [(name, norm) for name in NAMES[:1] + NAMES[2:] for norm in ("batch", "group")]
)
def test_evaluation_of_an_image_ignores_its_batch_mates(name, norm):
    net = build(name, num_classes=3, image_size=16, norm=norm)
    net(images(4, 16, seed=1))  # gives BatchNorm statistics that are not those of the next batch
    net.eval()
    with torch.no_grad():
        mixed, others = images(4, 16), images(4, 16, seed=2) * 5
        others[0] = mixed[0]
        assert torch.allclose(net(mixed)[0], net(others)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("norm", "depends"), [("batch", True), ("group", False)])
def test_in_training_only_batch_norm_mixes_images(norm, depends):
    net = build("convnet", num_classes=3, norm=norm)
    mixed, others = images(4), images(4, seed=2) * 5
    others[0] = mixed[0]
    assert torch.allclose(net(mixed)[0], net(others)[0], atol=1e-5) != depends


def test_group_norm_leaves_no_batch_norm_and_no_buffers():
    net = build("resnet18", num_classes=2, norm="group")
    assert not any(isinstance(module, nn.BatchNorm2d) for module in net.modules())
    assert list(net.buffers()) == []
    assert {m.num_groups for m in net.modules() if isinstance(m, nn.GroupNorm)} == {32}


@pytest.mark.parametrize(("channels", "groups"), [(8, 8), (24, 24), (32, 32), (48, 24), (64, 32), (512, 32)])
def test_number_of_groups(channels, groups):
    assert norm_layer("group", channels).num_groups == groups


def test_max_pool_only_from_64_pixels():
    names = [dict(build("resnet18", num_classes=2, image_size=s).body.named_children()).keys() for s in (32, 63, 64)]
    assert ["max_pool" in children for children in names] == [False, False, True]


def test_vit_features_see_every_patch_and_its_position():
    net = build("vit-small", num_classes=2, image_size=16).eval()
    x = images(1, 16).requires_grad_()
    net.features(x)[0, 0].backward()
    per_patch = x.grad.abs().sum(1).unfold(1, 4, 4).unfold(2, 4, 4).sum((-1, -2))
    assert per_patch.shape == (1, 4, 4) and (per_patch > 0).all()
    with torch.no_grad():
        swapped = torch.cat([x[..., 8:], x[..., :8]], dim=-1)
        moved = (net.features(x) - net.features(swapped)).abs().max()
        net.body.positions.zero_()
        rounding = (net.features(x) - net.features(swapped)).abs().max()
    # Attention sees a set of patches: only the positions tell a picture from its swapped halves.
    assert moved > 100 * rounding and rounding < 1e-4


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_convnet_learns_two_bright_classes(norm):
    net = build("convnet", num_classes=2, norm=norm, width=8)
    labels = torch.arange(16) % 2
    x = images(16) + 2 * labels.view(-1, 1, 1, 1) - 1
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(40):  # 20 were enough for six seeds; GroupNorm needs more than 10
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), labels).backward()
        optimiser.step()
    assert (net(x).argmax(1) == labels).all()


def test_state_keys_are_stable():
    keys = list(Arch("resnet18", 32).skeleton(2).state_dict())
    assert keys[0] == "body.stem.0.weight" and keys[-2:] == ["head.weight", "head.bias"]
    assert "body.stage2.0.shortcut.0.weight" in keys and "body.stage1.0.shortcut.0.weight" not in keys
    assert len(keys) == 20 * 6 + 2  # 20 convolutions, each with a norm of five tensors, and the head
