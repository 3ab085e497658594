"""Features on disk: the same bytes as a look, never a damaged one, and no look where sizes are enough."""

import json
import stat
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from rescene.cli.app import app
from rescene.config import resolve
from rescene.core.errors import ResceneWarning
from rescene.data import Dataset, Images, Transform
from rescene.engine.experiment import prepare, prepare_sizes
from rescene.lens import lens as lenses
from rescene.lens.feature_cache import FeatureCache, key_of
from rescene.lens.features import LeavesLens
from rescene.lens.lens import open_lens, sized, through, write_lens


def data(seed=0, n=6):
    draw = torch.Generator().manual_seed(seed)
    images = Images(torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8, generator=draw), torch.arange(n) % 2)
    test = images.select(slice(0, 2))
    return Dataset(
        "d", ("a", "b"), images, replace(test, pixels=255 - test.pixels), Transform((0.5,) * 3, (0.25,) * 3, 2)
    )


@pytest.fixture
def lens_file(tmp_path):
    """A small lens of the architecture of `leaves`."""
    made = LeavesLens(widths=(4, 8, 12, 16), num_patches=10, kept={"patches": (6, 4, 4, 2), "stage4": (16,)})
    draw = torch.Generator().manual_seed(0)
    for value in made.state_dict().values():
        drawn = torch.randn(value.shape, generator=draw)
        value.copy_(drawn.mul(40).round().clamp(-127, 127) if value.dtype == torch.int8 else drawn.abs() * 0.2 + 0.1)
    write_lens(made, "a test", tmp_path / "small.safetensors")
    return str(tmp_path / "small.safetensors")


@pytest.fixture
def looks(monkeypatch):
    """How many pictures were looked at, without the tests' own memory of looks."""
    seen = []

    def look(lens, pixels, device):
        seen.append(len(pixels))
        return lens.look(pixels)

    monkeypatch.setattr(lenses, "_looked", look)
    return seen


def test_a_second_look_reads_the_same_bytes(lens_file, looks, tmp_path):
    kept = FeatureCache(tmp_path / "seen")
    plain, first = through(lens_file, data()), through(lens_file, data(), kept=kept)
    looks.clear()
    again = through(lens_file, data(), kept=kept)
    assert looks == []
    for found in (first, again):
        assert torch.equal(found.train.pixels, plain.train.pixels) and torch.equal(found.test.pixels, plain.test.pixels)
    assert again.fingerprint() == plain.fingerprint() and again.pictures == data().fingerprint()


def test_other_images_and_another_lens_are_looked_at(lens_file, looks, tmp_path):
    kept = FeatureCache(tmp_path / "seen")
    through(lens_file, data(), kept=kept)
    through(lens_file, data(seed=1), kept=kept)
    assert looks == [6, 2, 6, 2] and len(kept.files()) == 2
    cpu = torch.device("cpu")
    assert len({key_of("a", "b", cpu), key_of("a", "c", cpu), key_of("c", "b", cpu)}) == 3


def test_a_key_names_what_rounding_depends_on(monkeypatch):
    before = key_of("a", "b", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some card")
    assert key_of("a", "b", torch.device("cuda")) != before
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert key_of("a", "b", torch.device("cpu")) != before


def flipped(path):
    """One byte of the features changed, everything else as it was."""
    with safe_open(path, "pt") as stored:
        told = stored.metadata()
    tensors = load_file(path)
    tensors["train"][0, 0, 0, 0] ^= 1
    save_file(tensors, path, told)


def shortened(path):
    path.write_bytes(path.read_bytes()[:-9])


def emptied(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [flipped, shortened, emptied])
def test_damaged_features_are_computed_again(lens_file, looks, tmp_path, damage):
    kept = FeatureCache(tmp_path / "seen")
    whole = through(lens_file, data(), kept=kept)
    damage(kept.files()[0][0])
    looks.clear()
    again = through(lens_file, data(), kept=kept)
    assert looks == [6, 2] and torch.equal(again.train.pixels, whole.train.pixels)
    looks.clear()
    assert torch.equal(through(lens_file, data(), kept=kept).train.pixels, whole.train.pixels) and looks == []


def test_only_the_user_may_read_them_and_a_site_keeps_the_last_look_only(lens_file, tmp_path):
    kept = FeatureCache(tmp_path / "seen", last_only=True)
    for seed in (0, 1):
        through(lens_file, data(seed=seed), kept=kept)
    ((path, found),) = kept.files()
    assert stat.S_IMODE(found.st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.stem == key_of(data(seed=1).fingerprint(), open_lens(lens_file).sha256, torch.device("cpu"))
    assert kept.clear() == found.st_size and kept.files() == []


def test_a_folder_that_cannot_be_written_costs_a_warning_only(lens_file, tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.warns(ResceneWarning, match="W221"):
        found = through(lens_file, data(), kept=FeatureCache(tmp_path / "file" / "seen"))
    assert len(found.train) == 6


def test_sizes_need_no_look(lens_file, looks):
    plain, found = through(lens_file, data()), sized(lens_file, data())
    looks.clear()
    assert found.train.pixels.shape == plain.train.pixels.shape and found.test.pixels.shape == plain.test.pixels.shape
    assert (
        found.transform == plain.transform and found.picture_size == plain.picture_size and found.notes == plain.notes
    )
    settings = ["method=moments", "model.name=linear", f"model.lens={lens_file}", "train.augment=false", "device=cpu"]
    recipe = resolve("smoke", settings).recipe
    few = data(n=60)
    sizes = prepare_sizes(recipe, few)
    assert looks == [], "a plan or a forecast"
    whole = prepare(recipe, few)
    assert sum(looks) == len(whole.dataset.train) + len(whole.dataset.test)
    assert sizes.arch == whole.arch and sizes.counts() == whole.counts()


@pytest.mark.slow
@pytest.mark.parametrize("command", [["run", "smoke", "--dry-run"], ["cost", "smoke"], ["scale", "smoke"]])
def test_plans_and_forecasts_do_not_look(command, lens_file, looks):
    name = "fedavg" if command[0] != "run" else "moments"  # moments has no forecast
    settings = [f"method={name}", "model.name=linear", f"model.lens={lens_file}", "train.augment=false", "device=cpu"]
    found = CliRunner().invoke(app, [*command, *settings])
    assert found.exit_code == 0, found.output
    assert looks == []


def test_the_cache_can_be_seen_and_cleared(monkeypatch, tmp_path, lens_file):
    from rescene.lens import feature_cache as keeping

    monkeypatch.setattr(keeping, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(lenses, "cache_folder", lambda: tmp_path)
    through(lens_file, data(), kept=keeping.users_own())
    rows = json.loads(CliRunner().invoke(app, ["lens", "seen", "--json"]).output)
    assert (
        [row["files"] for row in rows] == [1, 0]
        and rows[0]["bytes"] > 0
        and rows[0]["folder"] == str(tmp_path / "seen")
    )
    assert CliRunner().invoke(app, ["lens", "seen", "--clear"]).exit_code == 0
    assert keeping.users_own().files() == []
