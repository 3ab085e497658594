"""A run made from objects says so, goes on with the same objects and with no others; results as frames."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from own_things import SMALL, Pairs, arrays, small
from torch import nn
from typer.testing import CliRunner

import rescene
from rescene.cli.app import app
from rescene.cli.progress import watch
from rescene.config import resolve
from rescene.core.errors import ConfigError, RunError
from rescene.data import objects
from rescene.engine.run_folder import differences
from rescene.lens import expect_looks, tell_looked
from rescene.methods.fedavg import FedAvg
from rescene.nets import own_networks
from rescene.notebook import NotebookLine
from rescene.report import write_report

X, Y, X_TEST, Y_TEST = DATA = arrays()


class Mine(FedAvg):
    """FedAvg under another name."""

    name, title = "mine-from-an-object", "Mine"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("objects") / "run"
    return rescene.run("smoke", model=small(), data=DATA, method=Mine, out=out, **SMALL)


def test_it_says_so_everywhere(finished, tmp_path):
    assert [words.split("-")[0] for words in finished.objects] == ["model: Small", "data: arrays"]
    kept = json.loads((finished.folder / "objects.json").read_text())["objects"]
    assert kept["model"]["class"].endswith("Small") and kept["method"]["class"].endswith("Mine")
    assert len(kept["model"]["weights"]) == len(small().state_dict())
    page = write_report([finished.folder], tmp_path / "report.html").read_text()
    assert "Made from Python objects" in page and "Small-" in page
    assert "made from Python objects" in finished._repr_html_()


def test_the_same_objects_find_the_finished_run(finished):
    again = rescene.run("smoke", model=small(), data=DATA, method=Mine(), out=finished.folder, **SMALL)
    assert again.values == finished.values


@pytest.mark.parametrize("progress", ["auto", True])
def test_a_finished_run_that_is_asked_for_again_says_so_in_one_line(finished, progress, capsys):
    same = {"model": small(), "data": DATA, "method": Mine(), "out": finished.folder, "progress": progress}
    rescene.run("smoke", **same, **SMALL)
    (line,) = capsys.readouterr().err.splitlines()
    assert "W562" in line and "finished before" in line and str(finished.folder) in line and "out=" in line


def test_a_wrong_argument_is_named_as_one_of_the_call():
    for given, code, where in (({"out": 3}, "E562", "rescene.run"), ({"federation.beta": -1}, "E104", "rescene.run")):
        with pytest.raises(ConfigError, match=code) as caught:
            rescene.run("smoke", **given)
        assert caught.value.where == where
    with pytest.raises(ConfigError, match="E104") as caught:
        resolve("smoke", ["federation.beta=-1"])
    assert caught.value.where == "command line"


def test_a_quiet_command_too_says_that_nothing_ran(tmp_path):
    for told in ("", "warning[W562] this run had finished before"):
        result = CliRunner().invoke(
            app,
            ["run", "smoke", *(f"{key}={value}" for key, value in SMALL.items()), "--out", str(tmp_path / "r"), "-q"],
        )
        assert result.exit_code == 0 and "AA" in result.stdout and len(result.stderr.splitlines()) == bool(told)
        assert result.stderr.startswith(told)


def test_a_run_says_which_classes_its_limit_leaves_out(tmp_path, capsys):
    with watch(quiet=False) as show:
        rescene.run(
            "smoke", data=DATA, method="fedavg", out=tmp_path / "a", progress=show, **SMALL, **{"tasks.limit": 1}
        )
    told = capsys.readouterr().err
    assert "uses 2 of 4 classes: tasks.limit=1 leaves the others out" in told
    assert "all sites up 0." in told  # of the method's one line for a round
    rescene.run("smoke", data=DATA, method="fedavg", out=tmp_path / "b", progress=True, **SMALL)
    assert "leaves the others out" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ({"recipie": "demo"}, "recipe"),
        ({"modle": "mlp"}, "model"),
        ({"callback": []}, "callbacks"),
        ({"dta": 1}, "data"),
    ],
)
def test_a_misspelt_argument_of_run_is_named_with_the_nearest(given, near):
    recipe = () if near == "recipe" else ("demo",)
    with pytest.raises(ConfigError, match="E562") as caught:
        rescene.run(*recipe, **given)
    assert caught.value.fix == f"did you mean {near}=?"


def test_a_run_without_a_recipe_is_told(tmp_path):
    with pytest.raises(ConfigError, match="needs a recipe"):
        rescene.run(out=tmp_path)


@pytest.mark.parametrize(("change", "words"), [
    ({"model": small(seed=1)}, "model: other first values: fc.bias, fc.weight, first.bias and 3 more"),
    ({"model": small(dropout=0)}, "model: other structure"),
    ({"data": (X, Y.flip(0), X_TEST, Y_TEST)}, "data: other training labels"),
    ({"data": (X[1:], Y[1:], X_TEST, Y_TEST)}, r"data: training pictures \[64, 3, 16, 16\] -> \[63, 3, 16, 16\]"),
    ({"model": "convnet"}, "model: an object then, none now"),
])  # fmt: skip
def test_other_objects_are_refused_and_what_differs_is_named(finished, change, words):
    given = {"model": small(), "data": DATA, "method": Mine} | change
    with pytest.raises(RunError, match=words) as error:
        rescene.run("smoke", out=finished.folder, **given, **SMALL)
    assert error.value.code == "E428"


def test_an_object_whose_class_has_changed_takes_the_place_of_the_one_before(monkeypatch):
    class Scaled(nn.Module):
        FACTOR = 1.0

        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(192, 4)

        def forward(self, x):
            return self.fc(self.FACTOR * x.flatten(1))

    monkeypatch.setattr(own_networks, "_OWN", {})
    name, before = own_networks.enter_object(Scaled)
    told = before.describe(8)
    Scaled.FACTOR = 0.1  # a cell of a notebook that is run again
    again, after = own_networks.enter_object(Scaled)
    assert name == again and own_networks.own_model(name) is after
    assert differences({"model": told}, {"model": after.describe(8)}) == ["model: other code"]


class Stop(Exception):
    pass


def test_a_stopped_run_goes_on_bit_for_bit_also_with_dropout(finished, tmp_path):
    def stop(event):
        if event["event"] == "round" and event["task"] == 1:
            raise Stop

    given = {"model": small(), "data": DATA, "method": Mine, "out": tmp_path / "run"}
    with pytest.raises(Stop):
        rescene.run("smoke", progress=stop, **given, **SMALL)
    torch.rand(7)  # whatever happened to torch's own stream in between
    on = rescene.run("smoke", **given, **SMALL)
    weights = [(folder / "model" / "final.safetensors").read_bytes() for folder in (on.folder, finished.folder)]
    assert on.values == finished.values and weights[0] == weights[1]


def test_another_process_says_what_it_lacks(finished, monkeypatch, tmp_path):
    monkeypatch.setattr(own_networks, "_OWN", {})
    with pytest.raises(ConfigError, match="was handed over as a Python object") as error:
        rescene.use.open_model(finished.folder)
    assert error.value.code == "E168"
    shutil.copytree(finished.folder, tmp_path / "run")
    (tmp_path / "run" / "results.json").unlink()
    found = CliRunner().invoke(app, ["resume", str(tmp_path / "run")])
    assert found.exit_code == 2 and "E168" in found.output and "rescene.run" in found.output


def test_frames(finished):
    pytest.importorskip("pandas")
    rounds, tasks = finished.rounds(), finished.tasks()
    assert len(rounds) == 4 and list(rounds.columns[:3]) == ["task", "round", "accuracy"]
    assert tasks["classes"].tolist() == ["0, 1", "2, 3"] and tasks["accuracy_at_end"].tolist() == finished.matrix[-1]
    assert len(finished.accuracies()) == 3 and finished.confusion().to_numpy().sum() == len(Y_TEST)
    assert set(finished.costs()["quantity"]) >= {"uplink_bytes"} and len(finished.participation()) == 8


def test_hyperparameters_of_a_method_object_count(tmp_path):
    method = rescene.methods.method_class("fedlwf")(kd_temperature=3.5)
    run = rescene.run("smoke", model=small(), data=DATA, method=method, out=tmp_path / "run", **SMALL)
    assert run.values["config"]["method"]["kd_temperature"] == 3.5
    with pytest.raises(ConfigError, match="no method"):
        rescene.run("smoke", method=Pairs, out=tmp_path / "b")


def test_the_package_shows_its_api_and_loads_without_torch():
    assert dir(rescene) == sorted(rescene.__all__, key=dir(rescene).index) and len(dir(rescene)) == len(
        set(dir(rescene))
    )
    code = "import rescene, sys; dir(rescene); sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'pandas')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert all(getattr(rescene, name) for name in rescene.__all__)


PLUGIN = """
import torch
from torch import nn
import rescene

@rescene.register_model("plugged-net")
def make(image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, 12), nn.ReLU(), nn.Linear(12, 3))

@rescene.register_dataset("plugged-data")
def data():
    y = torch.arange(4).repeat(10)
    x = (60 * y).reshape(-1, 1, 1, 1).expand(-1, 3, 8, 8).to(torch.uint8)
    return x, y
"""


def test_a_plug_in_brings_networks_and_data(tmp_path):
    file, out = tmp_path / "plugged.py", tmp_path / "run"
    file.write_text(PLUGIN)
    overrides = [f"{key}={value}" for key, value in SMALL.items()]
    given = [
        "run",
        "smoke",
        "--plugin",
        str(file),
        "method=fedavg",
        "model=plugged-net",
        "data=plugged-data",
        "--out",
        str(out),
    ]
    found = CliRunner().invoke(app, [*given, *overrides, "--quiet"])
    assert found.exit_code == 0, found.output
    kept = json.loads((out / "objects.json").read_text())["objects"]
    assert kept["model"]["name"] == "plugged-net" and kept["data"]["name"] == "plugged-data"
    for other in ({"name": "plugged-data", "code": "old"}, kept["data"] | {"source": "other"}):
        (out / "objects.json").write_text(json.dumps({"objects": kept | {"data": other}}))
        changed = CliRunner().invoke(app, [*given, *overrides, "--quiet"])
        assert "E428" in changed.output and "data: other code" in changed.output
    before = {part: {k: v for k, v in told.items() if k != "source"} for part, told in kept.items()}
    assert before != kept
    elsewhere = {part: told | {"code": "of another Python"} for part, told in kept.items()}
    for same in (before, elsewhere):  # a run of an earlier version, and of another Python
        (out / "objects.json").write_text(json.dumps({"objects": same}))
        found = CliRunner().invoke(app, [*given, *overrides, "--quiet"])
        assert found.exit_code == 0, found.output
    for what, name in (("models", "plugged-net"), ("datasets", "plugged-data")):
        assert name in CliRunner().invoke(app, ["list", what, "--plugin", str(file)]).output
    assert rescene.load(out).objects == [], "a command can make it again"


class Entry:
    """What an installed package announces."""

    def __init__(self, name, found):
        self.name, self.load = name, lambda: found


def test_installed_packages_announce_networks_and_data(monkeypatch, tmp_path):
    announced = {
        "rescene.models": [Entry("announced-net", small)],
        "rescene.datasets": [Entry("announced-data", lambda: DATA)],
    }
    monkeypatch.setattr(own_networks, "installed", lambda group: announced[group])
    monkeypatch.setattr(objects, "installed", lambda group: announced[group])
    run = rescene.run(
        "smoke", model="announced-net", data="announced-data", method="fedavg", out=tmp_path / "run", **SMALL
    )
    assert run.values["config"]["model"]["name"] == "announced-net" and run.objects == []
    with pytest.raises(ConfigError, match="did you mean 'announced-net'"):
        rescene.run("smoke", model="anounced-net", data=DATA, method="fedavg", out=tmp_path / "b", **SMALL)


@pytest.mark.slow
def test_the_example_of_a_student(tmp_path, monkeypatch):
    """An own method, network and data set in a sweep, with a table and a plot."""
    file = Path(__file__).parents[2] / "examples" / "own_experiment.py"
    monkeypatch.chdir(tmp_path)
    given = ["sweep", "smoke", "--plugin", str(file), "method=fedavg,nudged", "model=tiny-net", "data=stripes"]
    words = [*given, "--seeds", "0,1", "--out", "runs/stripes", "federation.num_rounds=1", "device=cpu"]
    for command in (
        words,
        ["table", "runs/stripes"],
        ["plot", "runs/stripes", "--kind", "curves", "--out", "stripes.png"],
    ):
        found = CliRunner().invoke(app, command)
        assert found.exit_code == 0, found.output
    assert Path("stripes.png").stat().st_size > 10_000


def test_a_line_in_a_notebook_changes_in_its_place(monkeypatch):
    IPython = pytest.importorskip("IPython")
    shown = []

    class Handle:
        def update(self, bundle, raw):
            shown[-1] = bundle["text/plain"]

    def display(bundle, raw, display_id=False):
        shown.append(bundle["text/plain"])
        return Handle()

    monkeypatch.setattr(IPython.display, "display", display)
    event = {"method": "FedAvg", "num_tasks": 2, "num_rounds": 2, "task": 0, "accuracy": None, "elapsed_s": 1.0}
    with NotebookLine(None) as show:
        expect_looks(64)
        tell_looked(32)
        assert shown == ["looked at 32 of 64 pictures"]
        show(event | {"event": "start", "done": 0})
        for r in range(2):
            show(event | {"event": "round", "round": r})
        show({"event": "event", "level": "warning", "code": "W301", "message": "<b>"})
    assert shown == ["FedAvg  task 1/2  round 2/2  0:01", "W301: <b>"]
