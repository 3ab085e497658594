"""Runs in processes of their own: a GPU each in turn, failures that stay alone, finished runs that are not run again."""

import json
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import rescene
from rescene.api import Result
from rescene.cli import running
from rescene.cli.app import app
from rescene.core.errors import ConfigError
from rescene.sweeps.grid import constants, grid, varied
from rescene.sweeps.one_run import Order
from rescene.sweeps.workers import in_processes, log_file, read_gpus, slots

TINY = ["tasks.limit=1", "federation.num_rounds=1", "model.width=2", "train.local_epochs=1", "train.server_epochs=1"]
GOOD = """
import os, pathlib
folder = pathlib.Path({folder!r})
folder.mkdir(parents=True)
(folder / "gpu").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "-"))
(folder / "results.json").write_text('{{"aa": 1}}')
"""


@pytest.fixture
def cells(tmp_path):
    return grid("smoke", ["method=fedavg"], "0,1,2,3", tmp_path / "runs")


def orders(cells, *codes):
    """Orders whose processes run these lines of Python in the place of a training."""
    lines = [code.format(folder=str(cell.folder)) for cell, code in zip(cells, codes, strict=True)]
    return [SimpleNamespace(command=[sys.executable, "-c", line]) for line in lines]


def test_a_failing_run_does_not_stop_the_others_and_says_why(cells):
    told = "import sys; sys.exit('error[E324] too large\\n  fix    a smaller model')"
    killed = "import os; os.kill(os.getpid(), 9)"
    found = dict(in_processes(cells, orders(cells, told, GOOD, "1 / 0", killed), slots(2, "", 2, 0)))
    assert isinstance(found[1], Result) and found[1].aa == 1
    assert (found[0].code, found[0].what, found[0].fix) == ("E324", "too large", "a smaller model")
    assert (
        found[2].code == "E326"
        and "ZeroDivisionError" in found[2].why
        and str(log_file(cells[2].folder)) in found[2].fix
    )
    assert found[3].code == "E326" and "signal 9" in found[3].why


def test_runs_take_the_gpus_in_turn_and_finished_ones_are_left_alone(cells):
    cells[0].folder.mkdir(parents=True)
    (cells[0].folder / "results.json").write_text('{"aa": 7}')
    begun = []
    outcomes = in_processes(cells, orders(cells, "1 / 0", GOOD, GOOD, GOOD), slots(None, "5,6", 4, 8), begun.append)
    found = dict(outcomes)
    assert found[0].aa == 7 and sorted(begun) == [1, 2, 3]
    used = [(cell.folder / "gpu").read_text() for cell in cells[1:]]
    assert set(used) <= {"5", "6"} and set(used[:2]) == {"5", "6"}
    assert list(in_processes(cells, orders(cells, *["1 / 0"] * 4), [{}])) and not begun[3:]


def test_gpus_that_are_not_there_are_told():
    assert read_gpus("0, 1", 2) == ["0", "1"] and read_gpus("", 0) == []
    assert read_gpus("GPU-8a1b-22,MIG-1/2/3", 1) == ["GPU-8a1b-22", "MIG-1/2/3"]
    for text, words in {"2": "there is no GPU 2", "0,x": "names no GPU", "0,,1": "names no GPU"}.items():
        with pytest.raises(ConfigError, match=words):
            read_gpus(text, 2)
    found = CliRunner().invoke(app, ["sweep", "smoke", "--gpus", "99"])
    assert found.exit_code == 2 and "error[E119]" in found.output


def test_a_sweep_that_is_left_stops_its_runs(cells):
    endless = "import signal, sys, time; signal.signal(15, lambda *a: sys.exit(143)); print('up', flush=True); time.sleep(600)"
    outcomes = in_processes(cells, orders(cells, GOOD, endless, endless, GOOD), slots(2, "", 2, 0))
    next(outcomes)
    while not any(log_file(cell.folder).is_file() and log_file(cell.folder).read_text() for cell in cells[1:3]):
        time.sleep(0.05)
    outcomes.close()  # what a Ctrl-C does to it
    assert not (cells[3].folder / "results.json").exists()
    busy = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert endless[:60] not in busy


def test_what_cells_share_is_said_once(cells, tmp_path, monkeypatch):
    columns = ("client_flops", "server_flops", "uplink_bytes", "downlink_bytes", "seconds", "disk_bytes")
    monkeypatch.setattr(running, "_figures", lambda cell: (dict.fromkeys(columns, 3e6), None, []))
    assert constants(cells) == ("method=fedavg",) and varied(cells) == ["seed=0", "seed=1", "seed=2", "seed=3"]
    assert varied(cells[:1]) == ["method=fedavg seed=0"]
    shown = CliRunner().invoke(
        app, ["sweep", "smoke", "method=fedavg", *TINY, "--seeds", "0,1", "--plan", "--out", str(tmp_path)]
    )
    assert shown.output.count("tasks.limit=1") == 1 and "In every cell: method=fedavg tasks.limit=1" in shown.output
    assert "2 runs, 2 not done; about 69.4 days and 6.00 MB of disk" in shown.output


def test_a_range_in_a_grid_is_told(tmp_path):
    with pytest.raises(ConfigError, match="a range") as caught:
        grid("smoke", ["train.lr=0.01..0.1"], "0", tmp_path)
    assert "--search" in caught.value.fix
    assert grid("smoke", ["data.path=../images"], "0", tmp_path)  # a path is no range


PLUGIN = """
from typing import ClassVar
from rescene.methods import register
from rescene.methods.fedavg import FedAvg

@register
class Mine(FedAvg):
    name: ClassVar[str] = "mine"
    title: ClassVar[str] = "Mine"
"""


@pytest.mark.slow
def test_a_sweep_in_processes_gives_the_same_bits_as_one_in_turn(tmp_path):
    (tmp_path / "mine.py").write_text(PLUGIN)
    asked = ["sweep", "smoke", "method=fedavg,mine", *TINY, "--plugin", str(tmp_path / "mine.py"), "-q", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for name, more in {"apart": ["--jobs", "2"], "turn": []}.items():
        line = [sys.executable, "-m", "rescene", *asked, *more, "--out", str(tmp_path / name)]
        done = subprocess.run(line, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        assert [row["method"] for row in json.loads(done.stdout)] == ["fedavg", "mine"]
    for folder in (tmp_path / "turn").glob("*-s0-*"):
        assert (folder / "results.json").read_bytes() == (
            tmp_path / "apart" / folder.name / "results.json"
        ).read_bytes()
    assert (tmp_path / "apart" / "report.html").is_file()
    told = next((tmp_path / "apart").glob("fedavg-*/command.txt")).read_text().split()
    assert told[:4] == ["rescene", "run", "smoke", "method=fedavg"] and told[-2:] == [
        "--plugin",
        str(tmp_path / "mine.py"),
    ]


@pytest.mark.slow
def test_a_sweep_that_was_stopped_continues(tmp_path):
    """SIGTERM in the middle of a run; the same command ends with the bits of a run that was never stopped."""
    settings = [
        "smoke",
        "method=fedavg",
        "tasks.limit=2",
        "federation.num_rounds=3",
        "model.width=2",
        "train.local_epochs=4",
    ]
    line = [
        sys.executable,
        "-m",
        "rescene",
        "sweep",
        *settings,
        "--jobs",
        "2",
        "--seeds",
        "0,1",
        "--out",
        str(tmp_path / "s"),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(line, env=environment, stderr=subprocess.PIPE, text=True)
    logs = tmp_path / "s" / "sweep-logs"
    while not any("round 1/3" in log.read_text() for log in logs.glob("*.log")):
        time.sleep(0.1)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 143 and "Go on with" in said
    assert not all(cell.done for cell in grid("smoke", settings[1:], "0,1", tmp_path / "s"))
    assert subprocess.run(line, env=environment, capture_output=True).returncode == 0
    for cell in grid("smoke", settings[1:], "0,1", tmp_path / "s"):
        whole = rescene.run("smoke", out=tmp_path / cell.folder.name, **dict(one.split("=") for one in cell.overrides))
        assert (cell.folder / "results.json").read_bytes() == (whole.folder / "results.json").read_bytes()


def test_a_tracker_that_is_missing_is_told_before_anything_runs(tmp_path):
    found = CliRunner().invoke(app, ["sweep", "smoke", "--log", "nothing", "--out", str(tmp_path)])
    assert found.exit_code == 2 and "error[E187]" in found.output and not list(tmp_path.iterdir())


def test_a_tracker_follows_the_runs_of_a_sweep(tmp_path, monkeypatch):
    from rescene import trackers

    lines = []

    class Lines:
        def start(self, folder, config):
            lines.append(folder.name)

        def log(self, step, values):
            lines.append(step)

        def finish(self, summary):
            lines.append(sorted(summary)[0])

    monkeypatch.setattr(running, "write_report", lambda folders, page: page)
    monkeypatch.setitem(trackers.TRACKERS, "lines", ("json", Lines))
    found = CliRunner().invoke(
        app, ["sweep", "smoke", "method=fedavg", *TINY, "--log", "lines", "--out", str(tmp_path), "-q"]
    )
    assert found.exit_code == 0, found.output
    assert lines[0].startswith("fedavg-s0-") and lines[-1] == "aa" and 1 in lines


def test_an_order_survives_its_journey():
    order = Order("smoke", ("method=fedavg", "tasks.plan=[[a b],[c]]"), "runs/it's here", "tensorboard", ("p.py",))
    told = json.loads(order.command[-1])
    assert Order(**told | {"overrides": tuple(told["overrides"]), "plugins": tuple(told["plugins"])}) == order
