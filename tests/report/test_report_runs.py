"""Reading run folders: what counts as one, what may be missing or damaged, what is derived."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from report_fixtures import NUM_ROUNDS, NUM_TASKS, PER_ROUND, accuracy_matrix, write_run, write_running

from rescene.core.errors import DataError
from rescene.core.results import Timing
from rescene.report import load_run


def test_a_folder_without_run_files_is_refused_with_a_hint(tmp_path: Path) -> None:
    inner = write_run(tmp_path / "sweep" / "rescene-s0-x")
    for folder in (tmp_path / "nowhere", tmp_path / "sweep"):
        with pytest.raises(DataError) as caught:
            load_run(folder)
        assert caught.value.code == "E213"
        assert caught.value.exit_code == 3
        assert str(folder) in caught.value.what
    assert str(inner) in str(caught.value.fix)  # the sweep folder: point at the run inside


def test_damaged_results_are_refused_rather_than_ignored(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "results.json").write_text('{"aa": 78')
    with pytest.raises(DataError, match="damaged results.json"):
        load_run(folder)


def test_other_damaged_files_are_noted_and_passed_over(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "timing.json").write_text("not json")
    (folder / "env.json").write_text("[1]")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([lines[0], "{broken", *lines[1:]]))
    run = load_run(folder)
    assert run.timing == Timing() and run.env == {}
    assert len(run.rounds) == NUM_TASKS * NUM_ROUNDS
    assert run.problems == (
        "metrics.jsonl: 1 unreadable line(s) left out",
        "timing.json could not be read (Expecting value: line 1 column 1 (char 0))",
        "env.json could not be read (it is empty or not a JSON object)",
    )


def test_a_running_run_gives_what_it_has(tmp_path: Path) -> None:
    run = load_run(write_running(tmp_path / "run", num_lines=7))  # 3 rounds, 1 task row, 3 rounds; then half a line
    assert not run.finished and run.state == "running" and run.problems == ()
    assert [(row.task, row.round) for row in run.rounds] == [(t, r) for t in (0, 1) for r in range(3)]
    assert run.matrix.tolist() == [[accuracy_matrix("rescene", 0)[0, 0]]]
    assert run.incremental.tolist() == [accuracy_matrix("rescene", 0)[0, 0]]


def test_a_round_written_twice_counts_once_and_the_later_one_wins(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    again = {"kind": "round", "task": 0, "round": 1, "participants": [2], "accuracy": 12.5}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(again) + "\n")
    run = load_run(folder)
    assert len(run.rounds) == NUM_TASKS * NUM_ROUNDS
    assert run.rounds[1].accuracy == 12.5


def test_matrix_has_nan_above_the_diagonal(tmp_path: Path) -> None:
    matrix = load_run(write_run(tmp_path / "run", "fedavg")).matrix
    np.testing.assert_array_equal(matrix, accuracy_matrix("fedavg", 0))
    assert np.isnan(matrix[np.triu_indices(NUM_TASKS, 1)]).all()


def test_upload_is_all_bytes_over_all_participations(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    told = json.loads((folder / "results.json").read_text())
    told["cost"]["measured"]["uplink_bytes"] = 9_000_000  # two exchanges a round: more than one message each
    (folder / "results.json").write_text(json.dumps(told))
    assert load_run(folder).upload_bytes == 9_000_000 / (NUM_TASKS * NUM_ROUNDS * PER_ROUND)
    (folder / "metrics.jsonl").unlink()
    assert load_run(folder).upload_bytes == told["cost"]["measured"]["uplink_bytes_per_message"]


def test_method_and_seed_of_a_bare_folder_come_from_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "re-fed-s12-0a1b2c3d"
    folder.mkdir()
    (folder / "status.json").write_text('{"state": "failed"}')
    run = load_run(folder)
    assert (run.method, run.seed, run.state) == ("re-fed", 12, "failed")


def test_numbers_that_are_not_finite_count_as_missing(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "run", aa=float("nan"), aia=float("inf"), old="83"))
    assert run.results.aa is None and run.results.aia is None and run.results.old is None
    assert run.problems == ("results.json: aa, aia, old could not be read",)  # one note for the file
