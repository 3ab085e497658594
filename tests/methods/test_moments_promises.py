"""What moments promises of a whole run: whoever holds which image, and whenever it comes, it is in the sums once."""

from dataclasses import replace

import pytest
import torch

from rescene.data import Images
from rescene.methods.moments import Moments, in_steps
from rescene.nets import Arch
from rescene.privacy.accounting import Composition
from rescene.privacy.feature_sums import exact_sums, unpacked
from rescene.privacy.mechanism import Mechanism, SitePrivacy
from rescene.privacy.noise import Noise
from rescene.testing.conformance import SIZE, drive, federation_of, make_world

MECHANISM = Mechanism("release", 0.5, 1.0, Composition(1, 1), kappa=0.3, covariance_weight=2.0)


def flat_world(domains=False, size=4):
    """The suite's world behind a linear network, in pictures of 4 x 4: 48 features, quick to add up."""
    world = make_world(domains)
    train = world.dataset.train
    small = Images(train.pixels[:, :, :size, :size].contiguous(), train.labels, train.domains)
    return replace(world, arch=Arch("linear", size), dataset=replace(world.dataset, train=small, test=small))


def driven(world, away=lambda federation: ()):
    """A run in which the sites that ``away`` names do not answer."""
    federation = federation_of(Moments(), world)
    federation.settings.absent = lambda clients, call: ([k for k in clients if k in away(federation)], [])
    return drive(Moments(), world, federation)


def totals(state):
    return [sum(getattr(part, name).long() for part in state.parts) for name in ("counts", "sums", "second")]


def expected(world, index):
    data = world.dataset.train
    z = in_steps(world.dataset.transform.normalise(data.pixels[index]).flatten(1))
    told = exact_sums(z, data.labels[index], len(world.dataset.classes))
    return [told[name].long() for name in ("counts", "sums", "second")]


def same(found, wanted):
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("domains", [False, True], ids=["new classes at known sites", "new domains"])
def test_every_image_is_in_the_sums_once(domains):
    world = flat_world(domains)
    held = torch.cat([part for shards in world.shards for part in shards])
    assert same(totals(driven(world)), expected(world, held))


def test_a_site_that_joins_next_month_adds_what_it_has_then():
    world = flat_world()
    state = driven(world, away=lambda federation: {4} if federation.task.index == 0 else ())
    held = [part for t, shards in enumerate(world.shards) for k, part in enumerate(shards) if (t, k) != (0, 4)]
    assert same(totals(state), expected(world, torch.cat(held))) and 4 in [part.client for part in state.parts]


def test_a_late_site_is_counted_as_if_it_had_been_punctual():
    world = flat_world()
    late = driven(world, away=lambda federation: {3} if federation.round == 0 else ())
    punctual = driven(world)
    assert same(totals(late), totals(punctual))
    assert torch.equal(late.model["head.weight"], punctual.model["head.weight"])


def test_more_features_than_images_in_the_whole_federation():
    world = flat_world(size=SIZE)
    assert len(world.dataset.train) < 3 * SIZE**2
    state = driven(world)
    data = world.dataset.train
    z = world.dataset.transform.normalise(data.pixels).flatten(1)
    right = (z @ state.model["head.weight"].T + state.model["head.bias"]).argmax(dim=1) == data.labels
    assert float(right.float().mean()) > 0.9


def test_constant_images_leave_a_finite_model():
    world = flat_world()
    grey = Images(torch.full_like(world.dataset.train.pixels, 77), world.dataset.train.labels)
    state = driven(replace(world, dataset=replace(world.dataset, train=grey, test=grey)))
    assert all(value.isfinite().all() for value in state.model.values())


class Talkative(Moments):
    """Forgets that it has answered, and answers again in every round."""

    def sum_up(self, payload, shard, client_state, rng):
        site = SitePrivacy(MECHANISM, Noise(torch.Generator().manual_seed(shard.task.index)))
        return super().sum_up(payload, replace(shard, site=site), None, rng)


def test_behind_a_mechanism_a_second_message_of_a_task_is_not_asked_for():
    world = flat_world()
    federation = federation_of(Talkative(), world)
    federation.mechanism = MECHANISM
    asked = []
    ask = federation.ask
    federation.ask = lambda clients, *more, **late: (
        asked.append((more[0], list(clients))) or ask(clients, *more, **late)
    )
    drive(Talkative(), world, federation)
    assert [clients for verb, clients in asked if verb == "sum_up"] == [[0, 1, 2, 3, 4], [], [0, 1, 2, 3, 4], []]


def test_the_second_moment_of_the_run_is_that_of_its_images():
    world = flat_world()
    second = unpacked(totals(driven(world))[2], 48)
    assert torch.equal(second, second.T) and bool((torch.linalg.eigvalsh(second.double()) > -1e-6).all())


def test_a_class_has_the_noise_of_the_answers_that_told_of_it():
    """Its own task's: one from each site. The second moment has that of both tasks."""
    world = flat_world()
    federation = federation_of(Talkative(), world)
    federation.mechanism = MECHANISM
    state = drive(Talkative(), world, federation)
    assert [part.class_noises.tolist() for part in state.parts] == [[1.0] * 4] * 5
    assert [part.noises for part in state.parts] == [2.0] * 5
