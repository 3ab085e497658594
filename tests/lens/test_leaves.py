"""Procedural pictures and what a lens is made of: deterministic, lively, and with the statistics they are meant to have."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from rescene.lens import draw_leaves
from rescene.lens.contrast import SMALL, contrast, draws, train_network, views
from rescene.lens.features import (
    PATCHES,
    Directions,
    by_rank,
    cells_of,
    cosines,
    leading_directions,
    parts_of,
    waves_over,
)
from rescene.lens.making import Measuring, assembled
from rescene.lens.network import LensNet, fold
from rescene.lens.patches import FLOOR, SIDE, THRESHOLD, areas, patch_deviation, patch_strengths, sampled_dictionary


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


def test_modes_are_cosine_waves_over_the_parts():
    """The first is the sum; all of them together are the parts again."""
    x = torch.randn(2, 5, 9, 9, generator=torch.Generator().manual_seed(0))
    parts = parts_of(x, 3)
    assert torch.allclose(parts[:, 4], x[..., 3:6, 3:6].mean(dim=(2, 3)), atol=1e-6), "the middle one"
    modes = waves_over(parts)
    assert torch.allclose(modes[:, 0], parts.sum(dim=1) / 3, atol=1e-6)
    assert torch.allclose(cells_of(modes), parts, atol=1e-6)
    across = modes[:, 1]  # left less right
    assert torch.allclose(across, (parts[:, [0, 3, 6]] - parts[:, [2, 5, 8]]).sum(dim=1) / 6**0.5, atol=1e-6)
    assert torch.allclose(cosines(4) @ cosines(4).T, torch.eye(16).double(), atol=1e-12)


def test_parts_share_a_middle_row_where_they_must():
    x = torch.arange(25.0).reshape(1, 1, 5, 5)
    assert parts_of(x, 2).flatten().tolist() == [6.0, 8.0, 16.0, 18.0]
    assert torch.allclose(areas(5, 2) @ x.flatten(), parts_of(x, 2).flatten())


def test_strength_of_a_patch_by_its_definition():
    x = F.avg_pool2d(pictures(4, size=64).float() / 255, 2)
    filters, offsets = sampled_dictionary(x, 7, torch.Generator().manual_seed(0))
    p = x[1, :, 3 : 3 + SIDE, 4 : 4 + SIDE].flatten()
    deviation = (p.var(unbiased=False) + FLOOR).sqrt()
    assert float(patch_deviation(x)[1, 0, 3, 4]) == pytest.approx(float(deviation), rel=1e-3)
    s = filters.flatten(1) @ ((p - p.mean()) / deviation) - offsets
    wanted = torch.cat([F.relu(s - THRESHOLD), F.relu(-s - THRESHOLD)]).sqrt()
    places = x.shape[-1] - SIDE + 1
    found = patch_strengths(x, filters, offsets, side=places)[1, 3 * places + 4]
    assert torch.allclose(found, wanted, atol=1e-3)
    quarters = patch_strengths(x, filters, offsets, side=2).square()
    every = patch_strengths(x, filters, offsets, side=places).square().transpose(1, 2).unflatten(2, (places, places))
    assert torch.allclose(quarters[:, 0], every[..., :14, :14].mean(dim=(2, 3)), atol=1e-4)


def test_leading_directions_are_those_of_the_covariance():
    rows = torch.randn(900, 5, generator=torch.Generator().manual_seed(0)) * torch.tensor([3.0, 1, 0.5, 0.2, 2])
    found = leading_directions(rows + 50, 2)
    assert found.shape == (5, 2)
    assert abs(float(found[0, 0])) > 0.95 and abs(float(found[4, 1])) > 0.95


@pytest.mark.parametrize("shared", [False, True])
def test_each_mode_keeps_its_own_number_of_directions(shared):
    modes = torch.randn(300, 4, 6, generator=torch.Generator().manual_seed(0)) * torch.arange(1.0, 7)
    directions = Directions(6, (3, 0, 2, 1), shared)
    directions.fit(modes)
    assert directions.basis.shape == (6, 3 if shared else 6) and directions.basis.dtype == torch.int8
    found = directions(modes)
    assert found.shape == (300, 6)
    covariance = torch.cov(found[:, :3].T)
    assert float((covariance - covariance.diagonal().diag()).abs().max()) < (0.3 if shared else 0.02) * float(
        covariance.max()
    )


def test_features_come_in_order_of_their_rank():
    order = by_rank((6, 2, 0, 3))
    assert sorted(order) == list(range(11))
    first = order[:5]  # of eleven: about half of each
    assert sum(i < 6 for i in first) == 3 and 6 in first and sum(i >= 8 for i in first) == 1


def test_a_small_lens_is_made_on_a_cpu_and_again_the_same():
    """The whole way, in its small form: train, draw patches, measure directions and deviations."""
    tiny = replace(SMALL, num_pictures=24, num_steps=2, num_pairs=8, widths=(4, 4, 8, 8), warm_up=1)
    measuring = Measuring(num_pictures=24, num_patches=6, kept={PATCHES: (4, 2, 2, 2), "stage3": (3,)})
    made = [assembled(train_network(tiny, 0, torch.device("cpu")), measuring, 0, torch.device("cpu")) for _ in range(2)]
    for (name, a), b in zip(made[0].state_dict().items(), made[1].state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    z = made[0](F.avg_pool2d(pictures(24, seed=3, size=64).float(), 2).round().to(torch.uint8))
    assert z.isfinite().all() and 0.3 < float(z.square().mean()) < 3
