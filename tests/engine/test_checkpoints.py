"""Checkpoints: written once, never half, never damaged unnoticed."""

import errno
import json
import os

import pytest
import torch

from rescene.engine.checkpoint import Checkpoints, write_atomically
from rescene.errors import ResceneWarning, RunError


def saved(folder, rounds=3):
    checkpoints = Checkpoints(folder)
    pool = []
    for r in range(1, rounds + 1):
        pool = pool + [{"x": torch.full((9,), float(r))}]
        checkpoints.save(r, {"model": {"w": torch.full((50,), float(r))}, "pool": pool}, {"r": r})
    return checkpoints


def test_the_newest_comes_back(tmp_path):
    saved(tmp_path)
    found = Checkpoints(tmp_path).load()
    assert found.step == 3 and found.facts == {"r": 3} and found.tree["model"]["w"][0] == 3
    assert [part["x"][0].item() for part in found.tree["pool"]] == [1.0, 2.0, 3.0]


def test_nothing_saved_is_none(tmp_path):
    assert Checkpoints(tmp_path / "no").load() is None


def test_an_old_part_of_the_pool_is_written_once_and_two_checkpoints_are_kept(tmp_path):
    checkpoints = saved(tmp_path)
    first = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("chunk-*")}
    found = checkpoints.load()
    checkpoints.save(4, {**found.tree, "model": {"w": torch.zeros(50)}}, {})
    after = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("chunk-*")}
    assert len(after.keys() - first.keys()) == 1  # the model only
    assert all(after[name] == first[name] for name in after.keys() & first.keys())
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000003.json", "step-000004.json"]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("offset", range(0, 100, 9))
@pytest.mark.parametrize("kind", ["step", "chunk"])
@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_damage_anywhere_is_noticed_and_the_one_before_stands_in(tmp_path, kind, offset, damage):
    saved(tmp_path)
    newest = tmp_path / "step-000003.json"
    if kind == "chunk":  # the model of the newest checkpoint, which the one before does not use
        own = set(json.loads(newest.read_text())["chunks"]) - set(
            json.loads((tmp_path / "step-000002.json").read_text())["chunks"]
        )
        target = next(tmp_path / f"chunk-{d[:32]}.safetensors" for d in own)
    else:
        target = newest
    data = bytearray(target.read_bytes())
    position = offset * len(data) // 100
    if damage == "flip":
        data[position] ^= 1
    else:
        del data[position:]
    target.write_bytes(data)
    with pytest.warns(ResceneWarning, match="W401"):
        found = Checkpoints(tmp_path).load()
    assert found.step == 2 and found.tree["model"]["w"][0] == 2


def test_if_all_are_damaged_there_is_none(tmp_path):
    saved(tmp_path)
    for path in tmp_path.glob("step-*"):
        path.write_text("{}")
    with pytest.warns(ResceneWarning):
        assert Checkpoints(tmp_path).load() is None


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_full_disk_keeps_the_old_file_and_says_so(tmp_path, monkeypatch, call):
    path = tmp_path / "results.json"
    write_atomically(path, b"old")

    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    if call == "write":
        real = open
        monkeypatch.setattr("rescene.engine.checkpoint.open", lambda n, m: _Full(real(n, m), fail), raising=False)
    else:
        monkeypatch.setattr(os, call, fail)
    with pytest.raises(RunError, match="No space left") as caught:
        write_atomically(path, b"new")
    assert caught.value.exit_code == 4 and "resume" in caught.value.fix
    monkeypatch.undo()
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


class _Full:
    """A file whose write fails."""

    def __init__(self, file, fail):
        self.file, self.write = file, fail

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.file.close()
