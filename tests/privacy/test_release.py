"""Sensitivity, noise and thresholds of the release, and the per-example sum: the bounds that the accountant relies on."""

import itertools
import math
import sys
from dataclasses import replace

import pytest
import torch

from rescene.core.errors import ConfigError
from rescene.core.rng import Rng
from rescene.methods.surrogates import surrogates_of
from rescene.nets import Arch
from rescene.privacy.accounting import Composition
from rescene.privacy.mechanism import (
    Mechanism,
    SitePrivacy,
    class_sums,
    clip_rows,
    noised_means,
    refuse_batch_statistics,
)
from rescene.privacy.noise import Noise
from rescene.privacy.private_condensation import clipped_gradient_sum
from rescene.privacy.release import embeddings, noised_sums
from rescene.training import Condensation

SETTINGS = Condensation(ipc=3, num_steps=4, start="noise")
RELEASE = Mechanism("release", 0.1, 2.0, Composition(1, 1), kappa=1.0, num_nets=2, threshold=3.0)


class Silent(Noise):
    """No noise, every record sampled: what remains is the part that must be bounded."""

    def words(self):
        return lambda count: torch.zeros(count, dtype=torch.int64)  # the middle of every law


def at_site(shard, mechanism, noise=None):
    return replace(shard, site=SitePrivacy(mechanism, noise or Noise(Rng(5).generator())))


def test_five_thousand_neighbours_never_move_a_sum_beyond_the_bound():
    """Data sets of 0 to 7 records of hostile sizes, and the same with one record more: no pair differs by more than D, around
    no centre or any that the server may have thought of."""
    g = torch.Generator().manual_seed(0)
    worst = 0.0
    for _ in range(5000):
        n, d, classes = (int(torch.randint(low, high, (), generator=g)) for low, high in ((0, 8), (1, 40), (1, 4)))
        clip, kappa = (10 ** (4 * torch.rand(2, generator=g) - 2)).tolist()
        size = 10 ** (12 * torch.rand(n + 1, 1, generator=g) - 4)
        psi, label = torch.randn(n + 1, d, generator=g) * size, torch.randint(classes, (n + 1,), generator=g)
        if torch.rand((), generator=g) < 0.05:
            psi[-1, 0] = torch.tensor([torch.inf, torch.nan, 3e38])[int(torch.randint(3, (), generator=g))]
        centre = torch.randn(classes, d, generator=g) * 10 ** (12 * torch.rand((), generator=g) - 4)
        if torch.rand((), generator=g) < 0.05:
            centre[0, 0] = torch.tensor([torch.inf, torch.nan, -3e38])[int(torch.randint(3, (), generator=g))]
        around = None if torch.rand((), generator=g) < 0.5 else centre
        step = 2.0**-40 * math.hypot(clip, kappa)
        less = class_sums(psi[:n], label[:n], classes, clip, kappa, step, around)
        more = class_sums(psi, label, classes, clip, kappa, step, around)
        moved = float((more - less).double().norm()) * 2.0**-40
        worst = max(worst, moved)
        assert moved <= 1 + 1e-9
    assert worst > 0.999, "the bound is reached, so a smaller one would be wrong"


def test_neighbours_of_a_real_network_stay_within_the_bound(tiny_world):
    """The whole way from pictures to sums, for every record of a site left out in turn."""
    net, shard = tiny_world["net"].eval(), tiny_world["shards"][1]
    thetas = [[p * scale for p in net.parameters()] for scale in (1.0, 30.0)]
    thetas = [[p.detach().clone() for p in theta] for theta in thetas]

    def sums(one):
        return noised_sums([embeddings(net, one, thetas, SETTINGS)], one, RELEASE, Silent())

    whole = sums(shard)
    for i in range(len(shard)):
        rest = replace(shard, index=torch.cat([shard.index[:i], shard.index[i + 1 :]]))
        assert 0 < float((whole - sums(rest)).norm()) <= RELEASE.sensitivity * (1 + 1e-6)


def test_per_example_gradients_are_the_true_ones_clipped_one_by_one(tiny_world):
    """Against a plain loop: autograd of ||mu_s - psi(x_i)||^2 for each record on its own, then clip, then sum."""
    net, shard = tiny_world["net"].eval().requires_grad_(False), tiny_world["shards"][1]
    real, pixels = shard.pictures(shard.index), torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    rows = []
    for x in real:
        s = pixels.clone().requires_grad_(True)
        loss = sum((f(s).mean(0) - f(x[None])[0]).square().sum() for f in (net.features, net))
        rows.append(torch.autograd.grad(loss, s)[0].flatten())
    rows = torch.stack(rows).double()
    clip = float(rows.norm(dim=1).median())  # half of them are clipped
    expected = (rows * (clip / rows.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0).reshape(pixels.shape)
    step = clip * 2.0**-30
    found = clipped_gradient_sum(net, pixels, real, clip, step, SETTINGS).double() * step
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))
    without = clipped_gradient_sum(net, pixels, real[1:], clip, step, SETTINGS).double() * step
    assert float((found - without).norm()) <= clip * (1 + 1e-6)
    assert not clipped_gradient_sum(net, pixels, real[:0], clip, step, SETTINGS).any()


@pytest.mark.slow
def test_five_thousand_neighbours_never_move_a_per_example_sum_beyond_the_bound():
    """63 worlds of a network, surrogates and 5 records, all of hostile sizes; the sums of all subsets of the records, and all 80
    pairs of subsets of which one holds a record more."""
    g, worst, pairs = torch.Generator().manual_seed(0), 0.0, 0
    for world in range(63):
        arch = Arch("convnet", 16, ("group", "batch")[world % 2], (2, 4)[world % 3 > 0])
        net = arch.build(3, g).eval().requires_grad_(False)
        for p in net.parameters():
            p.mul_(10 ** (2 * torch.rand((), generator=g) - 1))
        pixels = torch.randn(2, 3, 16, 16, generator=g) * 10 ** (4 * torch.rand((), generator=g) - 2)
        real = torch.randn(5, 3, 16, 16, generator=g) * 10 ** (6 * torch.rand(5, 1, 1, 1, generator=g) - 2)
        clip = float(10 ** (4 * torch.rand((), generator=g) - 2))
        sums = {
            chosen: clipped_gradient_sum(net, pixels, real[list(chosen)], clip, clip * 2.0**-30, SETTINGS)
            for size in range(6)
            for chosen in itertools.combinations(range(5), size)
        }
        for chosen in sums:
            for i in chosen:
                less = sums[tuple(j for j in chosen if j != i)]
                moved = float((sums[chosen] - less).double().norm()) * 2.0**-30
                pairs, worst = pairs + 1, max(worst, moved)
                assert moved <= 1 + 1e-5, "float32 embeddings change in their last digit with the size of the batch"
    assert pairs >= 5000 and worst > 0.999, "the bound is reached, so a smaller one would be wrong"


def test_rows_within_the_bound_stay_as_they_are():
    rows = torch.tensor([[0.3, 0.4], [0.0, 0.0], [6.0, 8.0]], dtype=torch.float64)
    assert torch.equal(clip_rows(rows, 5.0), torch.tensor([[0.3, 0.4], [0.0, 0.0], [3.0, 4.0]], dtype=torch.float64))


def test_means_come_from_noised_sums_alone_and_small_counts_are_suppressed():
    sums = torch.tensor([[20.0, 40.0, 10.0], [1.0, 1.0, 1.0], [9.0, 9.0, -3.0]])  # counts 5, .5 and -1.5 at kappa 2
    means, enough = noised_means(sums, kappa=2.0, least=2.0)
    assert means[0].tolist() == [4.0, 8.0] and enough.tolist() == [True, False, False]
    assert torch.isfinite(means).all()


def test_the_noise_has_the_promised_deviation(tiny_world):
    shard = tiny_world["shards"][0]
    psi = torch.zeros(len(shard), 4000)
    found = noised_sums([psi], shard, replace(RELEASE, sigma=3.0), Noise())
    expected = 3.0 * (2.0**2 + 1.0**2) ** 0.5
    assert float(found[:, :-1].std()) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("cipher", ["aes", "none", "seeded"])
def test_noise_is_fresh_unless_it_is_the_test_mode_and_has_the_right_law(monkeypatch, cipher):
    """Over three blocks: quantiles from the middle to the tails within six deviations of their own error, no block twice."""
    if cipher == "none":
        monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers", None)
    else:
        pytest.importorskip("cryptography")

    def noise():
        return Noise(Rng(1).generator() if cipher == "seeded" else None)

    assert torch.equal(noise().normal(8), noise().normal(8)) == (cipher == "seeded")
    assert noise().normal(0).shape == (0,) and noise().normal(2, 3).shape == (2, 3)
    n = 3 * 2**15 + 7
    many = noise().normal(n)
    assert len(many.unique()) == n
    for z in (-3.0, -1.0, 0.0, 0.5, 2.0):
        p = float(torch.special.ndtr(torch.tensor(z)))
        assert abs(float((many < z).double().mean()) - p) < 6 * (p * (1 - p) / n) ** 0.5
    pairs = many[: n - 1] * many[1:]
    assert abs(float(pairs.mean())) < 6 / n**0.5, "neighbours do not know of each other"
    assert float(noise().chosen(40000, 0.25).double().mean()) == pytest.approx(0.25, abs=0.015)


def test_torch_seeds_do_not_reach_the_noise():
    torch.manual_seed(0)
    first = Noise().normal(4)
    torch.manual_seed(0)
    assert not torch.equal(first, Noise().normal(4))


def test_a_release_uploads_ipc_surrogates_of_every_class_it_is_sure_of(tiny_world):
    """Client 1 has 13 and 3 images; the threshold lies at .1 * sqrt(5) * 3 < 1 record, then at 13 > 6.7 > 3."""
    shard, net = tiny_world["shards"][1], tiny_world["net"]
    (both,) = surrogates_of(net, [at_site(shard, RELEASE)], [Rng(0)], SETTINGS, 7)
    assert both.labels.tolist() == [0, 0, 0, 1, 1, 1] and both.num_suppressed == 0
    (one,) = surrogates_of(net, [at_site(shard, replace(RELEASE, threshold=30.0))], [Rng(0)], SETTINGS, 7)
    assert one.labels.tolist() == [0, 0, 0] and one.num_suppressed == 1


def test_without_noise_a_release_descends_towards_the_clipped_real_means(tiny_world):
    """One network, a clip nobody reaches, no noise: the plain gradient of Eq. 1 from the same start."""
    shard, net = tiny_world["shards"][2], tiny_world["net"]
    settings = Condensation(ipc=3, num_steps=1, radius=0.0, start="noise", real_batch="all", clip=1.0)
    free = replace(RELEASE, clip=1e6, num_nets=1, kappa=1e5, sigma=0.0)
    (private,) = surrogates_of(net, [at_site(shard, free, Silent())], [Rng(0)], settings, 7)
    (usual,) = surrogates_of(net, [shard], [Rng(0)], settings, 7)
    assert not torch.allclose(private.images, private.start, atol=1e-4)
    rows = private.labels == 1  # the site has this class only; both start from the same white noise
    assert torch.equal(private.start[rows], usual.start)
    assert torch.allclose(private.images[rows], usual.images, atol=1e-4)


@pytest.mark.parametrize("kind", ["release", "per-example"])
def test_uploads_do_not_tell_which_classes_a_site_has(tiny_world, kind):
    """Client 0 has no image of class 1: it sends both classes all the same, or decides by a noised count."""
    mechanism = replace(RELEASE, kind=kind, sigma=1.0, threshold=0.0, typical_count=10.0)
    labels = set()
    for seed in range(8):
        shard = at_site(tiny_world["shards"][0], mechanism, Noise(Rng(seed).generator()))
        (made,) = surrogates_of(tiny_world["net"], [shard], [Rng(0)], SETTINGS, 7)
        labels.add(tuple(made.labels.unique().tolist()))
    assert (0, 1) in labels


@pytest.mark.parametrize("kind", ["release", "per-example", "paper-experiment"])
def test_the_network_comes_back_and_two_sites_at_once_equal_one_by_one(tiny_world, kind):
    mechanism, net = replace(RELEASE, kind=kind), tiny_world["net"]
    before = {key: value.clone() for key, value in net.state_dict().items()}
    rngs = [Rng(1).at(k) for k in range(2)]

    def sites():
        return [at_site(s, mechanism, Noise(Rng(k).generator())) for k, s in enumerate(tiny_world["shards"][1:])]

    together = surrogates_of(net, sites(), rngs, SETTINGS, 7)
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    assert all(p.requires_grad for p in net.parameters())
    for shard, rng, batched in zip(sites(), rngs, together, strict=True):
        (alone,) = surrogates_of(net, [shard], [rng], SETTINGS, 7)
        assert torch.equal(alone.labels, batched.labels) and torch.allclose(alone.images, batched.images, atol=1e-5)
        assert not torch.equal(alone.images, alone.start)


def test_the_papers_experiment_without_noise_is_the_plain_clipped_descent(tiny_world):
    settings = Condensation(ipc=3, num_steps=3, clip=1.0, surrogates_per_class="half")
    shard = tiny_world["shards"][1]
    quiet = Mechanism("paper-experiment", 0.0, 1.0, Composition(1, 1))
    (ours,) = surrogates_of(tiny_world["net"], [at_site(shard, quiet)], [Rng(0)], settings, 7)
    (plain,) = surrogates_of(tiny_world["net"], [shard], [Rng(0)], settings, 7)
    assert torch.equal(ours.images, plain.images)
    loud = replace(quiet, sigma=5.0)
    (noisy,) = surrogates_of(tiny_world["net"], [at_site(shard, loud)], [Rng(0)], settings, 7)
    spread = (noisy.images - plain.images)[
        noisy.labels == 0
    ].std()  # three steps of 5 * 1 / 13, plus what follows from it
    assert float(spread) == pytest.approx(3**0.5 * 5 / 13, rel=0.1)


def test_a_site_with_too_few_images_answers_the_papers_experiment_with_nothing(tiny_world):
    shard, mechanism = tiny_world["shards"][1], Mechanism("paper-experiment", 1.0, 1.0, Composition(1, 1))
    for index in (shard.index[:1], shard.index[:0]):
        few = at_site(replace(shard, index=index), mechanism)
        half = Condensation(ipc=3, num_steps=2, clip=1.0, surrogates_per_class="half")
        (made,) = surrogates_of(tiny_world["net"], [few], [Rng(0)], half, 7)
        assert len(made.labels) == 0 and made.images.shape == (0, 3, 16, 16)


def test_batch_norm_in_train_mode_is_refused(tiny_world):
    net, shard = tiny_world["net"], tiny_world["shards"][0]
    refuse_batch_statistics(net.eval())
    theta = [p.detach().clone() for p in net.parameters()]
    net.train()
    for look in (
        lambda: embeddings(net, shard, [theta], SETTINGS),
        lambda: clipped_gradient_sum(
            net, shard.pictures(shard.index[:2]), shard.pictures(shard.index), 1.0, 2.0**-30, SETTINGS
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            look()
        assert caught.value.code == "E175" and "model.norm=group" in caught.value.fix
    with pytest.raises(ConfigError) as caught:
        embeddings(net.eval(), shard, [theta], SETTINGS.model_copy(update={"norm_statistics": "batch"}))
    assert caught.value.code == "E175"
