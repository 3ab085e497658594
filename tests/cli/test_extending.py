"""Methods of one's own, sweeps, and the page that explains a method."""

import contextlib
import json
import shlex
import shutil
import subprocess
import sys

import pytest
from PIL import Image
from typer.testing import CliRunner

from rescene.cli.app import app
from rescene.core.plugins import load_plugin
from rescene.methods import method_names
from rescene.sweeps.grid import axis, grid

invoke = CliRunner().invoke
TINY = ["federation.num_clients=3", "federation.per_round=2", "federation.num_rounds=1", "tasks.limit=1", "train.server_epochs=1",
        "train.local_epochs=1", "model.width=8"]  # fmt: skip
pytestmark = pytest.mark.usefixtures("blank_figures")


def test_a_new_method_runs_and_conforms(tmp_path):
    made = invoke(app, ["method", "new", "quiet_idea", "--in", str(tmp_path)])
    assert made.exit_code == 0 and "quiet_idea.py" in made.output
    plugin = str(tmp_path / "quiet_idea.py")
    out = tmp_path / "run"
    result = invoke(app, ["run", "smoke", "--plugin", plugin, "method=quiet_idea", *TINY, "--out", str(out), "-q"])
    assert result.exit_code == 0, result.output
    assert json.loads((out / "results.json").read_text())["method"] == "quiet_idea"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", "unkind or arguments", str(tmp_path)], capture_output=True
    )
    assert done.returncode == 0, done.stdout.decode()
    assert "QuietIdea" in invoke(app, ["method", "explain", "quiet_idea", "--plugin", plugin]).output


def test_a_new_method_overwrites_nothing_and_needs_a_name(tmp_path):
    (tmp_path / "idea.py").write_text("mine")
    refused = invoke(app, ["method", "new", "idea", "--in", str(tmp_path)])
    assert refused.exit_code == 2 and "exists already" in refused.output
    assert (tmp_path / "idea.py").read_text() == "mine"
    assert invoke(app, ["method", "new", "Not-A-Name", "--in", str(tmp_path)]).exit_code == 2


def test_a_plugin_that_registers_nothing_is_refused(tmp_path):
    """Also one that only uses a method of ours: what that registers does not count."""
    idea = "from rescene.methods.scaffold import Scaffold\n\nclass Forgotten(Scaffold):\n    name = 'forgotten'\n"
    (tmp_path / "forgotten_plugin.py").write_text(idea)
    words = ["list", "methods", "--plugin", str(tmp_path / "forgotten_plugin.py")]
    for _ in range(2):  # the second time it is imported already
        result = invoke(app, words)
        assert result.exit_code == 2 and "E561" in result.output and "registers nothing" in result.output


def test_a_broken_plugin_is_named(tmp_path):
    (tmp_path / "broken_plugin.py").write_text("1 / 0")
    result = invoke(app, ["run", "smoke", "--plugin", str(tmp_path / "broken_plugin.py")])
    assert result.exit_code == 2 and "ZeroDivisionError" in result.output
    assert invoke(app, ["run", "smoke", "--plugin", str(tmp_path / "none.py")]).exit_code == 2


def test_a_method_whose_model_does_not_fit_the_network_is_named(tmp_path):
    idea = """
from dataclasses import replace
from rescene.methods import register
from rescene.methods.fedavg import FedAvg


@register
class Headless(FedAvg):
    name, title = "headless", "Headless"

    def server_round(self, state, uploads, round, federation, rng):
        state = super().server_round(state, uploads, round, federation, rng)
        return replace(state, model={key: value for key, value in state.model.items() if key != "head.bias"})
"""
    (tmp_path / "headless_plugin.py").write_text(idea)
    words = ["run", "smoke", "--plugin", str(tmp_path / "headless_plugin.py"), "method=headless", *TINY]
    result = invoke(app, [*words, "--out", str(tmp_path / "r"), "-q"])
    assert result.exit_code == 2 and "E134" in result.output
    assert "Headless (headless) made a model that does not fit the network: 'head.bias'" in result.output
    assert "1 missing (head.bias)" in result.output and "all keys and shapes" in result.output


def test_a_run_that_lacks_its_plug_in_names_the_file_and_does_not_load_it(tmp_path):
    """Another process: here the method would stay registered. The run folder could be somebody else's, so nothing is loaded."""
    idea = "from rescene.methods import register\nfrom rescene.methods.fedavg import FedAvg\nprint('loaded')\n"
    idea += "@register\nclass Other(FedAvg):\n    name, title = 'other_idea', 'Other'\n"
    (tmp_path / "other idea.py").write_text(idea)
    made = ["run", "smoke", "--plugin", "other idea.py", "method=other_idea", *TINY, "--out", "r", "-q"]

    def rescene(*words):
        start = [sys.executable, "-m", "rescene", *words]
        return subprocess.run(start, cwd=tmp_path, capture_output=True, text=True)

    assert rescene(*made).returncode == 0
    (tmp_path / "r" / "results.json").unlink()
    refused = rescene("resume", "r")
    assert refused.returncode == 2 and "E103" in refused.stderr and "loaded" not in refused.stdout
    assert "fix    the same command with --plugin 'other idea.py'\n" in refused.stderr
    again = rescene("resume", "r", "--plugin", "other idea.py", "-q")
    assert again.returncode == 0 and (tmp_path / "r" / "results.json").is_file()
    (tmp_path / "r" / "results.json").unlink()
    (tmp_path / "other idea.py").rename(tmp_path / "elsewhere.py")
    assert "with the place where the file is now" in rescene("resume", "r").stderr


OWN = """
import rescene
import torch
from torch import nn

@rescene.register_model("lacked-net")
def net(image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * image_size**2, 8), nn.ReLU(), nn.Linear(8, 4))

@rescene.register_dataset("lacked-data")
def grey():
    y = torch.arange(4).repeat(20)
    return (60 * y).reshape(-1, 1, 1, 1).expand(-1, 3, 16, 16).to(torch.uint8), y
"""


@pytest.fixture(scope="module")
def own_runs(tmp_path_factory):
    """A run with a network of one's own, one with own data, and the exported model, made in this process; and the line that
    tells how to try the model."""
    place = tmp_path_factory.mktemp("lacking")
    (place / "lacked.py").write_text(OWN)
    Image.new("RGB", (32, 32)).save(place / "a.png")
    few = ["federation.num_rounds=1", "tasks.limit=1", "--plugin", "lacked.py", "-q"]
    with contextlib.chdir(place), pytest.MonkeyPatch.context() as patch:
        for words in (["model=lacked-net", "--out", "net"], ["data=lacked-data", "model.width=2", "--out", "data"]):
            words = ["run", "smoke", "method=fedavg", *words, *few]
            patch.setattr(sys, "argv", ["rescene", *words])  # what command.txt keeps
            made = invoke(app, words)
            assert made.exit_code == 0, made.output
        told = invoke(app, ["export", "net", "--plugin", "lacked.py", "--out", "net/export"]).output
        shutil.copytree("net/export", "lone")
    return place, told.splitlines()[-1]


@pytest.fixture
def elsewhere(own_runs, monkeypatch):
    """Beside the runs, in a process that has not loaded the plug-in."""
    monkeypatch.chdir(own_runs[0])
    monkeypatch.setattr("rescene.nets.own_networks._OWN", {})
    monkeypatch.setattr("rescene.data.objects._OWN", {})
    monkeypatch.delitem(sys.modules, "lacked")


@pytest.mark.parametrize(
    "words",
    [
        "predict net a.png",
        "predict net/export/model.safetensors a.png",
        "export net",
        "rerun net",
        "rerun data",
        "audit net",
        "leaderboard check net",
        "leaderboard check data",
        "run net/config.yaml --out again",
    ],
)
def test_an_own_network_and_own_data_that_are_lacking_are_traced_to_their_file(elsewhere, words):
    found = invoke(app, words.split())
    assert found.exit_code in (2, 3) and "fix    the same command with --plugin lacked.py\n" in found.stderr
    assert ("E201" if "data" in words else "E130") in found.stderr and "lacked" not in sys.modules


def test_a_misspelt_network_of_such_a_run_is_told_as_such(elsewhere):
    found = invoke(app, ["cost", "net/config.yaml", "model.name=lackd-net"])
    assert "E130" in found.stderr and "--plugin" not in found.stderr


def test_a_model_file_alone_says_what_it_lacks_and_its_export_how_to_use_it(own_runs, elsewhere):
    refused = invoke(app, ["predict", "lone/model.safetensors", "a.png"])
    assert refused.exit_code == 2 and "E130" in refused.stderr and "fix    --plugin FILE" in refused.stderr
    assert "resnet18" not in refused.stderr
    words = shlex.split(own_runs[1].replace("IMAGES", "a.png"))
    assert words[:4] == ["Try", "it:", "rescene", "predict"]
    assert invoke(app, words[3:]).exit_code == 0


def test_a_plug_in_imports_a_file_beside_it(tmp_path):
    (tmp_path / "levels_beside.py").write_text("LEVELS = [1, 2]")
    (tmp_path / "plugin_with_a_neighbour.py").write_text("from levels_beside import LEVELS")
    before = list(sys.path)
    load_plugin(tmp_path / "plugin_with_a_neighbour.py")
    assert sys.modules["plugin_with_a_neighbour"].LEVELS == [1, 2] and sys.path == before


def test_a_plug_in_does_not_take_the_name_of_a_shipped_method(tmp_path):
    """In a process of its own, in which no shipped method is loaded yet."""
    (tmp_path / "mine.py").write_text(
        "from rescene.methods import register\nfrom rescene.methods.averaging import AveragingMethod\n"
        "@register\nclass Mine(AveragingMethod):\n    name = 'fedprox'\n    title = 'Mine'\n"
    )
    words = [sys.executable, "-m", "rescene", "run", "smoke", "--plugin", str(tmp_path / "mine.py"), "method=fedprox"]
    told = subprocess.run([*words, "--out", str(tmp_path / "out")], capture_output=True, text=True, check=False)
    assert told.returncode == 2 and "E110" in told.stderr, told.stderr
    new = invoke(app, ["method", "new", "fedavg", "--in", str(tmp_path)])
    assert new.exit_code == 2 and "E111" in new.output and not (tmp_path / "fedavg.py").exists()


def test_explain_gives_symbol_and_place():
    facts = json.loads(invoke(app, ["method", "explain", "rescene", "--json"]).output)
    budget = next(row for row in facts["hyperparameters"] if row["name"] == "budget")
    assert budget["symbol"] == "B" and budget["default"] == 1000 and budget["place"] == "Sec. 4.1"
    assert facts["leaves the site"] and facts["client remembers"] == "nothing"


def test_a_grid_is_every_combination(tmp_path):
    cells = grid(
        "smoke",
        ["method=rescene,fedavg", "federation.beta=0.1,0.5", "tasks.sizes=[2,3,5]"],
        "0,1",
        tmp_path,
    )
    assert len(cells) == 8 and len({cell.folder for cell in cells}) == 8
    assert cells[0].resolved.recipe.tasks.sizes == [2, 3, 5]


def test_all_stands_for_every_method():
    assert axis("method=all") == [f"method={name}" for name in method_names()]
    assert axis("method.name=all") == [f"method.name={name}" for name in method_names()] and len(method_names()) >= 20


def test_a_sweep_skips_what_is_done_and_goes_on_after_a_failure(tmp_path):
    args = ["sweep", "smoke", "method=fedavg", *TINY, "--out", str(tmp_path / "s"), "-q"]
    assert invoke(app, args).exit_code == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "s").glob("*/results.json")}
    assert len(before) == 1 and (tmp_path / "s" / "report.html").is_file()
    bad = invoke(app, [*args, f"data.path=null,{tmp_path / 'missing'}"])
    assert bad.exit_code == 4 and "E201" in bad.output
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "s").glob("*/results.json")} == before
    (finished,) = before  # as if it had been made by a method of the user's, whose code is another now
    (finished.parent / "objects.json").write_text('{"objects": {"method": {"class": "idea.Idea", "code": "0"}}}')
    stale = invoke(app, args)
    assert stale.exit_code != 0 and "E428" in stale.output


def test_a_sweep_says_which_row_is_which(tmp_path):
    args = ["sweep", "smoke", "method=fedavg", "federation.beta=0.1,0.5", "--seeds", "0,1"]
    result = invoke(app, [*args, *TINY, "--out", str(tmp_path / "s"), "-q"])
    assert result.exit_code == 0, result.output
    head, *rows = [line.split() for line in result.output.splitlines()[:5]]
    assert head[:4] == ["method", "beta", "seed", "AA"]
    assert [row[:3] for row in rows] == [["FedAvg", beta, seed] for beta in ("0.1", "0.5") for seed in "01"]


def test_cost_before_a_run():
    facts = json.loads(invoke(app, ["cost", "smoke", "model.width=2", "--uplink-mbps", "8", "--json"]).output)
    assert facts["method"] == "ReSCENE" and facts["forecast"]["client_flops"] > 0
    assert facts["nominal"]["uplink_bytes_per_message"] == 2 * 2 * 3 * 32 * 32 * 4
    assert facts["latency"]["upload_s"] == pytest.approx(facts["forecast"]["uplink_bytes_per_message"] / 1e6, rel=0.3)
    assert facts["time"]["total_s"] > 0 and facts["data_missing"] is None
    given = ["--client-gflops", "1", "--server-gflops", "2000"]
    facts = json.loads(invoke(app, ["cost", "smoke", "method=fedavg", "model.width=2", *given, "--json"]).output)
    assert facts["latency"]["client_flops_per_s"] == 1e9 and facts["latency"]["server_flops_per_s"] == 2e12
    output = invoke(app, ["cost", "smoke", "method=glfc", "model.width=2"]).output
    for text in ("client state", "upload per site and round", "paper's convention", "the run, simulated"):
        assert text in output


@pytest.mark.slow
def test_cost_without_the_images(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RESCENE_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    output = invoke(app, ["cost", "cifar100", "model=convnet", "model.width=2"]).output
    assert "Sizes as published: data set 'cifar100' is not on this machine" in output
    found = invoke(app, ["cost", "office31"])
    assert found.exit_code == 3 and "'office31' is not on this machine" in found.output
    plan = ["sweep", "office31", "method=fedavg", "data.name=office31,fashion-mini", "--plan"]
    rows = json.loads(invoke(app, [*plan, "--json"]).output)
    assert rows[0]["state"] == "cannot run: E201" and "data prepare office31" in rows[0]["fix"]


def test_mistakes_in_asking_for_a_cost(tmp_path):
    for option in ("--uplink-mbps", "--client-gflops", "--server-gflops"):
        found = invoke(app, ["cost", "smoke", option, "-1"])
        assert found.exit_code == 2 and f"{option} -1 is not possible" in found.output
    invoke(app, ["method", "new", "priceless", "--in", str(tmp_path)])
    plugin = ["--plugin", str(tmp_path / "priceless.py")]
    found = invoke(app, ["cost", "smoke", "method=priceless", "model.width=2", *plugin])
    assert found.exit_code == 0 and "upload per site and round" in found.output, "a plug-in has a forecast too"
    planned = ["sweep", "smoke", "method=priceless", "model.width=2", "--plan", "--json", *plugin]
    rows = json.loads(invoke(app, planned).output)
    assert rows[0]["state"] == "to run" and rows[0]["seconds"] > 0


def test_explain_has_the_papers_asymptotics():
    facts = json.loads(invoke(app, ["method", "explain", "glfc", "--json"]).output)
    assert facts["server compute per task"] == "O(R K P + I K |C_{t-1}| F_enc)"
    assert "|C_{t-1}| classes of the previous task" in facts["where"] and "E_srv" not in facts["where"]
    assert "where" not in json.loads(invoke(app, ["method", "explain", "joint", "--json"]).output)
