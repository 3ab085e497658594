"""A user's own frozen network as a lens: from timm with a checkpoint file, or as an ONNX program."""

import importlib.util
import json
import sys

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import rescene
from rescene.cli.app import app
from rescene.config import resolve
from rescene.core.errors import ConfigError, DataError
from rescene.data import load
from rescene.lens import backbone, draw_leaves
from rescene.lens import lens as lenses
from rescene.lens.lens import fingerprint, open_lens, read_lens, take, write_content
from rescene.nets import timm_networks
from rescene.report.load import load_run
from rescene.report.summary import model_card
from rescene.use import open_model
from rescene.use.exporting import difference, export
from small_images import some_of_fashion_mini

NET = "test_resnet"  # timm's own smallest ResNet, 160 pixels
SUMS = {
    "method": "moments",
    "model.name": "linear",
    "train.augment": False,
    "federation.num_rounds": 1,
    "device": "cpu",
}


def needs(*modules):
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} is not installed")


@pytest.fixture(autouse=True)
def few_pictures_and_a_cache_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(backbone, "NUM_PICTURES", 24)
    monkeypatch.setattr(lenses, "cache_folder", lambda: tmp_path / "cache")
    open_lens.cache_clear()


def pixels(n=3, size=32):
    return torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))


@pytest.fixture
def checkpoint(tmp_path):
    """Random weights of the whole network, its classifier too, as people have them."""
    import timm

    torch.manual_seed(0)
    state = timm.create_model(NET, pretrained=False).state_dict()
    torch.save({"state_dict": {f"module.{key}": value for key, value in state.items()}}, tmp_path / "mine.pth")
    save_file(state, tmp_path / "mine.safetensors")
    return tmp_path / "mine.pth"


@needs("timm")
def test_a_timm_network_is_a_lens_with_unit_variance_on_procedural_pictures(checkpoint, tmp_path):
    lens = open_lens(f"timm:{NET}@{checkpoint}")
    assert lens.name == NET and "nobody here knows" in lens.made_from and lens.num_bytes > 0
    z = lens.module(draw_leaves(24, torch.Generator().manual_seed(0)))
    assert float(z.mean()) == pytest.approx(0, abs=0.01) and 0.5 < float(z.std()) < 1.05
    found = lens.look(pixels())
    assert found.dtype == torch.uint8 and found.shape == (3, lens.module.net.num_features, 1, 1)
    again = open_lens(f"timm:{NET}@{tmp_path / 'mine.safetensors'}")
    assert again.sha256 == lens.sha256, "the same weights from another kind of file"


@needs("timm")
def test_the_network_gets_pictures_as_it_was_trained(checkpoint):
    """Resized to its own side and normalised by its own numbers."""
    import timm

    lens = open_lens(f"timm:{NET}@{checkpoint}")
    net = timm.create_model(NET, pretrained=False, num_classes=0).eval()
    state = torch.load(checkpoint, weights_only=True)["state_dict"]
    net.load_state_dict({key.removeprefix("module."): v for key, v in state.items() if "fc" not in key})
    about, x = net.pretrained_cfg, pixels(size=160)
    mean, std = (torch.tensor(about[key]).reshape(1, 3, 1, 1) for key in ("mean", "std"))
    with torch.no_grad():
        wanted = net((x.float() / 255 - mean) / std)
    assert torch.allclose(lens.module.raw(x), wanted, atol=1e-5)


@needs("timm")
def test_a_taken_lens_is_one_file_whose_hash_follows_every_number(checkpoint, tmp_path):
    source, out = f"timm:{NET}@{checkpoint}", tmp_path / "lens.safetensors"
    found = CliRunner().invoke(app, ["lens", "take", source, "--out", str(out), "--made-from", "my photographs"])
    assert found.exit_code == 0, found.output
    lens = open_lens(str(out))
    assert lens.made_from == "my photographs" and lens.sha256 == open_lens(source).sha256
    told, tensors = take(source)
    changed = tensors | {"mean": tensors["mean"] + 1e-3}
    assert fingerprint(told, changed) != lens.sha256 != fingerprint(told | {"net": "test_vit"}, tensors)
    write_content((told, changed), out)
    with pytest.raises(ConfigError, match="E118"):  # it says another hash than it has
        read_lens(out, "lens")


@needs("timm")
def test_a_damaged_copy_in_the_cache_is_made_again(checkpoint):
    source = f"timm:{NET}@{checkpoint}"
    lens = open_lens(source)
    (kept,) = lenses.lens_folder().glob("*.safetensors")
    kept.write_bytes(kept.read_bytes()[:-4] + b"abcd")
    open_lens.cache_clear()
    assert open_lens(source).sha256 == lens.sha256 == read_lens(kept, "kept").sha256


@needs("timm")
@pytest.mark.parametrize(("name", "change", "code"), [
    ("test_rasnet", None, "E224"),
    ("hf_hub:timm/test_resnet.r160_in1k", None, "E224"),
    ("test_vit", None, "E225"),
    (NET, "cut", "E225"),
    (NET, "code", "E225"),
    (NET, "gone", "E224"),
])  # fmt: skip
def test_what_is_no_network_of_timm_is_refused(checkpoint, name, change, code):
    if change == "cut":
        checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    if change == "code":
        torch.save({"state_dict": print}, checkpoint)  # a pickle that names a function
    if change == "gone":
        checkpoint.unlink()
    with pytest.raises(DataError) as error:
        open_lens(f"timm:{name}@{checkpoint}")
    assert error.value.code == code


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(timm_networks, "find_spec", lambda name: None)
    for name, extra in ((f"timm:{NET}@{tmp_path / 'x.pth'}", "timm"), (str(tmp_path / "x.onnx"), "onnx")):
        (tmp_path / name.split("@")[-1]).write_bytes(b"x")
        with pytest.raises(DataError, match=rf"rescene\[{extra}\]") as error:
            open_lens(name)
        assert error.value.code == "E223"


def test_a_torchvision_of_another_build_is_named(monkeypatch, tmp_path):
    """Torch from one place and torchvision from another: the import fails with an error of torch's library."""
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    (tmp_path / "x.pth").write_bytes(b"x")
    with pytest.raises(DataError, match="torchvision::nms does not exist") as error:
        open_lens(f"timm:{NET}@{tmp_path / 'x.pth'}")
    assert error.value.code == "E223" and "torchvision" in str(error.value.fix)


@pytest.mark.parametrize(("lens", "words"), [
    ("timm:resnet18", "names no checkpoint, and nothing is downloaded"),
    ("timm:resnet18@", "names no checkpoint"),
    ("mine.pt2", "lens take mine.pt2 --trust"),
    ("glasses", "there is no lens 'glasses'"),
])  # fmt: skip
def test_a_recipe_says_at_once_what_is_no_lens(lens, words):
    with pytest.raises(ConfigError, match=words):
        resolve("smoke", ["method=moments", "model.name=linear", f"model.lens={lens}", "train.augment=false"])


def program(path, size=16, dtype="float32", batch="n", outputs=("features",)):
    """An ONNX file that takes pictures and gives the mean of each channel and its square, or maps."""
    import onnx
    from onnx import TensorProto, helper

    kind = {"float32": TensorProto.FLOAT, "uint8": TensorProto.UINT8, "float64": TensorProto.DOUBLE}[dtype]
    axes = helper.make_tensor("axes", TensorProto.INT64, [2], [2, 3])
    nodes = [
        helper.make_node("Cast", ["pixels"], ["x"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["x", "axes"], ["mean"], keepdims=0),
        helper.make_node("Mul", ["mean", "mean"], ["square"]),
        helper.make_node("Concat", ["mean", "square"], ["features"], axis=1),
    ]
    graph = helper.make_graph(
        nodes,
        "lens",
        [helper.make_tensor_value_info("pixels", kind, [batch, 3, size, size])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [axes],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, path)
    return path


@needs("onnx", "onnxruntime")
@pytest.mark.parametrize(("dtype", "batch"), [("float32", "n"), ("uint8", "n"), ("float32", 1)])
def test_an_onnx_program_is_a_lens(tmp_path, dtype, batch):
    lens = open_lens(str(program(tmp_path / "mine.onnx", dtype=dtype, batch=batch)))
    x = pixels(size=16)
    mean = x.float().mean(dim=(2, 3)) / (1 if dtype == "uint8" else 255)
    assert lens.name == "mine" and torch.allclose(lens.module.raw(x), torch.cat([mean, mean.square()], 1), rtol=1e-4)
    assert lens.look(pixels(size=40)).shape == (3, 6, 1, 1)


@needs("onnx", "onnxruntime")
def test_floats_are_normalised_as_the_user_says(tmp_path):
    file, out = program(tmp_path / "mine.onnx"), tmp_path / "lens.safetensors"
    found = CliRunner().invoke(
        app, ["lens", "take", str(file), "--out", str(out), *["--mean", "0.5", "0.5", "0.5", "--std", "2", "2", "2"]]
    )
    assert found.exit_code == 0, found.output
    x = pixels(size=16)
    mean = (x.float() / 255 - 0.5).mean(dim=(2, 3)) / 2
    assert torch.allclose(open_lens(str(out)).module.raw(x)[:, :3], mean, atol=1e-5)
    assert open_lens(str(out)).sha256 != open_lens(str(file)).sha256, "it computes something else"


@needs("onnx", "onnxruntime")
@pytest.mark.parametrize(("form", "why"), [
    ({"size": "any"}, "fixed side"),
    ({"dtype": "float64"}, "not uint8 or float32"),
    ({"batch": 4}, "4 pictures at a time"),
    (None, "E226"),
])  # fmt: skip
def test_a_program_that_is_no_lens_is_refused_before_a_run(tmp_path, form, why):
    file = tmp_path / "mine.onnx"
    file.write_bytes(b"nothing of the kind") if form is None else program(file, **form)
    with pytest.raises(DataError, match=why) as error:
        open_lens(str(file))
    assert error.value.code == "E226"


def test_a_pt2_file_is_opened_only_by_somebody_who_trusts_it(tmp_path):
    file = tmp_path / "mine.pt2"
    file.write_bytes(b"never opened")
    found = CliRunner().invoke(app, ["lens", "take", str(file), "--out", str(tmp_path / "lens.safetensors")])
    assert found.exit_code != 0 and "E227" in found.output


@needs("onnx", "onnxruntime", "onnxscript")
def test_a_trusted_pt2_file_becomes_a_program_that_runs_no_code(tmp_path):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 5, 3, stride=2)

        def forward(self, x):
            return self.conv(x).relu().mean(dim=(2, 3))

    net, example = Net().eval(), (torch.rand(2, 3, 16, 16),)
    torch.export.save(
        torch.export.export(net, example, dynamic_shapes=({0: torch.export.Dim("n")},)), tmp_path / "n.pt2"
    )
    out = tmp_path / "lens.safetensors"
    found = CliRunner().invoke(app, ["lens", "take", str(tmp_path / "n.pt2"), "--trust", "--out", str(out)])
    assert found.exit_code == 0, found.output
    x = pixels(size=16)
    assert torch.allclose(open_lens(str(out)).module.raw(x), net(x.float() / 255), atol=1e-5)


@pytest.fixture
def images(tmp_path):
    """A few pictures of four classes of fashion-mini."""
    return some_of_fashion_mini(tmp_path, 24, 8)


def learned(folder, lens, images):
    small = {"tasks.limit": 2, "federation.num_clients": 3, "federation.per_round": 3, "data.path": str(images)}
    return rescene.run("smoke", out=folder, **small, **SUMS, **{"model.lens": str(lens)})


@needs("timm")
@pytest.mark.parametrize(
    "kind", ["safetensors", "pt2", pytest.param("onnx", marks=needs("onnx", "onnxruntime", "onnxscript"))]
)
def test_one_file_holds_lens_and_head_and_computes_what_the_run_does(checkpoint, images, tmp_path, kind):
    lens = tmp_path / "lens.safetensors"
    write_content(take(f"timm:{NET}@{checkpoint}", "my | photographs"), lens)
    run = learned(tmp_path / "run", lens, images)
    assert "my \\| photographs" in model_card(load_run(run.folder))
    original = open_model(run.folder)
    export(run.folder, [kind], tmp_path / "out")
    lens.unlink()  # the file must do without it
    open_lens.cache_clear()
    other = open_model(tmp_path / "out" / f"model.{kind}", trust=kind == "pt2")
    test = load(path=images).test
    assert difference(original.scores(test.pixels), other.scores, test.pixels) < 1e-4
    right = float((other.scores(test.pixels).argmax(dim=1) == test.labels).float().mean())
    assert 100 * right == pytest.approx(run.values["aa"], abs=100 * 2 / len(test) + 0.01)


@needs("onnx", "onnxruntime")
def test_a_model_behind_an_onnx_lens_fits_into_safetensors_only(images, tmp_path):
    lens = program(tmp_path / "mine.onnx")
    run = learned(tmp_path / "run", lens, images)
    with pytest.raises(DataError, match="ONNX lens") as error:
        export(run.folder, ["safetensors", "pt2"], tmp_path / "out")
    assert error.value.code == "E228" and not (tmp_path / "out").exists()
    original = open_model(run.folder)
    export(run.folder, ["safetensors"], tmp_path / "out")
    lens.unlink()
    open_lens.cache_clear()
    file = tmp_path / "out" / "model.safetensors"
    assert difference(original.scores(pixels(4)), open_model(file).scores, pixels(4)) < 1e-4
    about = json.loads((run.folder / "model" / "model.json").read_text())
    (run.folder / "model" / "model.json").write_text(json.dumps(about | {"lens_sha256": "0" * 64}))
    program(lens)
    with pytest.raises(ConfigError, match="another lens"):
        open_model(run.folder)
