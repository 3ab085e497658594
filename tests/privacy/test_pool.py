"""Sums that the server adds up: what it draws is what one site with all images would have given, with all sites' noise."""

import math
from dataclasses import replace

import pytest
import torch
from sums_world import STARTS, SUMS, asked

from rescene.config import resolve
from rescene.core.errors import ConfigError
from rescene.core.rng import Rng
from rescene.methods import method_class
from rescene.methods.upload_schema import Misfit, Place, check_form
from rescene.privacy.mechanism import SitePrivacy, digest
from rescene.privacy.noise import Noise
from rescene.privacy.release import condense_released, drawn_from_laws, laws_of, pooled, released_moments
from rescene.training import Condensation

POOLED = replace(SUMS, pooled=True)
SETTINGS = Condensation(ipc=3, num_steps=0, start="coloured")
SENT = ["privacy.mechanism=release", "privacy.noise_multiplier=1", "privacy.send=sums", "privacy.pool=true"]


class Silent(Noise):
    def words(self):
        return lambda count: torch.zeros(count, dtype=torch.int64)  # the middle of every law


def sums_of(shards, noise=Silent):
    return [released_moments(shard, SitePrivacy(POOLED, noise())) for shard in shards]


def test_the_draw_is_that_of_one_site_that_holds_all(tiny_world):
    shards, release = tiny_world["shards"], replace(POOLED, sigma=1e-5)  # so that directions stand out
    everything = replace(shards[0], index=torch.cat([shard.index for shard in shards]))
    rngs = [Rng(k) for k in range(3)]
    made = condense_released(None, shards, rngs, SETTINGS, 0, release, sums_of(shards))
    (whole,) = sums_of([everything])
    laws = laws_of(whole, everything.images.pixels.shape[1:], release, math.sqrt(3) * release.deviation)
    for found, rng in zip(made, rngs, strict=True):
        alone = drawn_from_laws(everything, rng, laws, SETTINGS)
        assert torch.equal(found.labels, alone.labels) and len(found.labels) == 6
        assert torch.allclose(found.images, alone.images, atol=1e-5)
    assert not torch.equal(made[0].images, made[1].images), "every site has draws of its own"


def test_the_noise_is_that_of_all_who_sent(tiny_world):
    shards = tiny_world["shards"]
    true, _ = pooled(sums_of(shards), POOLED)
    draws = [pooled(sums_of(shards, Noise), POOLED) for _ in range(60)]
    noise = torch.stack([total - true for total, _ in draws])
    assert float(noise.std()) == pytest.approx(draws[0][1], rel=0.05)
    assert draws[0][1] == pytest.approx(math.sqrt(3) * POOLED.deviation)


def test_who_declines_gets_nothing_and_adds_nothing(tiny_world):
    first, _, last = sums_of(tiny_world["shards"])
    found, deviation = pooled([first, None, last], POOLED)
    assert torch.equal(found, first + last)
    assert deviation == pytest.approx(math.sqrt(2) * POOLED.deviation)
    assert pooled([None, None], POOLED)[0] is None
    made = condense_released(
        None, tiny_world["shards"], [Rng(k) for k in range(3)], SETTINGS, 0, POOLED, [first, None, last]
    )
    assert made[1].num_declined == 1 and not len(made[1].labels) and len(made[0].labels) == 6
    nobody = condense_released(None, tiny_world["shards"], [Rng(k) for k in range(3)], SETTINGS, 0, POOLED, [None] * 3)
    assert [own.num_declined for own in nobody] == [1, 1, 1]


def test_the_sum_is_decomposed_once_per_class_and_the_draws_are_those_of_one_site_at_a_time(tiny_world, monkeypatch):
    shards, rngs, eigh, sizes = tiny_world["shards"], [Rng(k) for k in range(3)], torch.linalg.eigh, []
    release, sums = replace(POOLED, sigma=1e-5), sums_of(shards)
    total, deviation = pooled(sums, release)
    alone = [
        drawn_from_laws(shard, rng, laws_of(total, shard.images.pixels.shape[1:], release, deviation), SETTINGS)
        for shard, rng in zip(shards, rngs, strict=True)
    ]
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: sizes.append(len(matrix)) or eigh(matrix))
    made = condense_released(None, shards, rngs, SETTINGS, 0, release, sums)
    assert sizes == [4, 4], "two classes, 2 x 2 cells"
    assert all(torch.equal(own.images, other.images) for own, other in zip(made, alone, strict=True))
    apart = condense_released(None, shards, rngs, SETTINGS, 0, replace(release, pooled=False), sums)
    assert len(sizes) == 2 + sum(len(own.labels.unique()) for own in apart), "not pooled: once per site and class"


def test_a_class_that_one_site_kept_home_is_drawn_from_the_others(tiny_world):
    """Of class 1 site 0 has no image, site 1 three: below the threshold. Site 2 has 27, and sends them for all."""
    strict = replace(POOLED, threshold=30.0)
    alone, _, apart = asked(tiny_world, "coloured", replace(strict, pooled=False))
    sites, _, together = asked(tiny_world, "coloured", strict)
    assert [u["labels"].tolist() for u in sites.sent] == [[0], [0], [1]] == [u["labels"].tolist() for u in alone.sent]
    assert [len(u["labels"].unique()) for u in apart.values()] == [1, 1, 1]
    for upload in together.values():
        assert upload["labels"].tolist() == [0] * 3 + [1] * 3 and "num_suppressed" not in upload["notes"]
    nobody = replace(POOLED, threshold=1000.0)
    _, _, none = asked(tiny_world, "coloured", nobody)
    assert all(len(u["labels"]) == 0 and u["notes"]["num_suppressed"] == 2 for u in none.values())


def test_both_engines_pool_alike_and_absence_matters(tiny_world):
    sites, payload, batched = asked(tiny_world, "coloured", POOLED)
    _, _, single = asked(tiny_world, "coloured", POOLED, engine="one-by-one")
    assert all(torch.equal(batched[k]["images"], single[k]["images"]) for k in range(3))
    two = {k: sites.sent[k] for k in (0, 2)}
    fewer = sites.method.opened(two, payload, sites, sites._place.at("client_round", 0))
    assert not torch.allclose(fewer[0]["images"], batched[0]["images"], atol=1e-3)


def test_pooling_is_the_servers_affair():
    assert digest([], POOLED) == digest([], SUMS)


@pytest.mark.parametrize("colour", [False, True])
def test_only_sums_of_as_many_channels_as_the_lens_gives_fit(tiny_world, colour):
    """rows: numbers of the covariance, one per cell of a 2 x 2 grid, of each channel where it has colour."""
    mechanism, method = replace(POOLED, covariance_colour=colour), method_class("rescene")(ipc=3, **STARTS["coloured"])
    form = method.expects("client_round", {}, Place(tiny_world["task"], 4, mechanism=mechanism, channels=19))

    def upload(channels):
        rows = 4 * (channels if colour else 1)
        sums = torch.zeros(2, channels * 16 + rows * (rows + 1) // 2 + 1)
        sums[:, -1] = 2 * mechanism.least_count * mechanism.kappa
        return {"labels": torch.tensor([0, 1]), "sums": sums, "notes": {}}

    check_form(form, upload(19))
    for channels in (3, 18):
        with pytest.raises(Misfit, match="another shape"):
            check_form(form, upload(channels))


@pytest.mark.parametrize(("overrides", "words"), [
    ([*SENT, "method.start=coloured", "method.num_steps=0", "privacy.send=surrogates"], r"privacy\.send=sums"),
    ([*SENT, "method.start=noise"], r"privacy\.pool: .*coloured"),
    (["privacy.pool=true"], r"privacy\.send=sums"),
])  # fmt: skip
def test_without_sums_of_pictures_there_is_nothing_to_pool(overrides, words):
    with pytest.raises(ConfigError, match=words):
        resolve("smoke", overrides)


def test_recipes_that_say_nothing_of_lens_and_pool_keep_their_names():
    plain = resolve("smoke", ["method=rescene-plus", "method.step=fixed"])
    assert plain.recipe.privacy.pool is None and plain.recipe.model.lens is None
    assert resolve("smoke", ["method=rescene-plus"]).digest() != plain.digest()
    assert plain.digest().startswith("b25d91c3"), "of runs made before there were lenses"
    pool = resolve("smoke", [*SENT, "method.start=coloured", "method.num_steps=0"])
    assert pool.recipe.promise(2).mechanism.pooled
    assert pool.digest() != resolve("smoke", [*SENT[:-1], "method.start=coloured", "method.num_steps=0"]).digest()
