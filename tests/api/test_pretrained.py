"""Networks of timm with a checkpoint: trained and frozen, in one process and across sites; foreign files are refused."""

import importlib.util
import json
import warnings

import pytest
import torch
from own_things import SMALL, arrays
from safetensors.torch import load_file, save_file

import rescene
from rescene.config import resolve
from rescene.core.errors import ConfigError, DataError, ResceneError
from rescene.lens import backbone
from rescene.nets import Arch
from rescene.nets.model_file import initial_weights

NET = "timm:test_resnet"  # timm's own smallest ResNet, 160 pixels
needs_timm = pytest.mark.skipif(importlib.util.find_spec("timm") is None, reason="timm is not installed")


@pytest.fixture
def checkpoint(tmp_path):
    """Random weights of the whole network, its classifier too, as people have them."""
    import timm

    with torch.random.fork_rng():
        torch.manual_seed(0)
        state = timm.create_model("test_resnet", pretrained=False).state_dict()
    torch.save({"state_dict": {f"module.{key}": value for key, value in state.items()}}, tmp_path / "mine.pth")
    save_file(state, tmp_path / "mine.safetensors")
    return tmp_path / "mine.pth"


@needs_timm
@pytest.mark.parametrize("side", [32, 64, 224])
def test_the_body_of_a_run_is_that_of_the_checkpoint_at_any_size(checkpoint, side):
    import timm

    arch = Arch(NET, side)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        weights = initial_weights(checkpoint, arch, None, ["ant", "bee"], torch.Generator().manual_seed(0))
    assert [str(w.message).split()[0] for w in told] == ["warning[W168]"]
    theirs = timm.create_model("test_resnet", pretrained=False, num_classes=0).eval()
    theirs.load_state_dict(
        {k: v for k, v in load_file(checkpoint.with_suffix(".safetensors")).items() if "fc" not in k}
    )
    x = torch.randn(2, 3, side, side)
    assert torch.allclose(arch.restore(weights).eval().features(x), theirs(x), atol=1e-5)


@needs_timm
def test_a_network_of_one_size_gets_pictures_of_that_size():
    net = Arch("timm:test_vit", 32).build(3).eval()
    assert net.body.plan.model.size == 160 and net(torch.randn(2, 3, 32, 32)).shape == (2, 3)
    assert not Arch("timm:test_vit", 32).has_batch_norm and Arch(NET, 32).has_batch_norm


@needs_timm
@pytest.mark.parametrize("method", ["fedavg", "fedewc", "target"])
def test_a_trained_backbone(checkpoint, tmp_path, method):
    given = SMALL | {"federation.num_rounds": 1, "model.init": str(checkpoint)}
    run = rescene.run(
        "smoke", model=NET, data=arrays(per_class=6, side=32), method=method, out=tmp_path / "run", **given
    )
    about = rescene.use.open_model(run.folder).about
    from timm import create_model

    assert tuple(about["mean"]) == tuple(create_model("test_resnet").pretrained_cfg["mean"])
    trained = load_file(run.folder / "model" / "final.safetensors")
    first = torch.load(checkpoint, weights_only=True)["state_dict"]["module.conv1.0.weight"]
    assert not torch.equal(trained["body.net.conv1.0.weight"], first)
    checkpoint.unlink()
    again = rescene.run("smoke", model=NET, data=arrays(per_class=6, side=32), method=method, out=run.folder, **given)
    assert again.aa == run.aa


@needs_timm
def test_a_frozen_backbone_is_recorded_as_the_lens_that_it_is(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(backbone, "NUM_PICTURES", 24)
    given = SMALL | {"model.init": str(checkpoint), "model.frozen": True, "train.augment": False}
    run = rescene.run(
        "smoke", model=NET, data=arrays(per_class=6, side=32), method="moments", out=tmp_path / "run", **given
    )
    model = run.values["config"]["model"]
    assert model["name"] == "linear" and model["lens"] == f"{NET}@{checkpoint}" and model["frozen"]
    assert resolve(
        "smoke", {"method": "moments", **{f"model.{k}": v for k, v in model.items()}, "train.augment": False}
    )


def test_frozen_needs_a_backbone_and_its_weights():
    for values in ({"model.name": "resnet18"}, {"model.name": NET}):
        with pytest.raises(ConfigError, match="frozen needs model.name=timm:NAME and its checkpoint"):
            resolve("smoke", {"model.frozen": True, **values})


@needs_timm
@pytest.mark.parametrize(("name", "change", "code", "words"), [
    ("timm:test_vit", None, "E225", "tensors are missing, the first is cls_token"),
    ("timm:test_rasnet", None, "E224", "did you mean timm:test_resnet"),
    ("timm:hf_hub:x/y", None, "E224", "timm has no model"),
    (NET, {"conv1.0.weight": torch.zeros(2, 3, 3, 3)}, "E225", "another shape, the first is conv1.0.weight"),
    (NET, b"nothing of the kind", "E225", "no weights"),
    (NET, "gone", "E225", "no such file"),
    ("convnet", None, "E134", "body.stage1.0.weight"),
])  # fmt: skip
def test_a_foreign_file_is_refused_before_there_is_a_folder(checkpoint, tmp_path, name, change, code, words):
    file = checkpoint
    if name == "convnet":
        file = checkpoint.with_suffix(".safetensors")
    elif isinstance(change, dict):
        state = torch.load(checkpoint, weights_only=True)["state_dict"]
        torch.save(state | {f"module.{key}": value for key, value in change.items()}, file)
    elif isinstance(change, bytes):
        file.write_bytes(change)
    elif change == "gone":
        file.unlink()
    with pytest.raises(ResceneError) as error:
        rescene.run("smoke", model=name, data=arrays(side=32), method="fedavg", out=tmp_path / "run", **SMALL,
                    **{"model.init": str(file)})  # fmt: skip
    assert error.value.code == code and words in str(error.value) and not (tmp_path / "run").exists()


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    from rescene.nets import own_networks, timm_networks

    monkeypatch.setattr(timm_networks, "find_spec", lambda name: None)
    monkeypatch.setattr(own_networks, "_OWN", {})
    with pytest.raises(DataError, match=r"rescene\[timm\]") as error:
        rescene.run("smoke", model="timm:resnet18", data=arrays(), method="fedavg", out=tmp_path / "run", **SMALL)
    assert error.value.code == "E223" and not (tmp_path / "run").exists()


def test_classes_of_a_file_are_matched_by_name_and_never_by_place(tmp_path):
    x, y, x_test, y_test = arrays()
    first = {"model": "convnet", "method": "fedavg", "model.width": 4} | SMALL
    names = [["ant", "bee", "cat", "dog"], ["dog", "ant", "fox", "eel"]]
    data = [tuple([p, [n[c] for c in q]] for p, q in ((x, y), (x_test, y_test))) for n in names]
    one = rescene.run("smoke", data=(*data[0][0], *data[0][1]), out=tmp_path / "one", **first)
    two = first | {
        "model.init": str(one.folder / "model" / "final.safetensors"),
        "tasks.per_task": 4,
        "train.lr": 1e-12,
    }
    other = rescene.run("smoke", data=(*data[1][0], *data[1][1]), out=tmp_path / "two", **two)
    before, after = (load_file(run.folder / "model" / "final.safetensors")["head.weight"] for run in (one, other))
    order = json.loads((other.folder / "model" / "model.json").read_text())["classes"]
    assert torch.allclose(after[order.index("ant")], before[0], atol=1e-6)
    assert torch.allclose(after[order.index("dog")], before[3], atol=1e-6)
    told = [json.loads(line)["message"] for line in (other.folder / "events.jsonl").read_text().splitlines()]
    assert any("known from the file: ant, dog" in line and "new: eel, fox" in line for line in told)
