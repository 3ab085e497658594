"""Runs as jobs of a cluster. submitit's local executor stands in for SLURM: it has the same signals and the same queue of its own."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import rescene
from rescene.api import Result
from rescene.cli.app import app
from rescene.core.errors import ConfigError
from rescene.sweeps import cluster
from rescene.sweeps.cluster import ClusterJob, on_cluster, read_settings
from rescene.sweeps.grid import grid
from rescene.sweeps.one_run import Order
from rescene.sweeps.workers import log_file


def test_settings_are_read():
    assert read_settings(["account=lab", "at_once=4"]) == {"slurm_account": "lab", "slurm_array_parallelism": 4}
    for text in ("partition", "minutes=two", "color=red"):
        with pytest.raises(ConfigError, match="E106"):
            read_settings([text])


def test_without_submitit_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    found = CliRunner().invoke(app, ["sweep", "smoke", "--slurm", "--out", str(tmp_path)])
    assert found.exit_code == 2 and "error[E500]" in found.output and "rescene[slurm]" in found.output


def test_a_machine_without_slurm_is_told(tmp_path):
    pytest.importorskip("submitit")
    found = CliRunner().invoke(app, ["sweep", "smoke", "--slurm", "--out", str(tmp_path)])
    assert found.exit_code == 2 and "error[E500]" in found.output and "login node" in found.output


def test_jobs_in_the_queue_are_not_submitted_again(tmp_path, monkeypatch):
    cells = grid("smoke", ["method=fedavg"], "0,1", tmp_path)
    submitted = []

    class Job:
        def __init__(self, name):
            self.job_id, self.paths = name, SimpleNamespace(stderr="job.err")

        def done(self):
            return True

        def result(self):
            raise RuntimeError("cancelled by the operator")

    def submit(job):
        submitted.append(job.order.folder)
        return Job("8")

    monkeypatch.setattr(cluster, "_executor", lambda *args: submit)
    monkeypatch.setattr(cluster, "_queued", lambda root: {str(cells[0].folder): Job("7")})
    orders = [Order("smoke", cell.overrides, str(cell.folder)) for cell in cells]
    found = dict(on_cluster(cells, orders, {}))
    assert submitted == [str(cells[1].folder)]
    assert found[1].code == "E326" and "cancelled by the operator" in found[1].why
    noted = json.loads((tmp_path / "slurm-jobs" / "jobs.json").read_text())
    assert noted == {str(cells[0].folder): "7", str(cells[1].folder): "8"}


@pytest.mark.slow
def test_a_job_that_is_taken_away_continues_with_the_same_bits(tmp_path, monkeypatch):
    submitit = pytest.importorskip("submitit")
    monkeypatch.setattr(cluster, "POLL_S", 0.1)
    settings = ["method=fedavg", "tasks.limit=2", "federation.num_rounds=3", "model.width=2", "train.local_epochs=4"]
    cells = grid("smoke", settings, "0", tmp_path / "s")
    jobs, submit = [], submitit.AutoExecutor.submit
    monkeypatch.setattr(submitit.AutoExecutor, "submit", lambda self, work: jobs.append(submit(self, work)) or jobs[-1])
    orders = [Order("smoke", cell.overrides, str(cell.folder)) for cell in cells]
    outcomes = on_cluster(
        cells,
        orders,
        {"timeout_min": 60},
        cluster="local",
        started=lambda number, job: interrupt(jobs[0], cells[0].folder),
    )
    ((number, result),) = outcomes
    assert isinstance(result, Result), (result, Path(jobs[0].paths.stderr).read_text())
    said = log_file(cells[0].folder).read_text()
    assert "interrupted; every finished round is saved" in said and said.count("task 2/2 round 3/3") == 1
    whole = rescene.run(
        "smoke", out=tmp_path / cells[0].folder.name, **dict(one.split("=") for one in cells[0].overrides)
    )
    assert (cells[0].folder / "results.json").read_bytes() == (whole.folder / "results.json").read_bytes()


def interrupt(job, folder):
    """What SLURM does when it needs the place: after the first round, it signals the job, and submitit puts it back."""
    from submitit.local.local import LocalJobEnvironment

    while not (log_file(folder).is_file() and "round 1/3" in log_file(folder).read_text()):
        time.sleep(0.05)
        assert job.state == "RUNNING"
    controller = job._process.pid
    task = int(Path(f"/proc/{controller}/task/{controller}/children").read_text().split()[0])
    os.kill(task, LocalJobEnvironment._usr_sig())


def test_a_job_stops_its_run_before_it_goes(tmp_path):
    pytest.importorskip("submitit")
    job = ClusterJob(Order("smoke", (), str(tmp_path / "run")))
    stopped = []
    job.process = SimpleNamespace(
        poll=lambda: None, terminate=lambda: stopped.append("asked"), wait=lambda s: stopped.append("gone")
    )
    assert job.checkpoint().function.order == job.order and stopped == ["asked", "gone"]
