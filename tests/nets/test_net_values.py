"""Building, restoring and growing networks: where the values come from and who owns them."""

import math

import pytest
import torch
from safetensors.torch import save_file

from rescene.core.errors import ConfigError
from rescene.core.record import pack, unpack
from rescene.core.rng import seeded_generator
from rescene.nets import NAMES, Arch, build, check_fits, grow_head, load_weights

SMALL = Arch("convnet", 32, width=8)


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("name", NAMES)
def test_weights_come_from_the_generator_alone(name):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = build(name, num_classes=3, generator=seeded_generator(5)).state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    two = build(name, num_classes=3, generator=seeded_generator(5)).state_dict()
    assert same(one, two)
    other = build(name, num_classes=3, generator=seeded_generator(6)).state_dict()
    assert not torch.equal(one["head.weight"], other["head.weight"])
    first = next(iter(one))
    assert not torch.equal(one[first], other[first])


@pytest.mark.parametrize(("name", "norm"), [(name, "batch") for name in NAMES] + [("resnet18", "group")])
def test_every_value_is_initialised(name, norm):
    # In deterministic mode torch fills unwritten memory with NaN (integers: the largest), so a forgotten tensor shows.
    torch.use_deterministic_algorithms(True)
    try:
        state = build(name, num_classes=3, norm=norm).state_dict()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.isfinite(value).all() for value in state.values())
    assert all(value == 0 for key, value in state.items() if key.endswith("num_batches_tracked"))


def test_without_a_generator_the_seed_is_zero():
    assert same(SMALL.build(4).state_dict(), SMALL.build(4, seeded_generator(0)).state_dict())


@pytest.mark.parametrize(("name", "norm"), [(name, "batch") for name in NAMES] + [("resnet18", "group")])
def test_restored_net_is_the_original_bit_for_bit(name, norm):
    arch = Arch(name, 16, norm)
    net = arch.build(3, seeded_generator(0))
    x = torch.randn(2, 3, 16, 16, generator=seeded_generator(1))
    net(x)  # moves BatchNorm's statistics away from their initial values
    twin = arch.restore(net.state_dict())
    assert same(net.state_dict(), twin.state_dict())
    assert twin.training and all(p.requires_grad for p in twin.parameters())
    with torch.no_grad():
        assert torch.equal(net.eval()(x), twin.eval()(x))


def test_restored_net_shares_no_memory_with_the_mapping():
    state = {key: value.clone() for key, value in SMALL.build(3).state_dict().items()}
    kept = {key: value.clone() for key, value in state.items()}
    net = SMALL.restore(state)
    net(torch.ones(2, 3, 32, 32)).sum().backward()
    with torch.no_grad():
        for tensor in [*net.parameters(), *net.buffers()]:
            tensor.add_(1)
    assert same(state, kept)


def test_restore_keeps_the_global_random_state_and_the_dtype():
    state = {k: v.bfloat16() if v.is_floating_point() else v for k, v in SMALL.build(3).state_dict().items()}
    before = torch.get_rng_state()
    net = SMALL.restore(state)
    assert torch.equal(torch.get_rng_state(), before)
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}


def test_restore_does_without_step_counters():
    state = SMALL.build(3).state_dict()
    lean = {key: value for key, value in state.items() if not key.endswith("num_batches_tracked")}
    assert len(lean) == len(state) - 3
    assert same(SMALL.restore(lean).state_dict(), state)


def test_a_max_pooled_resnet_takes_the_weights_of_the_small_one():
    state = Arch("resnet18", 32).build(2).state_dict()
    assert same(Arch("resnet18", 64).restore(state).state_dict(), state)


def test_grown_head_keeps_old_rows_and_draws_new_ones():
    state = SMALL.build(4, seeded_generator(0)).state_dict()
    state["head.bias"] = torch.tensor([1.0, -2.0, 3.0, -4.0])
    kept = {key: value.clone() for key, value in state.items()}
    grown = grow_head(state, 300, seeded_generator(1))
    weight, bias = grown["head.weight"], grown["head.bias"]
    assert weight.shape == (300, 32) and bias.shape == (300,)
    assert torch.equal(weight[:4], kept["head.weight"]) and torch.equal(bias[:4], kept["head.bias"])
    assert torch.equal(bias[4:], torch.zeros(296))
    # Kaiming-uniform with a = sqrt(5): bound = sqrt(6 / ((1 + 5) * fan_in)) = 1 / sqrt(fan_in), std = bound / sqrt(3).
    bound = 1 / math.sqrt(32)
    assert weight[4:].abs().max() <= bound
    assert weight[4:].std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert all(torch.equal(grown[key], kept[key]) for key in kept if not key.startswith("head."))
    assert torch.equal(grow_head(state, 300, seeded_generator(1))["head.weight"], weight)
    for tensor in grown.values():
        tensor.zero_()
    assert same(state, kept)
    assert SMALL.restore(grown).head.out_features == 300


def test_growing_to_the_same_size_changes_and_draws_nothing():
    state = SMALL.build(4).state_dict()
    generator = seeded_generator(1)
    before = generator.get_state()
    assert same(grow_head(state, 4, generator), state)
    assert torch.equal(generator.get_state(), before)


def test_shrinking_a_head_is_refused():
    with pytest.raises(ConfigError, match="from 4 to 3"):
        grow_head(SMALL.build(4).state_dict(), 3, seeded_generator(0))


def test_arch_is_a_record_that_survives_saving():
    assert Arch("convnet", 32, width=8) == SMALL and hash(Arch("convnet", 32, width=8)) == hash(SMALL)
    skeleton, chunks = pack({"arch": SMALL})
    assert unpack(skeleton, chunks) == {"arch": SMALL}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": "resnet8"}, "did you mean 'resnet18'"),
        ({"name": "convnet", "norm": "grup"}, "did you mean 'group'"),
        ({"name": "mobilenet"}, "resnet18, resnet50, vit-small, vit-mini, convnet"),
        ({"name": "resnet18", "width": 16}, "only convnet"),
        ({"name": "convnet", "width": 0}, "at least 1"),
        ({"name": "vit-small", "image_size": 30}, "steps of 4"),
        ({"name": "vit-mini", "image_size": 30}, "steps of 4"),
        ({"name": "convnet", "image_size": 4}, "at least 8"),
    ],
)
def test_bad_architectures_are_refused(arguments, said):
    with pytest.raises(ConfigError) as caught:
        build(num_classes=2, **arguments)
    assert said in str(caught.value) and caught.value.exit_code == 2


def broken(key, value):
    state = SMALL.build(3).state_dict()
    if value is None:
        del state[key]
    else:
        state[key] = value
    return dict(state)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("body.stage2.0.weight", torch.zeros(16, 8, 5, 5)),
        ("body.stage2.0.weight", torch.zeros(16, 8, 3, 3, dtype=torch.int64)),
        ("body.stage3.1.running_var", None),
        ("body.stage4.0.weight", torch.zeros(1)),
        ("head.weight", None),
        ("head.weight", torch.zeros(3)),
        ("head.weight", torch.zeros(3, 33)),
        ("head.bias", torch.zeros(4)),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_key(key, value):
    for refuse in (lambda state: check_fits(SMALL, state), SMALL.restore):
        with pytest.raises(ConfigError) as caught:
            refuse(broken(key, value))
        assert caught.value.where == key


def test_weights_file_round_trip(tmp_path):
    state = SMALL.build(3, seeded_generator(3)).state_dict()
    save_file(state, tmp_path / "w.safetensors")
    loaded = load_weights(tmp_path / "w.safetensors")
    check_fits(SMALL, loaded)
    assert same(loaded, dict(state))
    with pytest.raises(ConfigError) as caught:
        check_fits(Arch("convnet", 32, width=16), loaded)
    assert caught.value.where == "body.stage1.0.weight"


def test_bad_weights_files_are_refused(tmp_path):
    (tmp_path / "text.safetensors").write_text("not weights")
    for name, why in [("absent.safetensors", "no such file"), ("text.safetensors", "not a readable")]:
        with pytest.raises(ConfigError, match=why):
            load_weights(tmp_path / name)
