"""Data through a lens: bytes in the range that its public constants promise, on every machine of a federation alike."""

from dataclasses import replace

import pytest
import torch

from rescene.config import resolve
from rescene.config.plan import SitesSection
from rescene.data import Dataset, Images, Transform
from rescene.data.lens import CHUNK, DEVIATION, MEAN, STEP, look_through, seen, through
from rescene.data.own import away
from rescene.engine.experiment import prepare
from rescene.errors import ConfigError
from rescene.functional.starts import dead_leaves
from rescene.functional.waves import wave_picture

WAVES = ["model.name=mlp", "model.lens=waves", "train.augment=false"]


def pictures(n, size=16):
    return torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def data(n=6):
    images = Images(pictures(n), torch.arange(n) % 2, torch.zeros(n, dtype=torch.int64))
    return Dataset(
        "d", ("a", "b"), images, images.select(slice(0, 2)), Transform((0.5,) * 3, (0.25,) * 3, 2), ("here",)
    )


def test_the_constants_are_those_of_dead_leaves():
    """In groups: light, both colours, the waves of each scale."""
    found = wave_picture(dead_leaves(400, 32, torch.Generator().manual_seed(7)))
    mean, deviation = found.mean(dim=(0, 2, 3)), found.std(dim=(0, 2, 3))
    for rows in (slice(0, 1), slice(3, 11), slice(11, 19)):
        assert float(mean[rows].mean()) == pytest.approx(MEAN[rows.start], rel=0.05)
        assert float(deviation[rows].mean()) == pytest.approx(DEVIATION[rows.start], rel=0.05)
    assert float(mean[1:3].abs().max()) < 0.05 * DEVIATION[1]


def test_bytes_are_deviations_in_steps():
    x = pictures(5)
    found = look_through("waves", x)
    assert found.dtype == torch.uint8 and found.shape == (5, 19, 4, 4)
    mean, deviation = (torch.tensor(v).reshape(-1, 1, 1) for v in (MEAN, DEVIATION))
    wanted = ((wave_picture(x.float() / 255) - mean) / deviation).clamp(-128 / STEP, 127 / STEP)
    back = through("waves", data()).transform.normalise(found)
    assert float((back - wanted).abs().max()) <= 0.51 / STEP


def test_what_is_far_off_ends_at_the_range_instead_of_wrapping():
    black_and_white = torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1).expand(2, 3, 16, 16)
    light = look_through("waves", black_and_white)[:, 0]
    assert bool((light[0] == 0).all()) and bool((light[1] == 255).all())


def test_batches_make_no_difference():
    x = pictures(CHUNK + 3, size=8)
    parts = torch.cat([look_through("waves", part) for part in x.split(400)])
    far = (look_through("waves", x).int() - parts.int()).abs()
    assert (
        int(far.max()) <= 1 and float(far.float().mean()) < 1e-3
    )  # a byte at the edge of rounding may fall either way
    assert torch.equal(seen("waves", x[:9]).round().to(torch.uint8), look_through("waves", x[:9]))


def test_a_data_set_keeps_everything_but_its_look():
    plain = data()
    found = through("waves", plain)
    assert through(None, plain) is plain
    assert (found.image_size, found.num_channels, found.picture_size) == (4, 19, 16)
    assert torch.equal(found.train.labels, plain.train.labels) and torch.equal(found.train.domains, plain.train.domains)
    assert found.classes == plain.classes and found.notes[-1] == "16 pixels seen through waves"
    assert len(found.transform.mean) == len(found.transform.std) == 19 and found.transform.pad == 0
    other = through("waves", replace(plain, transform=Transform((0.1,) * 3, (0.9,) * 3, 1)))
    assert other.transform == found.transform, "how it looks is stated, not measured"


def test_a_server_without_images_has_the_network_of_its_sites():
    plan = SitesSection.model_validate({"image_size": 16, "tasks": [{"classes": ["a", "b"], "rounds": 1}]})
    nothing = through("waves", away(("a", "b"), Transform((0.5,) * 3, (0.25,) * 3, 2), 16))
    assert nothing.train.pixels.shape == (0, 19, 4, 4) and len(nothing.test) == 0
    recipe = resolve("smoke", [*WAVES, "device=cpu"]).recipe.model_copy(update={"sites": plan})
    server, site = prepare(recipe), prepare(recipe, replace(data(), domains=()))
    assert server.arch == site.arch and server.arch.channels == 19 and server.arch.image_size == 4
    assert server.dataset.transform == site.dataset.transform
    assert server.dataset.picture_size == site.dataset.picture_size == 16


@pytest.mark.parametrize(("overrides", "words"), [
    (["train.augment=true"], r"train\.augment=false"),
    (["method=target"], r"three channels here; model\.lens=null"),
    (["method=glfc"], r"three channels here; model\.lens=null"),
    (["method.start=leaves"], r"three channels here; model\.lens=null"),
    (["model.lens=glasses"], "model.lens"),
])  # fmt: skip
def test_what_cannot_be_looked_at_through_a_lens_is_refused(overrides, words):
    resolve("smoke", WAVES)
    with pytest.raises(ConfigError, match=words):
        resolve("smoke", [*WAVES, *overrides])


@pytest.mark.parametrize("name", ["resnet18", "vit-small", "convnet"])
def test_networks_for_photographs_say_what_to_use_instead(name):
    recipe = resolve("smoke", [*WAVES, f"model.name={name}", "model.width=null"]).recipe
    with pytest.raises(ConfigError, match=f"{name} cannot look through a lens") as error:
        prepare(recipe, data())
    assert error.value.code == "E130" and error.value.fix == "model.name=mlp"
