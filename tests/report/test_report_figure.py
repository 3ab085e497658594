"""``rescene plot``: every kind in every format, drawn by the page's functions, with the numbers beside it."""

from __future__ import annotations

import csv
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from report_fixtures import accuracy_matrix, config, cost, leakage, write_run

from rescene.core.errors import ConfigError
from rescene.report import load_run
from rescene.report.drawing import Plot, _drawn, together
from rescene.report.figures_accuracy import forgetting_bars, incremental_curve, matching_curve, rounds_curve
from rescene.report.figures_tradeoffs import accuracy_for_compute, accuracy_for_upload
from rescene.report.groups import RunGroup, group_runs
from rescene.report.page import KINDS, figure, page_cells
from rescene.report.tables import PAGE


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> list[RunGroup]:
    """Three methods, two seeds each; the control sends the images themselves."""
    base = tmp_path_factory.mktemp("runs")
    copies = {**leakage(), "near_copies": 1.0, "nearest_rms_median": 0.0}
    folders = []
    for seed in (0, 1):
        folders += [write_run(base / f"{method}-{seed}", method, seed) for method in ("rescene", "fedavg")]
        folders.append(write_run(base / f"raw-{seed}", "raw-upload", seed, leakage=copies))
    return group_runs([load_run(folder) for folder in folders])


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "frontier"])  # which needs other runs
def test_every_kind_gives_a_figure_and_its_numbers(groups: list[RunGroup], tmp_path: Path, kind: str) -> None:
    picture, table = figure(groups, kind, tmp_path / f"{kind}.png")
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = rows_of(table)
    assert rows and {"panel"} < set(rows[0])


@pytest.mark.parametrize(("ending", "start"), [(".pdf", b"%PDF"), (".svg", b"<?xml")])
def test_print_formats_repeat_to_the_byte(groups: list[RunGroup], tmp_path: Path, ending: str, start: bytes) -> None:
    first, _ = figure(groups, "old-recent", tmp_path / f"a{ending}")
    again, _ = figure(groups, "old-recent", tmp_path / f"b{ending}")
    assert first.read_bytes() == again.read_bytes() and first.read_bytes().startswith(start)


def test_bands_and_bars_of_percentages_stay_below_100(tmp_path: Path) -> None:
    rounds = [{"kind": "round", "task": t, "round": r, "participants": [0], "uplink_bytes": 1, "downlink_bytes": 1}
              for t in (0, 1) for r in (0, 1)]  # fmt: skip
    folders = []
    for seed, value in enumerate((100.0, 70.0)):  # mean 85, deviation 21.2
        folder = write_run(tmp_path / f"run-{seed}", "rescene", seed, incremental_accuracy=[value] * 3)
        lines = [json.dumps(row | {"accuracy": value}) for row in rounds]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        folders.append(folder)
    groups = group_runs([load_run(folder) for folder in folders])
    for plot in (incremental_curve(groups), rounds_curve(groups)):
        assert plot is not None
        with _drawn(plot) as sheet:
            (axes,) = sheet.axes
            tops = [band.get_paths()[0].vertices[:, 1].max() for band in axes.collections]
            assert tops == [100.0]
            assert max(tick for tick in axes.get_yticks() if tick <= axes.get_ylim()[1]) <= 100


def ticks(plot: Plot | None) -> tuple[list[str], list[str]]:
    """What stands at the two axes of a plot."""
    assert plot is not None
    with _drawn(plot) as sheet:
        sheet.draw_without_rendering()
        (axes,) = sheet.axes
        both = [[text.get_text() for text in axis.get_ticklabels(which="both")] for axis in (axes.xaxis, axes.yaxis)]
    return both[0], both[1]


def test_few_rounds_are_whole_numbers(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    few = [line for line in lines if json.loads(line).get("kind") == "round"][:3]
    (folder / "metrics.jsonl").write_text("\n".join(few))
    shown = ticks(rounds_curve(group_runs([load_run(folder)])))[0]
    assert {"1", "2", "3"} <= set(shown) and not any("." in text for text in shown)


def test_a_loss_within_one_power_of_ten_has_readable_ticks(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for i, line in enumerate(lines):
        line["notes"] = {"matching_loss": 0.2 + 0.01 * i}
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    shown = ticks(matching_curve(group_runs([load_run(folder)])))[1]
    assert sum(bool(text) for text in shown) > 1 and not any("$" in text for text in shown)


def test_curves_hold_both_panels_and_every_seed(groups: list[RunGroup], tmp_path: Path) -> None:
    rows = rows_of(figure(groups, "curves", tmp_path / "c.svg")[1])
    assert {row["panel"] for row in rows} == {"tasks", "incremental"}
    told = [
        float(row["accuracy"])
        for row in rows
        if (row["panel"], row["method"], row["seed"]) == ("tasks", "ReSCENE", "1")
    ]
    assert told == accuracy_matrix("rescene", 1)[-1].tolist()


def test_privacy_shows_the_control_and_leaves_out_who_sends_no_images(groups: list[RunGroup], tmp_path: Path) -> None:
    rows = rows_of(figure(groups, "privacy", tmp_path / "p.svg")[1])
    assert {row["method"] for row in rows} == {"ReSCENE", "Raw upload (control)"}
    control = [row for row in rows if row["method"].startswith("Raw")]
    assert {row["near_copies_percent"] for row in control} == {"100.0", ""}
    assert {row["nearest_rms_median"] for row in control} == {"0.0", ""}


def noised(tmp_path: Path, start: str, sigma: float, epsilon: float | None) -> Path:
    told = config("rescene", 0)
    told["method"]["start"] = start
    told["privacy"] = {"mechanism": "release", "noise_multiplier": sigma}
    kept = {"private": True, "mechanism": "release", "noise_multiplier": sigma, "epsilon": epsilon}
    return write_run(tmp_path / f"{start}-{sigma}", "rescene", 0, config=told, privacy=kept)


def test_privacy_has_a_line_over_the_noise_for_each_mode(tmp_path: Path) -> None:
    """Surrogates from noise stand on another line than moments, though one mechanism guards both."""
    told = [
        ("coloured", 0.6, 8.0),
        ("coloured", 1.0, 4.0),
        ("noise", 0.7, 8.0),
        ("noise", 1.2, 4.0),
        ("real", 1.0, 5.0),
    ]
    groups = group_runs([load_run(noised(tmp_path, *each)) for each in told])
    plots = [plot for plot in KINDS["privacy"][0](groups) if plot]
    assert [plot.name for plot in plots] == ["near-copies", "distance", "noise"]
    lines: dict[str, list[float]] = {}
    for row in plots[-1].rows:
        lines.setdefault(row["mode"], []).append(row["sigma"])
    assert lines == {"moments": [0.6, 1.0], "release": [0.7, 1.0, 1.2]}


def test_who_pays_nothing_is_named_under_the_figure(tmp_path: Path) -> None:
    """Log axes have no 0, and a method that is not there without a word looks forgotten."""
    free = cost(61_440, 75, True)
    free["measured"]["client_flops"] = 0.0
    folders = [write_run(tmp_path / "a"), write_run(tmp_path / "b", "raw-upload", cost=free)]
    compute, upload = (
        draw(group_runs([load_run(f) for f in folders])) for draw in (accuracy_for_compute, accuracy_for_upload)
    )
    assert compute and {row["method"] for row in compute.rows} == {"ReSCENE"}
    assert upload and "not drawn" not in axis_label(upload)
    assert "not drawn, at 0: Raw upload (control)" in axis_label(compute)


def test_bars_show_the_forgetting_of_the_table(tmp_path: Path) -> None:
    """8.15 came out as 8.2 in the table and, as a mean of 8.149999999999999, as 8.1 in the bar beside it."""
    groups = group_runs([load_run(write_run(tmp_path / "run", forgetting=8.15))])
    bars, cell = forgetting_bars(groups), page_cells(groups)[0][[column.key for column in PAGE].index("forgetting")]
    assert bars
    with _drawn(bars) as sheet:
        assert [text.get_text() for text in sheet.axes[0].texts] == [cell.text] == ["8.2"]


def axis_label(plot: Plot) -> str:
    with _drawn(plot) as sheet:
        return " ".join(sheet.axes[0].get_xlabel().split())


@pytest.mark.parametrize("least", [4e12, 2e15, 3e16])
def test_sizes_below_a_panel_do_not_overprint(tmp_path: Path, least: float) -> None:
    folders = []
    for method, flops in (("rescene", least), ("fedavg", 7e16)):
        paid = cost(61_440, 75, True)
        paid["measured"]["client_flops"] = flops
        folders.append(write_run(tmp_path / method, method, cost=paid))
    plot = accuracy_for_compute(group_runs([load_run(folder) for folder in folders]))
    assert plot
    with _drawn(together([plot, plot], 2)) as sheet:
        sheet.draw_without_rendering()
        for part in sheet.subfigs:
            axes = part.axes[0]
            inside = [label for label in axes.get_xticklabels() if label.get_text() and _within(axes, label)]
            boxes = [label.get_window_extent() for label in inside]
            assert boxes and all(a.x1 < b.x0 for a, b in pairwise(boxes))


def _within(axes: Any, label: Any) -> bool:
    low, high = axes.get_xlim()
    return bool(low <= label.get_position()[0] <= high)


def test_panels_share_one_legend_in_the_methods_colours(groups: list[RunGroup], tmp_path: Path) -> None:
    svg = figure(groups, "cost", tmp_path / "c.svg")[0].read_text("utf-8")
    for label in ("ReSCENE", "FedAvg", "Raw upload (control)"):
        assert svg.count(f">{label}</text>") == 1
    assert "#0072b2" in svg and ">Accuracy for the bytes sent</text>" in svg


def test_panels_fit_the_page() -> None:
    plots = [Plot(str(i), "", "", [{"a": 1}], lambda sheet: sheet.subplots(), 3.4, 3.6) for i in range(4)]
    sheet = together(plots, 3)
    assert (sheet.width_in, sheet.height_in) == (pytest.approx(3 * 3.6), pytest.approx(2 * 3.4 + 0.6))


def test_bad_requests_are_explained(groups: list[RunGroup], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean curves"):
        figure(groups, "curve", tmp_path / "x.png")
    with pytest.raises(ConfigError, match="ends in '.gif'"):
        figure(groups, "curves", tmp_path / "x.gif")
    weights = [group for group in groups if group.method == "fedavg"]
    for kind in ("privacy", "surrogates"):
        with pytest.raises(ConfigError, match="nothing to draw") as caught:
            figure(weights, kind, tmp_path / "x.png")
        assert caught.value.code == "E146" and not (tmp_path / "x.png").exists()
