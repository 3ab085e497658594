"""`rescene leaderboard` as a person uses it: an honest run is accepted, each lie is refused with the difference, the page is fresh."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import rescene
from rescene.api import default_folder
from rescene.cli.app import app
from rescene.cli.leaderboard_verbs import leaderboard_rows
from rescene.config import resolve
from rescene.report.leaderboard import csv_of, page_of

ROOT = Path(__file__).parents[2]
SMALL = {
    "method": "fedavg",
    "federation.num_rounds": 2,
    "tasks.limit": 2,
    "model.width": 4,
    "federation.num_clients": 4,
}


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    """A run of two tasks whose folder's name ends in the hash of its recipe."""
    folder = tmp_path_factory.mktemp("kept") / default_folder(resolve("smoke", SMALL)).name
    rescene.run("smoke", out=folder, **SMALL)
    return folder


@pytest.fixture
def submitted(honest, tmp_path):
    """A copy that a test may change."""
    return Path(shutil.copytree(honest, tmp_path / honest.name))


def check(folder, *more):
    return CliRunner().invoke(app, ["leaderboard", "check", str(folder), *map(str, more)])


def rewrite(path, change):
    row = json.loads(path.read_text())
    change(row)
    path.write_text(json.dumps(row))


def refused(result, code, *words):
    assert result.exit_code == 5 and f"error[{code}]" in result.stderr, result.output + result.stderr
    for word in words:
        assert word in result.stderr, result.stderr


def test_an_honest_run_is_accepted_to_the_bit(honest):
    result = check(honest, "--rounds", 2)
    assert result.exit_code == 0, result.output + result.stderr
    assert "rounds: 2 held again, every number the same" in result.output and result.output.endswith("accepted\n")


def test_a_changed_number_is_refused(submitted):
    before = json.loads((submitted / "results.json").read_text())["aa"]
    rewrite(submitted / "results.json", lambda row: row.update(aa=99.0))
    result = check(submitted, "--rounds", 0)
    refused(result, "E543", f"aa: results.json says 99.0, its accuracy matrix gives {before:.10g}")
    told = json.loads(check(submitted, "--rounds", 0, "--json").output)
    assert told["accepted"] is False and told["code"] == "E543" and told["why"][0].startswith("aa: ")


def test_an_accuracy_matrix_that_was_never_recorded_is_refused(submitted):
    def lift(row):
        row["accuracy_matrix"] = [[100.0, None], [100.0, 100.0]]
        row |= {"aa": 100.0, "aia": 100.0, "old": 100.0, "recent": 100.0, "worst_task": 100.0}
        row |= {"forgetting": 0.0, "bwt": 0.0, "balanced_accuracy": None, "incremental_accuracy": [100.0, 100.0]}

    rewrite(submitted / "results.json", lift)
    refused(check(submitted, "--rounds", 0), "E543", "accuracy on task 1 after task 2: metrics.jsonl")


def test_a_changed_recipe_is_refused(submitted):
    config = yaml.safe_load((submitted / "config.yaml").read_text())
    config["train"]["lr"] = 0.5
    (submitted / "config.yaml").write_text(yaml.safe_dump(config))
    refused(check(submitted, "--rounds", 0), "E541", "train.lr: config.yaml says 0.5, results.json says")


def test_a_recipe_changed_in_both_places_has_another_hash(submitted):
    config = yaml.safe_load((submitted / "config.yaml").read_text())
    config["train"]["lr"] = 0.5
    (submitted / "config.yaml").write_text(yaml.safe_dump(config))
    rewrite(submitted / "results.json", lambda row: row["config"]["train"].update(lr=0.5))
    name = submitted.name.rpartition("-")[2]
    refused(check(submitted, "--rounds", 0), "E542", f"the folder's name says {name}, config.yaml gives")
    anonymous = submitted.rename(submitted.with_name("renamed"))  # without a hash only the rounds can tell
    refused(check(anonymous), "E544", "task 1, round 1", "local_loss: metrics.jsonl says")


def test_other_images_are_refused(submitted):
    rewrite(submitted / "env.json", lambda row: row.update(data_fingerprint="0" * 64))
    refused(check(submitted), "E542", f"env.json says {'0' * 64}, the images here give")


def test_on_another_machine_sites_and_accuracy_are_compared_with_room(submitted):
    rewrite(submitted / "env.json", lambda row: row.update(torch="1.0"))
    accepted = check(submitted)
    assert accepted.exit_code == 0 and "accuracies within 5 points; here torch: 1.0 ->" in accepted.output
    lines = [json.loads(line) for line in (submitted / "metrics.jsonl").read_text().splitlines()]
    truth = lines[0]["accuracy"]
    lines[0] |= {"accuracy": truth + 6.0, "participants": [0]}
    (submitted / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    refused(
        check(submitted),
        "E544",
        f"task 1, round 1, accuracy: metrics.jsonl says {truth + 6.0}, held again {truth}",
        "sites: metrics.jsonl says [0]",
    )


def test_a_folder_without_its_files_cannot_be_checked(submitted):
    (submitted / "metrics.jsonl").unlink()
    refused(check(submitted), "E545", "it has no metrics.jsonl")


def test_a_damaged_file_is_named(submitted):
    (submitted / "env.json").write_text("[]")
    refused(check(submitted), "E545", "env.json could not be read")


def test_a_file_of_a_newer_version_is_told_as_such(submitted):
    rewrite(submitted / "results.json", lambda row: row.update(schema=99))
    result = check(submitted, "--rounds", 0)
    assert result.exit_code == 4 and "E414" in result.stderr


def test_write_makes_a_page_and_a_table(honest, tmp_path):
    result = CliRunner().invoke(app, ["leaderboard", "write", str(honest.parent), "--out", str(tmp_path / "board")])
    assert result.exit_code == 0, result.output
    page, table = ((tmp_path / "board" / name).read_text() for name in ("index.html", "leaderboard.csv"))
    assert "FedAvg" in page and "official code, hand computation" in page and len(table.splitlines()) == 2
    empty = CliRunner().invoke(app, ["leaderboard", "write", str(tmp_path / "nowhere")])
    assert empty.exit_code == 2 and "E108" in empty.output + empty.stderr


def test_the_page_in_the_docs_is_up_to_date(monkeypatch):
    monkeypatch.chdir(ROOT)
    rows, out = leaderboard_rows([Path("results")]), Path("docs/leaderboard")
    assert (out / "leaderboard.csv").read_text("utf-8") == csv_of(rows, Path()), "rescene leaderboard write"
    assert (out / "index.html").read_text("utf-8") == page_of(rows, out, Path()), "rescene leaderboard write"
