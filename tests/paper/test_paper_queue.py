"""The queue: what is missing, in order, in so many minutes; nothing finished is lost, whatever ends it."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from paper_runs import cell_of, write_run
from PIL import Image
from typer.testing import CliRunner

from rescene.cli.app import app
from rescene.cli.paper_verbs import _print_plan
from rescene.core.errors import DataError
from rescene.core.run_state import working_in
from rescene.data import load, prepare
from rescene.paper import PaperCell, Store, missing_runs, paper_recipe, queue_runner
from rescene.paper.missing_runs import Missing, _queue, missing_cells, predictor
from rescene.paper.queue_runner import Queue, _share_done, rescene_run

MAIN = paper_recipe("main")
# a run of ten rounds: goes on after the last saved one, saves each, stops at Ctrl-C
PRETENDED = """
import json, pathlib, signal, sys, time
folder, pause, code = pathlib.Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
folder.mkdir(parents=True, exist_ok=True)
if code:
    sys.exit("error[E999]: the card is on fire")
status = folder / "status.json"
done = json.loads(status.read_text())["done"] if status.exists() else 0
with (folder / "metrics.jsonl").open("a") as rounds:
    for r in range(done, 10):
        time.sleep(pause)
        rounds.write(json.dumps({"round": r}) + "\\n"); rounds.flush()
        new = folder / "status.part"
        new.write_text(json.dumps({"done": r + 1, "steps": 10, "state": "interrupted"}))
        new.replace(status)  # whole or not at all, as the engine writes it: a kill may come at any time
(folder / "results.json").write_text('{"aa": 1.0}')
"""


def wanted(*names, base="smoke"):
    sizes = ("federation.num_rounds=3", "model.width=8")
    return [Missing("test", name, PaperCell("fashion-mini", "0.5", "fedavg", "", base, ("method=fedavg", *sizes)), s)
            for s, name in enumerate(names)]  # fmt: skip


def pretend(pause=0.0, failing=()):
    def command(missing, folder):
        return [sys.executable, "-c", PRETENDED, str(folder), str(pause), str(int(missing.name in failing))]

    return command


def queue(tmp_path, cells, minutes, predicted, **more):
    return Queue(cells, lambda one: predicted.get(one.name), minutes, tmp_path / "work", tmp_path / "results", **more)


def test_what_ends_in_time_is_run_in_order_and_kept(tmp_path):
    cells = wanted("first", "long", "short")
    told = []
    note = {"tell": lambda row: told.append((row.cell, row.state))}
    made = queue(tmp_path, cells, 6, {"first": 5, "long": 100, "short": 1}, least=99, command=pretend(), **note)
    rows = {row.cell: row for row in made.run()}
    assert [row.state for row in rows.values()] == ["done", "waiting", "done"]
    assert told == [("first", "running"), ("first", "done"), ("short", "running"), ("short", "done")]
    assert rows["first"].used > 0 and rows["first"].predicted == 5
    kept = {path.parent for path in (tmp_path / "results").rglob("results.json")}
    assert kept == {tmp_path / "results" / one.folder for one in (cells[0], cells[2])}
    report = json.loads((tmp_path / "results" / "queue.json").read_text())
    assert [run["state"] for run in report["runs"]] == ["done", "waiting", "done"] and report["minutes"] == 6


def test_several_at_once_take_longer_each(tmp_path):
    made = queue(tmp_path, wanted("a", "b"), 60, {"a": 10, "b": 20}, parallel=2, command=pretend(pause=0.1))
    assert [row.predicted for row in made.rows] == [16, 32]
    made._fill()
    assert len(made.going) == 2 and [row.state for row in made.rows] == ["running", "running"]
    assert {row.state for row in made.run()} == {"done"}


def test_a_run_that_fails_does_not_stop_the_others(tmp_path):
    rows = queue(tmp_path, wanted("bad", "good"), 1, {"bad": 0.1, "good": 0.1}, command=pretend(failing=("bad",))).run()
    assert [(row.state, row.why) for row in rows] == [("failed", "error[E999]: the card is on fire"), ("done", "")]
    assert len(list((tmp_path / "results").rglob("results.json"))) == 1


@pytest.mark.parametrize(("minutes", "least", "predicted"), [(0.0, 0.0, {}), (1.0, 2.0, {"a": 5}), (1.0, 2.0, {})])
def test_without_time_nothing_is_begun(tmp_path, minutes, least, predicted):
    (row,) = queue(tmp_path, wanted("a"), minutes, predicted, least=least, command=pretend()).run()
    assert row.state == "waiting" and not (tmp_path / "work").exists()
    assert "too few" in row.why and ("not known" in row.why) == (not predicted)
    report = json.loads((tmp_path / "results" / "queue.json").read_text())
    assert [run["why"] for run in report["runs"]] == [row.why]


def test_a_stopped_run_goes_on_and_loses_no_round(tmp_path):
    """The time ends, a kill ends it, and then it is left to end: every round is there once."""
    cells = wanted("a")
    (row,) = queue(tmp_path, cells, 0.02, {}, least=0, command=pretend(pause=0.6)).run()
    folder = tmp_path / "work" / cells[0].folder
    share = _share_done(folder)
    assert row.state == "stopped" and 0 < share < 1 and not list((tmp_path / "results").rglob("results.json"))
    again = queue(tmp_path, cells, 1, {"a": 0.4}, command=pretend(pause=0.25))
    assert again.rows[0].predicted == pytest.approx(0.4 * (1 - share), abs=0.01), "only what is left is predicted"
    again._fill()
    before = _share_done(folder)
    while _share_done(folder) == before:
        time.sleep(0.02)
    again.going[0].process.kill()
    again.going[0].process.wait()
    (row,) = queue(tmp_path, cells, 1, {"a": 0.4}, command=pretend()).run()
    rounds = [json.loads(line)["round"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert row.state == "done" and rounds[-1] == 9 and sorted(set(rounds)) == list(range(10))
    assert len(rounds) <= 11, "a kill may fall between a round and its note, no more"


def test_what_a_killed_queue_left_is_copied_by_the_next(tmp_path):
    """A run that ended after its queue was killed, and a copy that was torn."""
    cell, work, results = cell_of(MAIN, "cifar10/0.5/fedavg"), tmp_path / "work", tmp_path / "results"
    ended, torn = (write_run(work, cell, seed=seed) for seed in (0, 1))
    for folder in (ended, torn):
        (folder / "timing.json").write_text('{"total_s": 9.0, "at_a_time": 3}')
    copied = results / torn.name
    copied.mkdir(parents=True)
    (copied / "results.json").write_text((torn / "results.json").read_text()[:100])
    assert Store([results]).unreadable == [copied]
    assert queue(tmp_path, [], 1, {}).run() == []
    kept = Store([results]).find(cell.experiment)
    assert [(run.seed, run.folder) for run in kept] == [(0, results / ended.name), (1, copied)]
    assert json.loads((copied / "timing.json").read_text()) == {"total_s": 9.0, "at_a_time": 3}
    (results / ended.name).rename(results / "by-hand")
    queue(tmp_path, [], 1, {}).run()
    assert not (results / ended.name).exists(), "a run that is kept under another name is not copied again"


def test_damaged_results_are_no_end(tmp_path):
    """The run itself refuses a folder with damaged results, so the queue may not call it done."""
    cells = wanted("a", "b")
    (tmp_path / "work" / cells[0].folder).mkdir(parents=True)
    (tmp_path / "work" / cells[0].folder / "results.json").write_text('{"aa": 1')
    rows = queue(tmp_path, cells, 1, {"a": 0.1, "b": 0.1}, command=pretend(failing=("a",))).run()
    assert [(row.state, row.why) for row in rows] == [("failed", "error[E999]: the card is on fire"), ("done", "")]


def test_a_full_disk_stops_no_run(tmp_path, monkeypatch):
    cells = wanted("a", "b")
    before = queue_runner.write_atomically

    def full(path, *parts, **more):
        if path.name == "queue.json" or cells[0].folder.name in str(path):
            raise OSError(28, "No space left on device")
        before(path, *parts, **more)

    monkeypatch.setattr(queue_runner, "write_atomically", full)
    rows = queue(tmp_path, cells, 1, {"a": 0.1, "b": 0.1}, parallel=2, command=pretend()).run()
    assert [row.state for row in rows] == ["done", "done"] and "No space left" in rows[0].why and not rows[1].why
    assert [path.parent.name for path in (tmp_path / "results").rglob("results.json")] == [cells[1].folder.name]


@pytest.mark.parametrize("numbers", [(signal.SIGHUP,), (signal.SIGTERM, signal.SIGINT, signal.SIGTERM)])
def test_whatever_stops_the_queue_stops_its_runs(tmp_path, numbers):
    """A closed terminal and an impatient second Ctrl-C. A run that takes two seconds to stop is waited for."""
    script = f"""
import pathlib, signal, sys
sys.path[:0] = {[str(Path(__file__).parent)]!r}
for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):  # whatever the tests themselves were started under
    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
from test_paper_queue import Queue, wanted
slow = "import signal, time, pathlib, sys; folder = pathlib.Path(sys.argv[1]); folder.mkdir(parents=True); stop = []; " \
    "signal.signal(signal.SIGTERM, lambda *_: stop.append(1)); (folder / 'begun').touch(); " \
    "[time.sleep(0.1) for _ in iter(lambda: not stop, False)]; time.sleep(2); (folder / 'stopped').touch()"
command = lambda missing, folder: [sys.executable, "-c", slow, str(folder)]
Queue(wanted("a", "b"), lambda one: None, 5, pathlib.Path("work"), pathlib.Path("results"), 2, command=command).run()
"""
    process = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        while len(list(tmp_path.rglob("begun"))) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        for number in numbers:
            process.send_signal(number)
            time.sleep(0.3)
        process.wait(30)
    finally:
        process.kill()
        process.wait()
    assert len(list(tmp_path.rglob("stopped"))) == 2, "both had ended before the queue did"
    assert {run["state"] for run in json.loads((tmp_path / "results" / "queue.json").read_text())["runs"]} == {
        "stopped"
    }


def test_what_lacks_its_data_is_listed_and_not_started(tmp_path, monkeypatch):
    monkeypatch.setenv("RESCENE_DATA", str(tmp_path))
    cells = [Missing("test", "no data", cell_of(MAIN, "cifar10/0.5/fedavg"), 0), *wanted("a")]
    lacking, done = queue(tmp_path, cells, 1, {"no data": 0.1, "a": 0.1}, command=pretend()).run()
    assert (lacking.state, done.state) == ("cannot run", "done")
    assert lacking.used is None and "is not on this machine: rescene data prepare cifar10" in lacking.why


def test_a_queue_in_the_background_can_stop_its_runs(tmp_path):
    """A shell lets its background jobs ignore Ctrl-C, and so do the processes that they start."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        (row,) = queue(tmp_path, wanted("a"), 0.02, {}, least=0, command=pretend(pause=0.6)).run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert row.state == "stopped" and not list((tmp_path / "results").rglob("results.json"))


def test_what_is_stored_is_not_missing(tmp_path):
    before = missing_cells(Store([tmp_path]))
    assert before[0].group.startswith("a.") and before[0].name == "main:cifar10/0.5/fedcbdr, equal weights"
    assert [group["group"][0] for group in _queue()] == ["a", "b", "c", "e", "j", "d", "f", "g", "h", "i"]
    assert len({(one.cell.experiment, one.seed) for one in before}) == len(before)
    write_run(tmp_path, cell_of(MAIN, "cifar10/0.5/rescene").fast)
    after = missing_cells(Store([tmp_path]))
    assert [one.name for one in after] == [
        one.name for one in before if one.name != "main:cifar10/0.5/rescene, E_srv=10" or one.seed
    ]


def test_a_set_prepared_with_another_test_split_is_told_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setenv("RESCENE_DATA", str(tmp_path))
    for name in ("a", "b"):
        for i in range(10):
            pixels = np.random.default_rng([i, *name.encode()]).integers(0, 256, (16, 16, 3), dtype=np.uint8)
            (tmp_path / "images" / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{i}.png")
    (cell,) = (one.cell for one in missing_cells(Store([tmp_path])) if one.name == "office31:office31/1.0/target")
    drawn = replace(cell, overrides=(*cell.overrides, "data.held_out=drawn"))
    assert drawn.obstacle.fix.startswith("rescene data prepare office31 --from SOURCE --held-out drawn; ")
    for held_out in ("drawn", "last"):
        made = prepare("folder", tmp_path / "images", tmp_path / "office31", held_out=held_out)
        made.rename(made.with_name(made.name.replace("folder", "office31")))
        assert drawn.obstacle is None and (cell.obstacle is None) == (held_out == "last")
        assert held_out == "last" or cell.obstacle.fix.startswith("rescene data prepare office31 --from SOURCE; ")
        assert load("office31", held_out=held_out).split.endswith("last") == (held_out == "last")
    (tmp_path / "office31" / "office31.safetensors").unlink()
    with pytest.raises(DataError, match="another test split"):  # it is on this machine, but not so
        load("office31", held_out="drawn")
    assert load("office31").split.endswith("last")  # whoever does not ask gets what is there


def test_minutes_are_predicted_from_runs_on_the_same_device_only(tmp_path):
    cell = cell_of(MAIN, "cifar10/0.5/fedavg")
    nominal = {"client_flops": 33.33e15, "server_flops": 0.0}
    for number, seconds in enumerate((240.0, 300.0)):
        folder = write_run(tmp_path, cell, seed=number, cost={"nominal": nominal, "measured": {}})
        (folder / "env.json").write_text('{"device": "card"}')
        (folder / "timing.json").write_text(json.dumps({"total_s": seconds}))
    store = Store([tmp_path])
    missing = Missing("b", "x", cell, 2)
    assert predictor(store, "card")(missing) == pytest.approx(4.0, rel=0.02), (
        "the quickest: the other ran beside something"
    )
    assert predictor(store, "another card")(missing) is None
    (tmp_path / "at-a-time.json").write_text(json.dumps({run.folder.name: 2 for run in store.all() if run.seed == 1}))
    alone = pytest.approx(300 / 60 / 1.6, rel=0.02)
    assert predictor(store, "card")(missing) == alone, "what the list says counts, not who was the quickest"
    assert predictor(store, "card")(Missing("b", "x", cell_of(MAIN, "cifar10/0.5/refed"), 0)) is None
    office = paper_recipe("office31").cells[0]
    assert predictor(store, "card")(Missing("e", "x", office, 0)) is None, "its sizes are not known without the images"
    folder = write_run(
        tmp_path, replace(office, overrides=(*office.overrides, "data.held_out=drawn")), cost={"nominal": nominal}
    )
    (folder / "env.json").write_text('{"device": "card"}')
    (folder / "timing.json").write_text('{"total_s": 90.0}')
    predict = predictor(Store([tmp_path]), "card")
    assert predict(Missing("e", "x", office, 0)) == pytest.approx(1.5), (
        "but known from another reading on the same images"
    )
    assert predict(Missing("e", "x", cell_of(paper_recipe("office31"), "office31/1.0/fedcbdr"), 0)) is None


def test_a_queue_writes_down_how_many_ran_at_a_time(tmp_path):
    """For the next prediction, with the runs of another queue. Of a run that an earlier queue began nobody knows it."""
    cells = wanted("a", "b", "c", "d")

    def timed(missing, folder):
        python, option, program, *words = pretend(pause=0.3)(missing, folder)
        return [python, option, f"{program}\n(folder / 'timing.json').write_text('{{\"total_s\": 60.0}}')", *words]

    (tmp_path / "work" / cells[2].folder).mkdir(parents=True)
    queue(tmp_path, cells[:2], 1, {}, parallel=2, least=0, command=timed).run()
    queue(tmp_path, cells[2:3], 1, {}, least=0, command=timed).run()
    other = tmp_path / "work" / "of" / "another-queue"
    other.mkdir(parents=True)
    with working_in(other):
        queue(tmp_path, cells[3:], 1, {}, least=0, command=timed).run()
    told = [json.loads((tmp_path / "results" / one.folder / "timing.json").read_text()) for one in cells]
    assert [one.get("at_a_time") for one in told] == [2, 2, None, 2] and all(one["total_s"] == 60 for one in told)


def test_the_list_of_stored_runs_names_runs_that_are_there():
    results = Path(__file__).parents[2] / "results"
    listed = json.loads((results / missing_runs.AT_A_TIME).read_text())
    assert set(listed.values()) <= missing_runs.SLOWER.keys()
    assert all((results / folder / "timing.json").is_file() for folder in listed)


def test_runs_with_statistics_of_the_batch_are_timed_apart(tmp_path):
    """Their condensation is not recorded as a graph and takes several times as long."""
    cell = cell_of(MAIN, "cifar10/0.5/rescene").fast
    nominal = {"client_flops": 3.6e15, "server_flops": 20e15}
    folder = write_run(tmp_path, cell, cost={"nominal": nominal, "measured": {}})
    (folder / "env.json").write_text('{"device": "card"}')
    (folder / "timing.json").write_text(json.dumps({"total_s": 120.0}))
    predict = predictor(Store([tmp_path]), "card")
    assert predict(Missing("a", "x", cell.read_as("real minibatch 10"), 0))
    assert predict(Missing("a", "x", cell.read_as("BatchNorm in train mode"), 0)) is None


def test_the_command_line_plans_and_refuses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RESCENE_DATA", str(tmp_path))
    (tmp_path / "kept").mkdir()

    def invoke(*words):
        return CliRunner().invoke(app, ["paper", "run", *words])

    plan = json.loads(invoke("--queue", "--plan", "--runs", "kept", "--json").output)
    assert len(plan) > 80 and plan[0]["predicted"] is None
    assert {row["state"] for row in plan} == {"cannot run"} and "data prepare cifar10" in plan[0]["why"]
    assert not Path("runs").exists()
    said = invoke("--queue", "--plan", "--runs", "kept", "--minutes", "30", "--parallel", "2").output
    assert f"In 30 minutes, 2 at a time: no run would start, {len(plan)} cannot run." in said
    idle = (("--queue", "--minutes", "5", "--fast"), ("main", "--minutes", "5"), ("main", "--plan", "--parallel", "2"))
    for words in (("--queue",), ("main", "--queue", "--minutes", "5"), (), ("--queue", "--minutes", "0"), *idle):
        result = invoke(*words, "--runs", "kept")
        assert result.exit_code == 2 and "E501" in result.output, result.output


def test_a_part_of_the_queue_can_be_picked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()

    def planned(*words):
        told = CliRunner().invoke(app, ["paper", "run", "--queue", "--plan", "--runs", "kept", "--json", *words])
        return json.loads(told.output) if told.exit_code == 0 else told.output

    everything, plain = planned(), planned("--only", "main:cifar10/*, no augmentation")
    methods = ("fedavg", "fedcbdr", "glfc", "refed")
    assert [row["cell"] for row in plain] == [f"main:cifar10/0.5/{method}, no augmentation" for method in methods]
    group = planned("--only", "c")
    assert [row["cell"] for row in group] == [row["cell"] for row in everything if row["group"].startswith("c.")]
    both = planned("--only", "c", "--only", "main:cifar10/*/fedavg, equal w*")
    assert [row["cell"] for row in both] == ["main:cifar10/0.5/fedavg, equal weights", *(row["cell"] for row in group)]
    small = [row["cell"] for row in planned("--only", "cifar10")]
    assert small == [row["cell"] for row in everything if "cifar10/" in row["cell"]], "cifar10 is not cifar100"
    assert "E151" in planned("--only", "nothing")


def test_a_plan_says_what_the_minutes_are_enough_for(tmp_path, capsys):
    cells = wanted("first", "long", "unknown", "short")
    minutes = {"first": 5, "long": 100, "short": 1}
    states = {}
    for given in (6, 30, 200):
        made = queue(tmp_path, cells, given, minutes)
        states[given] = [row.state for row in made.plan()]
        assert {row.state for row in made.rows} == {"waiting"}, "a plan changes nothing"
    assert states == {
        6: ["would end", "later", "later", "would end"],
        30: ["would end", "later", "would begin", "later"],
        200: ["would end", "would end", "would begin", "later"],
    }
    _print_plan(queue(tmp_path, cells, 30, minutes).plan(), 30, 1, as_json=False)
    table, said = capsys.readouterr().out.rsplit("\n", 2)[:2]
    assert (
        said
        == "In 30 minutes, 1 at a time: 1 would end (5 minutes), 1 would begin (1 not known), 2 later (101 minutes)."
    )
    assert "not known" in table and "used" not in table


def test_the_minutes_of_a_plan_reach_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(missing_runs, "missing_cells", lambda store: wanted("a", "b"))
    monkeypatch.setattr(missing_runs, "predictor", lambda store, device: lambda one: {"a": 5, "b": 100}[one.name])
    (tmp_path / "kept").mkdir()

    def planned(*words):
        told = CliRunner().invoke(app, ["paper", "run", "--queue", "--plan", "--runs", "kept", "--json", *words])
        return [row["state"] for row in json.loads(told.output)]

    assert planned() == ["waiting", "waiting"]
    assert planned("--minutes", "6") == ["would end", "later"]
    assert planned("--minutes", "200") == ["would end", "would end"]


@pytest.mark.parametrize("parallel", [1, 2, 3])
@pytest.mark.parametrize("minutes", [0.5, 6, 40])
def test_the_plan_starts_what_the_queue_starts_first(tmp_path, minutes, parallel):
    predicted = dict(zip("abcde", (5, 30, None, 1, 0.2), strict=True))
    made = queue(tmp_path, wanted(*predicted), minutes, predicted, parallel=parallel, command=pretend())
    planned = {row.cell for row in made.plan() if row.state != "later"}
    made._fill()
    started = {one.row.cell for one in made.going}
    made._stop()
    assert started <= planned and bool(started) == bool(planned)


@pytest.mark.slow
def test_a_real_run_is_stopped_and_goes_on(tmp_path):
    cells = wanted("smoke")
    made = Queue(cells, lambda one: None, 5, tmp_path / "work", tmp_path / "results", least=0)
    made._fill()
    folder = tmp_path / "work" / cells[0].folder
    while not (_share_done(folder) > 0):
        time.sleep(0.02)
    made._stop()
    assert made.rows[0].state in ("stopped", "done")
    (row,) = Queue(
        cells, lambda one: None, 5, tmp_path / "work", tmp_path / "results", least=0, command=rescene_run
    ).run()
    assert row.state == "done"
    (found,) = Store([tmp_path / "results"]).all()
    assert found.seed == 0 and found.results.aa is not None
    command = (found.folder / "command.txt").read_text()
    assert command.startswith("rescene run ") and str(tmp_path) not in command  # it can be published
