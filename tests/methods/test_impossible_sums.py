"""Sums that no images have are left out, also where nobody can see who sent them; sums of honest sites never are."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from rescene.config import resolve
from rescene.core.errors import ResceneWarning, RunError
from rescene.methods import moments
from rescene.methods.moments import EVERYBODY, Moments, impossible, received
from rescene.privacy.feature_sums import RADIUS, noised_feature_sums, norm
from rescene.privacy.mechanism import SitePrivacy
from rescene.privacy.noise import Noise
from rescene.privacy.totals import added
from rescene.testing.conformance import drive, federation_of, make_world

D, NUM, SITES = 64, 2, 10
CLASSES = tuple(range(NUM))
LIAR = 3  # of the small world; it has images of both classes
LIES = {
    "labels swapped, ten times": lambda a: {k: v if k == "second" else 10 * v.flip(0) for k, v in a.items()},
    "second moment, ten times and negative": lambda a: a | {"second": -10 * a["second"]},
    "second moment, ten times": lambda a: a | {"second": 10 * a["second"]},
    "class sums, ten times": lambda a: a | {"sums": 10 * a["sums"]},
    "counts, ten times and negative": lambda a: a | {"counts": -10 * a["counts"]},
}


@lru_cache
def mechanism(honest=SITES, epsilon=8):
    """That of the recipe `own`, with a secure sum of ten sites or noise by each site."""
    secure = [f"privacy.honest_sites={honest}"] if honest else []
    sites = [f"federation.num_clients={SITES}", f"federation.per_round={SITES}", "data.path=."]
    return resolve("own", [f"privacy.epsilon={epsilon}", *sites, *secure]).recipe.promise(1).mechanism


def images(count, seed):
    """Features of ``count`` images of each class at every site, in steps: classes have means of their own, as in a lens."""
    draw = torch.Generator().manual_seed(seed)
    means = torch.randn(NUM, D, generator=draw) * 0.3 + torch.randn(D, generator=draw)
    labels = torch.arange(NUM).repeat_interleave(count * SITES)
    z = moments.in_steps(0.7 * means[labels] + 0.5 * torch.randn(len(labels), D, generator=draw))
    owner = torch.arange(len(labels)) % SITES
    return [(z[owner == k], labels[owner == k]) for k in range(SITES)]


def opened(held, m, seed, lie=lambda answer: answer):
    """The secure sum as the server reads it, or what the first site sent; that site may lie."""
    site = SitePrivacy(m, Noise(torch.Generator().manual_seed(seed)))
    answers = [noised_feature_sums(z, labels, NUM, site) for z, labels in (held if m.honest_sites else held[:1])]
    answers[0] = lie(answers[0])
    noises = SITES / m.honest_sites if m.honest_sites else 1.0
    return received(EVERYBODY, added(answers), CLASSES, m, noises)


@pytest.mark.parametrize("honest", [SITES, None], ids=["secure sum", "one site"])
@pytest.mark.parametrize("count", [0, 1, 200])
def test_honest_sums_are_never_left_out(honest, count):
    for epsilon in (1, 8):
        m = mechanism(honest, epsilon)
        for seed in range(20):
            assert impossible(opened(images(count, seed), m, seed), m, CLASSES) == ""


def test_images_that_reach_every_bound_are_not_left_out():
    """All alike and as long as the clip allows: squares and their sum along the mean are as large as they can be."""
    m, long = mechanism(), torch.full((400, D), RADIUS * norm(D) / D**0.5).trunc()
    held = [(long, torch.arange(400) % NUM)] * SITES
    for seed in range(20):
        assert impossible(opened(held, m, seed), m, CLASSES) == ""


@pytest.mark.parametrize("lie", LIES)
def test_one_site_of_ten_that_sends_ten_times_larger_numbers_is_noticed(lie):
    m = mechanism()
    for seed in range(5):
        assert impossible(opened(images(200, seed), m, seed, LIES[lie]), m, CLASSES)


def driven(monkeypatch, since):
    """A run in which one site's numbers are ten times as large from this task on."""
    m = replace(mechanism(2), sigma=1e-3)
    monkeypatch.setattr(
        moments, "noised_feature_sums", lambda z, y, num, site: lying(noised_feature_sums(z, y, num, site), site)
    )
    world, method = make_world(), Moments()
    federation = federation_of(method, world, mechanism=m)
    plain = federation.settings.shard_of

    def lying(answer, site):
        return LIES["second moment, ten times and negative"](answer) if site.why == "liar" else answer

    def shard_of(task, client):
        why = "liar" if client == LIAR and task.index >= since else ""
        return replace(plain(task, client), site=SitePrivacy(m, Noise(torch.Generator().manual_seed(client)), why=why))

    federation.settings.shard_of = shard_of
    return drive(method, world, federation), world.tasks


def test_a_run_goes_on_without_an_impossible_sum_and_says_so(monkeypatch):
    with pytest.warns(ResceneWarning, match=r"W446.*the secure sum over sites in round 0 of task 1 is left out"):
        state, tasks = driven(monkeypatch, since=1)
    (part,) = state.parts
    first, later = list(tasks[0].classes), list(tasks[1].classes)
    assert (part.counts[first] > 0).all() and (part.counts[later] == 0).all()
    assert (state.model["head.bias"][later] < -1e8).all(), "a class that nobody told of never wins"


def test_without_any_other_sum_the_run_stops(monkeypatch):
    with pytest.warns(ResceneWarning, match="W446"), pytest.raises(RunError, match="E446"):
        driven(monkeypatch, since=0)


def test_nothing_is_said_of_an_honest_run(monkeypatch, recwarn):
    driven(monkeypatch, since=99)
    assert not [one for one in recwarn if "W446" in str(one.message)]
