"""A run goes on where it began; with other code or on another machine only if it is told to, and then its results say so."""

import json

import pytest
import torch
from stopping import stopped_after
from typer.testing import CliRunner

import rescene
from rescene.cli.app import app
from rescene.engine import parts
from rescene.engine.folder import MADE_ON, made_on
from rescene.errors import RunError
from rescene.report import write_report


def stop(folder, steps=3):
    """A run that ends after so many steps."""
    with stopped_after(steps):
        rescene.run("smoke", out=folder)


def move(monkeypatch, **there):
    """From now on code or machine are others."""
    monkeypatch.setattr(parts, "made_on", lambda device: made_on(device) | there)


def test_env_json_says_what_the_bits_depend_on(tmp_path):
    result = rescene.run("smoke", out=tmp_path / "r")
    found = json.loads((tmp_path / "r/env.json").read_text())
    assert {*MADE_ON, "commit", "data_fingerprint"} <= found.keys()
    assert found["torch"] == torch.__version__ and found["threads"] == torch.get_num_threads()
    assert len(found["code"]) == 64 and "elsewhere" not in result.values


@pytest.mark.parametrize("key", MADE_ON)
def test_elsewhere_is_refused_with_what_differs(tmp_path, monkeypatch, key):
    stop(tmp_path / "r")
    move(monkeypatch, **{key: "other"})
    with pytest.raises(RunError, match="E416") as caught:
        rescene.run("smoke", out=tmp_path / "r")
    assert f"{key}: " in caught.value.why and "-> other" in caught.value.why and "--elsewhere" in caught.value.fix
    last = json.loads((tmp_path / "r/events.jsonl").read_text().splitlines()[-1])
    assert last["code"] == "E416" and "--elsewhere" in last["message"]  # what an operator of many sites sees


def test_told_to_go_on_it_does_and_says_so_even_if_it_dies_again(tmp_path, monkeypatch):
    stop(tmp_path / "r")
    move(monkeypatch, torch="9.9", threads=64)
    with stopped_after(1):  # before anything was written here
        rescene.run("smoke", out=tmp_path / "r", elsewhere=True)
    with pytest.raises(RunError, match="E416"):
        rescene.run("smoke", out=tmp_path / "r")
    stopped = rescene.run("smoke", out=tmp_path / "r", elsewhere=True)
    (part,) = stopped.values["elsewhere"]
    assert part["changed"] == {"torch": [torch.__version__, "9.9"], "threads": [torch.get_num_threads(), 64]}
    page = write_report([stopped.folder], tmp_path / "page.html").read_text()
    assert "Went on elsewhere" in page and "W403" in page


def test_after_a_step_here_it_goes_on_here_without_being_told(tmp_path, monkeypatch):
    stop(tmp_path / "r")
    move(monkeypatch, torch="9.9")
    with stopped_after(3):
        rescene.run("smoke", out=tmp_path / "r", elsewhere=True)
    assert len(rescene.run("smoke", out=tmp_path / "r").values["elsewhere"]) == 1


def test_without_a_record_of_where_it_began_it_is_refused(tmp_path, monkeypatch):
    """A checkpoint of an earlier version tells nothing; then env.json does, if it can be read."""
    stop(tmp_path / "r")
    monkeypatch.setattr("rescene.engine.checkpoint.Checkpoints.load", _without("made_on"))
    (tmp_path / "r/env.json").write_text("{")
    with pytest.raises(RunError, match="E416") as caught:
        rescene.run("smoke", out=tmp_path / "r")
    assert "torch: unknown ->" in caught.value.why


def test_on_the_command_line(tmp_path, monkeypatch):
    stop(tmp_path / "r")
    move(monkeypatch, code="f" * 64)
    refused = CliRunner().invoke(app, ["resume", str(tmp_path / "r"), "-q"])
    assert refused.exit_code == 4 and "E416" in refused.output and "-> ffffffffffff" in refused.output
    assert CliRunner().invoke(app, ["resume", str(tmp_path / "r"), "-q", "--elsewhere"]).exit_code == 0
    assert json.loads((tmp_path / "r/results.json").read_text())["elsewhere"][0]["step"] in (2, 3)


def _without(key):
    from dataclasses import replace

    from rescene.engine.checkpoint import Checkpoints

    load = Checkpoints.load

    def read(self):
        found = load(self)
        return replace(found, facts={k: v for k, v in found.facts.items() if k != key})

    return read
