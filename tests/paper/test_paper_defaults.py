"""results/defaults.csv says for every default that the paper's text does not fix which data chose it."""

import csv
import json
from collections import Counter
from pathlib import Path

import pytest

from rescene.config.compose import recipe_names, recipe_text
from rescene.core.documents import parse_yaml
from rescene.core.recipe_keys import flatten
from rescene.methods import method_class
from rescene.paper.numbers import packaged

FILE = Path(__file__).parents[2] / "results" / "defaults.csv"
CHOSEN_BY = {
    *(
        "paper",
        "paper, silent",
        "paper, counts",
        "paper, test figures",
        "departure",
        "public code",
        "off",
        "size",
        "speed",
        "privacy",
        "setting",
    ),
    *("training images", "test accuracy seen"),
}
METHODS = (
    *("rescene", "rescene-plus", "raw-upload", "fedavg", "fedewc", "fedlwf"),
    *("target", "glfc", "fedcbdr", "refed", "feddm", "fedaf"),
)


def wanted():
    """(where, key) -> value, of methods where the paper is silent, of recipes for every setting of a method and the choice of
    the test, and of the paper's rows for what they set themselves."""
    found = {}
    for name in METHODS:
        for row in method_class(name).table():
            if row["place"].startswith("["):
                found[f"method {name}", f"method.{row['name']}"] = row["default"]
    for name in recipe_names():
        tree = parse_yaml(recipe_text(name), name)
        own = flatten({key: tree[key] for key in ("method", "methods") if key in tree})
        found |= {(f"recipe {name}", key): value for key, value in own.items() if key != "method.name"}
        if test := tree.get("data", {}).get("held_out"):
            found[f"recipe {name}", "data.held_out"] = test
    for data, rows in packaged("readings.yaml")["taken"].items():
        for name, overrides in rows.items():
            where = f"paper's row {name}" + ("" if data == "*" else f" on {data}")
            found |= {(where, key): parse_yaml(value, key) for key, _, value in (o.partition("=") for o in overrides)}
    return found


@pytest.fixture(scope="module")
def told():
    return list(csv.DictReader(FILE.read_text().splitlines()))


def test_every_default_has_one_line_with_its_value(told):
    lines = {(row["where"], row["key"]): json.loads(row["value"]) for row in told}
    assert lines == wanted(), "results/defaults.csv"
    assert max(Counter((row["where"], row["key"]) for row in told).values()) == 1


def test_every_line_says_which_data_chose_it(told):
    assert {row["chosen_by"] for row in told} <= CHOSEN_BY and all(row["note"] for row in told)


def test_nothing_of_the_papers_row_was_chosen_by_its_height(told):
    by = {row["key"]: row["chosen_by"] for row in told if row["where"] == "method rescene"}
    assert "test accuracy seen" not in by.values() and by["method.server_augment"] == "paper, test figures"
    own = [row for row in told if row["where"].startswith("paper's row")]
    assert {row["chosen_by"] for row in own if row["key"] == "train.augment"} == {"paper, test figures"}
    assert {row["chosen_by"] for row in own if row["key"] != "train.augment"} == {"paper"}
    plus = {
        row["key"] for row in told if row["where"] == "method rescene-plus" and row["chosen_by"] == "test accuracy seen"
    }
    assert plus == {"method.step", "method.server_augment"}
