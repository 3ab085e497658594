"""A finished run becomes files that compute the same, name what is in pictures, and say what they are."""

import csv
import io
import json
import os
import re
import shutil
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import rescene
from rescene.cli.app import app
from rescene.core.errors import ConfigError, DataError, RunError
from rescene.data import load
from rescene.nets import NAMES, Arch
from rescene.report.load import load_run
from rescene.report.summary import model_card
from rescene.use import export, find_images, formats, open_model, predict
from rescene.use.exporting import difference
from rescene.use.model import Whole

invoke = CliRunner().invoke


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny finished run on two tasks of the embedded images."""
    small = {"federation.num_rounds": 1, "train.server_epochs": 1, "method.num_steps": 1, "tasks.limit": 2}
    small |= {"model.width": 8}
    return rescene.run("smoke", out=tmp_path_factory.mktemp("use") / "run", **small).folder


@pytest.fixture(scope="module")
def lens_run(tmp_path_factory):
    """The same with a network behind a lens."""
    small = {"federation.num_rounds": 1, "train.server_epochs": 2, "tasks.limit": 2, "train.augment": False}
    lens = {
        "model.name": "mlp",
        "model.lens": "waves",
        "model.width": 16,
        "method.start": "coloured",
        "method.num_steps": 0,
    }
    return rescene.run("smoke", out=tmp_path_factory.mktemp("use") / "run", **small, **lens).folder


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "pictures" / "deep"
    folder.mkdir(parents=True)
    for i in range(3):
        pixels = np.random.default_rng(i).integers(0, 256, (40, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    (folder / "notes.txt").write_text("no picture")
    return tmp_path / "pictures"


@pytest.mark.parametrize("kind", ["safetensors", "pt2", "onnx"])
def test_a_file_computes_what_the_run_does_and_knows_its_classes(run, tmp_path, pictures, kind):
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    (row,) = export(run, [kind], tmp_path / "out")
    assert "64 test" in row["compared on"] and sorted(p.name for p in (tmp_path / "out").iterdir()) == [f"model.{kind}"]
    original, other = open_model(run), open_model(tmp_path / "out" / f"model.{kind}", trust=kind == "pt2")
    pixels = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    assert torch.allclose(original.scores(pixels), other.scores(pixels), atol=1e-4)
    assert other.classes == ["T-shirt", "Trouser", "Pullover", "Dress"] and "Not private" in other.about["privacy"]
    files = find_images([pictures])
    wanted, _ = predict(original, files)
    found, _ = predict(other, files)
    assert [a.top[0][0] for a in found] == [a.top[0][0] for a in wanted]


@pytest.mark.parametrize("kind", ["safetensors", "pt2", "onnx"])
def test_the_lens_is_inside_the_file(lens_run, tmp_path, kind):
    """Photographs go in, of the size before the lens; any number of them."""
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    (row,) = export(lens_run, [kind], tmp_path / "out")
    assert "64 test" in row["compared on"]
    original, other = open_model(lens_run), open_model(tmp_path / "out" / f"model.{kind}", trust=kind == "pt2")
    assert original.image_size == other.image_size == 32 and other.about["lens"] == "waves"
    assert "[n, 3, 32, 32]" in other.about["input"]
    pixels = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    assert difference(original.scores(pixels), other.scores, pixels) < 1e-4
    # accuracy as the run measured it, where what the lens gives was rounded to bytes
    values, test = rescene.load(lens_run).values, load("fashion-mini").test
    seen = test.select(test.labels < 4)
    right = float((other.scores(seen.pixels).argmax(dim=1) == seen.labels).float().mean())
    assert 100 * right == pytest.approx(values["aa"], abs=0.5) and values["aa"] > 40


def test_pages_of_a_lens_run_say_so(lens_run, pictures, tmp_path):
    text = model_card(load_run(lens_run))
    assert "pictures of 32x32 pixels" in text and "waves, 19 channels of 4x4" in text and "| mlp, 4 classes |" in text
    assert invoke(app, ["report", str(lens_run), "--out", str(tmp_path / "r.html")]).exit_code == 0
    assert "as the lens sees them: the light of 4 x 4 parts, 1 of 19 channels" in (tmp_path / "r.html").read_text()
    result = invoke(app, ["predict", str(lens_run), str(pictures), "--gallery", str(tmp_path / "g.html")])
    assert result.exit_code == 0 and (tmp_path / "g.html").read_text().count("data:image/png") == 3


@pytest.mark.parametrize("kind", ["pt2", "onnx"])
@pytest.mark.parametrize("name", NAMES)
def test_every_network_survives_tracing(tmp_path, name, kind):
    """Also with another number of pictures than it was traced with."""
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    arch = Arch(name, 16)
    whole = Whole(arch.build(3), [0.5] * 3, [0.25] * 3)
    about = {"schema": 1, "arch": vars(arch), "classes": ["a", "b", "c"], "mean": [0.5] * 3, "std": [0.25] * 3}
    formats.WRITERS[kind](whole, json.dumps(about), tmp_path / f"m.{kind}")
    pixels = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)
    assert difference(whole(pixels), open_model(tmp_path / f"m.{kind}", trust=kind == "pt2").scores, pixels) < 1e-4


def test_a_file_that_computes_something_else_is_not_kept(run, tmp_path, monkeypatch):
    def wrong(whole, about, path):
        with torch.no_grad():
            other = {
                key: value + 0.01 if key == "head.bias" else value for key, value in whole.net.state_dict().items()
            }
        whole.net.load_state_dict(other)
        write(whole, about, path)
        with torch.no_grad():
            whole.net.head.bias -= 0.01

    write = formats.WRITERS["safetensors"]
    monkeypatch.setitem(formats.WRITERS, "safetensors", wrong)
    with pytest.raises(RunError, match="does not compute") as error:
        export(run, ["safetensors"], tmp_path)
    assert error.value.code == "E420" and not list(tmp_path.iterdir())


def test_export_where_the_data_is_not(run, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    text = (moved / "config.yaml").read_text().replace("path: null", "path: /no/such/folder")
    (moved / "config.yaml").write_text(text)
    (row,) = export(moved, ["safetensors"], tmp_path)
    assert "no test (there is nothing at" in row["compared on"]


def test_commands(run, tmp_path, pictures):
    result = invoke(app, ["export", str(run), "--to", "safetensors,pt2", "--out", str(tmp_path / "x"), "--json"])
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.output)["files"]) == 2 and (tmp_path / "x" / "MODEL_CARD.md").is_file()
    file = str(tmp_path / "x" / "model.pt2")
    (pictures / "broken.png").write_text("no picture")
    page = tmp_path / "g.html"
    args = ["predict", file, str(pictures), "--trust", "--gallery", str(page)]
    table = invoke(app, args)
    assert table.exit_code == 0 and "W203" in table.output and "broken.png" in table.output
    rows = json.loads(invoke(app, [*args[:4], "--format", "json", "--top", "2"]).stdout)
    assert len(rows) == 3 and all(len(row["top"]) == 2 for row in rows)
    listed = list(csv.DictReader(io.StringIO(invoke(app, [*args[:4], "--format", "csv"]).stdout)))
    assert [row["class"] for row in listed] == [row["top"][0]["class"] for row in rows]
    html = page.read_text()
    assert html.count('class="card answer"') == 3 and "not calibrated" in html
    assert 'src="http' not in html and html.count("data:image/png") == 3


def test_bad_input_gets_an_answer(run, tmp_path, pictures, monkeypatch):
    def fails(*args, code, says):
        result = invoke(app, list(map(str, args)))
        assert result.exit_code == code and says in result.output and "Traceback" not in result.output, result.output

    fails("export", tmp_path, code=2, says="E180")
    fails("export", run, "--to", "pt3", code=2, says="did you mean pt2?")
    fails("predict", tmp_path / "no.pt2", pictures, code=2, says="no such file")
    (tmp_path / "bad.pt2").write_text("no model")
    fails("predict", tmp_path / "bad.pt2", pictures, code=2, says="E158")
    fails("predict", tmp_path / "bad.pt2", pictures, "--trust", code=2, says="E183")
    fails("predict", run / "model" / "final.safetensors", pictures, code=2, says="only models exported by rescene")
    fails("predict", run, tmp_path / "nothing", code=3, says="there is nothing at")
    (tmp_path / "empty").mkdir()
    fails("predict", run, tmp_path / "empty", code=3, says="E212")
    fails("predict", run, pictures / "deep" / "notes.txt", code=3, says="none of the images")
    fails("predict", run, pictures, "--format", "xml", code=2, says="one of: table, json, csv")
    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    fails("export", run, "--to", "onnx", code=2, says="rescene[onnx]")


class Trace:
    """A pickle that makes a folder when it is opened."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_file_that_can_run_code_is_opened_only_if_it_is_trusted(run, tmp_path, pictures):
    """A pt2 file of ours, in which one weight is said to be a pickle and is one."""
    export(run, ["pt2"], tmp_path)
    evil, trace = tmp_path / "evil.pt2", tmp_path / "trace"
    with zipfile.ZipFile(tmp_path / "model.pt2") as good, zipfile.ZipFile(evil, "w") as bad:
        contents = {name: good.read(name) for name in good.namelist()}
        (config,) = (name for name in contents if name.endswith("weights_config.json"))
        about = json.loads(contents[config])
        weight = next(iter(about["config"].values()))
        weight["use_pickle"] = True
        (place,) = (name for name in contents if name.endswith(f"data/weights/{weight['path_name']}"))
        buffer = io.BytesIO()
        torch.save(Trace(trace), buffer)
        for name, data in (contents | {config: json.dumps(about).encode(), place: buffer.getvalue()}).items():
            bad.writestr(name, data)
    refused = invoke(app, ["predict", str(evil), str(pictures)])
    assert refused.exit_code == 2 and "E158" in refused.output and "--trust" in refused.output
    assert not trace.exists()
    invoke(app, ["predict", str(evil), str(pictures), "--trust"])
    assert trace.exists()  # or the file above would have shown nothing


def test_the_command_that_export_prints_works(run, tmp_path):
    """Also for a file that must be trusted."""
    for kind, end in (("safetensors", "IMAGES"), ("pt2", "IMAGES --trust")):
        said = invoke(app, ["export", str(run), "--to", kind, "--out", str(tmp_path)]).output
        assert said.rstrip().endswith(end), said


SMALL = Arch("mlp", 16, width=4)
ABOUT = {"schema": 2, "arch": vars(SMALL), "classes": list("abc"), "mean": [0.5] * 3, "std": [0.25] * 3}


@pytest.mark.parametrize("kind", ["safetensors", "pt2", "onnx"])
def test_a_model_has_a_name_for_each_output(tmp_path, pictures, kind):
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    whole, file = Whole(SMALL.build(3), ABOUT["mean"], ABOUT["std"]), tmp_path / f"m.{kind}"
    formats.WRITERS[kind](whole, json.dumps(ABOUT | {"classes": ["a", "b"]}), file)
    result = invoke(app, ["predict", str(file), str(pictures), "--trust"])
    assert result.exit_code == 2 and "error[E157]" in result.output
    assert "it names 2 classes (a, b) and has 3 outputs" in result.output


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"classes": list("abb")}, "'b' stands 2 times"),
        ({"classes": [1, 2, 3]}, "classes.0"),
        ({"arch": vars(SMALL) | {"image_size": 24}}, "24x24|1728"),
        ({"arch": vars(SMALL) | {"image_size": "16"}}, "arch.image_size"),
        ({"picture_size": 10**9}, "4096"),
        ({"mean": [0.5]}, "1 means"),
        ({"std": [0.5, 0.5, float("inf")]}, "std.2"),
        ({"lens": "waves"}, "lens"),
    ],
)
@pytest.mark.parametrize("kind", ["safetensors", "onnx"])
def test_a_file_that_does_not_agree_with_itself_is_refused(tmp_path, monkeypatch, kind, wrong, says):
    """Of a whole computation only its answers can tell: here the network itself stands in for one."""
    whole, file = Whole(SMALL.build(3), ABOUT["mean"], ABOUT["std"]), tmp_path / f"m.{kind}"
    text = json.dumps(ABOUT | wrong)
    formats.write_safetensors(whole, text, file)
    monkeypatch.setitem(formats.READERS, "onnx", lambda path: (text, whole))
    with pytest.raises(ConfigError) as caught:
        open_model(file)
    assert caught.value.code == "E157" and re.search(says, caught.value.why) and caught.value.where == str(file)


def test_a_model_of_a_newer_version_is_refused(run, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    path = moved / "model" / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"schema": 99}))
    with pytest.raises(RunError, match="newer version"):
        open_model(moved)


def test_the_card_tells_what_the_run_found(run):
    text, values = model_card(load_run(run)), rescene.load(run).values
    assert f"{values['aa']:.1f} %" in text and values["privacy"]["statement"] in text
    assert f"{100 * values['leakage']['near_copies']:.0f} % are near-copies" in text
    for part in ("## Data", "## Accuracy", "## Privacy", "## Cost", "## Limits", "T-shirt, Trouser", "fashion-mini"):
        assert part in text


def test_the_card_needs_a_finished_run(run, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(run, moved)
    (moved / "results.json").unlink()
    with pytest.raises(RunError, match="no finished run"):
        model_card(load_run(moved))


def test_names_of_files_cannot_break_the_page(tmp_path):
    from rescene.report.galleries import GalleryAnswer, write_gallery

    name = "<script>alert(1)</script>.png"
    page = write_gallery(
        [GalleryAnswer(name, [("<b>", 0.4)], np.zeros((3, 8, 8), np.uint8))], "m", ["<b>"], tmp_path / "g.html"
    )
    assert "<script>" not in page.read_text() and "unsure" in page.read_text()


def test_folders_are_searched_once(pictures):
    one = pictures / "deep" / "0.png"
    assert find_images([one, pictures]) == [one, pictures / "deep" / "1.png", pictures / "deep" / "2.png"]
    with pytest.raises(DataError):
        find_images([pictures / "nowhere"])


def test_what_cannot_be_read_is_told_how_to_mend_it(run, tmp_path):
    (tmp_path / "photo.heic").write_bytes(b"\0\0\0\x18ftypheic")
    (tmp_path / "cut.gif").write_bytes(b"GIF89a")
    for name, words in {
        "photo.heic": "fix    save them as JPEG or PNG",
        "cut.gif": "copy them again: the files",
    }.items():
        found = invoke(app, ["predict", str(run), str(tmp_path / name)])
        assert found.exit_code == 3 and words in found.output
    Image.new("RGB", (9, 9)).save(tmp_path / "whole.gif")
    assert invoke(app, ["predict", str(run), str(tmp_path / "whole.gif")]).exit_code == 0


def test_a_prediction_prints_its_classes_and_no_pixels(run, pictures):
    (first, *_) = rescene.load(run).predict(pictures, top=1)
    assert re.fullmatch(r"<Prediction .*0\.png: [\w-]+ \d+ %>", repr(first))
