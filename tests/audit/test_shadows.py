"""The membership attack on condensations: it finds copies, and nothing where there is nothing."""

from dataclasses import replace

import pytest
import torch
from audit_world import RELEASE, small_stage, with_settings

from rescene.audit.membership import membership_attack
from rescene.audit.stage import as_promised


@pytest.fixture
def stage(tiny_world):
    return small_stage(tiny_world)


def test_surrogates_that_started_as_real_images_give_members_away(stage):
    found = membership_attack(with_settings(stage, num_steps=1), as_promised(None), 40, 20, 1)
    assert found["num_in"] + found["num_out"] == 40 * 20 and found["num_targets"] == 20
    assert found["tpr_at_0.01"] > 0.25, "two of about five images of a class are copied"
    twice = membership_attack(with_settings(stage, num_steps=1), as_promised(None), 40, 20, 2)
    assert twice["tpr_at_0.01"] > found["tpr_at_0.01"], "a second round copies others"


def test_under_strong_noise_it_guesses(stage):
    strong = replace(RELEASE, sigma=20.0)
    found = membership_attack(with_settings(stage, num_steps=1), as_promised(strong), 40, 20, 1)
    assert abs(found["auc"] - 0.5) < 0.1 and found["tpr_at_0.01"] < 0.15
    assert 0 < found["spread"]["auc"] < 0.1


def test_sites_that_send_nothing_leave_nothing_to_attack(stage):
    shy = replace(RELEASE, threshold=1e6)
    found = membership_attack(stage, as_promised(shy), 10, 8, 1)
    assert found["num_pictures"] == 0 and found["auc"] == 0.5 and found["tpr_at_0.01"] == 0.0
    assert torch.tensor(list(found["spread"].values())).abs().sum() == 0
