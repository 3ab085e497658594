"""The theory in words and on the page: what fails is said to fail, what promises nothing is said to promise nothing."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from page_parser import Page
from report_fixtures import config, write_run
from typer.testing import CliRunner

from rescene.cli.app import app
from rescene.core.json_files import record_of
from rescene.core.results import ClassTheory
from rescene.report import load_run, write_report
from rescene.report.figures_theory import class_rows, findings, picks_plot, pool_balance

invoke = CliRunner().invoke


def class_row(name: str = "Coat", task: int = 0, **changes: Any) -> dict[str, Any]:
    """A class for which every statement of the paper holds and says something, unless changed."""
    rounds = {
        "round": [1, 2, 3, 4],
        "num": [50, 50, 50, 50],
        "task_end_error": [0.9, 0.1, 0.05, 0.05],
        "bias": [0.9, 0.1, 0.05, 0.05],
        "deviation": [0.01] * 4,
        "matching_error": [0.04] * 4,
        "surrogate_drift": [0.3] * 4,
        "real_drift": [0.2] * 4,
        "model_distance": [4.0, 3.0, 2.0, 1.0],
        "staleness_bound": [0.95] * 4,
        "num_kept": [10, 20, 30, 40],
        "recent": [False, True, True, True],
    }
    row = {
        "task": task, "class": name, "num_pool": 200, "num_window": 150, "num_kept": 100,
        "target_distance": 0.01, "target_bound": 0.06, "target_random": 0.2, "delta_window": 0.6, "coverage_fails_at": None,
        "full_pool_distance": 0.01, "full_pool_bound": 0.05, "delta_pool": 0.5, "full_pool_coverage_fails_at": None,
        "bias_pool": 0.28, "bias_window": 0.06, "removed_bias": 0.22, "sigma": 0.01, "coherence": 0.98,
        "theorem_needs": 0.08, "corollary_needs": 0.13, "largest_margin": 0.21,
        "kept_to_real": 0.06, "herded_to_real": 0.06, "pool_to_real": 0.27, "window_to_real": 0.06, "full_pool_to_real": 0.26,
        "sampling_error": 0.01, "smoothness": 0.1, "rounds": rounds,
    }  # fmt: skip
    return {**row, **changes}


def record(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"recent_fraction": 0.75, "num_rounds": 4, "real_per_class": 100, "classes": list(rows)}


def typed(*rows: dict[str, Any]) -> list[ClassTheory]:
    return [record_of(ClassTheory, row, []) for row in rows]


def found(*rows: dict[str, Any]) -> dict[str, Any]:
    """Findings by the first words of their statement."""
    return {one.statement.split(",")[0]: one for one in findings(typed(*rows))}


def test_where_everything_holds_it_says_so() -> None:
    one = found(class_row(), class_row("Bag"))
    assert {finding.verdict for finding in one.values()} == {"holds"} and "Budget" not in one
    assert "in 2 of 2 classes: 0.0100 on average, against a bound of 0.0600" in one["Lemma 1"].text
    assert "met in 2 of 2" in one["Theorem 1"].text and "every assumption in 2" in one["Theorem 1"].text
    assert "closer to the real mean in 2 of 2" in one["Corollary 1"].text


def test_failing_coverage_and_a_broken_bound_are_named() -> None:
    broken = class_row(coverage_fails_at=41, target_distance=0.3, target_random=0.31)
    one = found(class_row(), broken)
    assert one["Assumption 1"].verdict == one["Lemma 1"].verdict == "mixed"
    assert "first failed between step 41 and 41, at the median after 41\u00a0%" in one["Assumption 1"].text
    assert "in 1 of 2 classes" in one["Lemma 1"].text and "contradicts" not in one["Lemma 1"].text
    assert "every assumption in 1" in one["Theorem 1"].text and one["Theorem 1"].verdict == "mixed"
    assert found(broken)["Lemma 1"].verdict == "fails"
    lucky = found(class_row(coverage_fails_at=90))
    assert "held although the assumption failed" in lucky["Lemma 1"].text


def test_what_would_contradict_a_proof_is_not_hidden() -> None:
    assert "contradicts the proof" in found(class_row(target_distance=0.07))["Lemma 1"].text
    theorem = found(class_row(herded_to_real=0.3))["Theorem 1"]
    assert theorem.verdict == "fails" and "contradicts the proof" in theorem.text


def test_a_condition_that_is_not_met_promises_nothing() -> None:
    one = found(class_row(removed_bias=0.05, largest_margin=0.05, herded_to_real=0.3, target_random=0.05))
    assert one["Theorem 1"].verdict == one["Corollary 1"].verdict == "silent"
    assert "nothing is promised" in one["Theorem 1"].text and "further in 1" in one["Theorem 1"].text
    assert "In 1 of 1 no choice of direction and bias could meet it" in one["Theorem 1"].text
    assert "The bound is weak" in one["Lemma 1"].text


def test_the_direct_condition_is_named_where_the_fit_is_too_coarse() -> None:
    text = found(class_row(theorem_needs=0.5), class_row(theorem_needs=0.5, largest_margin=0.01))["Theorem 1"].text
    assert "In 1 of 2 no choice" in text and "In 1 that difference alone does exceed it" in text


def test_a_pool_that_fits_and_a_window_of_everything_are_stated() -> None:
    one = found(class_row(num_kept=200, num_window=200), class_row())
    assert "In 1 of 2 classes the whole pool fitted" in one["Budget"].text and "In 1 of 2" in one["Window"].text
    # no draw leaves anything out
    assert "random" not in found(class_row(num_kept=200, target_random=0.0))["Lemma 1"].text


def test_an_empty_staleness_bound_says_nothing() -> None:
    rounds = class_row()["rounds"]
    assert found(class_row(rounds={**rounds, "staleness_bound": [2.5] * 4}))["Proposition 1"].verdict == "silent"
    assert found(class_row(rounds={**rounds, "staleness_bound": [2.5, 1, 1, 1]}))["Proposition 1"].verdict == "mixed"
    assert "Proposition 1" not in found(class_row(rounds={**rounds, "staleness_bound": [None] * 4}))


def test_damaged_rows_are_left_out(tmp_path: Path) -> None:
    rows = record(class_row(), class_row("Bag", target_bound=None), {"task": 1})
    run = load_run(write_run(tmp_path / "r", theory=rows))
    assert [row.class_name for row in class_rows([run])] == ["Coat"]
    assert run.problems == ("results.json: theory.classes[1].target_bound, theory.classes[2].class could not be read",)


def test_the_page_has_the_section_and_its_figures(tmp_path: Path, blank_figures: set[str]) -> None:
    blank_figures |= {"theory-distance", "theory-picks", "theory-staleness"}
    folders = [
        write_run(tmp_path / f"s{s}", seed=s, theory=record(class_row("<b>Coat</b>"), class_row())) for s in (0, 1)
    ]
    page = write_report(folders, tmp_path / "out" / "report.html")
    html = page.read_text("utf-8")
    ids = Page(html).values("id")
    assert {"theory", "figure-theory-distance", "figure-theory-picks", "figure-theory-staleness"} <= set(ids) and len(
        ids
    ) == len(set(ids))
    assert "<b>Coat</b>" not in html and "seed 1" in html and 'href="#theory"' in html
    with (page.parent / "plots" / "theory-staleness.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 4 and float(rows[0]["task_end_error"]) == 0.9
    other = write_report([write_run(tmp_path / "plain", "fedavg")], tmp_path / "plain-out" / "report.html")
    assert 'id="theory"' not in other.read_text("utf-8")


@pytest.mark.slow
def test_the_section_names_whose_buffer_it_is(tmp_path: Path) -> None:
    folders = []
    for epochs, aa in ((10, 80.0), (100, 87.0)):
        told = config("rescene", 0)
        told["train"]["server_epochs"] = epochs
        folders.append(write_run(tmp_path / str(epochs), config=told, aa=aa, theory=record(class_row())))
    html = write_report(folders, tmp_path / "report.html").read_text("utf-8")
    lead = html.partition('id="theory"')[2].partition("</p>")[0]
    assert lead.endswith("From ReSCENE E_srv=100.")


def test_the_verb_prints_a_table_words_and_json(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / "runs" / f"s{seed}", seed=seed, theory=record(class_row(coverage_fails_at=7)))
    one = invoke(app, ["paper", "theory", str(tmp_path / "runs" / "s0")])
    assert (
        one.exit_code == 0
        and "T1 Coat" in one.output
        and "Lemma 1, the buffer approaches its target: holds" in one.output
    )
    assert "directional coverage: fails" in one.output
    both = invoke(app, ["paper", "theory", str(tmp_path / "runs")]).output
    assert "All 2 runs together, 2 classes" in both
    facts = json.loads(invoke(app, ["paper", "theory", str(tmp_path / "runs"), "--json"]).output)
    assert len(facts) == 2 and facts[0]["theory"]["classes"][0]["coverage_fails_at"] == 7
    assert {"statement", "verdict", "text"} == set(facts[0]["findings"][0])


@pytest.mark.parametrize("case", ["nowhere", "other method", "unfinished"])
def test_the_verb_says_what_is_missing(tmp_path: Path, case: str) -> None:
    folder = tmp_path / "r"
    if case != "nowhere":
        write_run(folder, "fedavg", theory=None)
    if case == "unfinished":
        (folder / "results.json").unlink()
    result = invoke(app, ["paper", "theory", str(folder)])
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert ("E108" if case == "nowhere" else "E160") in result.output and "fix" in result.output


def test_the_pool_is_shown_as_it_is_held_and_as_it_is_drawn(tmp_path: Path, blank_figures: set[str]) -> None:
    blank_figures.add("pool")
    own = config("rescene", 0)
    own["method"] |= {"alpha": 0.5}
    rows = (class_row("Coat", num_kept=100), class_row("Bag", task=1, num_pool=400, num_kept=100))
    run = load_run(write_run(tmp_path / "run", theory=record(*rows), config=own))
    plot = pool_balance(run)
    assert plot is not None
    # an earlier class has its buffer, the newest every upload: 100 and 400; square roots 10 and 20
    assert [(row["class"], row["n_c"], row["pi_c"]) for row in plot.rows] == [("Coat", 100, 20.0), ("Bag", 400, 80.0)]
    assert [row["q_c"] for row in plot.rows] == pytest.approx([100 / 3, 200 / 3])
    page = write_report([tmp_path / "run"], tmp_path / "r.html").read_text("utf-8")
    assert "What the server trains on" in page and 'id="figure-pool"' in page
    assert pool_balance(load_run(write_run(tmp_path / "other", "fedavg"))) is None


def test_picks_are_summed_over_classes_and_missing_in_older_records() -> None:
    picks = picks_plot(typed(class_row(), class_row("Bag")))
    assert picks is not None
    assert [row["num_kept"] for row in picks.rows] == [20, 40, 60, 80]
    assert [row["num"] for row in picks.rows] == [100] * 4
    older = class_row()
    older["rounds"] = {key: value for key, value in older["rounds"].items() if key not in ("num_kept", "recent")}
    assert picks_plot(typed(older)) is None
