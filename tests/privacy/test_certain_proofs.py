"""No release proves that an image was there. benchmarks/certain_proofs.py does the same with a million releases."""

from dataclasses import replace

import pytest
import torch
from certain_proofs import floating_near_zero, proofs

from rescene.privacy.accounting import Composition
from rescene.privacy.mechanism import Mechanism, SitePrivacy
from rescene.privacy.noise import Noise
from rescene.privacy.release import noised_sums, released_moments

RELEASE = Mechanism("release", 0.6, 1.0, Composition(1, 1), kappa=0.33)


def seeded(seed):
    return Noise(torch.Generator().manual_seed(seed))


def test_floating_point_noise_proves_presence_and_discrete_noise_does_not():
    found = proofs(2000, 0, seeded(1))
    assert found.pop("floating-point noise, float64") > 1900, "the attack works"
    assert found == dict.fromkeys(found, 0) and len(found) == 3
    assert floating_near_zero(2**12)["chance_of_a_number"] > 1e-10, "as float32 too, in a release of very many numbers"


@pytest.mark.slow
def test_a_million_releases_with_discrete_noise_prove_nothing():
    found = proofs(1_000_000, 0, Noise())
    assert [found[f"discrete noise, {kind}"] for kind in ("float64", "float32")] == [0, 0]


def test_an_image_moves_every_release_by_the_same_whole_steps(tiny_world):
    """What is released is a function of whole numbers alone, so no last digit tells of the sum below the noise."""
    shard = tiny_world["shards"][1]
    less = replace(shard, index=shard.index[1:])
    psi = torch.randn(len(shard), 7, generator=torch.Generator().manual_seed(0))
    moved = {
        tuple(
            (noised_sums([psi], shard, RELEASE, seeded(s)) - noised_sums([psi[1:]], less, RELEASE, seeded(s)))
            .flatten()
            .tolist()
        )
        for s in range(200)
    }
    assert len(moved) == 1

    def moments(one, seed):
        return released_moments(one, SitePrivacy(RELEASE, seeded(seed)))

    moved = {tuple((moments(shard, s) - moments(less, s)).flatten().tolist()) for s in range(50)}
    assert len(moved) == 1


def test_no_order_of_the_images_changes_a_release(tiny_world):
    shard = tiny_world["shards"][1]
    psi = 1e3 * torch.randn(len(shard), 7, generator=torch.Generator().manual_seed(0))
    order = torch.randperm(len(shard), generator=torch.Generator().manual_seed(1))
    turned = replace(shard, index=shard.index[order])
    assert torch.equal(
        noised_sums([psi], shard, RELEASE, seeded(0)), noised_sums([psi[order]], turned, RELEASE, seeded(0))
    )
