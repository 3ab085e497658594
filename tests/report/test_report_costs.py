"""The cost table: measured beside nominal, and ratios only to FedAvg in the same setting."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_fixtures import config, write_run

import rescene
from rescene.cli.costing import _cost_table
from rescene.cli.running import print_summary
from rescene.report import load_run
from rescene.report.formatting import times
from rescene.report.groups import group_runs
from rescene.report.page import cost_rows, cost_titles

WORK = (("Site compute", "all sites, whole run"), ("Server compute", "whole run"))
FORECAST = ("client_flops", "client_flops_per_round_mean", "client_flops_per_round_max", "client_state_bytes",
            "uplink_bytes_per_message", "downlink_bytes_per_message", "uplink_bytes", "downlink_bytes")  # fmt: skip


def test_ratios_are_to_fedavg_in_the_same_setting(tmp_path: Path) -> None:
    other = config("refed", 0)
    other["federation"]["beta"] = 0.1
    folders = [write_run(tmp_path / name, name) for name in ("rescene", "fedavg")]
    folders.append(write_run(tmp_path / "refed", "refed", config=other))
    rows = {row.group.method: row.cells for row in cost_rows(group_runs([load_run(folder) for folder in folders]))}
    up = cost_titles().index(("Up", "whole run"))
    ours = rows["rescene"]
    assert (ours[up].measured, ours[up].ratio) == ("4.61 MB", "0.23 × FedAvg")  # 61,440 x 75 bytes, of 268,000 x 75
    assert ours[0].nominal == "76.8 kB" and ours[0].ratio == ""
    assert rows["fedavg"][up].ratio == "" and rows["refed"][up].ratio == ""  # itself; another beta


def test_a_small_ratio_keeps_two_digits() -> None:
    """191 kB against FedAvg's 44.7 MB is not nothing."""
    assert [times(ratio) for ratio in (0.00427, 0.0996, 0.1, 1e-6, 0.0)] == ["0.0043", "0.10", "0.10", "0.0000010", "0"]


def test_work_is_added_up_and_time_told_by_round(tmp_path: Path) -> None:
    runs = [load_run(write_run(tmp_path / name, name)) for name in ("rescene", "fedavg")]
    rows = {row.group.label: row.cells[-2:] for row in cost_rows(group_runs(runs))}
    compute, time = rows["ReSCENE"]
    assert (compute.measured, compute.parts) == ("5.71 TFLOP", ("5 % at sites",))  # 0.31 and 5.4
    assert compute.nominal == "7.14 TFLOP" and rows["FedAvg"][0].parts == ("100 % at sites",)
    assert (time.measured, time.parts) == ("3.3 s", ("sites 1.3 s", "server 2.0 s"))  # 20.1 s and 30 s in 15 rounds


def test_a_run_without_timing_has_no_time(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "timing.json").unlink()
    (row,) = cost_rows(group_runs([load_run(folder)]))
    assert row.cells[-1].measured == "–" and row.cells[-1].value is None


def test_work_that_is_not_counted_is_said_wherever_work_is_shown(tmp_path: Path) -> None:
    """The look through a lens is no FLOP of the sites, and a solver none of the server: 0 would say that nothing was done."""
    seen = config("moments", 0)
    seen["model"]["lens"] = "leaves"
    runs = [
        load_run(write_run(tmp_path / "moments", "moments", config=seen)),
        load_run(write_run(tmp_path / "rescene")),
    ]
    rows = {row.group.method: row.cells for row in cost_rows(group_runs(runs))}
    sites, server = (cost_titles().index((who, unit)) for who, unit in WORK)
    assert rows["moments"][sites].measured == "2.20 TFLOP + lens" and rows["moments"][server].measured == "none counted"
    assert rows["moments"][-2].measured == "2.20 TFLOP + lens"  # of all
    assert rows["rescene"][sites].measured == "310 GFLOP" and rows["rescene"][server].measured == "5.40 TFLOP"
    facts = {"lens": True, "forecast": dict.fromkeys(FORECAST, 1.0) | {"server_flops": 0.0}, "nominal": None}
    names = [row["cost"] for row in _cost_table(facts)]
    assert names[0].endswith("without the lens") and names[-1].endswith("without averages, sums and solver")


def test_terminal_python_and_page_count_what_is_sent_at_the_end_of_a_task(
    tmp_path: Path, image_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished = rescene.run(
        "smoke", out=tmp_path / "run", method="fot", **{"data.path": str(image_folder), "model.width": 4}
    )
    measured = finished.values["cost"]["measured"]
    turns = len(finished.participation())
    assert finished.upload_bytes == load_run(finished.folder).upload_bytes == measured["uplink_bytes"] / turns
    assert finished.upload_bytes > 1.5 * measured["uplink_bytes_per_message"]  # the sketches
    print_summary([finished], "page")
    assert f"{finished.upload_bytes / 1e6:.2f} MB" in capsys.readouterr().out


def test_a_method_that_asks_everybody_has_one_upload_per_site_and_round(tmp_path: Path, image_folder: Path) -> None:
    """Half of the sites are drawn, and Moments asks all of them. Nothing is sent at the end of a task."""
    setting = {"federation.num_clients": 4, "federation.per_round": 2, "federation.num_rounds": 1}
    run = rescene.run("smoke", out=tmp_path / "run", method="moments", **setting, **{"data.path": str(image_folder)})
    measured = run.values["cost"]["measured"]
    rounds = load_run(run.folder).rounds
    assert all(len(row.participants) == 2 and row.num_asked == 4 for row in rounds)
    assert run.upload_bytes == measured["uplink_bytes_per_message"] == measured["uplink_bytes"] / (4 * len(rounds))
