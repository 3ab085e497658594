"""Sums around a centre from earlier releases: the same sums with less to clip, one release all the same."""

from dataclasses import replace

import pytest
import torch
from sums_world import STARTS, SUMS, asked, federation

from rescene.config import resolve
from rescene.core.errors import ConfigError
from rescene.core.rng import Rng
from rescene.methods.rescene import Collected
from rescene.methods.upload_schema import Place, check_form
from rescene.privacy.ledger import Ledger
from rescene.privacy.mechanism import SitePrivacy, class_sums, honest_sums, moved_back, noised_means
from rescene.privacy.noise import Noise
from rescene.privacy.release import moments_of, released_moments, sums_upload

CENTRED = replace(SUMS, centred=True)


def test_a_centre_leaves_what_nobody_clips_as_it_is_and_saves_what_would_be_clipped():
    g = torch.Generator().manual_seed(0)
    groups, centre = torch.arange(40) % 2, torch.tensor([[5.0, 0.0, 1.0], [0.0, -7.0, 0.0]])
    psi = centre[groups] + 0.1 * torch.randn(40, 3, generator=g)
    truth = torch.stack([psi[groups == c].double().mean(0) for c in (0, 1)])

    def means(clip, around):
        sums = class_sums(psi, groups, 2, clip, 1.0, 2.0**-30, around).double() * 2.0**-30
        return noised_means(sums if around is None else moved_back(sums, around, 1.0), 1.0, 1.0)[0]

    assert torch.allclose(means(100.0, centre), means(100.0, None)) and torch.allclose(means(100.0, None), truth)
    assert torch.allclose(means(1.0, centre), truth) and not torch.allclose(means(1.0, None), truth, atol=1.0)


def test_the_noise_around_a_centre_is_that_of_the_clip(tiny_world):
    """Moving the sums back multiplies the count's noise by the centre: the noise of a mean, clip / count, stays."""
    shard, centre = tiny_world["shards"][1], torch.full((2, 58), 0.05)
    quiet = replace(tiny_world["shards"][1], site=SitePrivacy(replace(CENTRED, sigma=0.0), Noise()))
    true = released_moments(quiet, quiet.site, centre)
    assert true[:, -1].tolist() == [13.0, 3.0]
    # without a ledger each is a new draw
    found = torch.stack([released_moments(shard, SitePrivacy(CENTRED, Noise()), centre) for _ in range(200)])
    noise = found - true
    assert float(noise[..., -1].std()) == pytest.approx(CENTRED.deviation, rel=0.15)
    residual = noise[..., :-1] - noise[..., -1:] / CENTRED.kappa * 0.05
    assert float(residual.std()) == pytest.approx(CENTRED.deviation, rel=0.05)


def test_another_centre_gets_the_release_that_was_made(tiny_world, tmp_path):
    """Moments are released once per task; a server that moves the centre learns nothing more from the site."""
    shard, ledger = tiny_world["shards"][1], Ledger(tmp_path / "l.jsonl")

    def ask(round, centre):
        site = SitePrivacy(CENTRED, Noise(), "run", 0, round, 1, ledger)
        return released_moments(shard, site, centre)

    first = ask(0, torch.zeros(2, 58))
    assert torch.equal(ask(1, torch.ones(2, 58)), first) and ledger.participations("run", 0) == 1


@pytest.mark.parametrize("start", STARTS)
def test_the_server_broadcasts_the_mean_of_what_it_has_and_sites_use_it(tiny_world, start):
    """First nothing; then the pictures of class 0 for it, and for class 1, of which there are none, all pictures."""
    sites, payload, uploads = asked(tiny_world, start, CENTRED)
    assert "centre" not in payload
    method, images = sites.method, uploads[0]["images"][uploads[0]["labels"] == 0]
    state = method.init(tiny_world["arch"].build(2, torch.Generator().manual_seed(1)), Rng(0))
    zeros, ones = torch.zeros(len(images), dtype=torch.int64), torch.ones(3, dtype=torch.int64)
    old = Collected(torch.randn(3, 3, 16, 16, generator=Rng(1).generator()), 5 * ones, ones, ones)
    state = replace(state, pool=(Collected(images, zeros, zeros, zeros),), buffers=(old,))
    again = federation(tiny_world, method, CENTRED)
    payload = method.broadcast(state, 1, again, Rng(3))
    if start == "coloured":
        own, everything = (moments_of(x, CENTRED).mean(0) for x in (images, torch.cat([images, old.images])))
        assert torch.allclose(payload["centre"], torch.stack([own, everything]), atol=1e-6)
    again.ask(again.participants, "client_round", payload)
    form = method.expects("client_round", payload, Place(tiny_world["task"], 16, mechanism=CENTRED))
    for plain, centred in zip(sites.sent, again.sent, strict=True):
        check_form(form, centred)
        assert plain["sums"].shape == centred["sums"].shape and not torch.equal(plain["sums"], centred["sums"])
        assert torch.equal(plain["sums"][:, -1], centred["sums"][:, -1]), "the count has no centre"


def test_a_form_with_a_centre_reaches_as_far_as_the_centre():
    rows = {"clip": 1.0, "kappa": 1.0, "deviation": 0.1, "least": 1.0}
    sums = torch.tensor([[60.0, 20.0]])
    assert not honest_sums(sums, **rows) and honest_sums(sums, **rows, centre=torch.tensor([[2.0]]))
    assert not honest_sums(10 * sums * torch.tensor([1.0, 0.1]), **rows, centre=torch.tensor([[2.0]]))


def test_a_centre_that_is_no_number_gives_nothing_away(tiny_world):
    shard = replace(tiny_world["shards"][1], site=SitePrivacy(CENTRED, Noise()))
    found = released_moments(shard, shard.site, torch.full((2, 58), torch.nan))
    assert found[:, :-1].isnan().all() and sums_upload(found, (0, 1), CENTRED)["sums"][:, :-1].isnan().all()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["privacy.send=surrogates"], r"privacy\.send=sums"),
        (["privacy.mechanism=per-example"], r"privacy\.send=sums"),
        (["privacy.send=sums", "method=feddm"], "FedDM keeps nothing from earlier rounds"),
    ],
)
def test_centres_that_nobody_could_send_are_refused(overrides, says):
    release = ["method.start=noise", "privacy.mechanism=release", "privacy.epsilon=8", "privacy.centre=released"]
    with pytest.raises(ConfigError, match=says):
        resolve("smoke", [*release, *overrides])
    resolve("smoke", [*release, "privacy.send=sums"])
