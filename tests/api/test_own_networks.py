"""Networks of the user's own: taken apart, built, run with every method, refused before a run."""

import pytest
import torch
from own_things import SMALL, Small, arrays, small
from torch import nn

import rescene
from rescene.core.errors import ConfigError
from rescene.core.rng import seeded_generator
from rescene.lens import backbone
from rescene.methods import method_names
from rescene.nets import Arch, forward_flops
from rescene.nets.own_networks import enter_object
from rescene.training.per_image import gradient_norms, is_layered


def test_the_last_linear_layer_is_the_head_and_features_go_into_it():
    net = small().eval()
    arch = Arch(enter_object(net)[0], 16)
    made, x = arch.build(10).eval(), torch.randn(3, 3, 16, 16)
    made.head.load_state_dict(net.fc.state_dict())
    assert torch.allclose(made(x), net(x), atol=1e-6)
    assert made.features(x).shape == (3, 16) and "body.net.fc.weight" not in made.state_dict()


def test_a_restored_network_is_the_same_also_where_a_buffer_is_in_no_state_dict():
    arch = Arch(enter_object(small())[0], 16)
    net, x = arch.build(4).eval(), torch.randn(2, 3, 16, 16)
    again = arch.restore(net.state_dict()).eval()
    assert torch.equal(again(x), net(x)) and again.body.net.scale == 2
    assert forward_flops(arch, 4) > 0


def test_a_module_keeps_its_weights_and_a_function_makes_new_ones_for_each_seed():
    net = small()
    fixed, made = (Arch(enter_object(one)[0], 16) for one in (net, Small))
    first, second = (made.build(2, seeded_generator(s)).body.net.first.weight for s in (1, 2))
    assert torch.equal(fixed.build(2, seeded_generator(1)).body.net.first.weight, net.first.weight)
    assert not torch.equal(first, second)
    assert torch.equal(first, made.build(2, seeded_generator(1)).body.net.first.weight)


def test_a_function_may_ask_for_sizes():
    model = rescene.Model(
        lambda image_size, num_classes: nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, num_classes))
    )
    assert model.taken_apart(8).feature_size == 192


def test_gradients_per_image_do_not_take_the_short_way_through_groups():
    net = Arch(enter_object(small(norm=None, dropout=0))[0], 16).build(4).eval()
    x, y = torch.randn(3, 3, 16, 16), torch.tensor([0, 1, 2])
    assert not is_layered(net)
    expected = []
    for i in range(3):
        net.zero_grad()
        nn.functional.cross_entropy(net(x[i : i + 1]), y[i : i + 1]).backward()
        expected.append(sum(float(p.grad.square().sum()) for p in net.parameters()) ** 0.5)
    assert torch.allclose(gradient_norms(net, x, y), torch.tensor(expected), rtol=1e-4)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.fc = nn.Linear(192, 8), nn.Linear(192, 8), nn.Linear(8, 2)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.fc(self.a(x.flatten(1)) + self.b(x.flatten(1)))


class Detached(nn.Sequential):
    def forward(self, x):
        return super().forward(x.detach())


class Locked(nn.Sequential):
    def __deepcopy__(self, memo):
        raise TypeError("cannot pickle this")


def flat(*more):
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 5), *more)


@pytest.mark.parametrize(("network", "words"), [
    (nn.Conv2d(3, 8, 3), r"gives float32 \[2, 8, 6, 6\]"),
    (flat(nn.Softmax(dim=1)), "ends in a softmax"),
    (flat(nn.LogSoftmax(dim=1)), "ends in a log_softmax"),
    (flat(nn.ReLU()), "does not come straight from an nn.Linear"),
    (rescene.Model(flat(nn.ReLU()), head="2"), "has no linear layer '2'; it has: 1"),
    (rescene.Model(flat(nn.Tanh()), head="1"), "does more after its head"),
    (nn.Sequential(nn.Flatten(), nn.Linear(7, 5)), "fails on pictures"),
    (nn.LSTM(8, 8), "fails on pictures|gives a tuple"),
    (Twice(), "is a parameter that another layer has too"),
    (Detached(nn.Flatten(), nn.Linear(192, 8), nn.Linear(8, 5)), "without its head it fails|no gradient"),
    (Locked(nn.Flatten(), nn.Linear(192, 5)), "cannot be copied"),
    (nn.Sequential(nn.Flatten(), nn.LazyLinear(4), nn.Linear(4, 2)), "a lazy layer has no size yet"),
    (lambda: 3, "gives a int"),
    (lambda depth: flat(), "wants 'depth'"),
    ("convnet-ish", "E130|unknown"),
    (7, "it is a int"),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_what_is_no_network_is_refused_before_there_is_a_folder(network, words, tmp_path):
    data = arrays(side=8)
    with pytest.raises(ConfigError, match=words) as error:
        rescene.run("smoke", model=network, data=data, method="fedavg", out=tmp_path / "run", **SMALL)
    assert error.value.code in ("E156", "E130") and error.value.fix and not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"norm": None, "dropout": 0}], ids=["norm and dropout", "plain"])
@pytest.mark.parametrize("method", method_names())
def test_every_method_runs_with_an_own_network(method, how, tmp_path):
    settings = SMALL | {"federation.engine": "debug", "federation.num_rounds": 1}
    if method in ("pilora", "fedcprompt"):  # they need attention layers
        with pytest.raises(ConfigError, match="E580|E586"):
            rescene.run("smoke", model=small(**how), data=arrays(), method=method, out=tmp_path / "run", **settings)
        return
    result = rescene.run("smoke", model=small(**how), data=arrays(), method=method, out=tmp_path / "run", **settings)
    assert result.values["events_summary"]["client_failures"] == 0 and len(result.matrix) == 2


def test_batch_norm_is_refused_under_a_mechanism_that_needs_gradients_per_image(tmp_path):
    private = SMALL | {"privacy.mechanism": "dp-sgd", "privacy.epsilon": 8, "train.augment": False}
    with pytest.raises(ConfigError, match="BatchNorm mixes"):
        rescene.run("smoke", model=small(), data=arrays(), method="fedavg", out=tmp_path / "run", **private)
    pytest.importorskip("dp_accounting")
    plain = small(norm=lambda n: nn.GroupNorm(2, n), dropout=0)
    assert rescene.run("smoke", model=plain, data=arrays(), method="fedavg", out=tmp_path / "run", **private).aa >= 0


def test_a_network_brings_its_own_normalisation(tmp_path):
    model = rescene.Model(small(), mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.2))
    run = rescene.run("smoke", model=model, data=arrays(), method="fedavg", out=tmp_path / "run", **SMALL)
    about = rescene.use.open_model(run.folder).about
    assert about["mean"] == [0.5, 0.4, 0.3] and about["std"] == [0.2, 0.2, 0.2]


def test_a_frozen_network_is_a_lens_of_which_only_the_head_learns(tmp_path, monkeypatch):
    monkeypatch.setattr(backbone, "NUM_PICTURES", 24)
    model = rescene.Model(small(), size=16, frozen=True)
    run = rescene.run("smoke", model=model, data=arrays(), method="moments", out=tmp_path / "run", **SMALL)
    assert run.values["config"]["model"]["lens"].startswith("object:Small-") and "model: Small-" in run.objects[0]
    assert run.aa > 50, "the classes are colours"
    with pytest.raises(ConfigError, match="no size is given"):
        rescene.Model(small(), frozen=True)


def test_two_networks_cannot_share_a_name():
    rescene.register_model("same-name")(Small)
    rescene.register_model("same-name")(Small)
    with pytest.raises(ConfigError, match="E169"):
        rescene.register_model("same-name")(lambda: small(norm=None))
