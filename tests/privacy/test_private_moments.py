"""Surrogates from noised picture moments: the bound, one release per task, and that nothing else looks at the images."""

from dataclasses import replace

import pytest
import torch

from rescene.config import resolve
from rescene.core.errors import RunError
from rescene.core.rng import Rng
from rescene.methods.surrogates import surrogates_of
from rescene.privacy.accounting import Composition
from rescene.privacy.ledger import Ledger
from rescene.privacy.mechanism import Mechanism, SitePrivacy
from rescene.privacy.noise import Noise
from rescene.privacy.release import released_moments, sums_size
from rescene.training import Condensation

SETTINGS = Condensation(ipc=3, num_steps=0, start="coloured")
RELEASE = Mechanism("release", 0.05, 1.0, Composition(1, 1), kappa=0.33, mean_grid=8, covariance_grid=2)


class Silent(Noise):
    def words(self):
        return lambda count: torch.zeros(count, dtype=torch.int64)  # the middle of every law


@pytest.mark.parametrize("colour", [False, True])
def test_a_record_moves_the_sums_by_no_more_than_the_bound(tiny_world, colour):
    release = replace(RELEASE, covariance_colour=colour)
    shard, site = tiny_world["shards"][1], SitePrivacy(release, Silent())
    whole = released_moments(shard, site)
    assert whole.shape[1] == sums_size(SETTINGS, release, None)
    for i in range(len(shard)):
        rest = replace(shard, index=torch.cat([shard.index[:i], shard.index[i + 1 :]]))
        assert 0 < float((whole - released_moments(rest, site)).norm()) <= release.sensitivity * (1 + 1e-6)
    assert float(released_moments(replace(shard, index=shard.index[:0]), site).norm()) == 0


def test_colour_is_part_of_the_question(tiny_world, tmp_path):
    ledger = Ledger(tmp_path / "l.jsonl")

    def asked(release):
        return released_moments(tiny_world["shards"][1], SitePrivacy(release, Noise(), "run", 0, 0, 1, ledger))

    first = asked(RELEASE)
    assert torch.equal(asked(RELEASE), first)
    with pytest.raises(RunError, match="E412"):
        asked(replace(RELEASE, covariance_colour=True))


def test_one_release_per_task_serves_every_round_with_fresh_surrogates(tiny_world, tmp_path):
    ledger = Ledger(tmp_path / "l.jsonl")

    def ask(round, task=0, shard=tiny_world["shards"][1]):
        site = SitePrivacy(RELEASE, Noise(), "run", task, round, 1, ledger)
        return surrogates_of(tiny_world["net"], [replace(shard, site=site)], [Rng(round)], SETTINGS, 0)[0]

    first, second = ask(0), ask(1)
    assert ledger.participations("run", 0) == 1 and first.num_declined == second.num_declined == 0
    assert first.labels.tolist() == [0] * 3 + [1] * 3 and not torch.equal(first.images, second.images)
    gone = replace(tiny_world["shards"][1], index=tiny_world["shards"][1].index[:0])
    assert torch.equal(ask(0, shard=gone).images, first.images), (
        "later draws see the released numbers, never the images"
    )
    ask(0, task=1)
    assert ledger.participations("run", 1) == 1


def test_classes_that_drown_in_noise_stay_home(tiny_world):
    loud = replace(RELEASE, sigma=2.0)  # 3 deviations of the count: 3 x 2 x 1.05 / 0.33 = 19 images
    shard = replace(tiny_world["shards"][1], site=SitePrivacy(loud, Silent()))
    (made,) = surrogates_of(tiny_world["net"], [shard], [Rng(0)], SETTINGS, 0)
    assert made.num_suppressed == 2 and len(made.labels) == 0


def test_the_recipe_promises_one_release_for_each_record():
    promise = resolve("waves-dp").recipe.promise(5)
    assert promise.composition == Composition(1, 1) and 7.99 < promise.epsilon() <= 8
