"""The transcription: every table is complete, and the numbers agree with each other as the paper says they do."""

import pytest

from rescene.paper import printed, table_names

TASKS = {"cifar10": 5, "cifar100": 10, "tinyimagenet": 10}
# table -> (lines, cells), counted on the printed page: e.g. Table 1 has 3 sets x 3 betas x 8 methods, AA and AIA each
SIZES = {
    "main": (144, 72), "safl": (18, 9), "clients-100": (48, 8), "backbones": (36, 9), "buffers": (10, 5),
    "full-accumulation": (30, 6), "server-epochs": (14, 5), "office31": (40, 8), "per-task": (670, 82),
    "matched-memory": (45, 10), "lambda": (8, 4), "budget": (8, 4), "imbalance": (8, 4), "cost-client": (120, 24),
    "cost-total": (40, 8), "privacy": (52, 16),
}  # fmt: skip


def value(table, cell, metric):
    (found,) = [n for n in printed(table) if (n.cell, n.metric) == (cell, metric)]
    return found


def cells(table):
    return list(dict.fromkeys(n.cell for n in printed(table)))


def values(table, cell):
    return {n.metric: n.mean for n in printed(table) if n.cell == cell}


def test_every_table_is_complete_and_no_number_stands_twice():
    assert set(SIZES) == set(table_names())
    for table, (lines, num_cells) in SIZES.items():
        assert (len(printed(table)), len(cells(table))) == (lines, num_cells), table
        assert len({(n.cell, n.metric) for n in printed(table)}) == lines, table
        assert all(n.place.startswith("Table ") for n in printed(table))


@pytest.mark.parametrize(
    ("table", "cell", "metric", "mean", "std"),
    [
        ("main", "cifar10/0.1/rescene", "aa", 61.78, 1.14),
        ("main", "cifar10/0.1/fedavg", "aa", 10.00, 0.00),
        ("main", "cifar100/0.5/refed", "aia", 49.89, 0.10),
        ("main", "tinyimagenet/1.0/target", "aia", 30.56, 4.35),
        ("safl", "tinyimagenet/0.1/fedaf", "aia", 10.37, None),
        ("clients-100", "cifar10/0.5/glfc/N=100", "aia_change", 0.31, None),
        ("backbones", "cifar100/0.5/fedcbdr/ViT-Small-4", "client_pflop", 2320.76, None),
        ("server-epochs", "cifar10/0.1/rescene/E_srv=10", "aia", 65.03, None),
        ("per-task", "tinyimagenet/1.0/rescene", "task_8", 44.8, None),
        ("imbalance", "cifar10/0.5/rescene/alpha=1.0+tau=0.0", "aa", 67.26, None),
        ("cost-client", "tinyimagenet/0.5/fedcbdr", "state_mb", 1519.68, None),
        ("privacy", "cifar10/0.5/refed/sigma=5", "task_0", 8.10, None),
    ],
)
def test_spot_values(table, cell, metric, mean, std):
    found = value(table, cell, metric)
    assert (found.mean, found.std) == (mean, std)


def test_only_the_main_table_prints_deviations():
    assert all((n.std is not None) == (table == "main") for table in table_names() for n in printed(table))


# "each row averages to the AA of the run" (Table 7), printed to one decimal


def test_per_task_rows_average_to_aa():
    for cell in cells("main"):
        tasks = values("per-task", cell)
        assert len(tasks) == TASKS[cell.split("/")[0]]
        mean = sum(tasks.values()) / len(tasks)
        assert mean == pytest.approx(value("main", cell, "aa").mean, abs=0.06), cell
    for cell in cells("safl"):
        tasks = values("per-task", cell).values()
        assert sum(tasks) / len(tasks) == pytest.approx(value("safl", cell, "aa").mean, abs=0.06)


def test_office31_and_privacy_rows_average_to_aa():
    for cell in cells("office31"):
        row = values("office31", cell)
        # GLFC: 21.833 and 21.84
        assert sum(row[f"task_{j}"] for j in range(3)) / 3 == pytest.approx(row["aa"], abs=0.0101)
    for cell in cells("privacy"):
        row = values("privacy", cell)
        if "task_0" in row:
            assert sum(row[f"task_{j}"] for j in range(5)) / 5 == pytest.approx(row["aa"], abs=0.006)


def test_the_same_experiment_has_the_same_numbers_in_every_table():
    default = {
        "cifar10/0.5/rescene": ["buffers", "lambda", "budget", "imbalance", "matched-memory", "full-accumulation"]
    }
    suffix = {"buffers": "temporal", "lambda": "lambda=0.75", "budget": "B=1000", "imbalance": "alpha=0.5+tau=1.0",
              "matched-memory": "default", "full-accumulation": "temporal"}  # fmt: skip
    for cell, tables in default.items():
        for table in tables:
            for metric in ("aa", "aia"):
                assert value(table, f"{cell}/{suffix[table]}", metric).mean == value("main", cell, metric).mean
    for n in printed("backbones"):
        if n.setting == "ResNet-18" and n.metric in ("aa", "aia"):
            assert n.mean == value("main", f"cifar100/0.5/{n.method}", n.metric).mean
    for n in printed("full-accumulation"):
        if n.setting == "temporal" and n.metric in ("aa", "aia"):
            assert n.mean == value("main", f"{n.data}/0.5/rescene", n.metric).mean
    full_pool = value("buffers", "cifar10/0.5/rescene/full-pool", "aa").mean
    assert value("lambda", "cifar10/0.5/rescene/lambda=1.00", "aa").mean == full_pool


def test_changes_and_ratios_follow_from_the_other_columns():
    for cell in cells("clients-100"):
        row, base = values("clients-100", cell), values("main", cell.removesuffix("/N=100"))
        assert row["aa"] - base["aa"] == pytest.approx(row["aa_change"], abs=0.006)
        assert row["aia"] - base["aia"] == pytest.approx(row["aia_change"], abs=0.006)
    for cell in cells("cost-client"):
        row, data = values("cost-client", cell), cell.split("/")[0]
        ratio = row["client_pflop"] / values("cost-client", f"{data}/0.5/fedavg")["client_pflop"]
        assert ratio == pytest.approx(row["client_compute_ratio"], abs=0.051)
    for cell in cells("cost-total"):
        row = values("cost-total", cell)
        run = values("cost-client", cell)["client_pflop"]
        assert row["task_client_pflop"] == pytest.approx(run / 5, abs=0.0051)
        if value("cost-total", cell, "task_server_pflop").note == "":
            assert row["task_client_pflop"] + row["task_server_pflop"] == pytest.approx(
                row["task_total_pflop"], abs=0.006
            )
            assert 100 * row["task_client_pflop"] / row["task_total_pflop"] == pytest.approx(
                row["client_share"], abs=0.06
            )
    for data in TASKS:
        part, whole = (values("full-accumulation", f"{data}/0.5/rescene/{s}") for s in ("temporal", "keep-all"))
        assert part["samples"] / whole["samples"] == pytest.approx(part["samples_ratio"], abs=0.0051)
