"""Whole runs: the paper's invariants, resumption, failing sites, and what ends up in the folder."""

import gc
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file

import rescene
from rescene.core.errors import ConfigError, RunError, is_out_of_memory
from rescene.engine.observers.leakage_watch import LeakageWatch
from rescene.methods import Method, ModelState
from rescene.methods.registry import register

SMALL = {"federation.num_clients": 4, "federation.per_round": 2, "federation.num_rounds": 3, "tasks.limit": 2, "method.ipc": 3,
         "method.num_steps": 2, "method.real_batch": 16, "train.server_epochs": 2, "model.width": 8}  # fmt: skip


def run(folder, **more):
    return rescene.run(
        "smoke", out=folder, **{**SMALL, **{key.replace("__", "."): value for key, value in more.items()}}
    )


def model(result):
    return load_file(result.folder / "model" / "final.safetensors")


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbed, to be read and to be compared with."""
    return run(tmp_path_factory.mktemp("whole") / "r")


def test_a_run_leaves_a_complete_folder(whole):
    result = whole
    files = {str(p.relative_to(result.folder)) for p in result.folder.rglob("*") if p.is_file()}
    wanted = {"config.yaml", "origin.json", "command.txt", "env.json", "status.json", "metrics.jsonl", "results.json",
              "timing.json", "partition.json", "partition.safetensors", "surrogates.safetensors", "surrogates.json",
              "csv/accuracy_matrix.csv", "csv/rounds.csv", "csv/cost.csv", "csv/confusion.csv", "csv/participation.csv",
              "model/final.safetensors", "model/model.json"}  # fmt: skip
    assert wanted <= files
    pairs = json.loads((result.folder / "surrogates.json").read_text())["pairs"]
    rounds = {t: [p["round"] for p in pairs if p["task"] == t] for t in (0, 1)}
    assert all(seen == sorted(seen) and set(seen) == {0, 1, 2} for seen in rounds.values()), "first, middle, latest"
    values = json.loads((result.folder / "results.json").read_text())
    for key in ("aa", "aia", "accuracy_matrix", "forgetting", "cost", "leakage", "seed", "config", "within_task"):
        assert key in values
    assert result.aa == pytest.approx(sum(result.matrix[-1]) / 2, abs=1e-6)  # equal test sizes
    assert math.isnan(result.matrix[0][1]) and len(result.matrix) == 2
    assert "time" not in json.dumps(values).lower().replace("timestamp", "")
    assert rescene.load(result.folder).aa == result.aa


def test_bytes_are_those_of_the_real_payloads(whole):
    result = whole
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    measured = result.values["cost"]["measured"]
    assert measured["uplink_bytes"] == sum(r["uplink_bytes"] for r in rows if r["kind"] == "round")
    for row in rows:
        if row["kind"] == "round":
            assert [int(client) for client in row["sites"]] == row["participants"]
            assert [sum(side) for side in zip(*row["sites"].values(), strict=True)] == [
                row["uplink_bytes"],
                row["downlink_bytes"],
            ]
    first, last = (r for r in rows if r["kind"] == "task")
    for side in ("client_flops", "server_flops"):  # told so far at the end of each task
        assert 0 < first[side] < last[side] == measured[side]
    for side in ("uplink_bytes", "downlink_bytes"):
        assert 0 < first[f"{side}_so_far"] < last[f"{side}_so_far"] == measured[side]
    images = result.values["leakage"]["num_images"]
    # float32 pictures and one int64 label each; the two numbers for the log are small change
    assert 0 <= measured["uplink_bytes"] - images * (3 * 32 * 32 * 4 + 8) < 60 * len(rows) * 2
    assert result.values["cost"]["nominal"]["uplink_bytes_per_message"] == 2 * 3 * 3 * 32 * 32 * 4


def test_nominal_bytes_are_those_of_the_paper():
    from rescene.methods import method_class
    from rescene.nets import Arch, state_bytes

    ours, places = method_class("rescene")(ipc=10), [(2, 32), (10, 32), (20, 64)]
    arches = [(count, Arch("resnet18", side)) for count, side in places]
    megabytes = [ours.nominal_bytes(arch, count, 10 * count).up / 1e6 for count, arch in arches]
    assert [f"{value:.2f}" for value in megabytes] == ["0.25", "1.23", "9.83"]
    nets = [
        ("resnet18", 32, 10),
        ("resnet18", 32, 100),
        ("resnet18", 64, 200),
        ("resnet50", 32, 100),
        ("vit-small", 32, 100),
    ]
    sizes = [state_bytes(Arch(name, size).skeleton(classes).state_dict()) / 1e6 for name, size, classes in nets]
    assert [f"{value:.2f}" for value in sizes] == ["44.73", "44.92", "45.12", "95.03", "85.51"]


def test_a_budget_of_at_least_the_pool_is_full_accumulation(tmp_path):
    herded = run(tmp_path / "a", method__budget=10_000)
    everything = run(tmp_path / "b", method__buffer="keep-all")
    assert same(model(herded), model(everything)) and herded.matrix[-1] == everything.matrix[-1]


@pytest.mark.slow
def test_a_window_of_all_rounds_is_full_pool_herding(tmp_path):
    whole = run(tmp_path / "a", method__budget=5, method__recent_fraction=1.0)
    pool = run(tmp_path / "b", method__budget=5, method__buffer="full-pool")
    recent = run(tmp_path / "c", method__budget=5, method__recent_fraction=0.3)
    assert same(model(whole), model(pool)) and not same(model(whole), model(recent))


def test_rescene_without_memory_is_feddm(tmp_path):
    forgetful = run(tmp_path / "a", method__accumulate=False, method__buffer="none", method__alpha=1.0, method__tau=0.0)
    feddm = run(tmp_path / "b", method="feddm")
    assert same(model(forgetful), model(feddm))


@pytest.mark.parametrize("buffer", ["earliest", "latest", "random", "temporal"])
def test_buffers_hold_at_most_their_budget_per_class(tmp_path, buffer):
    result = run(tmp_path / "r", method__budget=4, method__buffer=buffer)
    from rescene.engine.checkpoint import Checkpoints

    state = Checkpoints(result.folder / "checkpoints").load().tree["state"]
    assert len(state.buffers) == 2 and state.pool == ()
    for task, part in enumerate(state.buffers):
        counts = torch.bincount(part.labels)
        assert counts.max() == 4 and set(part.labels.tolist()) <= {2 * task, 2 * task + 1}
    rounds = state.buffers[0].rounds
    if buffer == "earliest":
        assert rounds.min() == 1 and rounds.max() <= 2
    if buffer == "latest":
        assert rounds.max() == 3


def test_one_by_one_agrees_with_batched(whole, tmp_path):
    batched, single = whole, run(tmp_path / "b", federation__engine="one-by-one")
    for key, value in model(batched).items():
        assert torch.allclose(value.float(), model(single)[key].float(), atol=2e-3), key
    assert batched.values["cost"]["measured"]["uplink_bytes"] == pytest.approx(
        single.values["cost"]["measured"]["uplink_bytes"], rel=1e-3
    )


def test_all_methods_meet_the_same_sites_and_split(whole, tmp_path):
    a, b = (
        whole,
        rescene.run(
            "smoke",
            out=tmp_path / "b",
            **{**{k: v for k, v in SMALL.items() if not k.startswith("method.")}, "method": "fedavg"},
        ),
    )
    assert (a.folder / "partition.json").read_text() == (b.folder / "partition.json").read_text()
    assert (a.folder / "csv/participation.csv").read_text() == (b.folder / "csv/participation.csv").read_text()


def test_fedavg_uploads_its_model_and_no_images(tmp_path):
    result = rescene.run("smoke", out=tmp_path / "r", method="fedavg", **{"model.width": 8})
    assert result.values["leakage"] is None and not result.values["privacy"]["private"]
    nominal = result.values["cost"]["nominal"]["uplink_bytes_per_message"]
    assert result.values["cost"]["measured"]["uplink_bytes_per_message"] == pytest.approx(nominal, rel=0.02)


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(whole, tmp_path):
    a, b, c = whole, run(tmp_path / "b"), run(tmp_path / "c", seed=1)
    assert (a.folder / "results.json").read_bytes() == (b.folder / "results.json").read_bytes()
    assert same(model(a), model(b)) and not same(model(a), model(c))


# --- resumption ---------------------------------------------------------------------------------------------------------


def test_a_finished_folder_is_returned_and_a_changed_recipe_refused(whole, tmp_path):
    first = rescene.load(shutil.copytree(whole.folder, tmp_path / "r"))
    before = (first.folder / "results.json").stat().st_mtime_ns
    assert run(tmp_path / "r").aa == first.aa
    assert (first.folder / "results.json").stat().st_mtime_ns == before
    with pytest.raises(RunError, match="E405") as caught:
        run(tmp_path / "r", seed=5, method__ipc=2)
    assert caught.value.why.startswith("method.ipc"), "by their names"
    assert "seed: 0 -> 5" in caught.value.why and "method.ipc: 3 -> 2" in caught.value.why


def test_another_method_stands_first_among_what_changed(whole):
    with pytest.raises(RunError, match="E405") as caught:
        rescene.run("smoke", out=whole.folder, **{"method": "fedavg", "federation.beta": 0.1})
    first, *rest = caught.value.why.splitlines()
    assert first == "method.name: 'rescene' -> 'fedavg'" and rest == sorted(rest) and "federation.beta" in rest[0]


def test_a_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="E406"):
        run(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.slow  # every place; five random ones are below, and all named ones in make trust
def test_interrupted_anywhere_the_end_is_the_same(whole, tmp_path, monkeypatch):
    """Stop after every single step once; each continuation must end with the same bytes."""
    from rescene.engine.loop import Run

    commit = Run.commit
    for stop in range(1, 11):

        def commit_then_stop(self, number, stop=stop):
            commit(self, number)
            if number == stop:
                raise KeyboardInterrupt

        folder = tmp_path / f"stop{stop}"
        monkeypatch.setattr(Run, "commit", commit_then_stop)
        with pytest.raises(KeyboardInterrupt):
            run(folder)
        assert json.loads((folder / "status.json").read_text())["state"] == "interrupted"
        monkeypatch.setattr(Run, "commit", commit)
        resumed = run(folder)
        assert (folder / "results.json").read_bytes() == (whole.folder / "results.json").read_bytes()
        assert same(model(resumed), model(whole))
        assert (folder / "metrics.jsonl").read_text() == (whole.folder / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_killed_at_five_random_moments_the_end_is_the_same(tmp_path):
    """kill -9, wherever it hits: results.json and the model are bit-identical to the undisturbed run."""
    many = {**SMALL, "model.width": 32, "federation.num_rounds": 13}  # enough steps for five kills on any machine
    whole = rescene.run("smoke", out=tmp_path / "whole", **many)
    folder, moments = tmp_path / "killed", random.Random(0)
    overrides = [f"{key}={value}" for key, value in many.items()]
    command = [sys.executable, "-m", "rescene", "run", "smoke", *overrides, "--out", str(folder), "-q"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for _ in range(5):
        process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        steps_before = _steps_done(folder)
        while process.poll() is None and _steps_done(folder) == steps_before:
            time.sleep(0.005)  # let it get past loading, so that the kill hits work
        time.sleep(moments.random() * 0.06)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "the run ended before it could be killed"
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert (folder / "results.json").read_bytes() == (whole.folder / "results.json").read_bytes()
    assert same(load_file(folder / "model" / "final.safetensors"), model(whole))


def _steps_done(folder: Path) -> int:
    return max((int(path.stem.split("-")[1]) for path in (folder / "checkpoints").glob("step-*.json")), default=0)


CRASH = """
import os, signal, sys, threading
import rescene
from rescene.engine.loop import Run

reached, replace, perform = threading.Event(), os.replace, Run.perform

def stuck(source, target):  # the writer gets this far with step 5 and no further
    if place in os.path.basename(target) and run.parts.done == done:
        reached.set()
        threading.Event().wait()
    replace(source, target)

def die(self, step):
    global run
    run = self
    if self.parts.steps.index(step) == 5:  # step 6 has begun
        assert reached.wait(60)
        os.kill(os.getpid(), signal.SIGKILL)
    perform(self, step)

os.replace, Run.perform = stuck, die
place, done = sys.argv[1], int(sys.argv[2])
rescene.run("smoke", out=sys.argv[3], **eval(sys.argv[4]))
"""


@pytest.mark.parametrize(
    ("place", "done"),
    [
        pytest.param("chunk-", 4, marks=pytest.mark.slow),
        ("step-", 4),
        pytest.param("status", 5, marks=pytest.mark.slow),
    ],
)
def test_killed_while_a_checkpoint_is_being_written(whole, tmp_path, place, done):
    """The process dies in step 6 while the chunks, the manifest or the status of step 5 are not yet in their place."""
    folder = tmp_path / "r"
    killed = subprocess.run([sys.executable, "-c", CRASH, place, str(done), str(folder), repr(SMALL)])
    assert killed.returncode == -signal.SIGKILL and _steps_done(folder) == done
    assert json.loads((folder / "status.json").read_text())["done"] == 4  # never more than is on disk
    resumed = run(folder)
    assert (folder / "results.json").read_bytes() == (whole.folder / "results.json").read_bytes()
    assert (folder / "metrics.jsonl").read_text() == (whole.folder / "metrics.jsonl").read_text()
    assert same(model(resumed), model(whole))


def test_a_step_under_way_when_the_run_is_stopped_counts_if_its_checkpoint_was_written(tmp_path, monkeypatch):
    from rescene.engine.loop import Run

    perform = Run.perform

    def stop(self, step):
        if self.parts.steps.index(step) == 5:
            raise KeyboardInterrupt
        perform(self, step)

    monkeypatch.setattr(Run, "perform", stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "r")
    status = json.loads((tmp_path / "r/status.json").read_text())
    assert status["state"] == "interrupted" and status["done"] == 5 == _steps_done(tmp_path / "r")


@pytest.mark.parametrize("step", [4, 10])
def test_a_checkpoint_that_cannot_be_written_stops_the_run_at_the_next_commit_or_the_end(tmp_path, monkeypatch, step):
    from rescene.engine.checkpoint import Checkpoints
    from rescene.engine.loop import Run

    performed, perform, save = [], Run.perform, Checkpoints.save

    def full(self, number, tree, facts):
        if number == step:
            raise RunError("E410", "could not save: No space left on device")
        save(self, number, tree, facts)

    monkeypatch.setattr(Checkpoints, "save", full)
    monkeypatch.setattr(Run, "perform", lambda self, s: (performed.append(s), perform(self, s)))
    with pytest.raises(RunError, match="E410"):
        run(tmp_path / "r")
    status = json.loads((tmp_path / "r/status.json").read_text())
    assert status["state"] == "failed" and status["done"] == step - 1 and len(performed) == min(step + 1, 10)
    assert not (tmp_path / "r/results.json").exists()


def test_a_second_error_is_told_beside_the_first(tmp_path, monkeypatch):
    """The disk fails while the run fails for another reason: the reason is raised, the disk is in the events."""
    from rescene.engine.checkpoint import Checkpoints

    def full(self, number, tree, facts):
        raise RunError("E410", "could not save: No space left on device")

    monkeypatch.setattr(Checkpoints, "save", full)
    with pytest.raises(RunError, match="0 of 4 sites answered"):
        rescene.run("smoke", out=tmp_path / "r", **FRAGILE, **{"method.broken": True})
    assert "E410" in (tmp_path / "r/events.jsonl").read_text()
    assert json.loads((tmp_path / "r/status.json").read_text())["done"] == 0


@pytest.mark.slow
def test_two_runs_in_threads_of_one_process_are_the_two_runs(whole, tmp_path):
    alone = [whole, run(tmp_path / "alone", seed=1)]
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(lambda seed: run(tmp_path / f"beside{seed}", seed=seed), (0, 1)))
    for a, b in zip(alone, together, strict=True):
        assert (a.folder / "results.json").read_bytes() == (b.folder / "results.json").read_bytes()
        assert same(model(a), model(b))


def test_a_damaged_checkpoint_is_replaced_by_the_one_before(whole, tmp_path, monkeypatch):
    from rescene.engine.loop import Run

    commit = Run.commit

    def commit_then_stop(self, number):
        commit(self, number)
        if number == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(Run, "commit", commit_then_stop)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "r")
    monkeypatch.undo()
    (tmp_path / "r/checkpoints/step-000005.json").write_text("half a fi")
    run(tmp_path / "r")
    timing = json.loads((tmp_path / "r/timing.json").read_text())
    assert timing["aside"]["checkpoint"] > 0  # the writer's own seconds, which the loop did not wait for
    assert timing["parts"] == 2 and timing["total_s"] == pytest.approx(sum(timing["phases"].values()), abs=0.05)
    assert (tmp_path / "r/results.json").read_bytes() == (whole.folder / "results.json").read_bytes()
    assert "W401" in (tmp_path / "r/events.jsonl").read_text()


# --- sites that fail ----------------------------------------------------------------------------------------------------


@register
class Fragile(Method):
    """A method whose client 0 always fails, and everybody if ``broken``."""

    name: ClassVar[str] = "fragile"
    title: ClassVar[str] = "Fragile"
    paper: ClassVar[str] = "-"
    leaves_site: ClassVar[str] = "a number"
    scenarios: ClassVar[tuple[str, ...]] = ("class",)
    broken: bool = False

    def client_round(self, payload, shard, client_state, rng):
        if self.broken or int(shard.task.train[0]) in shard.index.tolist():  # exactly one site holds that image
            raise ArithmeticError("the site is on fire\nsecond line")
        return {"n": len(shard)}, {"rounds": (client_state or {"rounds": 0})["rounds"] + 1}

    def server_round(self, state: ModelState, uploads, round, federation, rng):
        return state


FRAGILE = {"method": "fragile", "federation.num_clients": 4, "federation.per_round": 4, "tasks.limit": 1,
           "model.width": 8}  # fmt: skip


def test_a_failing_site_is_named_and_the_round_goes_on(tmp_path):
    result = rescene.run("smoke", out=tmp_path / "r", **FRAGILE)
    events = [json.loads(line) for line in (result.folder / "events.jsonl").read_text().splitlines()]
    assert result.values["events_summary"]["client_failures"] == 2  # one site, two rounds
    assert all("ArithmeticError: the site is on fire" in e["message"] and "second" not in e["message"] for e in events)


def test_below_the_quorum_the_run_stops_and_can_be_resumed(tmp_path):
    with pytest.raises(RunError, match="0 of 4 sites answered"):
        rescene.run("smoke", out=tmp_path / "r", **FRAGILE, **{"method.broken": True})
    assert json.loads((tmp_path / "r/status.json").read_text())["state"] == "failed"


def test_a_machine_too_small_for_its_sites_is_no_fault_of_theirs(tmp_path, monkeypatch):
    monkeypatch.setattr(Fragile, "client_round", lambda *args: torch.empty(1 << 60, dtype=torch.uint8))
    with pytest.raises(RuntimeError) as caught:
        rescene.run("smoke", out=tmp_path / "r", **FRAGILE)
    assert is_out_of_memory(caught.value)


def test_the_debug_form_names_stage_client_and_arguments(tmp_path):
    with pytest.raises(RunError) as caught:
        rescene.run("smoke", out=tmp_path / "r", **FRAGILE, **{"federation.engine": "debug"})
    error = caught.value
    assert "client_round" in error.what and "test_runs.py" in error.where
    assert "model" in error.why and "images per class" in error.why


def test_a_scenario_the_method_cannot_learn_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="contradicts") as caught:
        rescene.run("smoke", out=tmp_path / "r", **{**FRAGILE, "tasks.scenario": "domain"})
    assert "Fragile cannot learn domain-incremental tasks" in caught.value.why


def test_bad_recipes_are_refused_before_anything_happens(tmp_path):
    for key, value in [("federation.per_round", 99), ("method.budget", 0), ("method.ipc", 0), ("federation.beta", 0.0)]:
        with pytest.raises(ConfigError) as caught:
            run(tmp_path / "r", **{key: value})
        assert caught.value.exit_code == 2 and key.split(".")[-1] in str(caught.value)
    assert not (tmp_path / "r").exists()


def test_flops_are_counted_inside_vmap():
    from rescene.nets import Arch, forward_flops
    from rescene.nets.cost import FlopMeter

    arch = Arch("convnet", 16, "group", 4)
    meter = FlopMeter(arch)
    net = meter.attach(arch.build(2), 2)
    x = torch.randn(6, 3, 16, 16)
    with torch.no_grad():
        net(x)
        torch.func.vmap(lambda one: net(one[None]))(x)
    assert meter.flops["server"] == 12 * forward_flops(arch, 2)


def test_numbers_that_are_not_finite_are_left_out(tmp_path):
    result = rescene.run("smoke", out=tmp_path / "r", **{**FRAGILE, "method": "spoiled"})
    assert result.values["events_summary"]["client_failures"] == 2
    assert "E322" in (result.folder / "events.jsonl").read_text()


@register
class Spoiled(Fragile):
    """One site sends NaN."""

    name: ClassVar[str] = "spoiled"

    def client_round(self, payload, shard, client_state, rng):
        spoiled = int(shard.task.train[0]) in shard.index.tolist()
        return {"value": torch.tensor(math.nan if spoiled else 1.0)}, client_state


def test_a_disk_that_fills_up_stops_the_run_and_it_can_be_resumed(whole, tmp_path, monkeypatch):
    """Every write call of a run fails once with ENOSPC; each time the message says so and the end is the same."""
    import errno

    real, folder, stops = os.fsync, tmp_path / "r", 0
    for failing in range(1, 200, 7):
        calls = 0

        def fsync(number, failing=failing):
            nonlocal calls
            calls += 1
            if calls == failing:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(number)

        monkeypatch.setattr(os, "fsync", fsync)
        try:
            run(folder)
            break
        except RunError as error:
            assert error.code == "E410" and "No space left" in error.what
            stops += 1
        finally:
            monkeypatch.undo()
    result = run(folder)
    assert stops >= 3
    assert (result.folder / "results.json").read_bytes() == (whole.folder / "results.json").read_bytes()


def test_warnings_of_a_run_become_events(tmp_path):
    result = rescene.run("smoke", out=tmp_path / "r", **{**FRAGILE, "method": "fedavg", "federation.num_clients": 60,
                         "federation.per_round": 2, "federation.beta": 0.05, "train.local_epochs": 1})  # fmt: skip
    events = [json.loads(line) for line in (result.folder / "events.jsonl").read_text().splitlines()]
    assert any(event["code"] == "W121" for event in events)


@pytest.mark.slow
def test_memory_grows_by_the_pool_only(tmp_path, monkeypatch):
    """Live tensors after round 3 and after round 8 differ by what was gathered in between, and nothing else."""
    from rescene.core.record import num_bytes
    from rescene.engine.loop import Run

    commit, live, pool = Run.commit, {}, {}

    def commit_and_measure(self, number):
        commit(self, number)
        self.parts.writer.wait()
        gc.collect()
        plain = (torch.Tensor, torch.nn.Parameter)  # torch.export leaves tensors without memory behind
        tensors = [value for value in gc.get_objects() if type(value) in plain]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        kept = (self.parts.state, *self.observers.states().values())
        live[number], pool[number] = sum(storages.values()), sum(num_bytes(tree) for tree in kept)

    monkeypatch.setattr(Run, "commit", commit_and_measure)
    run(tmp_path / "r", federation__num_rounds=9, tasks__limit=1)
    (early, late), grown = (live[4], live[9]), pool[9] - pool[4]  # step 1 begins the task
    assert grown > 0 and abs(late - early - grown) < 4096  # a third of a picture: distances are held twice


@pytest.mark.parametrize(("num_rounds", "moments"), [
    (1, [["latest"]]),
    (2, [["first", "latest"], ["latest"]]),
    (4, [["first", "latest"], ["latest"], ["middle", "latest"], ["latest"]]),
])  # fmt: skip
def test_uploads_are_kept_from_the_first_middle_and_latest_round(num_rounds, moments):
    from rescene.config import resolve
    from rescene.engine import prepare

    recipe = resolve("smoke", {"federation.num_rounds": num_rounds}).recipe
    watch = LeakageWatch(SimpleNamespace(experiment=prepare(recipe)))
    for watch.round, wanted in enumerate(moments):
        assert watch._moments() == wanted
