"""A search for settings: on training images only, continued where it was stopped, and honest about what chose."""

import json

import pytest
import torch
from typer.testing import CliRunner

import rescene
from rescene.api import Result
from rescene.cli.app import app
from rescene.config import resolve
from rescene.core.errors import ConfigError, DataError, RunError
from rescene.data import Dataset, Images, load
from rescene.data.derived_sets import validation_part
from rescene.data.images import measure
from rescene.engine.experiment import load_data
from rescene.sweeps.search import read_search, search_settings

SPACE = ["method=fedavg,fedlwf", "train.lr=log:0.001..0.1", "train.local_epochs=1..4", "model.width=2"]


def test_a_validation_part_is_drawn_from_training_images_alone():
    whole = load()
    part = validation_part(whole, 0.25, seed=3)
    assert len(part.train) + len(part.test) == len(whole.train) and part.split == "validation=0.25 seed=3"
    own = {row.numpy().tobytes() for row in whole.train.pixels}
    assert all(row.numpy().tobytes() in own for row in part.test.pixels)
    counts = torch.bincount(part.test.labels)
    assert counts.tolist() == (torch.bincount(whole.train.labels) * 0.25).round().int().tolist()
    assert torch.equal(validation_part(whole, 0.25, seed=3).test.pixels, part.test.pixels)
    assert not torch.equal(validation_part(whole, 0.25, seed=4).test.pixels, part.test.pixels)
    recipe = resolve("smoke", ["data.validation=0.25", "data.seed=3"]).recipe
    assert torch.equal(load_data(recipe.images).test.pixels, part.test.pixels)
    last = load_data(resolve("smoke", ["data.validation=0.25", "data.held_out=last"]).recipe.images)
    assert last.split == "validation=0.25 last"
    for c, n in enumerate(counts.tolist()):
        assert torch.equal(last.test.pixels[last.test.labels == c], whole.train.pixels[whole.train.labels == c][-n:])


def test_a_validation_part_keeps_domains_apart_and_refuses_a_class_of_one():
    pixels, labels = torch.zeros(20, 3, 8, 8, dtype=torch.uint8), torch.tensor([0] * 10 + [1] * 10)
    images = Images(pixels, labels, torch.tensor([0, 1] * 10))
    found = validation_part(Dataset("d", ("a", "b"), images, images, measure(pixels), ("x", "y")), 0.4, 0)
    assert torch.bincount(found.test.labels * 2 + found.test.domains).tolist() == [2, 2, 2, 2]
    lonely = Images(pixels[:3], torch.tensor([0, 0, 1]))
    with pytest.raises(DataError, match="E229"):
        validation_part(Dataset("d", ("a", "b"), lonely, lonely, measure(pixels)), 0.4, 0)


def test_a_run_on_a_validation_part_says_so_and_a_run_without_one_keeps_its_name(tmp_path):
    small = {"tasks.limit": 1, "federation.num_rounds": 1, "model.width": 2, "method": "fedavg"}
    result = rescene.run("smoke", out=tmp_path / "run", **small, **{"data.validation": 0.2})
    assert "validation part of the training images" in result.values["evaluated"]
    assert result.values["tasks"][0]["test_size"] == 240 and result.values["tasks"][0]["train_size"] == 960
    assert "evaluated" not in rescene.run("smoke", out=tmp_path / "other", **small).values
    assert resolve("smoke", []).digest() == resolve("smoke", ["data.validation=null"]).digest()


def test_what_is_searched_is_read_from_the_command_line(tmp_path):
    found = read_search("smoke", SPACE, "0,1", "aa", tmp_path)
    assert found.space == {
        "method": ("fedavg", "fedlwf"),
        "train.lr": (0.001, 0.1, True),
        "train.local_epochs": (1, 4, False),
    }
    assert found.fixed == ("model.width=2", "data.validation=0.2") and found.seeds == (0, 1)
    cells = found.cells({"method": "fedavg", "train.lr": 0.02, "train.local_epochs": 3})
    assert [cell.resolved.recipe.data.validation for cell in cells] == [0.2, 0.2]
    assert cells[0].resolved.recipe.train.lr == 0.02
    words = found.test_command({"method": "fedavg", "train.lr": 0.02})
    assert words == "rescene sweep smoke model.width=2 method=fedavg train.lr=0.02 --seeds 0,1"
    wrong = (
        ["model.width=2"],
        ["train.lr=0.1..0.01"],
        ["train.lr=log:0..1"],
        ["train.lr=1..2", "data.validation=null"],
    )
    for overrides in wrong:
        with pytest.raises(ConfigError, match="E106"):
            read_search("smoke", overrides, "0", "aa", tmp_path)
    with pytest.raises(ConfigError, match="E106"):
        read_search("smoke", SPACE, "0", "test_accuracy", tmp_path)
    with pytest.raises(ConfigError, match="E102"):
        read_search("smoke", ["train.no_such_key=1..2"], "0", "aa", tmp_path)


def peak(cell):
    """Best at lr = 0.02 and three epochs."""
    train = cell.resolved.recipe.train
    return 90 - 100 * abs(train.lr - 0.02) - abs(train.local_epochs - 3)


def fake(cells):
    return ((cell, Result(cell.folder, {"aa": peak(cell)})) for cell in cells)


def test_a_search_finds_and_continues(tmp_path):
    pytest.importorskip("optuna")
    whole = search_settings(
        read_search("smoke", SPACE, "0,1", "aa", tmp_path / "whole"), 12, 1, fake, lambda line: None
    )
    best = max(row["aa"] for row in whole["trials"])
    assert len(whole["trials"]) == 12 and whole["best"]["aa"] == best > 86
    assert "validation part of the training images" in whole["chosen_on"] and "--seeds 0,1" in whole["test_command"]
    assert json.loads((tmp_path / "whole" / "search.json").read_text()) == whole
    asked = []

    def stopping(cells):
        asked.append(len(cells))
        if len(asked) == 5:
            raise KeyboardInterrupt
        return fake(cells)

    parts = read_search("smoke", SPACE, "0,1", "aa", tmp_path / "parts")
    with pytest.raises(KeyboardInterrupt):
        search_settings(parts, 12, 1, stopping, lambda line: None)
    again = search_settings(parts, 12, 1, fake, lambda line: None)
    assert asked == [2] * 5 and again["trials"] == whole["trials"]
    with pytest.raises(ConfigError, match="another search"):
        search_settings(read_search("smoke", SPACE, "0", "aa", tmp_path / "parts"), 12, 1, fake, lambda line: None)


def test_a_trial_that_fails_is_told_and_the_search_goes_on(tmp_path):
    pytest.importorskip("optuna")
    lines = []

    def half(cells):
        for cell in cells:
            wide = cell.resolved.recipe.train.local_epochs > 2
            yield cell, RunError("E324", "too large") if wide else Result(cell.folder, {"aa": peak(cell)})

    found = search_settings(read_search("smoke", SPACE, "0", "aa", tmp_path), 8, 3, half, lines.append)
    assert len(found["trials"]) == len(lines) == 8 and any("too large" in line for line in lines)
    assert found["best"]["train.local_epochs"] <= 2


def test_without_optuna_the_extra_is_named(tmp_path, monkeypatch):
    from rescene.sweeps import search

    monkeypatch.setattr(search, "find_spec", lambda name: None)
    found = CliRunner().invoke(app, ["sweep", "smoke", *SPACE, "--search", "2", "--out", str(tmp_path)])
    assert found.exit_code == 2 and "error[E500]" in found.output and "rescene[search]" in found.output


@pytest.mark.slow
def test_the_command_searches_with_real_runs(tmp_path):
    pytest.importorskip("optuna")
    small = ["tasks.limit=1", "federation.num_rounds=1", "model.width=2", "method=fedavg", "train.lr=log:0.001..0.1"]
    found = CliRunner().invoke(app, ["sweep", "smoke", *small, "--search", "2", "--out", str(tmp_path / "s")])
    assert found.exit_code == 0, found.output
    assert (
        "the test images took no part" in found.output
        and "Measure the best one on the test images, once" in found.output
    )
    for row in json.loads((tmp_path / "s" / "search.json").read_text())["trials"]:
        assert 0 <= row["aa"] <= 100
    for results in (tmp_path / "s").glob("*/results.json"):
        assert "validation" in json.loads(results.read_text())["evaluated"]
