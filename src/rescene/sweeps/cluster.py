"""Runs of a sweep as jobs of a SLURM cluster, through submitit (``pip install 'rescene[slurm]'``).

A job that is pre-empted, or whose time is over, is put back into the queue and continues from its last round, with the same bits.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rescene.core.errors import ConfigError, ResceneError, RunError, did_you_mean, lines_of
from rescene.core.files import write_atomically
from rescene.core.run_state import read_object
from rescene.sweeps.grid import SweepCell
from rescene.sweeps.one_run import Order
from rescene.sweeps.workers import PATIENCE_S, CellOutcome, loaded, log_file, outcome_of

FOLDER, JOBS = "slurm-jobs", "jobs.json"
MOST_REQUEUES = 100  # how often a job whose time is over may continue
POLL_S = 5.0
UNDER_WAY = {"PENDING", "RUNNING", "REQUEUED", "CONFIGURING", "COMPLETING", "SUSPENDED", "RESIZING"}
SETTINGS = {  # what --slurm-set takes, and how submitit calls it
    "partition": "slurm_partition",
    "account": "slurm_account",
    "qos": "slurm_qos",
    "constraint": "slurm_constraint",
    "minutes": "timeout_min",
    "cpus": "cpus_per_task",
    "gpus": "gpus_per_node",
    "mem_gb": "mem_gb",
    "at_once": "slurm_array_parallelism",
}
NUMBERS = {"minutes", "cpus", "gpus", "mem_gb", "at_once"}


class ClusterJob:
    """What a job does: the run in a process of its own, so that the job itself can react to the cluster's signals."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        """The exit code of the run."""
        log = log_file(Path(self.order.folder))
        log.parent.mkdir(parents=True, exist_ok=True)
        with open(log, "ab") as file:
            self.process = subprocess.Popen(self.order.command, stdout=file, stderr=subprocess.STDOUT)
            return self.process.wait()

    def checkpoint(self) -> Any:
        """Called by submitit before the job is taken away: stop the run between two writes, and ask for another turn."""
        from submitit.helpers import DelayedSubmission

        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return DelayedSubmission(ClusterJob(self.order))


def read_settings(texts: Sequence[str]) -> dict[str, Any]:
    """``--slurm-set`` as submitit wants it.

    >>> read_settings(["partition=gpu", "minutes=240", "gpus=1"])
    {'slurm_partition': 'gpu', 'timeout_min': 240, 'gpus_per_node': 1}
    """
    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or key not in SETTINGS or (key in NUMBERS and not value.isdigit()):
            fix = f"key=value with one of: {', '.join(SETTINGS)}"
            if key not in SETTINGS:
                fix = did_you_mean(key, SETTINGS) or fix
            raise ConfigError("E106", f"cannot read --slurm-set {text!r}", where="--slurm-set", fix=fix)
        found[SETTINGS[key]] = int(value) if key in NUMBERS else value
    return found


def on_cluster(
    cells: Sequence[SweepCell],
    orders: Sequence[Order],
    settings: dict[str, Any],
    cluster: str | None = "slurm",
    started: Callable[[int, str], None] = lambda number, job: None,
) -> Iterator[CellOutcome]:
    """Submit every cell that is neither done nor in the queue, wait, and hand out what each gave. Finished cells come first.

    ``cluster``: slurm; local runs jobs on this machine, for tests. If the waiting is interrupted, the jobs go on, and the same
    command waits for them again.
    """
    waiting: dict[int, Any] = {}
    root = cells[0].folder.parent / FOLDER
    submit = _executor(root, settings, cluster)
    queued = _queued(root)
    for number, one in enumerate(cells):
        if one.done:
            yield number, loaded(one)
            continue
        before = queued.get(str(one.folder))
        waiting[number] = before if before is not None else submit(ClusterJob(orders[number]))
        started(number, str(waiting[number].job_id))
        _note(root, {str(cells[i].folder): str(job.job_id) for i, job in waiting.items()})
    while waiting:
        ended = [number for number, job in waiting.items() if job.done()]
        for number in ended:
            yield number, _outcome(cells[number].folder, waiting.pop(number))
        if waiting and not ended:
            time.sleep(POLL_S)


def _executor(root: Path, settings: dict[str, Any], cluster: str | None) -> Callable[[ClusterJob], Any]:
    if find_spec("submitit") is None:
        raise ConfigError(
            "E500", "--slurm needs submitit", where="--slurm", why="it is an extra", fix="pip install 'rescene[slurm]'"
        )
    import submitit

    try:
        executor = submitit.AutoExecutor(folder=root / "%j", cluster=cluster, slurm_max_num_timeout=MOST_REQUEUES)
        executor.update_parameters(name="rescene", **({"timeout_min": 24 * 60} | settings))
    except (RuntimeError, ValueError, NameError) as error:
        fix = "run it where sbatch is, such as on the login node of the cluster"
        raise ConfigError("E500", "this machine cannot submit jobs", where="--slurm", why=str(error), fix=fix) from None
    return lambda job: _asked(executor, job)


def _asked(executor: Any, job: ClusterJob) -> Any:
    try:
        return executor.submit(job)
    except Exception as error:  # submitit passes on what sbatch says, in classes of its own
        said = lines_of(error)[-1][:300]
        fix = "check --slurm-set; partition, account and time must be allowed for you"
        raise ConfigError("E500", "the cluster refused a job", where="--slurm", why=said, fix=fix) from None


def _queued(root: Path) -> dict[str, Any]:
    """Jobs of an earlier call that are still in the queue, by run folder."""
    import submitit

    try:
        noted = read_object(root / JOBS)
    except (OSError, ValueError):
        return {}
    jobs = {folder: submitit.SlurmJob(folder=root / str(name), job_id=str(name)) for folder, name in noted.items()}
    return {folder: job for folder, job in jobs.items() if str(job.state).split()[0] in UNDER_WAY}


def _note(root: Path, jobs: dict[str, str]) -> None:
    root.mkdir(parents=True, exist_ok=True)
    write_atomically(root / JOBS, (json.dumps(jobs, indent=1) + "\n").encode(), sync="none")


def _outcome(folder: Path, job: Any) -> Any:
    try:
        return outcome_of(folder, job.result(), log_file(folder))
    except ResceneError as error:
        return error
    except Exception as error:  # the job itself failed: its node died, or it was cancelled
        said = lines_of(error)[-1][:300]
        fix = f"read {job.paths.stderr}; the same command tries again"
        return RunError("E326", f"job {job.job_id} ended without a result", where=str(folder), why=said, fix=fix)
