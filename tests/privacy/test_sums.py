"""Noised sums on the wire: the server makes of them what the sites would have made, and takes nothing else."""

from dataclasses import replace

import pytest
import torch
from sums_world import STARTS, SUMS, asked

from rescene.config import resolve
from rescene.core.errors import ConfigError
from rescene.core.record import tensors
from rescene.methods.upload_schema import Misfit, Place, check_form
from rescene.privacy.mechanism import digest, honest_sums
from rescene.privacy.release import sums_received, sums_upload

SIZES = {"noise": 2 * (16 + 2) + 1, "coloured": 3 * 4 * 4 + 10 + 1}  # of a class: means, and the count


@pytest.mark.parametrize("engine", ["batched", "one-by-one"])
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", ["rescene", "feddm"])
def test_the_server_makes_of_sums_what_the_sites_would_have_made(tiny_world, name, start, engine):
    """The same noise, the same streams: the same surrogates but for the rounding of the sums to float32."""
    _, _, here = asked(tiny_world, start, replace(SUMS, sends_sums=False), name, engine=engine)
    sites, _, there = asked(tiny_world, start, SUMS, name, engine=engine)
    assert all("images" not in upload for upload in sites.sent) and any(len(u["labels"]) for u in there.values())
    for client in range(3):
        assert torch.equal(here[client]["labels"], there[client]["labels"])
        assert torch.allclose(here[client]["images"], there[client]["images"], atol=1e-4)
        assert here[client]["notes"].keys() == there[client]["notes"].keys()


@pytest.mark.parametrize("start", STARTS)
def test_a_site_is_opened_alike_whoever_else_has_answered(tiny_world, start):
    """Randomness has the address of the client, so neither order nor absence of others matters."""
    sites, payload, everybody = asked(tiny_world, start)
    rng = sites._place.at("client_round", 0)
    for client in (2, 1):
        alone = sites.method.opened({client: sites.sent[client]}, payload, sites, rng)[client]
        assert torch.equal(alone["labels"], everybody[client]["labels"])
        assert torch.allclose(alone["images"], everybody[client]["images"], atol=1e-5)


@pytest.mark.parametrize("start", STARTS)
def test_bytes_both_ways_are_those_of_the_sums(tiny_world, start):
    """A row of float32 and a label for each class that is sent; sums of pictures need no model."""
    sites, payload, _ = asked(tiny_world, start)
    for upload in sites.sent:
        assert upload["sums"].shape == (len(upload["labels"]), SIZES[start]) and upload["sums"].dtype == torch.float32
        assert sum(t.numel() * t.element_size() for t in tensors(upload)) == len(upload["labels"]) * (
            4 * SIZES[start] + 8
        )
    assert ("model" in payload) == (start == "noise")
    assert sites.ledger.meter.flops["server"] > 0 or start == "coloured"  # the descent is the server's work now


@pytest.mark.parametrize("start", STARTS)
def test_suppressed_classes_stay_home_and_a_site_that_declines_says_just_that(tiny_world, tmp_path, start):
    strict = replace(SUMS, threshold=30.0)  # 30 x .1 x sqrt 5 = 6.7 images: site 1 has 13 and 3
    sites, payload, uploads = asked(tiny_world, start, strict, book=tmp_path)
    assert sites.sent[1]["labels"].tolist() == [0] and uploads[1]["labels"].tolist() == [0] * 3
    assert uploads[1]["notes"]["num_suppressed"] == 1
    if start == "noise":  # one participation is all; moments are released once and serve every round
        sites.sent = []
        sites.move(tiny_world["task"], 1)
        with pytest.warns(match="declines"):
            uploads = sites.ask(sites.participants, "client_round", payload)
        assert sites.sent[0] == {"notes": {"num_declined": 1}}
        assert len(uploads[0]["labels"]) == 0 and uploads[0]["notes"]["num_declined"] == 1


def test_how_the_release_travels_is_no_part_of_the_question():
    """A site's ledger answers both with the same noised numbers."""
    assert digest([], SUMS) == digest([], replace(SUMS, sends_sums=False))
    assert digest([], SUMS) != digest([], replace(SUMS, clip=1.0))


def test_what_is_suppressed_is_the_same_on_both_sides():
    """A count that rounding moves over the threshold is judged after rounding."""
    edge = SUMS.least_count * SUMS.kappa
    sums = torch.tensor([[0.5, edge], [0.5, edge * (1 - 1e-9)], [0.5, 2 * edge], [0.5, 0.5 * edge]]).double()
    upload = sums_upload(sums, (4, 5, 6, 7), SUMS)
    back = sums_received(upload, (4, 5, 6, 7))
    assert 6 in upload["labels"] and 7 not in upload["labels"]
    again = sums_upload(back, (4, 5, 6, 7), SUMS)
    assert torch.equal(again["labels"], upload["labels"]) and torch.equal(again["sums"], upload["sums"])


def spoilt(upload, **parts):
    return upload | parts


@pytest.mark.parametrize("start", STARTS)
def test_only_sums_that_the_mechanism_can_give_fit(tiny_world, start):
    sites, payload, _ = asked(tiny_world, start)
    place = Place(tiny_world["task"], 16, mechanism=SUMS)
    form = sites.method.expects("client_round", payload, place)
    for upload in (*sites.sent, {"notes": {"num_declined": 1}}):
        check_form(form, upload)
        check_form(form, {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in upload.items()})
    good = sites.sent[1]
    sums, labels = good["sums"], good["labels"]
    far, few, none = sums.clone(), sums.clone(), sums.clone()
    far[0, 0] = 2 * (float(sums[0, -1]) + 10)  # beyond so many records of norm 2 and nine deviations
    few[0, -1], none[0, 1] = 0.9 * SUMS.least_count * SUMS.kappa, torch.nan
    bad = {
        "another shape": [spoilt(good, sums=sums[:, 1:]), spoilt(good, sums=sums[:1])],
        "not a float32": [spoilt(good, sums=sums.double()), spoilt(good, sums=sums.flatten())],
        "not numbers": [spoilt(good, sums=none)],
        "no such mechanism": [spoilt(good, sums=far), spoilt(good, sums=few)],
        "other classes": [spoilt(good, labels=labels + 1), spoilt(good, labels=labels * 0)],
        "parts asked for": [spoilt(good, images=sums), {"labels": labels, "notes": {}}, {"notes": {"num_declined": 2}},
                            spoilt(good, notes={"num_images": 12})],
    }  # fmt: skip
    for words, uploads in bad.items():
        for upload in uploads:
            with pytest.raises(Misfit, match=words):
                check_form(form, upload)


def test_the_form_allows_every_number_that_noise_can_draw():
    """A hundred images at the clip, all in one direction; the largest noise towards it, and away from the count."""
    noise = SUMS.deviation * 8.3 * torch.tensor([[1.0, 1.0, -1.0]])
    sums = torch.tensor([[100 * SUMS.clip, 0.0, 100 * SUMS.kappa]]) + noise
    assert honest_sums(sums, SUMS.clip, SUMS.kappa, SUMS.deviation, SUMS.least_count)
    assert not honest_sums(sums * torch.tensor([1.1, 1, 1]), SUMS.clip, SUMS.kappa, SUMS.deviation, SUMS.least_count)


@pytest.mark.parametrize("mechanism", ["none", "per-example", "paper-experiment"])
def test_without_a_release_there_are_no_sums_to_send(mechanism):
    with pytest.raises(ConfigError, match=r"no noised sums to send; privacy\.mechanism=release"):
        resolve(
            "smoke",
            [
                "method.start=noise",
                f"privacy.mechanism={mechanism}",
                "privacy.noise_multiplier=1",
                "privacy.send=sums",
            ],
        )


def test_a_recipe_that_says_nothing_of_it_keeps_its_name():
    release = ["method.start=noise", "privacy.mechanism=release", "privacy.epsilon=8"]
    plain, said = resolve("smoke", release), resolve("smoke", [*release, "privacy.send=sums"])
    assert plain.recipe.privacy.send is None and "send" not in plain.recipe.privacy.model_dump(exclude_none=True)
    assert plain.digest() != said.digest() and said.recipe.promise(5).mechanism.sends_sums
    assert said.recipe.promise(5).epsilon() == plain.recipe.promise(5).epsilon()
