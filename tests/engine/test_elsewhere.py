"""A run goes on where it began; with other code or on another machine only if it is told to, and then its results say so."""

import json
import shutil

import pytest
import torch
from stopping import stopped_after
from typer.testing import CliRunner

import rescene
from rescene.cli.app import app
from rescene.core.errors import RunError
from rescene.engine import run_parts as parts
from rescene.engine.run_folder import MADE_ON, made_on
from rescene.report import write_report


def run(folder, **more):
    return rescene.run("smoke", out=folder, **{"model.width": 8}, **more)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    folder = tmp_path_factory.mktemp("begun") / "r"
    with stopped_after(3):
        run(folder)
    return folder


@pytest.fixture
def stopped(begun, tmp_path):
    """A run that ended after three steps."""
    return shutil.copytree(begun, tmp_path / "r")


def move(monkeypatch, **there):
    """From now on code or machine are others."""
    monkeypatch.setattr(parts, "made_on", lambda device: made_on(device) | there)


def test_env_json_says_what_the_bits_depend_on(tmp_path):
    result = run(tmp_path / "r")
    found = json.loads((tmp_path / "r/env.json").read_text())
    assert {*MADE_ON, "commit", "data_fingerprint"} <= found.keys()
    assert found["torch"] == torch.__version__ and found["threads"] == torch.get_num_threads()
    assert len(found["code"]) == 64 and "elsewhere" not in result.values


@pytest.mark.parametrize("key", MADE_ON)
def test_elsewhere_is_refused_with_what_differs(stopped, monkeypatch, key):
    move(monkeypatch, **{key: "other"})
    with pytest.raises(RunError, match="E416") as caught:
        run(stopped)
    assert f"{key}: " in caught.value.why and "-> other" in caught.value.why and "--elsewhere" in caught.value.fix
    last = json.loads((stopped / "events.jsonl").read_text().splitlines()[-1])
    assert last["code"] == "E416" and "--elsewhere" in last["message"]  # what an operator of many sites sees


def test_told_to_go_on_it_does_and_says_so_even_if_it_dies_again(stopped, tmp_path, monkeypatch, blank_figures):
    move(monkeypatch, torch="9.9", threads=64)
    with stopped_after(1):  # before anything was written here
        run(stopped, elsewhere=True)
    with pytest.raises(RunError, match="E416"):
        run(stopped)
    (part,) = run(stopped, elsewhere=True).values["elsewhere"]
    assert part["changed"] == {"torch": [torch.__version__, "9.9"], "threads": [torch.get_num_threads(), 64]}
    page = write_report([stopped], tmp_path / "page.html").read_text()
    assert "Went on elsewhere" in page and "W403" in page


def test_after_a_step_here_it_goes_on_here_without_being_told(stopped, monkeypatch):
    move(monkeypatch, torch="9.9")
    with stopped_after(3):
        run(stopped, elsewhere=True)
    assert len(run(stopped).values["elsewhere"]) == 1


def test_without_a_record_of_where_it_began_it_is_refused(stopped, monkeypatch):
    """A checkpoint of an earlier version tells nothing; then env.json does, if it can be read."""
    monkeypatch.setattr("rescene.engine.checkpoint.Checkpoints.load", _without("made_on"))
    (stopped / "env.json").write_text("{")
    with pytest.raises(RunError, match="E416") as caught:
        run(stopped)
    assert "torch: unknown ->" in caught.value.why


def test_on_the_command_line(stopped, monkeypatch, blank_figures):
    move(monkeypatch, code="f" * 64)
    refused = CliRunner().invoke(app, ["resume", str(stopped)])
    assert refused.exit_code == 4 and refused.output.count("E416") == 1 and "-> ffffffffffff" in refused.output
    assert CliRunner().invoke(app, ["resume", str(stopped), "-q", "--elsewhere"]).exit_code == 0
    assert json.loads((stopped / "results.json").read_text())["elsewhere"][0]["step"] in (2, 3)


def _without(key):
    from dataclasses import replace

    from rescene.engine.checkpoint import Checkpoints

    load = Checkpoints.load

    def read(self):
        found = load(self)
        return replace(found, facts={k: v for k, v in found.facts.items() if k != key})

    return read
