"""Data through a lens: bytes in the range that its public constants promise, on every machine of a federation alike."""

import json
from dataclasses import replace

import pytest
import torch

from rescene.config import resolve
from rescene.config.site_sections import SitesSection
from rescene.core.errors import ConfigError
from rescene.data import Dataset, Images, Transform
from rescene.data.derived_sets import away
from rescene.engine.experiment import prepare
from rescene.functional.pictures import dead_leaves, wave_picture
from rescene.lens.features import LeavesLens
from rescene.lens.lens import CHUNK, KEY, Waves, open_lens, read_lens, through, write_lens

LENS = open_lens("waves")
MEAN, DEVIATION, STEP = Waves.MEAN, Waves.DEVIATION, LENS.step
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
    found = LENS.look(x)
    assert found.dtype == torch.uint8 and found.shape == (5, 19, 4, 4)
    mean, deviation = (torch.tensor(v).reshape(-1, 1, 1) for v in (MEAN, DEVIATION))
    wanted = ((wave_picture(x.float() / 255) - mean) / deviation).clamp(-128 / STEP, 127 / STEP)
    back = through("waves", data()).transform.normalise(found)
    assert float((back - wanted).abs().max()) <= 0.51 / STEP


def test_what_is_far_off_ends_at_the_range_instead_of_wrapping():
    black_and_white = torch.tensor([0, 255], dtype=torch.uint8).reshape(2, 1, 1, 1).expand(2, 3, 16, 16)
    light = LENS.look(black_and_white)[:, 0]
    assert bool((light[0] == 0).all()) and bool((light[1] == 255).all())


def test_batches_make_no_difference():
    x = pictures(10 * CHUNK["cpu"] + 3, size=8)
    parts = torch.cat([LENS.look(part) for part in x.split(400)])
    far = (LENS.look(x).int() - parts.int()).abs()
    # a byte at the edge of rounding may fall either way
    assert int(far.max()) <= 1 and float(far.float().mean()) < 1e-3
    assert torch.equal(LENS.seen(x[:9]).round().to(torch.uint8), LENS.look(x[:9]))


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
    assert error.value.code == "E130" and error.value.fix == "model.name=linear or mlp"


SMALL = {
    "widths": (4, 8, 12, 16),
    "num_patches": 10,
    "kept": {"patches": (6, 4, 4, 2), "stage2": (8, 2, 2, 0), "stage4": (16,)},
}


def small_lens(seed=0):
    """Of the architecture of `leaves`, with random numbers in it."""
    generator = torch.Generator().manual_seed(seed)
    lens = LeavesLens(**SMALL)
    for name, value in lens.state_dict().items():
        drawn = torch.randn(value.shape, generator=generator)
        value.copy_(drawn.mul(40).round().clamp(-127, 127) if value.dtype == torch.int8 else drawn * 0.2)
        if name == "deviation":
            value.copy_(drawn.abs() + 0.5)
    return lens


def test_leaves_ships_in_eight_megabytes_and_says_what_it_was_made_from():
    lens = open_lens("leaves")
    assert lens.num_bytes <= 8_000_000 and len(lens.sha256) == 64 and "no photograph" in lens.made_from
    assert lens.about().keys() == {"name", "sha256", "bytes", "made_from"}
    found = lens.look(pictures(2, size=32))
    assert found.dtype == torch.uint8 and found.shape == (2, 2816, 1, 1)
    assert lens.look(pictures(1, size=64)).shape == (1, 4272, 1, 1)


@pytest.mark.slow
def test_procedural_pictures_have_unit_variance_through_leaves():
    """The clip of a mechanism rests on it: the mean square norm is the number of features."""
    from rescene.lens import draw_leaves

    large = draw_leaves(48, torch.Generator().manual_seed(1)).float()
    small = torch.nn.functional.avg_pool2d(large, 2).round().to(torch.uint8)
    z = open_lens("leaves").module(small)
    assert float(z.mean()) == pytest.approx(0, abs=0.15)
    assert float(z.square().mean()) == pytest.approx(1, abs=0.25)


def test_a_mirror_image_looks_the_same_and_grey_pictures_and_small_ones_can_be_seen():
    lens, x = small_lens(), pictures(3, size=32)
    assert torch.allclose(lens(x), lens(x.flip(3)), atol=1e-4)
    grey = x[:, :1].expand(-1, 3, -1, -1)
    assert lens(grey).isfinite().all() and lens(pictures(2, size=20)).shape == (2, lens.num_features(32))
    flat = torch.full((2, 3, 32, 32), 77, dtype=torch.uint8)
    assert lens(flat).isfinite().all()


def test_pictures_above_32_pixels_are_seen_twice():
    lens = small_lens()
    z = lens(pictures(2, size=48))
    assert z.shape[1] == lens.num_features(64) == lens.num_features(32) + 12 + 16


def test_a_lens_file_gives_the_lens_back_and_its_hash_follows_every_number(tmp_path):
    lens, x = small_lens(), pictures(3, size=32)
    write_lens(lens, "a test", tmp_path / "mine.safetensors")
    back = open_lens(str(tmp_path / "mine.safetensors"))
    assert (back.name, back.made_from) == ("mine", "a test")
    assert torch.allclose(back.module(x), lens(x), rtol=0.02, atol=0.05)  # stored in float16
    write_lens(lens, "other words", tmp_path / "same.safetensors")
    assert read_lens(tmp_path / "same.safetensors", "same").sha256 == back.sha256
    lens.offsets[3] += 1e-3
    write_lens(lens, "a test", tmp_path / "changed.safetensors")
    assert read_lens(tmp_path / "changed.safetensors", "changed").sha256 != back.sha256


def test_what_is_no_lens_is_refused_with_a_reason(tmp_path):
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(2)}, tmp_path / "foreign.safetensors")
    (tmp_path / "cut.safetensors").write_bytes(b"12")
    lies = {**SMALL, "made_from": "", "num_patches": 10**9}  # would take terabytes
    for name, told in (("lying", json.dumps(lies)), ("deep", "[" * 100_000), ("list", "[1]")):
        save_file({"offsets": torch.zeros(2)}, tmp_path / f"{name}.safetensors", {KEY: told})
    for name in ("foreign", "cut", "missing", "lying", "deep", "list"):
        with pytest.raises(ConfigError) as error:
            open_lens(str(tmp_path / f"{name}.safetensors"))
        assert error.value.code == "E118"
