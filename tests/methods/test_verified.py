"""What methods say they were compared with exists, and a method that says nothing is shown as not verified."""

import ast
import json
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rescene.cli.app import app
from rescene.config import resolve
from rescene.core.errors import ConfigError
from rescene.core.verification import NOT_VERIFIED, Verified, in_short
from rescene.methods import method_class, method_names
from rescene.methods.base import NOT_SAID
from rescene.methods.fedavg import FedAvg
from rescene.methods.moments import Moments
from shipped_methods import SHIPPED

ROOT = Path(__file__).parents[2]
DECLARED = [(name, one) for name in method_names() for one in method_class(name).verifications()]
ORACLES = "tests/oracles/test_oracles.py"


@cache
def functions_of(file):
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("name", "one"), DECLARED, ids=lambda value: value if isinstance(value, str) else value.where)
def test_the_place_exists(name, one):
    file, _, test = one.where.partition("::")
    if test:
        assert test in functions_of(file)
    else:
        assert (ROOT / file / "results.json").is_file()
    assert one.close


def test_what_a_method_says_of_a_paper_is_what_its_run_holds():
    for _, one in DECLARED:
        if one.against == "paper figure":
            held = json.loads((ROOT / one.where / "results.json").read_text(encoding="utf-8"))
            assert one.close.startswith(f"AA {held['aa']:.2f} against "), one


def test_five_methods_and_more_are_compared_with_official_code():
    names = {name for name, one in DECLARED if one.against == "published code" and one.where.startswith(ORACLES)}
    assert {"glfc", "target"} <= names and len(names) >= 5


def test_a_comparison_is_not_inherited():
    class Heir(Moments):
        pass

    assert Moments.verifications() and Heir.verifications() == ()
    assert in_short(Heir.verifications()) == NOT_VERIFIED


def test_a_kind_that_nobody_knows_is_refused():
    with pytest.raises(ConfigError, match="hearsay") as caught:
        Verified("hearsay", "tests/x.py::test_y", "close")
    assert caught.value.code == "E540"


@pytest.mark.parametrize(("where", "close"), [("tests/x.py::test_y", ""), ("tests/x.py::test_y", " "), ("", "1e-6")])
def test_a_comparison_says_where_and_how_close_it_is(where, close):
    with pytest.raises(ConfigError, match="does not say") as caught:
        Verified("published code", where, close)
    assert caught.value.code == "E513" and ("how close" in caught.value.what) == bool(where)


def test_the_list_is_short_for_people_and_whole_for_programs():
    rows = {row["name"]: row for row in json.loads(CliRunner().invoke(app, ["list", "methods", "--json"]).output)}
    first = FedAvg.verifications()[0]
    assert {"against": first.against, "where": first.where, "close": first.close} in rows["fedavg"]["verified"]
    shown = CliRunner().invoke(app, ["list", "methods"]).output
    assert "published code, hand computation" in " ".join(shown.split()) and first.where not in shown
    assert first.where in CliRunner().invoke(app, ["method", "explain", "fedavg"]).output


def test_the_list_says_how_close_and_where_if_asked():
    lines = CliRunner().invoke(app, ["list", "methods", "--verified"]).output.splitlines()
    for name, one in DECLARED:
        assert f"  {one.against}: {one.close}" in lines and f"    {one.where}" in lines, name
    wrong = CliRunner().invoke(app, ["list", "recipes", "--verified"])
    assert wrong.exit_code == 2 and "E109" in wrong.output + wrong.stderr


def test_every_method_says_in_short_what_leaves_a_site():
    short = {name: method_class(name).leaving_in_short(None) for name in SHIPPED}
    assert len(short) == 28
    assert NOT_SAID not in short.values() and all(len(words) <= 32 for words in short.values()), short
    assert short["glfc"] == "weights, recoverable images" and short["fedprox"] == "weights"
    assert {short[name] for name in ("fot", "icarl", "pilora", "fedcbdr")}.isdisjoint({"weights"})


def test_a_method_that_sends_something_else_inherits_no_short_words():
    class Other(FedAvg):
        leaves_site = "every image"

    class Same(FedAvg):
        pass

    assert (Other.leaving_in_short(None), Same.leaving_in_short(None)) == (NOT_SAID, "weights")


def test_behind_a_mechanism_less_may_leave():
    sums = resolve(
        "smoke", {"method": "moments", "privacy.mechanism": "release", "privacy.epsilon": 8.0}
    ).recipe.promise(2)
    assert (
        Moments.leaving_in_short(sums.mechanism) == "noised sums" and Moments.leaving_in_short(None) == "feature sums"
    )
    steps = {
        "model.norm": "group",
        "privacy.mechanism": "dp-sgd",
        "privacy.noise_multiplier": 1.0,
        "privacy.sampling_rate": 0.1,
    }
    for name in ("icarl", "fedcbdr"):
        behind = resolve("smoke", {"method": name, **steps}).recipe.promise(2).mechanism
        assert method_class(name).leaving_in_short(behind) == "weights"
        assert method_class(name).leaving(behind) == FedAvg.leaves_site


def test_a_plug_in_that_says_nothing_is_not_verified(tmp_path):
    CliRunner().invoke(app, ["method", "new", "silent_idea", "--in", str(tmp_path)])
    text = (tmp_path / "silent_idea.py").read_text()
    assert "    uploads: ClassVar[UploadKind] =" in text and "    verified: ClassVar[tuple[Verified, ...]] = ()" in text
    told = CliRunner().invoke(app, ["method", "explain", "silent_idea", "--plugin", str(tmp_path / "silent_idea.py")])
    assert f"verified: {NOT_VERIFIED}" in told.output, told.output
