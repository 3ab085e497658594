"""``rescene privacy --ledger``: every release, its cost, its total and the floor."""

import json
from dataclasses import replace

import pytest
import yaml
from typer.testing import CliRunner

from rescene.cli.app import app
from rescene.deploy.site import Site
from rescene.deploy.site_config import ledger_of
from rescene.privacy.accounting import Composition, epsilon_of
from rescene.privacy.ledger import Charge, Declined, Floor, Ledger, Touched
from rescene.privacy.noise import Noise

CHARGE = Charge("moments-s0-1234", 0, 0, "release", 2.0, 1, 1.0, why="sum_up")


def spend(ledger, *places):
    """A release for each (task, images)."""
    for task, images in places:
        touched = Touched("32 px", [bytes([image]) for image in images])
        ledger.once(replace(CHARGE, task=task), "q", 1e-5, None, lambda: {"sums": Noise().normal(50)}, touched)


def shown(*words):
    done = CliRunner().invoke(app, ["privacy", *words])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def site(tmp_path):
    (tmp_path / "site.yaml").write_text(yaml.safe_dump({"client": 3}))
    ledger = ledger_of(Site.open(tmp_path).section, tmp_path)
    ledger.begin(Floor(epsilon_max=5.0), CHARGE.run)
    spend(ledger, (0, [1, 2]), (1, [3]), (2, [2, 4]))
    return tmp_path


def test_a_sites_ledger_is_printed_with_the_total_of_the_most_used_image(site):
    facts = json.loads(shown("--ledger", str(site), "--json"))["site 3"]
    once, twice = (epsilon_of(2.0, Composition(1, n), 1e-5) for n in (1, 2))
    rows = facts["releases"]
    assert [row["epsilon"] for row in rows] == pytest.approx([once] * 3)
    assert [row["total"] for row in rows] == pytest.approx([once, once, twice])
    assert [row["images"] for row in rows] == [2, 1, 2] and {row["asked for"] for row in rows} == {"sum_up"}
    assert all(len(row["released"]) == 64 and row["bytes"] > 400 for row in rows)
    assert "epsilon_max 5" in facts["floor"] and CHARGE.run in facts["floor"]
    words = shown("--ledger", str(site))
    assert "total" in words and CHARGE.run in words and rows[0]["released"][:12] in words


def test_a_runs_ledgers_are_printed_and_what_was_not_sent_is_said(tmp_path):
    ledger = Ledger(tmp_path / "ledgers" / "client-0.jsonl")
    spend(ledger, (0, [1]))

    def dies():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ledger.once(replace(CHARGE, task=1), "q", 1e-5, None, dies, None)
    words = shown("--ledger", str(tmp_path))
    assert "client 0" in words and "not sent" in words and "all" in words
    assert "none yet" not in words and "Floor: none. Simulated sites" in words, (
        "no run sets a floor for simulated sites"
    )


def test_a_simulations_ledger_has_no_column_for_who_asked(tmp_path):
    ledger = Ledger(tmp_path / "client-0.jsonl")
    ledger.once(replace(CHARGE, why=""), "q", 1e-5, None, lambda: {"sums": Noise().normal(5)}, None)
    assert "asked for" not in shown("--ledger", str(tmp_path)) and "mechanism" in shown("--ledger", str(tmp_path))


def test_with_one_budget_the_total_is_that_of_all_releases(site):
    (site / "site.yaml").write_text(yaml.safe_dump({"client": 3, "privacy": {"epsilon_max": 9.0, "one_budget": True}}))
    facts = json.loads(shown("--ledger", str(site), "--json"))["site 3"]
    totals = [epsilon_of(2.0, Composition(1, n), 1e-5) for n in (1, 2, 3)]
    assert [row["total"] for row in facts["releases"]] == pytest.approx(totals)
    assert "one budget" in facts["floor"] and "share one budget" in shown("--ledger", str(site))


def test_a_floor_that_the_operator_set_is_named_so(site):
    (site / "site.yaml").write_text(yaml.safe_dump({"client": 3, "privacy": {"epsilon_max": 2.0}}))
    assert "set in site.yaml" in shown("--ledger", str(site))
    with pytest.raises(Declined):
        spend(ledger_of(Site.open(site).section, site), (7, [2]))


@pytest.mark.parametrize(("words", "code"), [(["--ledger", "nowhere"], "E425"), ([], "E176")])
def test_without_a_ledger_or_a_recipe_it_says_what_to_give(words, code):
    done = CliRunner().invoke(app, ["privacy", *words])
    assert done.exit_code != 0 and code in done.output
