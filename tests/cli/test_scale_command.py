"""`rescene scale` as a person uses it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rescene.cli.app import app

DOCS = Path(__file__).parents[2] / "docs" / "cost.md"
invoke = CliRunner().invoke
SMALL = ["scale", "demo", "federation.num_rounds=1", "model.width=2", "--server-gflops", "100"]


def test_tables_for_the_recipes_sites_per_round_and_for_a_tenth():
    output = invoke(app, [*SMALL, "--clients", "10..1000"]).output
    assert "5 sites in a round" in output and "10% of the sites in a round" in output
    assert output.count("\n1,000 ") == 4 and "a site holds 120 images of a task" in output


def test_figures_as_json():
    rows = json.loads(invoke(app, [*SMALL, "--clients", "20,300", "--per-round", "7", "--json"]).output)
    assert [(row["num_clients"], row["per_round"]) for row in rows] == [(20, 7), (300, 7)]
    assert rows[0]["turns"] == pytest.approx(7 * 5 / 20) and set(rows[0]["limits"]) >= {"memory", "link", "training"}


def test_the_speed_of_this_device_is_the_default():
    rows = json.loads(invoke(app, [*SMALL[:-2], "--clients", "10", "--per-round", "5", "--json"]).output)
    assert rows[0]["training_s"] > 0


@pytest.mark.parametrize(("words", "code"), [
    (["--clients", "many"], "E116"),
    (["--clients", "0,10"], "E116"),
    (["--clients", "10..10000000"], "E116"),
    (["--per-round", "0"], "E116"),
    (["--per-round", "120%"], "E116"),
    (["--per-round", "some"], "E116"),
    (["--server-gb", "0"], "E115"),
    (["method=joint"], "E116"),
    (["privacy.mechanism=release", "method.start=noise", "privacy.epsilon=8"], "E114"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(words, code):
    result = invoke(app, [*SMALL[:2], "--clients", "10", "--server-gflops", "100", *words])
    assert result.exit_code == 2 and code in result.output and "Traceback" not in result.output


@pytest.mark.slow
def test_the_page_shows_what_the_command_prints():
    words = ["scale", "cifar10", "--server-gflops", "200000", "--per-round", "10%"]
    lines = [line.rstrip() for line in invoke(app, words).output.splitlines() if "as published" not in line]
    page = {line.rstrip() for line in DOCS.read_text().splitlines()}
    assert len(lines) > 15 and [line for line in lines if line not in page] == []
