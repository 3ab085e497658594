"""The frontier: what a run's mode is called, where its point stands, and which stored points stand beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_fixtures import config, leakage, write_run

from rescene.core.errors import ConfigError
from rescene.report import figures_tradeoffs, load_run, write_report
from rescene.report.figures_tradeoffs import Point, beside_stored, frontier, mode_of, points_of, stored_points
from rescene.report.groups import RunGroup, group_runs
from rescene.report.page import figure

PANELS = {"frontier-copies", "frontier-distance", "frontier-epsilon"}
GUARANTEE = {"private": True, "delta": 1e-5, "noise_multiplier": 0.6, "statement": "private"}


def run(folder: Path, method: str = "rescene", seed: int = 0, start: str = "real", **privacy: Any) -> Path:
    """A run in some mode; weights are sent by FedAvg."""
    own = config(method, seed) | {"method": {"name": method, "start": start}}
    told = {"config": own, "privacy": {"private": False, "statement": "none", **privacy}}
    if method == "raw-upload":
        told["leakage"] = {**leakage(), "near_copies": 1.0, "nearest_rms_median": 0.0}
    if start == "coloured":
        told["leakage"] = {**leakage(), "near_copies": 0.0, "nearest_rms_median": 0.4}
    return write_run(folder, method, seed, **told)


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    def dp(epsilon: float, mechanism: str = "release") -> dict[str, Any]:
        return GUARANTEE | {"epsilon": epsilon, "mechanism": mechanism}

    paper = {"mechanism": "paper-experiment", "noise_multiplier": 3.0}
    made = {
        "real start": run(tmp_path / "a"),
        "class moments": run(tmp_path / "b", start="coloured"),
        "moments ε=8": run(tmp_path / "c", start="coloured", **dp(7.9999)),
        "moments ε=1": run(tmp_path / "d", start="coloured", **dp(1.0)),
        "release ε=8": run(tmp_path / "e", start="noise", **dp(8.0)),
        "per-example ε=8": run(tmp_path / "f", start="noise", **dp(8.0, "per-example")),
        "σ=3": run(tmp_path / "g", **paper),
        "DP-SGD ε=8": run(tmp_path / "h", "fedavg", **dp(8.0, "dp-sgd")),
        "no noise": run(tmp_path / "i", "refed"),
        "release, test noise": run(tmp_path / "j", start="noise", mechanism="release", noise_multiplier=1.0),
        "": run(tmp_path / "k", "raw-upload"),
    }
    for i, folder in enumerate(made.values()):  # group_runs tells runs apart by their recipe
        text = (folder / "results.json").read_text()
        (folder / "results.json").write_text(text.replace('"lr": 0.05', f'"lr": 0.05, "way": {i}'))
    return made


def groups_of(*folders: Path) -> list[RunGroup]:
    return group_runs([load_run(folder) for folder in folders])


def test_every_mode_has_its_name(folders: dict[str, Path]) -> None:
    assert [mode_of(load_run(folder)) for folder in folders.values()] == list(folders)


def test_points_hold_the_mean_over_seeds_and_what_was_measured(folders: dict[str, Path], tmp_path: Path) -> None:
    again = run(tmp_path / "again", seed=1)
    text = (again / "results.json").read_text()
    (again / "results.json").write_text(text.replace('"lr": 0.05', '"lr": 0.05, "way": 0'))
    (point,) = points_of(groups_of(folders["real start"], again))
    each = [load_run(folder).results.aa for folder in (folders["real start"], again)]
    assert point.num == 2 and point.aa == pytest.approx(sum(each) / 2) and point.aa_std is not None
    assert (point.near_copies_percent, point.nearest_rms, point.epsilon) == (97.0, 0.012, None)
    (weights,) = points_of(groups_of(folders["DP-SGD ε=8"]))
    assert (weights.near_copies_percent, weights.nearest_rms, weights.epsilon) == (None, None, 8.0)


def test_three_panels_each_with_the_points_it_can_place(folders: dict[str, Path], tmp_path: Path) -> None:
    copies, distance, epsilon = frontier(points_of(groups_of(*folders.values())))
    assert (
        {row["method"] for row in copies.rows} == {row["method"] for row in distance.rows} == {"rescene", "raw-upload"}
    )
    assert len(epsilon.rows) == len(folders)
    picture, table = figure(groups_of(*folders.values()), "frontier", tmp_path / "f.svg")
    text = picture.read_text("utf-8")
    assert all(f">{mode}<" in text for mode in folders if mode not in ("", "no noise", "DP-SGD ε=8"))
    assert ">DP-SGD<" in text and ">none<" in text and text.count(">moments<") == 1
    assert len(table.read_text("utf-8").splitlines()) == 1 + sum(len(p.rows) for p in (copies, distance, epsilon))


def test_one_mode_is_no_frontier(folders: dict[str, Path], tmp_path: Path) -> None:
    same = groups_of(folders["real start"], folders["no noise"], folders[""])
    assert frontier(points_of(same)) == []
    with pytest.raises(ConfigError, match="nothing to draw for frontier") as caught:
        figure(same, "frontier", tmp_path / "f.png")
    assert "two modes of privacy" in caught.value.why


def test_stored_points_of_the_same_problem_stand_beside_a_single_run(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, blank_figures: set[str]
) -> None:
    blank_figures |= PANELS
    (own,) = points_of(groups_of(folders["real start"]))
    stored = [
        replace(own, mode=mode, epsilon=epsilon, stored=True)
        for mode, epsilon in (("real start", None), ("moments ε=8", 8.0), ("class moments", None))
    ]
    elsewhere = replace(stored[1], setting="another problem")
    monkeypatch.setattr(figures_tradeoffs, "stored_points", lambda: [*stored, elsewhere])
    assert beside_stored(groups_of(folders["real start"])) == [own, *stored[1:]]
    page = write_report([folders["real start"]], tmp_path / "page.html").read_text("utf-8")
    assert 'id="frontier"' in page and "Accuracy against what is guaranteed" in page
    monkeypatch.setattr(figures_tradeoffs, "stored_points", lambda: [elsewhere])
    page = write_report([folders["real start"]], tmp_path / "page.html").read_text("utf-8")
    assert 'id="frontier"' not in page and "Accuracy against near-copies" not in page  # one point says nothing


def test_a_page_of_several_modes_says_that_some_give_a_guarantee(
    folders: dict[str, Path], tmp_path: Path, blank_figures: set[str]
) -> None:
    blank_figures |= PANELS
    page = write_report([folders["real start"], folders["moments ε=8"]], tmp_path / "page.html").read_text("utf-8")
    assert 'id="frontier"' in page and "Some runs on this page state a guarantee" in page


def test_what_ships_is_readable_and_covers_every_mode() -> None:
    found = stored_points()
    assert all(isinstance(point, Point) and point.stored and 0 <= point.aa <= 100 for point in found)
    assert len({(point.setting, point.method, point.mode) for point in found}) == len(found)
    assert {point.method for point in found} >= {"rescene", "fedavg", "fedcbdr", "refed"}


def test_sums_are_named_after_their_lens():
    """Exact ones are a simulation, and say so; noised ones say epsilon."""
    from pathlib import Path

    from rescene.report import load_run
    from rescene.report.figures_tradeoffs import mode_of

    stored = Path(__file__).parents[2] / "results" / "lens"
    assert mode_of(load_run(stored / "cifar10-beta0.5-s0")) == "leaves, exact sums"
    assert mode_of(load_run(stored / "cifar10-eps8-s0")) == "leaves ε=8"
