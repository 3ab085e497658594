"""The set-up of a run: initial weights, participants, devices."""

import json
import warnings

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from rescene.config import resolve
from rescene.core.errors import ConfigError, ResceneWarning
from rescene.engine.experiment import pick_device, prepare


def start(file, *overrides):
    return prepare(resolve("smoke", [f"model.init={file}", *overrides]).recipe).initial_net().state_dict()


def export_of(file, names, **changes):
    """A model of these classes, as rescene export writes it; its weights."""
    arch = prepare(resolve("smoke").recipe).arch
    state = arch.build(len(names), torch.Generator().manual_seed(9)).state_dict()
    about = {"schema": 2, "arch": vars(arch), "classes": names, "mean": [0.5] * 3, "std": [0.25] * 3} | changes
    save_file(state, file, {"rescene": json.dumps(about)})
    return state


def test_a_class_starts_from_its_own_row_whatever_its_place(tmp_path):
    """The first task of the smoke recipe has T-shirt and Trouser."""
    file = tmp_path / "w.safetensors"
    given = export_of(file, ["T-shirt", "Trouser"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResceneWarning)
        assert all(torch.equal(value, given[key]) for key, value in start(file).items())
    for names, told in (
        (["Trouser", "dog", "T-shirt"], "not used: dog"),
        (["Trouser"], "new: T-shirt"),
        (["dog", "horse"], "known from the file: none"),
    ):
        given = export_of(file, names)
        with pytest.warns(ResceneWarning, match=f"W169.*{told}"):
            net = start(file)
        for row, name in enumerate(["T-shirt", "Trouser"]):
            same = [torch.equal(net["head.weight"][row], other) for other in given["head.weight"]]
            assert same == [other == name for other in names]
        assert torch.equal(net["body.stage1.0.weight"], given["body.stage1.0.weight"])


def test_a_run_knows_its_classes_by_the_file_beside_its_weights(tmp_path):
    given = export_of(tmp_path / "w.safetensors", ["Trouser", "T-shirt"])
    about = json.loads(safe_open(tmp_path / "w.safetensors", "pt").metadata()["rescene"])
    save_file(given, tmp_path / "final.safetensors")
    (tmp_path / "model.json").write_text(json.dumps(about))
    assert torch.equal(start(tmp_path / "final.safetensors")["head.weight"], given["head.weight"].flip(0))


def test_of_weights_without_names_only_the_body_is_used(tmp_path):
    file = tmp_path / "w.safetensors"
    given = export_of(file, ["T-shirt", "Trouser"])
    for state in (given, {key: value for key, value in given.items() if key.startswith("body.")}):
        save_file(state, file)
        with pytest.warns(ResceneWarning, match="W168"):
            net = start(file)
        assert torch.equal(net["body.stage1.0.weight"], given["body.stage1.0.weight"])
        assert net["head.weight"].shape == given["head.weight"].shape
        assert not torch.equal(net["head.weight"], given["head.weight"])


@pytest.mark.parametrize("method", ["moments", "afl", "fedcgs"])
def test_sums_of_random_features_are_told_as_such(method, tmp_path):
    with pytest.warns(ResceneWarning, match="W567.*body of convnet has random weights"):
        prepare(resolve("smoke", [f"method={method}"]).recipe)
    export_of(tmp_path / "w.safetensors", ["T-shirt", "Trouser"])
    behind_a_lens = ["model.lens=waves", "model.name=linear", "train.augment=false"]
    for told in ([f"model.init={tmp_path / 'w.safetensors'}"], behind_a_lens, ["model.name=linear"], ["method=fedavg"]):
        with warnings.catch_warnings():
            warnings.simplefilter("error", ResceneWarning)
            prepare(resolve("smoke", [f"method={method}", *told]).recipe)


def test_initial_weights_that_do_not_fit_are_refused(tmp_path):
    file, pair = tmp_path / "w.safetensors", ["T-shirt", "Trouser"]

    def refused(code, *words):
        with pytest.raises(ConfigError) as caught:
            start(file)
        assert caught.value.code == code and all(word in str(caught.value) for word in words), caught.value

    donor = prepare(resolve("smoke", ["model.width=8"]).recipe).initial_net().state_dict()
    save_file(donor, file)
    refused("E134", "body.stage1.0.weight", "of another form")
    save_file({"fc.weight": torch.zeros(5, 7), "layer1.0.conv1.weight": torch.zeros(2)}, file)  # from another library
    refused("E134", "missing (body.", "2 unknown here (fc.weight, layer1.0.conv1.weight)")
    export_of(file, pair, arch={"name": "resnet18", "image_size": 32})
    refused("E159", "model.name is resnet18 in the file and convnet here")
    for wrong in (
        {"classes": ["T-shirt"]},
        {"classes": ["a", "a"]},
        {"classes": 3},
        {"classes": []},
        {"mean": [0.5]},
        {"std": [1, 0, 1]},
        {"arch": {"name": "convnet"}},
        {"arch": {"name": "convnet", "image_size": 10**12}},
        {"lens": "waves"},
    ):
        export_of(file, pair, **wrong)
        refused("E157", str(file))
    save_file(donor, file, {"rescene": "[" * 100_000})
    refused("E149")


def test_participants_depend_on_seed_task_and_round_only():
    a, b = (prepare(resolve("smoke", [f"method={name}"]).recipe) for name in ("rescene", "fedavg"))
    for task in a.tasks:
        for r in range(5):
            drawn = a.participants(task, r)
            assert drawn == b.participants(task, r) and len(set(drawn)) == 2 and drawn == sorted(drawn)
    assert len({tuple(a.participants(a.tasks[0], r)) for r in range(20)}) > 1


def test_unknown_devices_are_refused():
    with pytest.raises(ConfigError):
        pick_device("warp")
    assert pick_device("cpu").type == "cpu"
