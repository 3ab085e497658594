"""Sweeps in which not everything goes well: cells too large, cells that fail, cells that cannot run, cells too short to be seen."""

import json
import re
import weakref
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from rescene.api import Result
from rescene.cli import progress, running
from rescene.cli.app import app
from rescene.cli.running import print_plan, run_cells
from rescene.core.errors import ConfigError, MethodCannot, ResceneWarning, RunError, for_people, is_out_of_memory
from rescene.methods import method_names
from rescene.sweeps.grid import grid, read_seeds
from rescene.sweeps.workers import log_file

invoke = CliRunner().invoke


def too_large(*args, **kwargs):
    """What torch says on a CPU."""
    return torch.empty(1 << 60, dtype=torch.uint8)


@pytest.fixture
def cells(tmp_path):
    return grid("smoke", ["method=fedavg,fedlwf", "model.width=2"], "0", tmp_path)


def test_out_of_memory_is_told_apart_from_mistakes():
    with pytest.raises(RuntimeError) as caught:
        too_large()
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(MemoryError()) and is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried ..."))
    mistake = RuntimeError("shapes cannot be multiplied")
    assert for_people(mistake) is mistake


def test_a_cell_too_large_for_a_cpu_is_listed_and_its_memory_let_go(cells, monkeypatch):
    held = []

    def execute(resolved, folder, progress, **options):
        if resolved.recipe.method["name"] == "fedavg":
            tensor = torch.zeros(3)
            held.append(weakref.ref(tensor))
            too_large()
        assert held[0]() is None  # the cell before would be in the way
        return Result(folder, {})

    monkeypatch.setattr(running, "execute", execute)
    monkeypatch.setattr(running, "write_report", lambda folders, page: page)
    results, (failure,) = run_cells(cells, quiet=True, as_json=False)
    assert [result.folder for result in results] == [cells[1].folder]
    assert failure["cell"].startswith("method=fedavg") and "too large for this device" in failure["error"]
    assert "train.batch_size" in failure["fix"]


@pytest.mark.parametrize("debug", [False, True])
def test_a_mistake_in_the_code_is_listed_with_its_traceback_and_the_others_run(cells, monkeypatch, capsys, debug):
    def execute(resolved, folder, progress, **options):
        return 1 / 0 if resolved.recipe.method["name"] == "fedavg" else Result(folder, {})

    if debug:
        monkeypatch.setenv("RESCENE_DEBUG", "1")
    monkeypatch.setattr(running, "execute", execute)
    monkeypatch.setattr(running, "write_report", lambda folders, page: page)
    results, (failure,) = run_cells(cells, quiet=True, as_json=False)
    assert [result.folder for result in results] == [cells[1].folder]
    assert failure["cell"].startswith("method=fedavg")
    assert failure["error"] == "[E326] a run ended with ZeroDivisionError: division by zero"
    log = log_file(cells[0].folder)
    assert str(log) in failure["fix"] and "in execute" in log.read_text()
    assert ("in execute" in capsys.readouterr().err) == debug


def test_an_error_lets_go_what_the_error_behind_it_held(cells, monkeypatch):
    held = []

    def inner():
        tensor = torch.zeros(3)
        held.append(weakref.ref(tensor))
        raise KeyError("behind")

    def execute(resolved, folder, progress, **options):
        if resolved.recipe.method["name"] != "fedavg":
            assert held[0]() is None
            return Result(folder, {})
        try:
            inner()
        except KeyError as error:
            raise RunError("E328", "in front") from error

    monkeypatch.setattr(running, "execute", execute)
    monkeypatch.setattr(running, "write_report", lambda folders, page: page)
    results, (failure,) = run_cells(cells, quiet=True, as_json=False)
    assert len(results) == 1 and failure["error"] == "[E328] in front"


def test_a_single_run_that_is_too_large_gets_a_message(tmp_path, monkeypatch):
    monkeypatch.setattr(running, "execute", too_large)
    found = invoke(app, ["run", "smoke", "--out", str(tmp_path / "r"), "-q"])
    assert found.exit_code == 4 and "error[E324]" in found.output and "smaller model" in found.output


def test_failures_are_part_of_the_json(tmp_path, monkeypatch):
    def execute(resolved, folder, progress, **options):
        if resolved.recipe.method["name"] == "fedavg":
            raise RunError("E320", "nobody answered", fix="ask again")
        scores = dict.fromkeys(("aa", "aia", "old", "recent", "forgetting"), 1.0)
        return Result(folder, {"method": "fedlwf", "seed": 0, "leakage": None, **scores})

    monkeypatch.setattr(running, "execute", execute)
    monkeypatch.setattr(running, "write_report", lambda folders, page: page)
    found = invoke(app, ["sweep", "smoke", "method=fedavg,fedlwf", "--out", str(tmp_path), "-q", "--json"])
    good, bad = json.loads(found.stdout)
    assert found.exit_code == 4 and good["aa"] == 1.0
    assert bad == {"cell": "method=fedavg seed=0", "error": "[E320] nobody answered", "fix": "ask again"}


def test_the_page_of_a_sweep_has_one_clock_for_all_cells(tmp_path, monkeypatch):
    clock, written = SimpleNamespace(now=0.0), []

    def execute(resolved, folder, progress, **options):
        clock.now += 40  # less than the minute after which the first page is due
        progress({"event": "round"})
        return Result(folder, {})

    monkeypatch.setattr(running, "execute", execute)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(progress, "write_report", lambda folders, page: written.append(clock.now))
    cells = grid("smoke", ["method=fedavg"], "0,1,2", tmp_path)
    run_cells(cells, quiet=True, as_json=False, page=tmp_path / "report.html")
    assert written[:1] == [80]


def test_a_seed_given_twice_is_one_run(tmp_path):
    assert [cell.resolved.recipe.seed for cell in grid("smoke", [], "1,0, 1", tmp_path)] == [1, 0]
    assert len(grid("smoke", ["federation.beta=0.1,0.1"], "0", tmp_path)) == 1
    with pytest.raises(ConfigError, match="cannot read the seeds"):
        read_seeds("0,x")
    with pytest.raises(ConfigError, match="from --seeds") as caught:  # it would be overruled by the default, seed 0
        grid("smoke", ["seed=3,4"], "0", tmp_path)
    assert caught.value.fix == "--seeds 3,4"


def test_a_plan_sums_up_what_can_run_apart_from_what_cannot(cells, monkeypatch, capsys):
    figures = dict.fromkeys(("client_flops", "server_flops", "uplink_bytes", "downlink_bytes", "seconds"), 0.0)

    def priced(cell):
        if cell is cells[0]:
            return RunError("E324", "too large")
        missing = RunError("E201", "no images") if cell is unready else None
        return running.Priced(cell, None, None, missing)

    unready = grid("smoke", ["method=fedewc"], "0", cells[0].folder.parent)[0]
    costs = {cells[1].folder: 7e9, unready.folder: 5e9}
    monkeypatch.setattr(running, "_priced", priced)
    monkeypatch.setattr(
        running, "plan_columns", lambda found: figures | {"client_flops": costs[found.experiment.folder]}
    )
    print_plan([*cells, cells[1], unready], as_json=False)  # one of them named twice, as tables of the paper do
    shown = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "7.00 GFLOP" in shown["in all, to run"] and "5.00 GFLOP" in shown["in all, cannot run"]


ASKED = [  # and methods that cannot do it, methods that can, the reason
    (["tasks.order=per-site"], {"rescene", "icarl", "fedlwf"}, {"fedavg", "fedewc", "joint"}, "orders of their own"),
    (["federation.delay=1", "model=vit-mini"], {"glfc", "joint"}, {"fedavg", "fedcprompt", "afl"}, "rounds later"),
    (["model=convnet"], {"pilora", "fedcprompt"}, {"rescene", "fedweit"}, "attention layers, and convnet has none"),
    (["model=mlp", "model.lens=waves", "train.augment=false"], {"mfcl"}, {"fedavg"}, "three channels"),
    (["tasks.drift=1", "federation.num_rounds=2"], {"fedewc"}, {"fedavg", "moments"}, "when a task begins"),
]


@pytest.mark.parametrize(("asked", "unable", "able", "why"), ASKED, ids=[asked[0] for asked, *_ in ASKED])
def test_all_methods_are_those_that_can_do_the_recipe(asked, unable, able, why, tmp_path):
    with pytest.warns(ResceneWarning, match="W580") as told:
        cells = grid("smoke", ["method=all", *asked], "0", tmp_path)
    left, (warning,) = {cell.resolved.recipe.method["name"] for cell in cells}, told
    out = set(method_names()) - left
    assert able <= left and unable <= out
    assert why in str(warning.message) and out <= set(re.findall(r"[\w-]+", str(warning.message)))
    for name in unable - {"pilora", "fedcprompt"}:  # the network is looked at when a run begins
        with pytest.raises(MethodCannot):
            grid("smoke", [f"method={name}", *asked], "0", tmp_path)


def test_all_methods_leave_none_if_none_can(tmp_path):
    asked = ["method=all", "tasks.order=per-site", "federation.screen=features"]
    with pytest.raises(ConfigError, match="E512") as refused:
        grid("smoke", asked, "0", tmp_path)
    assert "rescene" in refused.value.why and "fedavg" in refused.value.why


def test_a_mistake_is_no_limit_of_a_method(tmp_path):
    with pytest.raises(ConfigError, match="E571"):  # no method can: the two keys contradict each other
        grid("smoke", ["method=all", "tasks.order=per-site", "federation.exclude=[0]"], "0", tmp_path)
    with pytest.raises(ConfigError, match="E102"):
        grid("smoke", ["method=all", "tasks.ordre=per-site"], "0", tmp_path)
