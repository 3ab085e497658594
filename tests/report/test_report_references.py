"""Reference lines frame the comparison: they are shown, but nobody is above or below them in the first words."""

from pathlib import Path

from report_fixtures import write_run

from rescene.report import load_run
from rescene.report.groups import group_runs, headline_group
from rescene.report.summary import verdict


def test_joint_training_is_no_rival(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, method=name) for name in ("rescene", "fedavg", "joint")]
    words = verdict(group_runs([load_run(folder) for folder in folders]))
    assert "FedAvg" in words.title and "Joint" not in words.title


def test_a_reference_alone_still_opens_the_page(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, method=name) for name in ("joint", "fedavg")]
    runs = [load_run(folder) for folder in folders]
    assert headline_group(group_runs(runs)).method == "fedavg"
    assert headline_group(group_runs(runs[:1])).method == "joint"
