"""Moments: exact sums, the same head for every split and order, and the sensitivity that its mechanism promises."""

import math
from dataclasses import replace

import pytest
import torch

from rescene.core.rng import Rng
from rescene.data import Images, Task, Transform
from rescene.functional.discriminant import cross_validated_ridge, discriminant_head
from rescene.methods.base import Client
from rescene.methods.moments import EVERYBODY, Moments, Sums, in_steps, merged, possible_sums, received
from rescene.nets import Arch
from rescene.privacy.accounting import Composition
from rescene.privacy.feature_sums import (
    LARGEST,
    STEPS,
    Grid,
    clipped,
    deviations,
    exact_sums,
    noise_eigenvalue,
    noised_feature_sums,
    packed,
    second_moment,
    unpacked,
    wrapped,
)
from rescene.privacy.mechanism import Mechanism, SitePrivacy
from rescene.privacy.noise import Noise
from rescene.testing.conformance import federation_of, make_world

D = 12
MECHANISM = Mechanism("release", 0.5, 1.0, Composition(1, 1), kappa=0.3, covariance_weight=2.0)


class Silence(Noise):
    """Noise of size zero: what a mechanism releases before it is noised."""

    def words(self):
        return lambda count: torch.zeros(count, dtype=torch.int64)  # the middle of every law


def features(n, seed=0, d=D):
    return in_steps(2 * torch.randn(n, d, generator=torch.Generator().manual_seed(seed)))


def labels(n, classes=3, seed=0):
    return torch.randint(classes, (n,), generator=torch.Generator().manual_seed(seed))


def shard_of(pixels, labels, index, task):
    """A site whose pictures are D bytes, behind a linear network."""
    transform = Transform((128 / 255,) * D, (STEPS / 255,) * D, 0)
    arch = Arch("linear", 1, channels=D)
    return Client(Images(pixels, labels), index, task, transform, arch.restore)


def site_with(noise=None):
    return SitePrivacy(MECHANISM, noise or Silence())


def test_sums_are_whole_numbers_and_exact():
    z, y = features(2500), labels(2500)
    found = exact_sums(z, y, 3)
    assert found["counts"].tolist() == [int((y == c).sum()) for c in range(3)]
    for c in range(3):
        assert torch.equal(found["sums"][c], z[y == c].long().sum(dim=0))
    assert torch.equal(unpacked(found["second"].long(), D), z.long().T @ z.long())


def test_the_largest_features_do_not_round():
    z = torch.full((3000, 2), float(LARGEST))
    assert second_moment(z).tolist() == [[3000 * LARGEST**2] * 2] * 2


def test_packing_a_symmetric_matrix_loses_nothing():
    a = torch.randn(5, 5, dtype=torch.float64)
    assert torch.equal(unpacked(packed(a + a.T), 5), a + a.T) and packed(a).shape == (15,)


def test_bytes_of_a_lens_are_its_steps():
    """What the site adds up are the bytes themselves, less 128."""
    pixels = torch.randint(1, 256, (6, D, 1, 1), dtype=torch.uint8)
    task = Task(0, (0, 1), 2, None, torch.arange(6), torch.arange(0))
    shard = shard_of(pixels, torch.tensor([0, 0, 1, 1, 1, 0]), torch.arange(6), task)
    model = Arch("linear", 1, channels=D).build(2).state_dict()
    upload, state = Moments().sum_up({"model": model}, shard, None, Rng(0))
    whole = (pixels.flatten(1).long() - 128).clamp(-LARGEST, LARGEST)
    assert torch.equal(unpacked(upload["second"].long(), D), whole.T @ whole)
    again, after = Moments().sum_up({"model": model}, shard, state, Rng(0))
    assert again == {} and after is state, "an image is told of once"


def test_images_that_came_later_are_told_of_later():
    pixels = torch.randint(1, 256, (6, D, 1, 1), dtype=torch.uint8)
    task = Task(0, (0, 1), 2, None, torch.arange(6), torch.arange(0))
    every = torch.tensor([0, 0, 1, 1, 1, 0])
    model = Arch("linear", 1, channels=D).build(2).state_dict()
    some, all_of_them = (shard_of(pixels, every, torch.arange(n), task) for n in (4, 6))
    first, state = Moments().sum_up({"model": model}, some, None, Rng(0))
    second, _ = Moments().sum_up({"model": model}, all_of_them, state, Rng(0))
    whole, _ = Moments().sum_up({"model": model}, all_of_them, None, Rng(0))
    assert torch.equal(first["second"] + second["second"], whole["second"])
    assert second["counts"].tolist() == [1, 1]


def test_behind_a_mechanism_a_site_answers_once_in_every_task_whether_it_has_images_or_not():
    """An answer that came only with images would tell of a single one with certainty."""
    pixels, every = torch.randint(1, 256, (6, D, 1, 1), dtype=torch.uint8), torch.tensor([0, 0, 1, 1, 1, 0])
    model, state = {"model": Arch("linear", 1, channels=D).build(2).state_dict()}, None
    for number, held in enumerate((torch.arange(3), torch.arange(0), torch.arange(3, 6))):
        task = Task(number, (0, 1), 2, None, torch.arange(6), torch.arange(0))
        shard = replace(shard_of(pixels, every, held, task), site=site_with())
        upload, state = Moments().sum_up(model, shard, state, Rng(0))
        assert upload["sums"].shape == (2, D) and upload["second"].shape == (D * (D + 1) // 2,)
        assert int(upload["counts"].sum()) == Grid.of(MECHANISM, D, 2).counts * len(held)
        assert Moments().sum_up(model, shard, state, Rng(0)) == ({}, state)


def head_of(parts):
    """Weights that the server solves for from these (client, z, y)."""
    sums = [received(k, exact_sums(z, y, 3), (0, 1, 2), None, 0.0) for k, z, y in parts]
    state = Moments().init(Arch("linear", 1, channels=D).build(3), Rng(0))
    state = Moments()._solved(type(state)(state.model, merged((), sums, 3), {}), None)
    return state.model


def test_every_split_and_order_gives_the_same_bits():
    z, y = features(90), labels(90)
    whole = head_of([(0, z, y)])
    for cut in ([10, 30, 50], [1, 88, 1], [45, 45]):
        parts = list(zip(z.split(cut), y.split(cut), strict=True))
        for order in (parts, parts[::-1]):
            found = head_of([(k, *part) for k, part in enumerate(order)])
            assert torch.equal(found["head.weight"], whole["head.weight"])
            assert torch.equal(found["head.bias"], whole["head.bias"])


def test_the_head_is_the_discriminant_of_the_pooled_images():
    z, y = features(200), labels(200)
    found = head_of([(0, z[:80], y[:80]), (1, z[80:], y[80:])])
    x = (z / STEPS).double()
    means = torch.stack([x[y == c].mean(dim=0) for c in range(3)])
    within = (x - means[y]).T @ (x - means[y]) / len(x)
    onehot = torch.nn.functional.one_hot(y, 3).double()
    ridge = cross_validated_ridge(onehot.sum(dim=0), onehot.T @ x, x.T @ x)
    solved = torch.linalg.solve(within + ridge * within.diagonal().mean() * torch.eye(D), means.T)
    assert torch.allclose(found["head.weight"].double(), solved.T, rtol=1e-4, atol=1e-6)
    assert torch.allclose(found["head.bias"].double(), -0.5 * (means.T * solved).sum(dim=0), rtol=1e-4, atol=1e-6)


def test_more_features_than_images_and_absent_classes_are_no_trouble():
    z, y = features(5, d=40), torch.zeros(5, dtype=torch.int64)
    found = exact_sums(z, y, 2)
    counts, sums, second = found["counts"], found["sums"], unpacked(found["second"].double(), 40)
    weight, bias = discriminant_head(counts, sums, second, cross_validated_ridge(counts, sums, second))
    assert weight.isfinite().all() and bias.isfinite().all()
    assert (z.double() @ weight.T + bias).argmax(dim=1).tolist() == [0] * 5, "a class nobody has is never answered"


def test_constant_images_and_a_single_one_are_no_trouble():
    for z in (torch.zeros(3, D), features(1)):
        y = torch.zeros(len(z), dtype=torch.int64)
        found = exact_sums(z, y, 1)
        weight, bias = discriminant_head(found["counts"], found["sums"], unpacked(found["second"].double(), D), 0.1)
        assert weight.isfinite().all() and bias.isfinite().all()


@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
def test_one_image_moves_the_release_by_no_more_than_the_sensitivity(size):
    """Over the joint answer, in deviations of its noise: counts, sums and second moment of all classes, whatever the image is."""
    z, y = features(30), labels(30)
    grid, diagonal = Grid.of(MECHANISM, D, 3), packed(torch.eye(D, dtype=torch.bool))
    of_count, of_sum, of_square = deviations(MECHANISM, D)
    base = noised_feature_sums(z, y, 3, site_with())
    for seed in range(5):
        one = in_steps(size * torch.randn(1, D, generator=torch.Generator().manual_seed(seed)))
        more = noised_feature_sums(torch.cat([z, one]), torch.cat([y, torch.tensor([1])]), 3, site_with())
        moved = {name: (more[name] - base[name]).double() for name in base}
        change = math.sqrt(
            float(moved["counts"].square().sum()) / (grid.counts * of_count) ** 2
            + float(moved["sums"].square().sum()) / (grid.sums * of_sum) ** 2
            + float((moved["second"].square() * torch.where(diagonal, 1, 2)).sum()) / (grid.second * of_square) ** 2
        )
        assert change <= 1 / MECHANISM.sigma
        if size == 30.0:
            assert change == pytest.approx(1 / MECHANISM.sigma, rel=0.1), "an image at the clip uses all of it"


def test_a_clipped_image_is_whole_and_no_longer_than_the_radius():
    z = features(200, d=40) * 3
    found = clipped(z, 100.0)
    assert torch.equal(found, found.round()) and float(found.double().norm(dim=1).max()) <= 100
    assert float(found.double().norm(dim=1).min()) > 90
    assert torch.equal(clipped(features(5), 10_000.0), features(5))


@pytest.mark.parametrize("honest", [None, 4])
def test_noise_has_the_deviation_that_the_mechanism_states(honest):
    """Zero images: what comes is the noise; off the diagonal a product counts twice. Of H sites each adds its share."""
    mechanism = replace(MECHANISM, honest_sites=honest)
    grid, share = Grid.of(mechanism, 60, 3), 1 / math.sqrt(honest or 1)
    of_count, of_sum, of_square = (share * value for value in deviations(mechanism, 60))
    noise = Noise(torch.Generator().manual_seed(0))
    drawn = [
        noised_feature_sums(torch.zeros(0, 60), torch.zeros(0, dtype=torch.int64), 3, SitePrivacy(mechanism, noise))
        for _ in range(20)
    ]
    counts, sums, second = (torch.stack([one[name] for one in drawn]).double() for name in ("counts", "sums", "second"))
    diagonal = packed(torch.eye(60, dtype=torch.bool))
    assert float(counts.std()) == pytest.approx(grid.counts * of_count, rel=0.3)
    assert float(sums.std()) == pytest.approx(grid.sums * of_sum, rel=0.05)
    assert float(second[:, ~diagonal].std()) == pytest.approx(grid.second * of_square / math.sqrt(2), rel=0.05)
    assert float(second[:, diagonal].std()) == pytest.approx(grid.second * of_square, rel=0.1)


def test_numbers_beyond_32_bits_start_again_from_below():
    values = torch.tensor([0, -5, 2**31 - 1, 2**31, -(2**31) - 1, 2**33 + 7])
    assert wrapped(values).tolist() == [0, -5, 2**31 - 1, -(2**31), 2**31 - 1, 7]


def test_the_floor_knows_the_largest_eigenvalue_of_the_noise():
    d, noise = 150, Noise(torch.Generator().manual_seed(0))
    empty = [
        noised_feature_sums(torch.zeros(0, d), torch.zeros(0, dtype=torch.int64), 2, SitePrivacy(MECHANISM, noise))
        for _ in range(3)
    ]
    told = [received(0, one, (0, 1), MECHANISM, 1.0) for one in empty]
    matrix = unpacked(sum(one.second.double() for one in told), d) / STEPS**2
    assert float(torch.linalg.eigvalsh(matrix)[-1]) == pytest.approx(noise_eigenvalue(MECHANISM, d, 3), rel=0.1)


def test_the_server_reads_noised_sums_in_the_same_units():
    """Without noise and with images inside the clip, a release says what the exact sums say."""
    z, y = in_steps(0.5 * torch.randn(40, D, generator=torch.Generator().manual_seed(0))), labels(40)
    exact = received(0, exact_sums(z, y, 3), (0, 1, 2), None, 0.0)
    told = received(0, noised_feature_sums(z, y, 3, site_with()), (0, 1, 2), MECHANISM, 1.0)
    for name in ("counts", "sums", "second"):
        assert torch.allclose(getattr(told, name).double(), getattr(exact, name).double(), rtol=1e-4, atol=1e-2), name
    assert (told.noises, exact.noises) == (1, 0)


def test_classes_of_a_later_task_get_rows_of_their_own():
    first = received(4, exact_sums(features(6), labels(6, 2), 2), (0, 1), None, 0.0)
    second = received(4, exact_sums(features(6, 1), labels(6, 2), 2), (2, 3), None, 0.0)
    (both,) = merged(merged((), [first], 2), [second], 4)
    assert both.counts.tolist() == [*first.counts.tolist(), *second.counts.tolist()[2:]]
    assert torch.equal(both.second, first.second + second.second)


def test_sums_that_no_images_have_are_refused():
    honest = exact_sums(features(9), labels(9), 3)
    assert possible_sums(honest)
    assert not possible_sums(honest | {"sums": honest["sums"] + 10**6})
    assert not possible_sums(honest | {"second": -honest["second"]})
    assert not possible_sums(honest | {"counts": torch.zeros_like(honest["counts"])})


def test_a_site_that_was_away_comes_in_with_a_later_round():
    """Site 3 fails in the first round of each task; in the end the model is the one in which it never failed."""
    from rescene.testing.conformance import drive

    world = make_world()
    punctual = drive(Moments(), world, federation_of(Moments(), world))
    federation = federation_of(Moments(), world)
    federation.settings.absent = lambda clients, call: ([3] if call.round == 0 else [], [])
    late = drive(Moments(), world, federation)
    assert torch.equal(late.model["head.weight"], punctual.model["head.weight"])
    assert all(isinstance(part, Sums) for part in late.parts) and [part.client for part in late.parts] == [1, 2, 3, 4]


def test_exact_sums_are_refused_where_sites_hold_their_own_images():
    from pydantic import ValidationError

    from rescene.config import resolve
    from rescene.config.schema import Recipe

    plan = {"image_size": 32, "tasks": [{"classes": ["a", "b"], "rounds": 1}]}
    exact = resolve("lens-cifar10").recipe.model_dump(mode="json") | {"sites": plan}
    with pytest.raises(ValidationError, match="simulations only"):
        Recipe.model_validate(exact)
    Recipe.model_validate(resolve("lens-cifar10-dp").recipe.model_dump(mode="json") | {"sites": plan})


@pytest.mark.parametrize("name", ["lens-cifar10", "lens-cifar100", "lens-tinyimagenet", "lens-office31"])
def test_an_image_enters_one_noised_answer_in_the_whole_run(name):
    from rescene.config import resolve

    promise = resolve(f"{name}-dp", ["federation.num_rounds=7"]).recipe.promise(5)
    assert promise.composition.participations == 1 and promise.epsilon() == pytest.approx(8, rel=1e-3)
    assert resolve(name).recipe.promise(5) is None


def test_a_secure_sum_is_the_sum_of_the_sites_and_has_its_noise_once():
    """With seeded noise: H = 2 of four sites, so the sum has the noise of two whole ones, and no site's part is kept."""
    from rescene.testing.conformance import drive

    def driven(mechanism):
        world, method = make_world(), Moments()
        federation = federation_of(method, world, mechanism=mechanism)
        plain = federation.settings.shard_of
        noise = Noise(torch.Generator().manual_seed(0))
        federation.settings.shard_of = lambda task, client: replace(
            plain(task, client), site=SitePrivacy(mechanism, noise)
        )
        return drive(method, world, federation), len(world.tasks), len(federation.clients)

    secure, num_tasks, num_sites = driven(replace(MECHANISM, sigma=1e-3, honest_sites=2))
    own, _, _ = driven(replace(MECHANISM, sigma=1e-3))
    assert [part.client for part in secure.parts] == [EVERYBODY] and len(own.parts) == num_sites
    assert secure.parts[0].noises == pytest.approx(num_tasks * num_sites / 2)
    assert sum(part.noises for part in own.parts) == num_tasks * num_sites
    total = sum(part.second.double() for part in own.parts)
    assert float((secure.parts[0].second - total).norm() / total.norm()) < 0.01
