"""The red team: its attacks find what is broken on purpose, its table tells held from broken, and its exit code follows."""

import json

import pytest
from typer.testing import CliRunner

from rescene.audit import drawn_pictures as drawn
from rescene.audit import lying_requests as letters
from rescene.audit import masked, redteam, sums
from rescene.audit.rows import Found, row_of
from rescene.cli.app import app
from rescene.core.errors import RunError
from rescene.privacy.epsilon_bounds import success_lower_bound


def found(value=0.0, promised=1.0, control=True):
    return Found(value, promised, control, "epsilon", "noise off")


@pytest.mark.parametrize(
    ("one", "verdict", "good"),
    [
        (found(), "held", True),
        (found(2.0), "BROKEN", False),
        (found(control=False), "CONTROL DID NOT FIRE", False),
        (found(4.0, None), "as stated", True),
    ],
)
def test_a_verdict_follows_the_numbers(one, verdict, good):
    row = row_of("claim", "attack", one, 0.1)
    assert row.verdict == verdict and row.good is good


@pytest.mark.parametrize("attack", [sums.lattice, sums.differencing, drawn.known_seed, letters.verbs])
def test_these_claims_hold_and_their_controls_fire(attack):
    one = attack()
    assert one.control and one.verdict in ("held", "as stated"), one


@pytest.mark.parametrize("attack", [letters.memories, masked.second_sum, masked.two_lists])
def test_asking_twice_shows_no_site_alone_and_keeps_no_image_twice(attack):
    one = attack()
    assert one.control and one.verdict == "held", one


def test_masked_numbers_tell_nothing_and_bare_ones_everything():
    one = masked.traces(tries=40)
    assert one.control and one.verdict == "held", one


def test_secrets_from_the_time_of_day_are_guessed_and_the_systems_are_not():
    one = masked.guesses(num_seeds=10)
    assert one.control and one.verdict == "held", one


@pytest.mark.slow
def test_one_honest_site_is_seen_through_where_many_are_promised():
    one = masked.honest_few(draws=240)
    assert one.control and one.verdict == "held", one


def test_an_attack_that_reaches_its_bound_is_no_false_alarm():
    """Five right of 40 happen by chance in one of 150 attacks where 3 % are allowed: no proof of anything."""
    assert success_lower_bound(5, 40, sums.SURE / len(sums.SIZES)) < 0.03 < success_lower_bound(5, 40, sums.RISK / 3)


@pytest.mark.slow
def test_noised_sums_hold_and_weak_ones_are_seen_through():
    shown = sums.reconstruction(tries=40)
    assert shown.control and shown.verdict == "held", shown
    assert sums.membership().control


def test_weights_hold_and_weak_ones_are_inverted():
    pytest.importorskip("opacus")
    shown = sums.gradient_inversion(tries=40)
    assert shown.control and shown.verdict == "held", shown


@pytest.mark.parametrize(
    "attack", [letters.replies, letters.remembered, letters.requests, letters.evaluation, letters.errors]
)
def test_attacks_on_letters_fire_on_a_site_without_protection(attack):
    """Whether the claims hold is for ``rescene audit --all`` to say; here, that the attacks see anything."""
    assert attack().control


def test_a_generator_with_gaps_proves_with_certainty():
    assert sums.whole_numbers(count=20_000).control


def table(monkeypatch, one):
    monkeypatch.setattr(redteam, "ATTACKS", [redteam.Attack("claim", "attack", lambda: one)])


@pytest.mark.parametrize(("one", "code"), [(found(), 0), (found(3.0), 5), (found(control=False), 5)])
def test_the_exit_code_says_whether_all_is_well(monkeypatch, tmp_path, one, code):
    table(monkeypatch, one)
    result = CliRunner().invoke(app, ["audit", "--all", "--out", str(tmp_path / "a.json"), "--quiet"])
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert result.exit_code == code, result.output
    assert rows[0]["claim"] == "claim" and {row["verdict"] for row in rows[1:]} == {"untested"}


def test_a_missing_package_is_told(monkeypatch):
    def attack():
        raise ImportError("no opacus", name="opacus")

    monkeypatch.setattr(redteam, "ATTACKS", [redteam.Attack("claim", "attack", attack)])
    row = redteam.red_team()[0]
    assert (row.verdict, row.note) == ("not run", "needs opacus") and row.good


def test_secure_sums_without_their_packages_are_listed_as_not_run(monkeypatch):
    def attack():
        raise RunError("E439", "sums across sites need packages", fix='pip install "rescene[deploy]"')

    monkeypatch.setattr(redteam, "ATTACKS", [redteam.Attack("claim", "attack", attack)])
    rows = redteam.red_team()
    assert (rows[0].verdict, rows[0].note) == ("not run", 'pip install "rescene[deploy]"')
    assert "Not run, because packages are missing: 1 " in redteam.red_team_words(rows)
