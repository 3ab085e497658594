"""`rescene leaderboard` as a person uses it: an honest run is accepted, each lie is refused with the difference, the page is fresh."""

import json
import shutil
import warnings
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import rescene
from rescene.api import default_folder
from rescene.cli.app import app
from rescene.cli.look_verbs import leaderboard_rows
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


@pytest.fixture(scope="module")
def honest_images(tmp_path_factory):
    """A run whose sites send images, so that near-copies are counted."""
    more = SMALL | {"method": "rescene", "train.server_epochs": 1, "method.num_steps": 2}
    folder = tmp_path_factory.mktemp("kept") / default_folder(resolve("smoke", more)).name
    rescene.run("smoke", out=folder, **more)
    return folder


@pytest.fixture
def submitted(honest, tmp_path):
    """A copy that a test may change."""
    return Path(shutil.copytree(honest, tmp_path / honest.name))


def check(folder, *more):
    return CliRunner().invoke(app, ["leaderboard", "check", str(folder), *map(str, more)])


def put(place, value):
    """A change of one value; the place is dotted."""

    def change(row):
        *sections, key = place.split(".")
        for section in sections:
            row = row[section]
        row[key] = value(row.get(key)) if callable(value) else value

    return change


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


LIES = {
    "a guarantee": (lambda row: row["privacy"].update(private=True, epsilon=1.0), "E547", "privacy.epsilon: results.json says 1.0"),
    "a statement": (put("privacy.statement", "Private."), "E547", "privacy.statement: results.json says 'Private.'"),
    "another title": (put("style.title", "Best"), "E547", "style.title: results.json says 'Best', the method says 'FedAvg'"),
    "another upload": (put("style.uploads", "sums"), "E547", "style.uploads: results.json says 'sums'"),
    "other words": (put("style.sends", "nothing"), "E547", "style.sends: results.json says 'nothing'"),
    "another method": (put("method", "rescene"), "E547", "method: results.json says 'rescene', the recipe says 'fedavg'"),
    "less work of sites": (put("cost.measured.client_flops", 1), "E543", "client_flops: results.json says 1, metrics.jsonl"),
    "work of the server": (put("cost.measured.server_flops", 9), "E543", "server_flops: results.json says 9, metrics.jsonl 0"),
    "no work": (put("cost.measured.client_flops", None), "E543", "client_flops: results.json says nothing, metrics.jsonl"),
    "fewer bytes": (put("cost.measured.uplink_bytes", 1), "E543", "uplink_bytes: results.json says 1, metrics.jsonl"),
    "more bytes": (put("cost.measured.uplink_bytes", lambda sent: 2 * sent), "E543", "uplink_bytes: results.json says"),
    "fewer bytes down": (put("cost.measured.downlink_bytes", 1), "E543", "downlink_bytes: results.json says 1, metrics.jsonl"),
    "near-copies of nothing": (put("leakage", {"near_copies": 0.0}), "E543", "leakage.near_copies: results.json says 0.0"),
    "damaged near-copies": (put("leakage", {"num_images": 3}), "E545", "results.json: leakage could not be read"),
    "other sizes of tasks": (lambda row: row["tasks"][0].update(test_size=1), "E543", "aa: results.json says"),
    "fewer tasks": (lambda row: row["tasks"].pop(), "E545", "results.json: AA"),
    "no accuracies": (put("accuracy_matrix", []), "E545", "0 accuracies in 0 rows"),
    "a hole in the matrix": (lambda row: row["accuracy_matrix"][1].__setitem__(0, None), "E545", "2 accuracies in 2 rows"),
    "a damaged table": (lambda row: row["confusion"][0].pop(), "E545", "the confusion table is not square"),
    "another seed": (put("seed", 7), "E543", "seed: results.json says 7, the recipe says 0"),
    "a better worst task": (put("worst_task", 99.0), "E543", "worst_task: results.json says 99.0"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_one_false_value_is_refused(submitted, lie):
    change, code, words = LIES[lie]
    rewrite(submitted / "results.json", change)
    refused(check(submitted, "--rounds", 0), code, words)


COPIES = {
    "no near-copies": (put("leakage.near_copies", 0.0), "E543", "leakage.near_copies: results.json says 0.0, its tasks give"),
    "no exact copies": (put("leakage.exact_copies", 999), "E543", "leakage.exact_copies: results.json says 999"),
    "nothing measured": (put("leakage", None), "E547", "privacy.statement: results.json says"),
}  # fmt: skip


@pytest.mark.parametrize("lie", COPIES)
def test_false_near_copies_are_refused(honest_images, tmp_path, lie):
    change, code, words = COPIES[lie]
    copy = Path(shutil.copytree(honest_images, tmp_path / honest_images.name))
    assert check(copy, "--rounds", 0).exit_code == 0
    rewrite(copy / "results.json", change)
    refused(check(copy, "--rounds", 0), code, words)


def drop_key(folder, section, key):
    """A recipe without one key, in both places."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    del config[section][key]
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rewrite(folder / "results.json", lambda row: row["config"][section].pop(key))


def test_a_key_that_this_version_writes_may_not_be_missing(submitted):
    drop_key(submitted, "train", "lr")
    renamed = submitted.rename(submitted.with_name("fedavg-s0-deadbeef"))
    refused(check(renamed, "--rounds", 0), "E546", "config.yaml has no train.lr")


def test_a_recipe_of_an_older_version_has_a_hash_too(submitted):
    """Its hash is of the keys that it has, and the check says which keys it lacks."""
    rewrite(submitted / "env.json", lambda row: row.update(code="older"))
    drop_key(submitted, "federation", "delay")  # stands at the value that it had before there was a choice
    accepted = check(submitted, "--rounds", 0)
    assert accepted.exit_code == 0 and submitted.name.rpartition("-")[2] in accepted.output
    assert "older version: config.yaml lacks keys of today (1: federation.delay)" in accepted.output
    drop_key(submitted, "train", "lr")
    refused(check(submitted, "--rounds", 0), "E542", "the folder's name says", "config.yaml gives")
    refused(check(submitted.rename(submitted.with_name("fedavg-s0-deadbeef")), "--rounds", 0), "E542", "deadbeef")


def test_a_guarantee_of_an_older_version_is_derived_too(submitted):
    rewrite(submitted / "env.json", lambda row: row.update(code="older"))
    rewrite(submitted / "results.json", lambda row: row["privacy"].update(private=True, epsilon=1.0))
    refused(check(submitted, "--rounds", 0), "E547", "privacy.private: results.json says True, the recipe says False")


def test_costs_that_an_older_version_did_not_record_are_told(submitted):
    rewrite(submitted / "env.json", lambda row: row.update(code="older"))
    lines = [json.loads(line) for line in (submitted / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: line[key] for key in line if "flops" not in key and "so_far" not in key} for line in lines]
    (submitted / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    told = check(submitted, "--rounds", 0)
    assert told.exit_code == 0 and "has no totals of client_flops, server_flops, uplink_bytes" in told.output
    rewrite(submitted / "results.json", put("cost.measured.uplink_bytes", 1))
    refused(check(submitted, "--rounds", 0), "E543", "uplink_bytes: the rounds of metrics.jsonl have")


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


def test_another_name_of_the_images_is_refused(submitted):
    rewrite(submitted / "env.json", lambda row: row.update(data="cifar10"))
    refused(check(submitted), "E542", "name of the images: env.json says cifar10, the images here give")


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


@pytest.mark.parametrize("name", ["env.json", "results.json", "config.yaml"])
def test_a_damaged_file_is_named(submitted, name):
    (submitted / name).write_text("[")
    refused(check(submitted), "E545", f"{name} could not be read")
    told = json.loads(check(submitted, "--json").output)
    assert (told["accepted"], told["code"], told["folder"]) == (False, "E545", str(submitted))


def test_several_folders_are_checked_and_one_refusal_counts(honest, submitted):
    rewrite(submitted / "results.json", put("aa", 99.0))
    result = CliRunner().invoke(app, ["leaderboard", "check", str(honest), str(submitted), "--rounds", "0", "--json"])
    told = [json.loads(line) for line in result.output.splitlines()]
    assert result.exit_code == 5 and [(row["folder"], row["accepted"]) for row in told] == [
        (str(honest), True),
        (str(submitted), False),
    ]


def test_a_file_of_a_newer_version_is_told_as_such(submitted):
    rewrite(submitted / "results.json", lambda row: row.update(schema=99))
    result = check(submitted, "--rounds", 0)
    assert result.exit_code == 4 and "E414" in result.stderr
    assert json.loads(check(submitted, "--rounds", 0, "--json").output)["code"] == "E414"


def test_write_makes_a_page_and_a_table(honest, tmp_path):
    result = CliRunner().invoke(app, ["leaderboard", "write", str(honest.parent), "--out", str(tmp_path / "board")])
    assert result.exit_code == 0, result.output
    page, table = ((tmp_path / "board" / name).read_text() for name in ("index.html", "leaderboard.csv"))
    assert "FedAvg" in page and "published code, hand computation" in page and len(table.splitlines()) == 2
    empty = CliRunner().invoke(app, ["leaderboard", "write", str(tmp_path / "nowhere")])
    assert empty.exit_code == 2 and "E108" in empty.output + empty.stderr


def test_write_leaves_out_what_does_not_agree_and_what_repeats_a_seed(honest, tmp_path):
    for name in ("a", "b", "lying"):
        shutil.copytree(honest, tmp_path / "results" / name)
    rewrite(tmp_path / "results" / "lying" / "results.json", put("cost.measured.uplink_bytes", 1))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        (row,) = leaderboard_rows([tmp_path / "results"])
    told = [str(each.message) for each in found if "W546" in str(each.message)]
    assert [folder.name for folder in row.folders] == ["a"] and row.n == row.num_recorded == 1
    assert len(told) == 2 and "lying is left out of the leaderboard: [E543]" in told[0]
    assert "uplink_bytes: results.json says 1" in told[0]
    assert (
        f"{tmp_path / 'results' / 'b'} is left out" in told[1]
        and "seed of" in told[1]
        and told[1].endswith("a, which counts")
    )


def test_the_board_asks_the_method_and_not_the_file(submitted, tmp_path):
    """An older run's words are not compared, and not shown either."""
    rewrite(submitted / "env.json", lambda row: row.update(code="older"))
    rewrite(
        submitted / "results.json", lambda row: row["style"].update(title="Best", uploads="nothing", sends="nothing")
    )
    (row,) = leaderboard_rows([submitted.parent])
    assert (row.label, row.leaves) == ("FedAvg", "weights")
    (submitted / "metrics.jsonl").unlink()
    (row,) = leaderboard_rows([submitted.parent])
    assert row.num_recorded == 0 and "without rounds" in page_of([row], tmp_path)


def test_the_page_in_the_docs_is_up_to_date(monkeypatch):
    monkeypatch.chdir(ROOT)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        rows, out = leaderboard_rows([Path("results")]), Path("docs/leaderboard")
    assert not [str(each.message) for each in found if "[E5" in str(each.message)], (
        "all stored runs agree with themselves"
    )
    assert (out / "leaderboard.csv").read_text("utf-8") == csv_of(rows, Path()), "rescene leaderboard write"
    assert (out / "index.html").read_text("utf-8") == page_of(rows, Path()), "rescene leaderboard write"
