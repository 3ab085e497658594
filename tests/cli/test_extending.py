"""Methods of one's own, sweeps, and the page that explains a method."""

import json
import subprocess
import sys

from typer.testing import CliRunner

from rescene.cli.app import app
from rescene.cli.sweeping import grid

invoke = CliRunner().invoke
TINY = ["federation.num_clients=3", "federation.per_round=2", "federation.num_rounds=1", "tasks.limit=1", "train.server_epochs=1",
        "train.local_epochs=1"]  # fmt: skip


def test_a_new_method_runs_and_conforms(tmp_path):
    made = invoke(app, ["new", "method", "quiet_idea", "--in", str(tmp_path)])
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
    assert "QuietIdea" in invoke(app, ["explain", "quiet_idea", "--plugin", plugin]).output


def test_a_new_method_overwrites_nothing_and_needs_a_name(tmp_path):
    (tmp_path / "idea.py").write_text("mine")
    refused = invoke(app, ["new", "method", "idea", "--in", str(tmp_path)])
    assert refused.exit_code == 2 and "exists already" in refused.output
    assert (tmp_path / "idea.py").read_text() == "mine"
    assert invoke(app, ["new", "method", "Not-A-Name", "--in", str(tmp_path)]).exit_code == 2


def test_a_broken_plugin_is_named(tmp_path):
    (tmp_path / "broken_plugin.py").write_text("1 / 0")
    result = invoke(app, ["run", "smoke", "--plugin", str(tmp_path / "broken_plugin.py")])
    assert result.exit_code == 2 and "ZeroDivisionError" in result.output
    assert invoke(app, ["run", "smoke", "--plugin", str(tmp_path / "none.py")]).exit_code == 2


def test_explain_gives_symbol_and_place():
    facts = json.loads(invoke(app, ["explain", "rescene", "--json"]).output)
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
    rows = json.loads(invoke(app, ["sweep", "smoke", "method=all", "--plan", "--json"]).output)
    methods = [row["cell"].split()[0].removeprefix("method=") for row in rows]
    assert methods == ["rescene", "fedavg", "fedewc", "fedlwf", "target", "glfc", "fedcbdr", "refed", "feddm", "fedaf", "joint", "local",
                       "raw-upload"]  # fmt: skip


def test_a_sweep_skips_what_is_done_and_goes_on_after_a_failure(tmp_path):
    args = ["sweep", "smoke", "method=fedavg", *TINY, "--out", str(tmp_path / "s"), "-q"]
    assert invoke(app, args).exit_code == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "s").glob("*/results.json")}
    assert len(before) == 1 and (tmp_path / "s" / "report.html").is_file()
    bad = invoke(app, [*args, f"data.path=null,{tmp_path / 'missing'}"])
    assert bad.exit_code == 4 and "E201" in bad.output
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "s").glob("*/results.json")} == before
