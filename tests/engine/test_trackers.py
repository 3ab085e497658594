"""Trackers: three methods, told what a curve can show, and never able to stop a run."""

import json
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import rescene
from rescene import trackers
from rescene.cli.app import app
from rescene.core.errors import ConfigError

SMALL = {"federation.num_rounds": 2, "train.server_epochs": 1, "method.num_steps": 1, "tasks.limit": 2,
         "model.width": 8}  # fmt: skip


class Notebook:
    """A tracker of one's own."""

    def __init__(self):
        self.started, self.rows, self.summary = [], [], None

    def start(self, folder, config):
        print("a tool that talks")
        self.started.append((folder, config))

    def log(self, step, values):
        self.rows.append((step, values))

    def finish(self, summary):
        self.summary = summary


class Clumsy(Notebook):
    def log(self, step, values):
        raise OSError("the disk of the tracker is full")


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    notebook, clumsy = Notebook(), Clumsy()
    folder = tmp_path_factory.mktemp("trackers") / "run"
    return notebook, clumsy, rescene.run("smoke", out=folder, log=[clumsy, notebook], **SMALL)


def test_rounds_tasks_and_the_end_are_told(told):
    notebook, _, result = told
    ((folder, config),) = notebook.started
    assert folder == result.folder and config["method.num_steps"] == 1
    assert [step for step, _ in notebook.rows] == [1, 2, 2, 3, 4, 4]  # two rounds and the end of the task, twice
    rounds = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    wanted = [row["accuracy"] for row in rounds if row["kind"] == "round"]
    assert [values["accuracy/seen"] for _, values in notebook.rows if "accuracy/seen" in values] == wanted
    last = notebook.rows[-1][1]
    assert last["accuracy/aa"] == pytest.approx(result.aa) and {"accuracy/task_0", "accuracy/task_1"} <= set(last)
    assert notebook.summary["aa"] == pytest.approx(result.aa) and notebook.summary["near_copies"] > 0


def test_a_tracker_that_fails_is_left_out_with_a_warning(told):
    _, clumsy, result = told
    assert clumsy.summary is None
    text = (result.folder / "events.jsonl").read_text()
    assert text.count("W420") == 1 and "the disk of the tracker is full" in text


def test_what_a_tracker_prints_does_not_mix_with_results(tmp_path, capsys):
    rescene.run("smoke", out=tmp_path / "r", log=[Notebook()], **SMALL | {"tasks.limit": 1})
    printed = capsys.readouterr()
    assert "a tool that talks" in printed.err and "a tool that talks" not in printed.out


def test_a_finished_run_is_not_told_again(told):
    again = Notebook()
    rescene.run("smoke", out=told[2].folder, log=[again], **SMALL)
    assert again.started == [] and again.summary is None


def test_an_interrupted_run_closes_its_trackers(tmp_path):
    class Impatient(Notebook):
        def log(self, step, values):
            raise KeyboardInterrupt

    notebook = Notebook()
    with pytest.raises(KeyboardInterrupt):
        rescene.run("smoke", out=tmp_path / "r", log=[notebook, Impatient()], **SMALL)
    assert notebook.summary == {}
    resumed = Notebook()
    rescene.run("smoke", out=tmp_path / "r", log=[resumed], **SMALL)
    assert resumed.rows[0][0] in (1, 2) and resumed.rows[-1][0] == 4


def test_names_are_checked_before_the_run(tmp_path, monkeypatch):
    def fails(name, says):
        result = CliRunner().invoke(app, ["run", "smoke", "--log", name, "--out", str(tmp_path / "r")])
        assert result.exit_code == 2 and says in result.output and not (tmp_path / "r").exists()

    fails("tensorbord", "did you mean tensorboard?")
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    fails("wandb", "pip install 'rescene[wandb]'")
    with pytest.raises(ConfigError):
        trackers.open_trackers("nothing-like-it")


class Recorder(SimpleNamespace):
    """A module that remembers how it was called."""

    def __init__(self, **more):
        super().__init__(calls=[], **more)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


def told_to(tracker, folder):
    tracker.start(folder, {"seed": 0})
    tracker.log(3, {"accuracy/seen": 50.0})
    tracker.finish({"aa": 40.0})


def test_wandb_is_offline_unless_told_otherwise(tmp_path, monkeypatch):
    run = Recorder(summary={})
    seen = {}
    module = SimpleNamespace(init=lambda **given: seen.update(given) or run)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    told_to(trackers.WandB(), tmp_path)
    assert seen["mode"] == "offline" and seen["dir"] == str(tmp_path) and seen["resume"] == "allow"
    assert run.calls[0] == ("log", ({"accuracy/seen": 50.0},), {"step": 3}) and run.calls[-1][0] == "finish"
    assert run.summary == {"aa": 40.0}
    monkeypatch.setenv("WANDB_MODE", "online")
    told_to(trackers.WandB(), tmp_path)
    assert seen["mode"] == "online"


def test_mlflow_and_trackio_stay_in_the_run_folder(tmp_path, monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "TRACKIO_DIR", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    mlflow, trackio = Recorder(), Recorder()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    told_to(trackers.MLflow(), tmp_path)
    called = {name: (args, kwargs) for name, args, kwargs in mlflow.calls}
    assert called["set_tracking_uri"][0] == ((tmp_path / "mlflow").resolve().as_uri(),)
    assert called["log_params"][0] == ({"seed": "0"},) and called["log_metrics"][0] == ({"summary/aa": 40.0},)
    told_to(trackers.Trackio(), tmp_path)
    assert [name for name, *_ in trackio.calls] == ["init", "log", "log", "finish"]
    assert trackio.calls[1] == ("log", ({"accuracy/seen": 50.0},), {"step": 3})


def test_tensorboard_writes_what_it_is_told(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    told_to(trackers.TensorBoard(), tmp_path)
    found = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("accuracy/seen")] == [(3, 50.0)]
    assert [e.value for e in found.Scalars("summary/aa")] == [40.0]
