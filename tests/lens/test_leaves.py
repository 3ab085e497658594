"""Procedural pictures and what a lens is made of: deterministic, lively, and with the statistics they are meant to have."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from rescene.lens import draw_leaves
from rescene.lens.contrast import SMALL, contrast, draws, train_network, views
from rescene.lens.features import halves
from rescene.lens.making import Measuring, assembled, leading_directions
from rescene.lens.network import LensNet, fold
from rescene.lens.patches import FLOOR, SIDE, patch_deviation, sampled_dictionary


def pictures(n, seed=0, size=32):
    return draw_leaves(n, torch.Generator().manual_seed(seed), size)


def test_a_seed_gives_the_same_pictures_and_another_gives_others():
    assert torch.equal(pictures(5), pictures(5))
    assert not torch.equal(pictures(5), pictures(5, seed=1))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(pictures(5)[0], pictures(5)[1])


def test_pictures_use_the_range_and_have_edges_and_colour():
    x = pictures(120).float() / 255
    assert float(x.mean()) == pytest.approx(0.46, abs=0.06)
    assert float(x.std()) == pytest.approx(0.27, abs=0.05)
    assert float((x.std(dim=(1, 2, 3)) < 0.02).float().mean()) < 0.05, "hardly any picture is empty"
    grey = x.mean(dim=1, keepdim=True)
    assert float((x - grey).abs().mean()) > 0.02
    steps = (x[..., 1:] - x[..., :-1]).flatten()
    kurtosis = float(steps.pow(4).mean() / steps.square().mean().square())
    assert kurtosis > 6, "differences between neighbours have the heavy tails of natural images (3 is normal)"


def test_power_falls_with_frequency_about_as_in_photographs():
    light = pictures(200).float().mean(dim=1)
    power = torch.fft.rfft2(light - light.mean(dim=(1, 2), keepdim=True)).abs().square().mean(dim=0)
    f = (torch.fft.fftfreq(32)[:, None].square() + torch.fft.rfftfreq(32).square()).sqrt()
    low, high = (power[(f > a) & (f <= b)].mean() for a, b in ((0.05, 0.1), (0.2, 0.4)))
    exponent = math.log(float(low / high)) / math.log(0.3 / 0.075)
    assert 1.2 < exponent < 3.2, "photographs have about 2"


def test_the_loss_of_contrast_by_hand():
    z = F.normalize(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [-1.0, 1.0]]), dim=1)
    total = 0.0
    for i, partner in enumerate((2, 3, 0, 1)):
        scores = [math.exp(float(z[i] @ z[j]) / 0.5) for j in range(4) if j != i]
        total -= math.log(math.exp(float(z[i] @ z[partner]) / 0.5) / sum(scores))
    assert float(contrast(z, 0.5)) == pytest.approx(total / 4, rel=1e-5)


def test_a_view_without_any_change_is_the_picture():
    x = pictures(3, size=64)
    d = {name: torch.ones(3) for name in ("width", "height", "mirror", "light", "contrast", "saturation")}
    d |= {name: torch.zeros(3) for name in ("left", "top", "hue", "jitter", "grey", "blur")}
    found = views(x, d, 32) * 0.25 + 0.47
    assert torch.allclose(found, F.avg_pool2d(x.float() / 255, 2), atol=1e-5)
    mirrored = views(x, d | {"mirror": -torch.ones(3)}, 32) * 0.25 + 0.47
    assert torch.allclose(mirrored, found.flip(3), atol=1e-5)


def test_views_differ_and_stay_in_range():
    x, generator = pictures(6, size=64), torch.Generator().manual_seed(0)
    first, second = (views(x, draws(6, generator, SMALL), 32) for _ in range(2))
    assert first.shape == (6, 3, 32, 32) and not torch.allclose(first, second)
    assert float(first.min()) >= -0.47 / 0.25 - 1e-4 and float(first.max()) <= 0.53 / 0.25 + 1e-4


def test_folding_changes_nothing_but_the_number_of_layers():
    net = LensNet((4, 6, 8, 8)).eval()
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    x = torch.randn(2, 3, 16, 16)
    before = net(x)
    fold(net)
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in net.modules())
    for a, b in zip(before, net(x), strict=True):
        assert torch.allclose(a, b, atol=1e-4)


def test_halves_are_averages_over_quarters():
    x = torch.arange(25.0).reshape(1, 1, 5, 5)
    assert torch.equal(halves(x), F.adaptive_avg_pool2d(x, 2))
    assert torch.equal(halves(x[..., :4, :4]), F.adaptive_avg_pool2d(x[..., :4, :4], 2))


def test_strength_of_a_patch_by_its_definition():
    x = F.avg_pool2d(pictures(4, size=64).float() / 255, 2)
    patches = sampled_dictionary(x, 7, 0.5, torch.Generator().manual_seed(0))
    p = x[1, :, 3 : 3 + SIDE, 4 : 4 + SIDE].flatten()
    deviation = (p.var(unbiased=False) + FLOOR).sqrt()
    assert float(patch_deviation(x)[1, 0, 3, 4]) == pytest.approx(float(deviation), rel=1e-3)
    s = patches.filters.flatten(1) @ ((p - p.mean()) / deviation) - patches.offsets
    wanted = torch.cat([F.relu(s - 0.5), F.relu(-s - 0.5)])
    assert torch.allclose(torch.cat(patches.maps(x), dim=1)[1, :, 3, 4], wanted, atol=1e-3)


def test_leading_directions_are_those_of_the_covariance():
    rows = (
        torch.randn(200, 5, 4, generator=torch.Generator().manual_seed(0))
        * torch.tensor([3.0, 1, 0.5, 0.2, 2])[:, None]
    )
    found = leading_directions(list(rows.split(60)), 2)
    assert found.shape == (5, 2)
    assert abs(float(found[0, 0])) > 0.95 and abs(float(found[4, 1])) > 0.95


def test_a_small_lens_is_made_on_a_cpu_and_again_the_same():
    """The whole way, in its small form: train, draw patches, measure directions and deviations."""
    tiny = replace(SMALL, num_pictures=24, num_steps=2, num_pairs=8, widths=(4, 4, 8, 8), warm_up=1)
    measuring = Measuring(num_pictures=24, num_patches=6, modes=(4, 2, 2, 2))
    made = [assembled(train_network(tiny, 0, torch.device("cpu")), measuring, 0, torch.device("cpu")) for _ in range(2)]
    for (name, a), b in zip(made[0].state_dict().items(), made[1].state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    z = made[0](F.avg_pool2d(pictures(24, seed=3, size=64).float(), 2).round().to(torch.uint8))
    assert z.isfinite().all() and 0.3 < float(z.square().mean()) < 3
