"""``rescene table``: rows by what differs, honest bests, leakage beside accuracy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from report_fixtures import accuracy_matrix, config, leakage, write_run, write_running

from rescene.core.errors import ConfigError
from rescene.report import load_run
from rescene.report.load import RunRecord
from rescene.report.tables import TableCell, TableGrid, compare


def make(tmp_path: Path, method: str, seed: int = 0, beta: float = 0.5, **changes: Any) -> RunRecord:
    told = changes.pop("config", config(method, seed))
    told["federation"]["beta"] = beta
    folder = tmp_path / f"{method}-s{seed}-{beta}-{len(list(tmp_path.iterdir()))}"
    return load_run(write_run(folder, method, seed, config=told, **changes))


def column(grid: TableGrid, title: str) -> dict[str, Any]:
    """The entries under a title, by method (and value of the second column where there is a word in it)."""
    j = grid.columns.index(title)
    return {
        row[0] if isinstance(row[1], TableCell) or row[1].isdigit() else f"{row[0]} {row[1]}": row[j]
        for row in grid.rows
    }


def test_seeds_are_averaged_and_n_is_said(tmp_path: Path) -> None:
    runs = [make(tmp_path, "rescene", seed, aa=aa) for seed, aa in enumerate((80.0, 84.0, 88.0))]
    grid = compare(runs, metrics="aa")
    assert grid.columns == ("method", "n", "AA (%)", "Near-copies (% of uploads)")
    (row,) = grid.rows
    assert row[:2] == ("ReSCENE", "3")
    assert (row[2].mean, row[2].std, row[2].n) == (84.0, pytest.approx(4.0), 3)  # squares 16 + 0 + 16 over n-1 = 2


def test_leakage_stands_beside_accuracy_unasked(tmp_path: Path) -> None:
    grid = compare([make(tmp_path, "rescene"), make(tmp_path, "fedavg")], metrics="aia")
    found = column(grid, "Near-copies (% of uploads)")
    assert found["ReSCENE"].mean == pytest.approx(97.0) and found["FedAvg"] == "no images"
    blind = compare([make(tmp_path, "rescene", leakage=None), make(tmp_path, "feddm")], metrics="near-copies")
    assert column(blind, "Near-copies (% of uploads)")["ReSCENE"] == "not measured"  # sent images, nobody looked
    assert compare([make(tmp_path, "fedavg")]).columns == ("method", "n", "AA (%)", "AIA (%)")


def test_reference_lines_never_win(tmp_path: Path) -> None:
    accuracies = {"joint": 99.0, "raw-upload": 95.0, "local": 98.0, "rescene": 80.0, "fedavg": 20.0}
    grid = compare([make(tmp_path, method, aa=aa) for method, aa in accuracies.items()], metrics="aa")
    assert [name for name, cell in column(grid, "AA (%)").items() if cell.best] == ["ReSCENE"]


def test_best_is_sought_among_comparable_cells_only(tmp_path: Path) -> None:
    told = {("rescene", 0.1): 50.0, ("fedavg", 0.1): 60.0, ("rescene", 0.5): 80.0, ("fedavg", 0.5): 70.0}
    runs = [make(tmp_path, method, beta=beta, aa=aa) for (method, beta), aa in told.items()]
    grid = compare(runs, metrics="aa")
    best = [name for name, cell in column(grid, "AA (%)").items() if cell.best]
    assert best == ["FedAvg 0.1", "ReSCENE 0.5"]
    assert [row[1] for row in grid.rows] == ["0.1", "0.1", "0.5", "0.5"]  # settings together


def test_rows_at_equal_epsilon_compare_whatever_the_mechanism(tmp_path: Path) -> None:
    """8 by two mechanisms, and 4: the best is sought at 8 only, and no guarantee is a group of its own."""
    told = [("rescene", "release", 8.0, 50.0), ("fedavg", "dp-sgd", 7.9999, 20.0), ("refed", "dp-sgd", 4.0, 15.0)]
    runs = [make(tmp_path, "fedlwf", aa=90.0)]
    for method, mechanism, epsilon, aa in told:
        setting = config(method, 0) | {"privacy": {"mechanism": mechanism, "delta": 1e-5, "clip": len(method)}}
        runs.append(make(tmp_path, method, config=setting, aa=aa, privacy={"private": True, "epsilon": epsilon}))
    grid = compare(runs, by="epsilon", metrics="aa,epsilon")
    assert [row[:2] for row in grid.rows] == [("Re-Fed", "4"), ("ReSCENE", "8"), ("FedAvg", "8"), ("FedLwF", "–")]
    assert [name for name, cell in column(grid, "AA (%)").items() if cell.best] == ["ReSCENE"]


def test_one_competitor_wins_nothing(tmp_path: Path) -> None:
    grid = compare([make(tmp_path, "rescene", beta=beta) for beta in (0.1, 0.5)], metrics="aa")
    assert not any(cell.best for cell in column(grid, "AA (%)").values())


def test_less_is_better_where_it_is(tmp_path: Path) -> None:
    grid = compare([make(tmp_path, "rescene"), make(tmp_path, "fedavg")], metrics="forgetting,upload")
    assert column(grid, "Forgetting (points)")["ReSCENE"].best
    assert column(grid, "Upload (MB per site and round)")["ReSCENE"].best
    assert column(grid, "Upload (MB per site and round)")["FedAvg"].mean == pytest.approx(0.268)


def test_fewer_columns_never_melt_two_recipes(tmp_path: Path) -> None:
    other = config("rescene", 0)
    other["train"]["lr"] = 0.1
    runs = [make(tmp_path, "rescene", aa=80.0), make(tmp_path, "rescene", config=other, aa=50.0)]
    assert compare(runs).columns[:3] == ("method", "lr", "n")
    narrow = compare(runs, by="beta", metrics="aa")
    assert [row[2] for row in narrow.rows] == ["1", "1"]
    assert "Rows that look alike differ in train.lr." in narrow.notes


def test_by_seed_gives_the_raw_values(tmp_path: Path) -> None:
    runs = [make(tmp_path, "rescene", seed, aa=80.0 + seed) for seed in (0, 1)]
    grid = compare(runs, by="seed", metrics="aa")
    assert [(row[1], row[3].mean, row[3].best) for row in grid.rows] == [("0", 80.0, False), ("1", 81.0, False)]


def test_one_setting_across(tmp_path: Path) -> None:
    told = {("rescene", 0.1): 50.0, ("rescene", 0.5): 80.0, ("fedavg", 0.5): 90.0}
    runs = [make(tmp_path, method, beta=beta, aa=aa) for (method, beta), aa in told.items()]
    grid = compare(runs, metrics="aa", across="beta")
    assert grid.columns == ("method", "AA beta=0.1", "Near-copies beta=0.1", "AA beta=0.5", "Near-copies beta=0.5")
    rows = {row[0]: row for row in grid.rows}
    assert (rows["ReSCENE"][1].mean, rows["ReSCENE"][3].mean, rows["ReSCENE"][3].best) == (50.0, 80.0, False)
    assert rows["FedAvg"][1].mean is None and rows["FedAvg"][3].best and rows["FedAvg"][4] == "no images"


def test_unfinished_and_repeated_runs_are_named_not_counted(tmp_path: Path) -> None:
    runs = [make(tmp_path, "rescene"), make(tmp_path, "rescene"), load_run(write_running(tmp_path / "going", "fedavg"))]
    grid = compare(runs, metrics="aa")
    assert column(grid, "AA (%)")["FedAvg"].mean is None
    assert any(note.startswith("1 unfinished") for note in grid.notes)
    assert any(note.startswith("1 repeated") for note in grid.notes)


@pytest.mark.parametrize(
    ("options", "code", "hint"),
    [
        ({"by": "bet"}, "E141", "did you mean beta"),
        ({"by": "xyzzy"}, "E141", "no run has a setting"),
        ({"metrics": "xyzzy"}, "E143", "unknown metric"),
        ({"metrics": "forgeting"}, "E143", "did you mean forgetting"),
        ({"across": "beta,lr"}, "E144", "only one setting"),
        ({"across": "beta", "by": "model"}, "E144", "several recipes share one cell"),  # they differ in lr
    ],
)
def test_bad_requests_are_explained(tmp_path: Path, options: dict[str, str], code: str, hint: str) -> None:
    other = config("rescene", 0)
    other["train"]["lr"] = 0.1
    runs = [make(tmp_path, "rescene"), make(tmp_path, "rescene", config=other)]
    with pytest.raises(ConfigError, match=hint) as caught:
        compare(runs, **options)
    assert caught.value.code == code


def test_an_ambiguous_name_lists_the_choices(tmp_path: Path) -> None:
    told = config("rescene", 0)
    told["method"]["lr"] = 1.0
    with pytest.raises(ConfigError, match="train.lr or method.lr"):
        compare([make(tmp_path, "rescene", config=told)], by="lr")


def test_leakage_of_a_control_is_shown_though_it_competes_with_nobody(tmp_path: Path) -> None:
    copies = {**leakage(), "near_copies": 1.0}
    grid = compare([make(tmp_path, "raw-upload", leakage=copies), make(tmp_path, "fedavg")], metrics="aa")
    assert column(grid, "Near-copies (% of uploads)")["Raw upload (control)"].mean == 100.0


def test_each_task_and_what_is_known_inside_tasks_can_be_asked_for(tmp_path: Path) -> None:
    run = make(tmp_path, "rescene", within_task=[90.0, 92.0, 94.0, 96.0, 98.0])
    grid = compare([run], metrics="tasks,within-task")
    assert grid.columns[2:8] == ("T1 (%)", "T2 (%)", "T3 (%)", "T4 (%)", "T5 (%)", "Within task (%)")
    (row,) = grid.rows
    assert [cell.mean for cell in row[2:7]] == accuracy_matrix("rescene", 0)[-1].tolist()
    assert row[7].mean == pytest.approx(94.0)  # tasks of one size
    assert compare([run], metrics="task3").columns[2] == "T3 (%)"
    with pytest.raises(ConfigError, match="task5"):
        compare([run], metrics="task6")


def test_rows_are_headed_by_what_is_asked_not_by_how_it_ran(tmp_path: Path) -> None:
    """A path of a named set, the precision, and E_srv where no server trains say nothing about a row."""
    told = {"rescene": ("data/cifar10", "float32", 10), "raw-upload": (None, "auto", 100), "fedavg": (None, "auto", 5)}
    runs = []
    for method, (path, precision, epochs) in told.items():
        own = config(method, 0)
        own["data"], own["train"] = {"name": "cifar10", "path": path}, {"precision": precision, "server_epochs": epochs}
        runs.append(make(tmp_path, method, config=own, aa=float(epochs)))
    grid = compare(runs, metrics="aa")
    assert grid.columns[:3] == ("method", "server_epochs", "n")
    assert [row[:2] for row in grid.rows] == [("Raw upload (control)", "100"), ("ReSCENE", "10"), ("FedAvg", "–")]
    assert compare(runs, by="precision", metrics="aa").columns[1] == "precision"  # asked for


def test_precision_heads_a_column_where_nothing_else_tells_rows_apart(tmp_path: Path) -> None:
    runs = []
    for precision in ("auto", "float32"):
        own = config("rescene", 0)
        own["train"]["precision"] = precision
        runs.append(make(tmp_path, "rescene", config=own))
    assert compare(runs, metrics="aa").columns[:2] == ("method", "precision")
