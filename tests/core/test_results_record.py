"""One reader for results.json: what runs write today and what stored runs wrote is read whole."""

from pathlib import Path

import pytest

import rescene
import rescene.api
from rescene.core.errors import DataError, RunError
from rescene.core.method_style import style_of
from rescene.core.recipe_keys import experiment_keys, flatten
from rescene.core.results import RoundRecord, read_metrics, read_results, results_of_row, written
from rescene.core.run_state import read_object
from rescene.methods import method_class
from rescene.report import load_run

STORED = sorted(path.parent for path in (Path(__file__).parents[2] / "results").rglob("results.json"))


def read_whole(folders):
    for folder in folders:
        run = load_run(folder)
        assert run.problems == () and run.results.aa is not None and run.style.uploads, folder


def test_stored_runs_are_read_whole():
    assert len(STORED) > 100
    read_whole(STORED[::25])


@pytest.mark.slow
def test_every_stored_run_is_read_whole():
    read_whole(STORED)


def test_a_run_of_today_is_read_whole_and_carries_its_style(tmp_path):
    rescene.run("demo", method="fedavg", out=tmp_path / "run", **{"tasks.limit": 2, "federation.num_rounds": 1,
                "federation.num_clients": 3, "federation.per_round": 2})  # fmt: skip
    run = load_run(tmp_path / "run")
    assert run.problems == () and run.style == method_class("fedavg").style()
    assert run.results.style["title"] == "FedAvg" and len(run.results.tasks) == 2 == len(run.task_rows)
    assert run.results.cost.measured.uplink_bytes and run.timing.total_s
    (tmp_path / "run" / "results.json").unlink()
    assert load_run(tmp_path / "run").style.title == "FedAvg"  # before its end: from origin.json


@pytest.mark.parametrize(
    "more",
    [
        {"method": "rescene", "federation.faults.dropout": 0.1, "federation.screen": "features"},
        {
            "method": "fedavg",
            "federation.delay": 1,
            "federation.faults.attack": "flip",
            "federation.faults.attackers": [0],
        },
        {"method": "rescene", "privacy.mechanism": "paper-experiment", "privacy.noise_multiplier": 1.0},
    ],
)
def test_the_record_misses_nothing_that_a_run_writes(more, tmp_path):
    small = {"tasks.limit": 2, "federation.num_rounds": 1, "federation.num_clients": 3, "federation.per_round": 3}
    rescene.run("demo", out=tmp_path / "run", **small | more)
    there, again = (read_object(tmp_path / "run" / "results.json"), written(load_run(tmp_path / "run").results))
    assert there.pop("config").items() >= again.pop("config").items()  # a key without a value is not read
    assert again == there


def test_a_damaged_or_newer_file_is_refused(tmp_path):
    path = tmp_path / "results.json"
    with pytest.raises(DataError, match="E213.*has no results yet"):
        read_results(path, [])
    path.write_text('{"aa": 7')
    with pytest.raises(DataError, match="E213.*damaged"):
        read_results(path, [])
    path.write_text('{"schema": 99}')
    with pytest.raises(RunError, match="E414"):
        read_results(path, [])


def test_an_older_record_gets_the_choices_of_its_time():
    method = {"name": "rescene", "literal": False, "reduction": "sum", "precision": "auto"}
    assert results_of_row({"config": {"method": method}}, []).config["method"]["step"] == "fixed"
    assert style_of("rescene").title == "ReSCENE"


def test_a_site_that_was_not_drawn_but_sent_something_was_asked():
    assert RoundRecord(0, 0, (3, 0), sites={"1": (5.0, 5.0), "damaged": ()}).asked == (0, 1, 3)


def test_one_flattener_for_all():
    tree = {"seed": 1, "data": {"name": "x", "order_seed": 3}, "privacy": {}, "list": [1]}
    assert flatten(tree) == {"seed": 1, "data.name": "x", "data.order_seed": 3, "privacy": {}, "list": [1]}
    assert experiment_keys(tree) == {"data.name": "x", "privacy": {}, "list": [1]}


def test_bytes_for_each_turn_of_a_site_are_counted_by_hand(tmp_path):
    """Three turns: a round that a resumed run held again counts once, and half a line does not count."""
    rows = [
        '{"kind": "round", "task": 0, "round": 0, "participants": [0, 1], "uplink_bytes": 40}',
        '{"kind": "round", "task": 0, "round": 1, "participants": [0, 1], "uplink_bytes": 40}',
        '{"kind": "round", "task": 0, "round": 1, "participants": [2], "uplink_bytes": 20}',
        '{"kind": "task", "task": 0, "accuracy": [50.0], "aa": 50.0}',
        '{"kind": "round", "task": 1, "rou',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    rounds, tasks = read_metrics(tmp_path, problems := [])
    assert [row.participants for row in rounds] == [(0, 1), (2,)] and tasks[0].aa == 50.0 and problems == []
    of_a_later_version = {"cost": {"measured": {"uplink_bytes": 90, "a_new_figure": 1}}}
    assert rescene.api.Result(tmp_path, of_a_later_version).upload_bytes == 90 / 3
    assert rescene.api.Result(tmp_path, {}).upload_bytes == (40 + 20) / 3  # not finished: the rounds so far
