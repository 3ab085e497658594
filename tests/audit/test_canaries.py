"""Canaries: who holds what, and what the attacks find with and without protection."""

from dataclasses import replace

import pytest
import torch
from audit_world import PER_EXAMPLE, RELEASE, small_stage, with_settings

from rescene.audit.canaries import FEW, MANY, canary_audit, plan, rankings
from rescene.audit.stage import as_promised, seeded, uploads, without_noise
from rescene.core.rng import Rng
from rescene.privacy.accounting import gaussian_epsilon
from rescene.privacy.epsilon_bounds import bounds
from rescene.privacy.mechanism import SitePrivacy
from rescene.privacy.noise import Noise


@pytest.fixture
def stage(tiny_world):
    return small_stage(tiny_world)


def unknown_seed(mechanism):
    """Noise that repeats in this test but that the attacker does not know."""
    return lambda site, turn: SitePrivacy(mechanism, Noise(Rng(99).at(site, turn).generator()))


def test_each_canary_is_the_only_question_about_its_class_at_its_site(stage):
    placed = plan(stage, 25, giant=False, companions=4)
    assert len(placed.canaries) == 26 and len(placed.companions) == 13, "whole sites"
    assert stage.images.labels[placed.canaries].tolist() == placed.labels == [0, 1] * 13
    assert not set(placed.canaries.tolist()) & {p for own in stage.known.values() for p in own.tolist()}
    for k, own in enumerate(placed.held(placed.included)):
        expected = placed.canaries[2 * k : 2 * k + 2][placed.included[2 * k : 2 * k + 2]]
        assert own[8:].tolist() == expected.tolist() and stage.images.labels[own[:8]].tolist() == [0] * 4 + [1] * 4
    assert 5 < int(placed.included.sum()) < 21


@pytest.mark.parametrize("mechanism", [RELEASE, PER_EXAMPLE, None])
def test_without_noise_a_replay_is_always_right(stage, mechanism):
    silent = mechanism and replace(mechanism, sigma=0.0)
    placed = plan(stage, 20, giant=False, companions=FEW)
    scores = rankings(stage, placed, as_promised(silent), without_noise(silent), ("replay",))["replay"]
    assert torch.equal(scores > 0, placed.included)


@pytest.mark.parametrize("mechanism", [RELEASE, PER_EXAMPLE])
def test_with_noise_the_promise_is_not_contradicted(stage, mechanism):
    num = 60 if mechanism is RELEASE else 20
    rows = canary_audit(stage, unknown_seed(mechanism), without_noise(mechanism), 1e-5, num)
    assert [row["attack"] for row in rows] == ["photograph, replay", "photograph, look", "giant, replay"]
    assert max(row["epsilon"] for row in rows) <= gaussian_epsilon(2.0, mechanism.composition.steps, 1e-5)


def test_weak_noise_is_seen_through_and_participations_add_up(stage):
    """A giant moves the sum by D = 1 / sigma deviations; four participations move it by twice as much."""
    weak = replace(RELEASE, sigma=1.0)
    placed = plan(stage, 200, giant=True, companions=FEW)
    right = []
    for turns in (1, 4):
        scores = rankings(stage, placed, unknown_seed(weak), without_noise(weak), ("replay",), turns)["replay"]
        right.append(float(((scores > 0) == placed.included).double().mean()))
    assert right == pytest.approx([0.691, 0.841], abs=0.08), "Phi(1/2) and Phi(1)"


def test_the_clip_holds_a_giant_down(stage):
    placed = plan(stage, 10, giant=True, companions=FEW)
    everyone = torch.ones(10, dtype=torch.bool)
    inside, outside = (
        uploads(stage, placed.held(who), without_noise(RELEASE), 0, placed.factor, False)
        for who in (everyone, ~everyone)
    )
    moved = [float((a.of(c) - b.of(c)).norm()) for a, b in zip(inside, outside, strict=True) for c in (0, 1)]
    assert moved == pytest.approx([RELEASE.sensitivity] * 10, rel=1e-6)


def test_noise_from_a_known_seed_hides_nothing(stage):
    known = seeded(RELEASE, Rng(0), 0)
    placed = plan(stage, 20, giant=False, companions=FEW)
    scores = rankings(stage, placed, known, known, ("replay",))["replay"]
    assert torch.equal(scores > 0, placed.included)


def test_a_look_finds_photographs_that_surrogates_started_from(stage):
    found = {}
    for start in ("real", "noise"):
        one = with_settings(stage, start=start)
        placed = plan(one, 100, giant=False, companions=MANY)
        scores = rankings(one, placed, as_promised(None), as_promised(None), ("look",))["look"]
        found[start] = bounds({"look": (scores, placed.included)}, 1e-5)["look"]
    assert found["real"].epsilon > 0.3 and found["real"].num_right == found["real"].num_guesses == 10
    assert found["noise"].epsilon < 0.3


def test_the_number_of_surrogates_gives_a_canary_away(stage):
    """Of three images one surrogate is made, of four two: the shape alone tells."""
    stage = with_settings(stage, surrogates_per_class="half")
    placed = plan(stage, 10, giant=False, companions=3)
    scores = rankings(stage, placed, as_promised(None), as_promised(None), ("replay",))["replay"]
    assert torch.equal(scores > 0, placed.included) and bool(torch.isinf(scores).all())


def test_nothing_uploaded_is_no_guess(stage):
    one = with_settings(stage, min_images=50)
    placed = plan(one, 10, giant=False, companions=FEW)
    found = rankings(one, placed, as_promised(None), as_promised(None))
    assert not found["replay"].any() and not found["look"].any()
