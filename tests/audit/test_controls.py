"""Every breach made on purpose is noticed; an audit that has lost its teeth is noticed too."""

import pytest
from audit_world import small_stage, with_settings

from rescene.audit import control_words, controls, run_controls
from rescene.audit.controls import claimed
from rescene.privacy.accounting import epsilon_of


@pytest.fixture
def stage(tiny_world):
    return small_stage(tiny_world)


def test_the_claim_is_what_the_accountant_says():
    mechanism = claimed()
    assert epsilon_of(mechanism.sigma, mechanism.composition, mechanism.delta) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.slow
def test_all_five_controls_fire(stage, monkeypatch):
    monkeypatch.setattr(controls, "RETRIES", 40)
    monkeypatch.setattr(controls, "MANY", 4)  # of four images and the canary two are copied: enough for this size
    rows = run_controls(with_settings(stage, num_steps=1), 160, claimed(clip=2.0, kappa=0.7))
    assert {row["control"]: row["fired"] for row in rows} == dict.fromkeys(
        (
            "surrogates start as real images",
            "noise switched off",
            "clip switched off, giant record",
            "noise drawn again at every retry",
            "noise from a seed the server knows",
        ),
        True,
    ), rows
    assert "All 5 controls fired" in control_words(rows)


def test_too_few_canaries_do_not_fire_and_are_told_so(stage, monkeypatch):
    monkeypatch.setattr(controls, "RETRIES", 2)
    rows = run_controls(with_settings(stage, num_steps=1), 4, claimed(clip=2.0, kappa=0.7))
    assert not any(row["fired"] for row in rows) and "Only 0 of 5" in control_words(rows)
