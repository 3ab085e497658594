"""results/defaults.csv says for every default that the paper's text does not fix which data chose it."""

import csv
import json
import re
from collections import Counter, defaultdict
from inspect import get_annotations
from pathlib import Path

import pytest

from rescene.config import Recipe
from rescene.config.compose import recipe_names, recipe_text
from rescene.config.site_sections import SitesSection
from rescene.core.documents import parse_yaml
from rescene.core.hyperparameters import Hyperparameters, Section
from rescene.core.recipe_keys import flatten
from rescene.methods import method_class
from rescene.paper.numbers import packaged
from shipped_methods import SHIPPED

RESULTS = Path(__file__).parents[2] / "results"
FAMILIES = {
    "AveragingMethod": "methods that average",
    "Condensation": "methods that condense",
    "SurrogateMethod": "methods that send pictures",
}
# a field without a place chooses nothing if its default is one of these: off, found out, or empty (names and paths are)
NO_CHOICE = (None, False, 0, "none", "auto", ())
# of a recipe's privacy and training: what the recipe is for, and what a lens demands
WHAT_A_RECIPE_IS = {"privacy.mechanism", "privacy.epsilon", "train.augment"}
CHOSEN = ("method", "methods", "train", "privacy")  # sections of a recipe whose settings somebody chose


def is_open(place):
    """Whether the paper's text leaves a hyperparameter open: a place in brackets, or code."""
    return place.startswith("[") or place == "official code"


def open_defaults(hyperparameters):
    return {row["name"]: row["default"] for row in hyperparameters.table() if is_open(row["place"])}


def declaring(method, key):
    """The class that gives the hyperparameter its default in this method."""
    return next(base for base in method.__mro__ if key in get_annotations(base))


def of_methods(names=SHIPPED):
    """(where, key) -> value. A default that methods inherit stands once, under the method or the family that declares it."""
    methods = {name: method_class(name) for name in SHIPPED}
    users = defaultdict(list)  # of a default, by the class that declares it
    for name, method in methods.items():
        for key in open_defaults(method):
            users[declaring(method, key), key].append(name)

    def where(owner, key):
        candidates = [name for name, method in methods.items() if method is owner] or users[owner, key]
        return f"method {candidates[0]}" if len(candidates) == 1 else FAMILIES[owner.__name__]

    return {
        (where(declaring(methods[name], key), key), f"method.{key}"): value
        for name in names
        for key, value in open_defaults(methods[name]).items()
    }


def of_section(section, where):
    """(where, key) -> value. Where fields have a place it decides, as for methods; else every default that chooses something."""
    if issubclass(section, Hyperparameters):
        return {(where, f"{where}.{key}"): value for key, value in open_defaults(section).items()}
    found = {}
    for name, field in section.model_fields.items():
        if isinstance(field.default, Section):
            inner = of_section(type(field.default), f"{where}.{name}")
            found |= {(where, key): value for (_, key), value in inner.items()}
        elif not field.is_required() and field.default not in NO_CHOICE:
            found[where, f"{where}.{name}"] = field.default
    return found


def of_schema():
    sections = {name: type(f.default) for name, f in Recipe.model_fields.items() if isinstance(f.default, Section)}
    alone = {name for name, f in Recipe.model_fields.items() if f.default not in NO_CHOICE} - {*sections}
    assert alone == {"method"}, "a key outside of all sections"
    found = {}
    for name, section in (sections | {"sites": SitesSection}).items():
        found |= of_section(section, name)
    return found


def of_recipes():
    """Every setting of a method, of training and of privacy, and the choice of the test."""
    found = {}
    for name in recipe_names():
        tree = parse_yaml(recipe_text(name), name)
        own = flatten({key: tree[key] for key in CHOSEN if key in tree})
        left_out = WHAT_A_RECIPE_IS | {"method.name"}
        found |= {(f"recipe {name}", key): value for key, value in own.items() if key not in left_out}
        if test := tree.get("data", {}).get("held_out"):
            found[f"recipe {name}", "data.held_out"] = test
    return found


def of_papers_rows():
    """What the paper's rows set themselves."""
    found = {}
    for data, rows in packaged("readings.yaml")["taken"].items():
        for name, overrides in rows.items():
            where = f"paper's row {name}" + ("" if data == "*" else f" on {data}")
            found |= {(where, key): parse_yaml(value, key) for key, _, value in (o.partition("=") for o in overrides)}
    return found


def wanted():
    return of_methods() | of_schema() | of_recipes() | of_papers_rows()


@pytest.fixture(scope="module")
def told():
    return list(csv.DictReader((RESULTS / "defaults.csv").read_text().splitlines()))


def test_every_default_has_one_line_with_its_value(told):
    lines = {(row["where"], row["key"]): json.loads(row["value"]) for row in told}
    stored = {place: json.loads(json.dumps(value)) for place, value in wanted().items()}
    assert lines == stored, "results/defaults.csv"
    assert max(Counter((row["where"], row["key"]) for row in told).values()) == 1


def test_no_two_defaults_of_methods_share_a_line():
    lines = of_methods()
    for name in SHIPPED:
        own = of_methods([name])
        assert len(own) == len(open_defaults(method_class(name))), name
        assert all(lines[place] == value for place, value in own.items()), name


def test_every_line_says_which_data_chose_it(told):
    explained = re.findall(r'^\| "(.+?)" \|', (RESULTS / "README.md").read_text(), re.MULTILINE)
    assert {row["chosen_by"] for row in told} == {*explained} and all(row["note"] for row in told)


def test_nothing_of_the_papers_row_was_chosen_by_its_height(told):
    chosen_by = {(row["where"], row["key"]): row["chosen_by"] for row in told}
    by = {key: chosen_by[where, key] for where, key in of_methods(["rescene"])}
    assert "test accuracy seen" not in by.values() and by["method.server_augment"] == "paper, test figures"
    own = [row for row in told if row["where"].startswith("paper's row")]
    assert {row["chosen_by"] for row in own if row["key"] == "train.augment"} == {"paper, test figures"}
    assert {row["chosen_by"] for row in own if row["key"] != "train.augment"} == {"paper"}
    plus = {key for where, key in of_methods(["rescene-plus"]) if chosen_by[where, key] == "test accuracy seen"}
    assert plus == {"method.step", "method.server_augment"}
