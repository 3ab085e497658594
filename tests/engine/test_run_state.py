"""One definition of a run's state, and one process at a time in a run folder."""

import contextlib
import errno
import json
import os
import subprocess
import sys
import threading

import pytest
from stopping import stopped_after

import rescene
from rescene.core import run_state
from rescene.core.errors import RunError
from rescene.core.run_state import Busy, is_done, read_object, state_of, working_in
from rescene.report.load import load_run

NARROW = {"model.width": 8}
HOLD = """
import sys
from pathlib import Path
from rescene.core.run_state import working_in
with working_in(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def another_process(folder):
    """Works in the folder until the end of the block, and is then killed."""
    words = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "held\n"
        try:
            yield child.pid
        finally:
            child.kill()


@pytest.fixture(scope="module")
def halfway(tmp_path_factory):
    """A run that was killed after three steps."""
    folder = tmp_path_factory.mktemp("state") / "run"
    with stopped_after(3):
        rescene.run("smoke", out=folder, **NARROW)
    return folder


NOBODY = 2**22 + 1  # no process has this number
STATES = {
    "nothing": ({}, False, "unknown"),
    "damaged status": (None, False, "unknown"),
    "damaged status, results": (None, True, "done"),
    "killed after its results": ({"state": "running", "pid": NOBODY}, True, "done"),
    "killed after its results, number given to another": ({"state": "running", "pid": os.getpid()}, True, "done"),
    "killed": ({"state": "running", "pid": NOBODY}, False, "interrupted"),
    "going, of an older version": ({"state": "running", "pid": os.getpid()}, False, "running"),
    "failed": ({"state": "failed"}, False, "failed"),
    "failed, then its results were there": ({"state": "failed"}, True, "done"),
    "stopped": ({"state": "interrupted"}, False, "interrupted"),
    "its plan grew": ({"state": "done"}, False, "interrupted"),
}


@pytest.mark.parametrize("case", STATES)
def test_the_state_of_a_folder(tmp_path, case):
    status, has_results, state = STATES[case]
    (tmp_path / "config.yaml").touch()
    if status != {}:
        (tmp_path / "status.json").write_text('{"state": "runn' if status is None else json.dumps(status))
    if has_results:
        (tmp_path / "results.json").write_text('{"aa": 1.0}')
    assert state_of(tmp_path) == load_run(tmp_path).state == state
    assert is_done(tmp_path) == (state == "done")
    with another_process(tmp_path):
        assert state_of(tmp_path) == load_run(tmp_path).state == "running"


def test_the_system_releases_the_lock_of_a_killed_process(tmp_path):
    (tmp_path / "status.json").write_text(json.dumps({"state": "running", "pid": os.getpid()}))
    with another_process(tmp_path):
        pass
    assert (tmp_path / "run.lock").is_file()  # it was killed
    assert state_of(tmp_path) == "interrupted"  # although a process of the number in its status is alive
    with working_in(tmp_path):
        assert state_of(tmp_path) == "running" and state_of(tmp_path, mine=True) == "interrupted"
    assert not (tmp_path / "run.lock").exists()


def test_a_second_process_is_refused_and_changes_nothing(halfway):
    before = {path: path.read_bytes() for path in halfway.rglob("*") if path.is_file()}
    with another_process(halfway) as number:
        with pytest.raises(RunError, match="E422") as error:
            rescene.run("smoke", out=halfway, **NARROW)
        assert error.value.why == f"process {number}"
        (halfway / "run.lock").unlink()
    assert {path: path.read_bytes() for path in halfway.rglob("*") if path.is_file()} == before


def test_a_run_holds_its_folder_from_beginning_to_end(tmp_path, monkeypatch):
    monkeypatch.setattr(run_state, "_PAUSE_S", 0.0)
    folder, refused = tmp_path / "run", []

    class Second:
        """A tracker, told of every step while the run goes on."""

        def start(self, place, config):
            self.log(0, {})

        def log(self, step, values):
            with pytest.raises(RunError, match="E422"):
                rescene.run("smoke", out=folder, **NARROW)
            refused.append(step)

        def finish(self, summary):
            pass

    rescene.run("smoke", out=folder, log=[Second()], **NARROW)
    assert refused == [0, 1, 2, 2, 3, 4, 4]
    assert not (folder / "run.lock").exists() and state_of(folder) == "done"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == len({(row["kind"], row["task"], row.get("round")) for row in rows}) == 6


def test_never_two_at_once_also_while_locks_come_and_go(tmp_path):
    """Whoever ends removes the file; a lock on a removed file must not count."""
    inside, most, entered = [], [], []

    def work():
        for _ in range(40):
            with contextlib.suppress(Busy), working_in(tmp_path):
                inside.append(1)
                most.append(len(inside))
                state_of(tmp_path)
                inside.pop()
                entered.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1} and len(entered) > 40


@pytest.fixture
def no_locks(monkeypatch):
    def refuse(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(run_state.fcntl, "flock", refuse)
    monkeypatch.setattr(run_state, "_PAUSE_S", 0.0)


def test_without_locks_a_process_of_this_machine_is_noticed_by_its_number(tmp_path, no_locks):
    with another_process(tmp_path) as number, pytest.raises(Busy, match=str(number)), working_in(tmp_path):
        pass
    with working_in(tmp_path):  # it was killed
        pass
    result = rescene.run("smoke", out=tmp_path / "run", **NARROW)
    assert state_of(result.folder) == "done"


def test_going_on_in_a_folder_that_cannot_be_written_is_told(halfway, monkeypatch):
    before = {path: path.read_bytes() for path in halfway.rglob("*") if path.is_file()}
    real = open

    def read_only(path, mode="r", *args, **more):
        if str(path).startswith(str(halfway)) and set(mode) & set("wax+"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, mode, *args, **more)

    monkeypatch.setattr("builtins.open", read_only)
    with pytest.raises(RunError, match="E423") as error:
        rescene.run("smoke", out=halfway, **NARROW)
    monkeypatch.undo()
    assert os.strerror(errno.EROFS) in error.value.what
    assert {path: path.read_bytes() for path in halfway.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["a" * 300, "/".join(["a" * 100] * 60)], ids=["one part", "in all"])
def test_a_folder_whose_name_is_too_long_is_told(tmp_path, name):
    with pytest.raises(RunError, match="E407") as error:
        rescene.run("smoke", out=tmp_path / name, **NARROW)
    assert error.value.fix == "a shorter --out" and len(error.value.where) < 250 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 500 + "1" + "}" * 500, "[1]", "{}", "", "nan", '{"a": \xff}']
)
def test_what_is_no_object_of_ours_is_a_value_error(tmp_path, text):
    path = tmp_path / "results.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError):
        read_object(path)
