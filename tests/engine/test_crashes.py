"""kill -9 where a run writes; the short form of benchmarks/trust_crash.py, which visits every place."""

import errno
import json
import os
import random
import signal
import subprocess
import sys

import pytest
import trust_crash
from safetensors.torch import load_file
from stopping import stopped_after

import rescene
from rescene.cli.run_folders import prune
from rescene.core.run_state import state_of
from rescene.engine import checkpoint
from rescene.engine.loop import Run
from rescene.report.load import load_run

PLACES = [
    "config.yaml written", "origin.json opening", "env.json synced", "metrics.jsonl appended", "chunk writing", "step synced",
    "step removed", "chunk removed", "status.json renamed", "model.json opening", "rounds.csv written", "results.json renamed",
]  # fmt: skip
NARROW = {"model.width": 8}


@pytest.fixture(scope="module")
def crashes(tmp_path_factory):
    return {name: trust_crash.Crashes(name, tmp_path_factory.mktemp("crash") / name) for name in ("rescene", "refed")}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("method", ["rescene", "refed"])
def test_killed_at_a_named_place_the_end_is_the_same(crashes, method, place):
    found = crashes[method].found = trust_crash.Found()
    crashes[method].at(place, (crashes[method].places[place] + 1) // 2)
    assert found.held, found.differ


@pytest.mark.parametrize(
    "place", ["results.json renamed", *(f"status.json {at}" for at in ("writing", "written", "synced"))]
)
def test_killed_at_its_very_last_write_a_run_is_tidy_once_it_is_opened(crashes, place):
    """Its results are there, so it is not run again; yet nothing is left behind, and the status says done."""
    found = crashes["refed"].found = trust_crash.Found()
    crashes["refed"].at(place, crashes["refed"].places[place])
    assert found.held, found.differ


LAST = ["results.json renamed", *(f"status.json {at}" for at in ("opening", "writing", "written", "synced", "renamed"))]


@pytest.mark.parametrize("place", LAST)
def test_killed_between_its_results_and_its_last_status_a_run_is_done_and_never_pruned(crashes, place):
    folder = crashes["refed"].root / f"pruned {place}"
    number = crashes["refed"].places[place]
    assert trust_crash.world.end(crashes["refed"]._start(folder, f"{place}#{number}")) == -signal.SIGKILL
    status = json.loads((folder / "status.json").read_text())
    assert status["state"] == ("done" if place == "status.json renamed" else "running")
    (folder / "status.json").write_text(json.dumps(status | {"updated": "2020-01-01T00:00:00+00:00"}))
    before = (folder / "results.json").read_bytes()
    assert state_of(folder) == load_run(folder).state == "done"
    prune(folder, "interrupted,failed", yes=True)
    prune(folder, "interrupted,failed,checkpoints", yes=True)  # of a finished run, those may go
    assert (folder / "results.json").read_bytes() == before and not (folder / "checkpoints").exists()


def test_leftovers_of_killed_writes_are_swept_wherever_they_lie(tmp_path):
    def litter():
        left = [
            tmp_path / name for name in ("r/.a.json.tmp", "r/checkpoints/.chunk-1.safetensors.tmp", "r/csv/.b.csv.tmp")
        ]
        for path in left:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"half")
        return left

    with stopped_after(3):
        rescene.run("smoke", out=tmp_path / "r", **NARROW)
    unfinished = litter()
    finished = rescene.run("smoke", out=tmp_path / "r", **NARROW)
    assert not any(path.exists() for path in unfinished)
    others, left = tmp_path / "r" / ".sites.json.tmp", litter()
    others.write_bytes(b"half")  # of a process that may still be writing
    (tmp_path / "r/status.json").write_bytes(b'{"state"')
    assert rescene.run("smoke", out=tmp_path / "r", **NARROW).values == finished.values
    assert not any(path.exists() for path in left) and others.exists()
    assert json.loads((tmp_path / "r/status.json").read_text())["state"] == "done"


def test_a_finished_run_that_cannot_be_tidied_is_still_returned(tmp_path, monkeypatch):
    finished = rescene.run("smoke", out=tmp_path / "r", **NARROW)
    status, left = tmp_path / "r/status.json", tmp_path / "r/.x.tmp"
    status.write_text('{"state": "running"}')
    left.write_bytes(b"half")

    def read_only(*args, **more):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for call in ("replace", "unlink"):
        monkeypatch.setattr(os, call, read_only)
    assert rescene.run("smoke", out=tmp_path / "r", **NARROW).values == finished.values
    assert left.exists() and json.loads(status.read_text()) == {"state": "running"}


def test_killed_at_random_moments_also_while_coming_back(crashes):
    found = crashes["rescene"].found = trust_crash.Found()
    crashes["rescene"].at_random(random.Random(1), 4)
    assert found.kills == 4 and found.held, found.differ


def test_every_file_of_the_run_folder_is_written_at_a_named_place(crashes):
    """A file written past the hooks would be one whose crash nobody tries."""
    folder, places = crashes["rescene"].root / "whole", crashes["rescene"].places
    for path in folder.rglob("*"):
        if path.is_file():
            name = path.name.split("-")[0]
            assert f"{name} renamed" in places or f"{name} appended" in places, path


def test_the_place_can_be_named_from_outside(tmp_path):
    command = [sys.executable, "-m", "rescene", "run", "smoke", "model.width=8", "--out", str(tmp_path / "r"), "-q"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RESCENE_CRASH_AT": "step renamed#2"}
    assert subprocess.run(command, env=environment).returncode == -signal.SIGKILL
    assert sorted(path.name for path in (tmp_path / "r/checkpoints").glob("step-*")) == [
        "step-000001.json",
        "step-000002.json",
    ]


def test_nothing_happens_without_a_watcher():
    assert checkpoint.watcher is None
    checkpoint.reach("anywhere")


def test_killed_after_its_results_a_run_is_done(crashes):
    folder = crashes["rescene"].root / "done"
    assert trust_crash.world.end(crashes["rescene"]._start(folder, kill_at="results.json renamed")) == -signal.SIGKILL
    assert json.loads((folder / "status.json").read_text())["state"] == "running" and load_run(folder).state == "done"


def test_the_final_model_is_safe_before_it_is_evaluated(tmp_path, monkeypatch):
    evaluate = Run.evaluate

    def fail(self, task):
        if self.context.place == (1, -1):
            raise MemoryError("evaluation")
        return evaluate(self, task)

    whole = rescene.run("smoke", out=tmp_path / "whole", **NARROW)
    monkeypatch.setattr(Run, "evaluate", fail)
    with pytest.raises(MemoryError):
        rescene.run("smoke", out=tmp_path / "r", **NARROW)
    a, b = (load_file(path / "model" / "final.safetensors") for path in (tmp_path / "r", whole.folder))
    assert a.keys() == b.keys() and all(a[key].equal(b[key]) for key in a)
