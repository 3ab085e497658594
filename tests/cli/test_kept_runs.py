"""What is there, what can go, and whether it comes out the same again."""

import contextlib
import json
import shutil

import pytest
import typer
from typer.testing import CliRunner

import rescene
from rescene.cli.app import app
from rescene.core import run_state
from rescene.core.run_state import working_in

SMALL = {
    "federation.num_rounds": 1,
    "train.server_epochs": 1,
    "method.num_steps": 1,
    "tasks.limit": 1,
    "model.width": 8,
}
invoke = CliRunner().invoke
pytestmark = pytest.mark.usefixtures("blank_figures")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return rescene.run("smoke", out=tmp_path_factory.mktemp("keeping") / "run", **SMALL).folder


@pytest.fixture
def root(finished, tmp_path):
    """A finished run, one that failed, one whose process is gone, one that is going."""
    folder = tmp_path / "runs"
    for name, state in (("done", "done"), ("failed", "failed"), ("gone", "running"), ("going", "running")):
        run = shutil.copytree(finished, folder / name)
        if name != "done":
            (run / "results.json").unlink()
        status = json.loads((run / "status.json").read_text()) | {"state": state}
        status["pid"] = 2**22 + 1 if name == "gone" else status["pid"]
        (run / "status.json").write_text(json.dumps(status))
    return folder


def quiet_since(run, when):
    path = run / "status.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"updated": when}))


def test_the_list_tells_state_size_and_accuracy(root):
    rows = {row["run"].rsplit("/", 1)[1]: row for row in json.loads(invoke(app, ["runs", str(root), "--json"]).output)}
    assert {name: row["state"] for name, row in rows.items()} == {
        "done": "done",
        "failed": "failed",
        "gone": "interrupted",
        "going": "running",
    }
    files = [path for path in (root / "done").rglob("*") if path.is_file()]
    assert rows["done"]["bytes"] == sum(path.stat().st_size for path in files) and rows["done"]["aa"] is not None
    assert all(rows[name]["aa"] is None for name in ("failed", "gone", "going"))  # an AA is one of a finished run
    measured = json.loads((root / "gone" / "status.json").read_text())
    assert rows["gone"]["aa_so_far"] == f"{measured['aa']:.1f} after task 1/1" and rows["done"]["aa_so_far"] == ""
    printed = invoke(app, ["runs", str(root)]).output
    assert "4 runs" in printed and printed.count(rows["gone"]["aa_so_far"]) == 3
    assert "nothing here" in invoke(app, ["runs", str(root / "none")]).output


def test_pruning_asks_and_takes_no_for_an_answer(root):
    result = invoke(app, ["runs", str(root), "--prune", "failed,checkpoints"], input="n\n")
    assert result.exit_code == 0 and "nothing was removed" in result.output
    assert (root / "failed").is_dir() and (root / "done" / "checkpoints").is_dir()


def test_pruning_removes_what_was_named_and_no_more(root):
    assert invoke(app, ["runs", str(root), "--prune", "checkpoints", "--yes"]).exit_code == 0
    assert not (root / "done" / "checkpoints").exists() and (root / "done" / "results.json").is_file()
    assert (root / "failed" / "checkpoints").is_dir()  # it may still go on
    assert invoke(app, ["runs", str(root), "--prune", "failed,interrupted", "--yes"]).exit_code == 0
    assert sorted(path.name for path in root.iterdir()) == [
        "done",
        "going",
        "gone",
    ]  # gone: only just, perhaps elsewhere
    quiet_since(root / "gone", "2020-01-01T00:00:00+00:00")
    quiet_since(root / "going", "2020-01-01T00:00:00+00:00")
    assert invoke(app, ["runs", str(root), "--prune", "interrupted", "--yes"]).exit_code == 0
    assert sorted(path.name for path in root.iterdir()) == ["done", "going"]
    assert "nothing to remove" in invoke(app, ["runs", str(root), "--prune", "failed"]).output


def test_a_run_that_goes_on_while_pruning_asks_is_left_alone(root, monkeypatch):
    with contextlib.ExitStack() as process:
        monkeypatch.setattr(typer, "confirm", lambda words: process.enter_context(working_in(root / "failed")) is None)
        monkeypatch.setattr(run_state, "_PAUSE_S", 0.0)
        result = invoke(app, ["runs", str(root), "--prune", "failed"])
        assert "because it is running again" in result.output and (root / "failed" / "checkpoints").is_dir()


DAMAGE = {"deep": '{"a":' * 50_000, "nested": '{"config":' * 500 + "1" + "}" * 500, "list": "[1]", "empty": ""}


@pytest.mark.parametrize("text", DAMAGE.values(), ids=DAMAGE)
def test_one_damaged_run_does_not_hide_the_others(root, text, tmp_path):
    (root / "failed" / "results.json").write_text(text)
    rows = {row["run"].rsplit("/", 1)[1]: row for row in json.loads(invoke(app, ["runs", str(root), "--json"]).output)}
    assert rows["failed"]["state"] == "unreadable" and "results.json" in rows["failed"]["problem"]
    assert rows["done"]["state"] == "done" and "problem" not in rows["done"]
    assert rows["failed"]["problem"] in invoke(app, ["runs", str(root)]).output.replace("\n", " ")
    for words in (["table"], ["report", "--out", tmp_path / "page.html"]):
        result = invoke(app, [words[0], str(root), *map(str, words[1:])])
        assert result.exit_code == 0 and "left out" in result.output and "failed" in result.output, result.output
    assert "left out, " in (tmp_path / "page.html").read_text()
    assert invoke(app, ["table", str(root / "failed")]).exit_code == 3
    invoke(app, ["runs", str(root), "--prune", "failed,interrupted", "--yes"])
    assert (root / "failed" / "results.json").read_text() == text  # they may be mended


def test_a_federation_keeps_the_checkpoint_its_plan_may_grow_from(root):
    config = root / "done" / "config.yaml"
    config.write_text(config.read_text().replace("sites: null", "sites: {tasks: []}"))
    assert "nothing to remove" in invoke(app, ["runs", str(root), "--prune", "checkpoints"]).output


def test_a_word_that_cannot_be_pruned(root):
    result = invoke(app, ["runs", str(root), "--prune", "fialed"])
    assert result.exit_code == 2 and "did you mean failed?" in result.output


def test_a_repetition_comes_out_the_same(finished, tmp_path):
    folder = shutil.copytree(finished, tmp_path / "run")
    result = invoke(app, ["rerun", str(folder), "-q"])
    assert result.exit_code == 0 and "identical" in result.output, result.output
    assert rescene.load(tmp_path / "run-again").values == rescene.load(folder).values
    path = folder / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"aa": 1.0}))
    result = invoke(app, ["rerun", str(folder), "--json"])
    assert result.exit_code == 5
    found = json.loads(result.output)
    assert not found["identical"] and [row["what"] for row in found["numbers"]] == ["aa"]
    assert found["folder"].endswith("run-again2")


def test_a_repetition_of_a_private_run_says_why_it_differs(finished, tmp_path):
    private = {"method.start": "noise", "privacy.mechanism": "release", "privacy.epsilon": 8}
    for noise, code in (("os", 5), ("seeded", 0)):
        folder = rescene.run("smoke", out=tmp_path / noise, **SMALL, **private, **{"privacy.noise": noise}).folder
        result = invoke(app, ["rerun", str(folder), "-q"])
        assert result.exit_code == code, result.output
        assert ("comes from the operating system on purpose" in result.output) == bool(code)
    folder = shutil.copytree(finished, tmp_path / "run")
    path = folder / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"aa": 1.0}))
    assert "operating system" not in invoke(app, ["rerun", str(folder), "-q"]).output  # no noise explains that


def test_a_repetition_needs_a_finished_run_and_another_folder(finished, tmp_path):
    result = invoke(app, ["rerun", str(tmp_path)])
    assert result.exit_code == 4 and "no finished run here" in result.output
    result = invoke(app, ["rerun", str(finished), "--out", str(finished)])
    assert result.exit_code == 2 and "its own folder" in result.output


def test_a_loaded_run_answers_pictures(finished, image_folder):
    answers = rescene.load(finished).predict(image_folder / "test" / "ant", top=1)
    assert len(answers) == 6 and all(answer.top[0][0] in ("T-shirt", "Trouser") for answer in answers)
