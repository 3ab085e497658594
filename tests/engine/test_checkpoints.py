"""Checkpoints: written once, never half, never damaged unnoticed."""

import errno
import json
import os
import threading
import warnings

import pytest
import torch
from safetensors.torch import load

from rescene.core.errors import ResceneWarning, RunError
from rescene.engine.checkpoint import DTYPES, Checkpoints, encoded, save_atomically
from rescene.engine.run_context import warnings_to
from rescene.engine.run_parts import Writer


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


def test_chunks_are_safetensors_whatever_their_types_and_memory():
    whole = torch.arange(24).reshape(2, 3, 4)
    chunk = {str(dtype): whole.to(dtype) for dtype in DTYPES}
    chunk |= {
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "row": whole[:, 1],
        "turned": whole.transpose(0, 2),
    }
    chunk["channels last"] = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
    data = b"".join(encoded(chunk))
    found = load(data)
    assert found.keys() == chunk.keys()
    assert all(torch.equal(found[name], value) and found[name].dtype == value.dtype for name, value in chunk.items())
    assert b"".join(encoded(dict(reversed(chunk.items())))) == data  # equal chunks have equal bytes


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


def test_a_manifest_whose_text_changed_is_damaged_even_if_it_means_the_same(tmp_path):
    saved(tmp_path)
    newest = tmp_path / "step-000003.json"
    newest.write_bytes(newest.read_bytes() + b" ")
    with pytest.warns(ResceneWarning, match="checksum"):
        assert Checkpoints(tmp_path).load().step == 2


def test_a_chunk_damaged_on_disk_is_written_again(tmp_path):
    """It may belong to every checkpoint; a run that begins again would else refer to it for ever."""
    saved(tmp_path)
    for path in tmp_path.glob("chunk-*"):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(ResceneWarning, match="W401"):
        assert Checkpoints(tmp_path).load() is None
    saved(tmp_path)
    assert Checkpoints(tmp_path).load().step == 3


def test_after_beginning_again_new_checkpoints_are_kept_and_the_damaged_ones_go(tmp_path):
    saved(tmp_path, rounds=9)
    for path in tmp_path.glob("step-*"):
        path.write_bytes(b"")
    saved(tmp_path, rounds=1)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000001.json"]
    assert Checkpoints(tmp_path).load().step == 1


def test_what_a_killed_write_left_behind_is_removed(tmp_path):
    (tmp_path / ".chunk-0.safetensors.tmp").write_bytes(b"half")
    saved(tmp_path)
    assert not list(tmp_path.glob(".*"))


def test_a_format_from_the_future_is_refused_and_left_alone(tmp_path, monkeypatch):
    with monkeypatch.context() as future:
        future.setattr("rescene.engine.checkpoint.CHECKPOINT", 99)
        saved(tmp_path)
    with pytest.raises(RunError, match="E414") as caught:
        Checkpoints(tmp_path).load()
    assert caught.value.fix and len(list(tmp_path.glob("step-*"))) == 2


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_a_full_disk_keeps_the_old_file_and_says_so(tmp_path, monkeypatch, call):
    path = tmp_path / "results.json"
    save_atomically(path, b"old")

    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    if call == "write":
        real = open
        monkeypatch.setattr(
            "rescene.core.files.open", lambda n, m, **more: _Full(real(n, m, **more), fail), raising=False
        )
    else:
        monkeypatch.setattr(os, call, fail)
    with pytest.raises(RunError, match="No space left") as caught:
        save_atomically(path, b"new")
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


# --- written beside the run ---------------------------------------------------------------------------------------------


def test_one_piece_of_work_at_a_time_and_errors_come_out_once():
    writer, gate, order = Writer(torch.device("cpu")), threading.Event(), []

    def first():
        gate.wait()
        order.append("first")
        raise RunError("E410", "full")

    writer.start(first)
    assert order == []  # the run goes on meanwhile
    threading.Timer(0.05, gate.set).start()
    with pytest.raises(RunError, match="full"):
        writer.start(lambda: order.append("second"))
    writer.wait()
    assert order == ["first"]  # what was handed over after a failed write is not begun
    writer.start(lambda: order.append("third"))
    writer.wait()
    assert order == ["first", "third"]


def test_warnings_reach_the_run_whose_thread_or_writer_they_arise_in():
    """Two runs in threads, each with a writer; one ends while the other goes on."""
    turns, heard = threading.Barrier(2), {"short": [], "long": []}

    def warn(code):
        warnings.warn(ResceneWarning(code, "?"), stacklevel=2)

    def run(name):
        writer = Writer(torch.device("cpu"))
        with warnings_to(lambda level, code, what: heard[name].append(code)):
            turns.wait()
            warn("loop")
            writer.start(lambda: warn("writer"))
            writer.wait()
            if name == "long":
                turns.wait()
                warn("late")
        if name == "short":
            turns.wait()
            warn("after")

    with pytest.warns(ResceneWarning) as outside:
        threads = [threading.Thread(target=run, args=(name,)) for name in heard]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert heard == {"short": ["loop", "writer"], "long": ["loop", "writer", "late"]}
    assert [caught.message.code for caught in outside] == ["after"]  # nobody listens any more


def test_other_peoples_warnings_stay_warnings():
    with pytest.warns(UserWarning, match="theirs") as caught, warnings_to(lambda *row: pytest.fail("not ours")):
        warnings.warn("theirs", stacklevel=1)
    assert len(caught) == 1


def test_an_event_says_how_to_mend_what_a_warning_tells():
    heard = []
    with warnings_to(lambda *row: heard.append(row)):
        warnings.warn(ResceneWarning("W217", "two images leak", fix="remove\nthem"), stacklevel=1)
    assert heard == [("warning", "W217", "two images leak; remove them")]
