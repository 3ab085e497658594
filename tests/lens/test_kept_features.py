"""Features on disk: the same bytes as a look, never a damaged one, only new pictures looked at, and no look where sizes are enough."""

import hashlib
import json
import stat
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import rescene
from rescene.cli.app import app
from rescene.config import resolve
from rescene.core.errors import ResceneWarning
from rescene.data import Dataset, Images, Transform, images
from rescene.engine import continuation, experiment
from rescene.engine.experiment import prepare, prepare_sizes
from rescene.lens import lens as lenses
from rescene.lens import looks_to
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
    looks.clear()
    through(another_lens(lens_file), data(), kept=kept)
    assert looks == [6, 2] and len(kept.files()) == 3


def another_lens(path):
    """The lens of this file with one other number."""
    with safe_open(path, "pt") as stored:
        told = stored.metadata()
    tensors = load_file(path)
    tensors["mean"][0] += 1
    save_file(tensors, path.replace("small", "other"), told)
    return path.replace("small", "other")


def test_a_key_names_what_rounding_depends_on(monkeypatch):
    before = key_of("a", (3, 32, 32), torch.device("cpu"))
    assert (
        len({before, key_of("b", (3, 32, 32), torch.device("cpu")), key_of("a", (3, 16, 64), torch.device("cpu"))}) == 3
    )
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some card")
    assert key_of("a", (3, 32, 32), torch.device("cuda")) != before
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert key_of("a", (3, 32, 32), torch.device("cpu")) != before


def joined(first, later):
    """The training and test images of both, those of ``first`` first."""
    splits = {
        name: Images(
            *(torch.cat([getattr(getattr(d, name), what) for d in (first, later)]) for what in ("pixels", "labels"))
        )
        for name in ("train", "test")
    }
    return replace(first, **splits)


def shuffled(dataset):
    """The same images, the training images in another order."""
    order = torch.randperm(len(dataset.train), generator=torch.Generator().manual_seed(3))
    return replace(dataset, train=dataset.train.select(order))


@pytest.mark.parametrize(
    ("old", "new", "moved", "looked_at"),
    [
        (64, 32, lambda dataset: dataset, [32, 4]),
        (64, 32, shuffled, [32, 4]),
        (70, 33, lambda dataset: dataset, [39, 4]),  # and six that were in a chunk of six, and are in one of 32 now
        (70, 33, shuffled, [71, 4]),  # of 39 some are in full chunks, which 25 to 31 known ones fill up
    ],
)
def test_only_new_pictures_are_looked_at_and_the_bytes_are_those_of_a_look_at_all(
    lens_file, looks, tmp_path, old, new, moved, looked_at
):
    kept = FeatureCache(tmp_path / "seen")
    through(lens_file, data(n=old), kept=kept)
    grown = moved(joined(data(n=old), data(seed=1, n=new)))
    looks.clear()
    found = through(lens_file, grown, kept=kept)
    assert looks == looked_at
    plain = through(lens_file, grown)
    assert torch.equal(found.train.pixels, plain.train.pixels) and torch.equal(found.test.pixels, plain.test.pixels)
    looks.clear()
    for known in (grown, data(n=old)):
        through(lens_file, known, kept=kept)
    assert looks == [], "the grown set and the earlier one are both known"


def test_a_look_tells_after_each_chunk_how_many_pictures_it_has_seen_of_how_many(lens_file, tmp_path):
    heard, kept = [], FeatureCache(tmp_path / "seen")
    with looks_to(lambda done, total: heard.append((done, total))):
        through(lens_file, data(n=40), kept=kept)
        assert heard == [(32, 42), (40, 42), (42, 42)]
        heard.clear()
        through(lens_file, data(n=40), kept=kept)
        assert heard == [], "nothing was looked at"
        through(lens_file, data(n=40))
    assert heard == [(32, 42), (40, 42), (42, 42)]


def folder_of(root, *classes, count=40):
    """<class>/0.png ... of random pictures."""
    for name in classes:
        draws = np.random.default_rng(list(name.encode()))
        (root / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(draws.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(root / name / f"{i}.png")
    return str(root)


def test_a_run_that_goes_on_looks_at_next_months_pictures_only(lens_file, looks, tmp_path, monkeypatch):
    def kept_in(name):
        for module in (experiment, continuation):
            monkeypatch.setattr(module, "users_own", lambda: FeatureCache(tmp_path / name))

    def run(folder, **more):
        fixed = {"method": "moments", "model.name": "linear", "model.lens": lens_file, "train.augment": False}
        sites = {"federation.num_clients": 2, "federation.per_round": 2, "device": "cpu", "tasks.limit": None}
        return rescene.run("smoke", out=tmp_path / folder, **(fixed | sites | more))

    april, may = folder_of(tmp_path / "april", "ant", "bee"), folder_of(tmp_path / "may", "cow", "dog")
    kept_in("seen")
    before = run("r", **{"data.path": april, "tasks.plan": [["ant", "bee"]]})
    assert sum(looks) == 80
    looks.clear()
    after = rescene.continue_run(before, data=may)
    assert sum(looks) == 64 + 32, "80 new ones, and 16 test images that were in a smaller chunk"
    kept_in("empty")
    looks.clear()
    plan = [["ant", "bee"], ["cow", "dog"]]
    planned = run("p", **{"data.path": april, "data.more": [may], "tasks.plan": plan})
    assert sum(looks) == 160
    models = [(result.folder / "model/final.safetensors").read_bytes() for result in (after, planned)]
    assert models[0] == models[1] and after.matrix[1] == planned.matrix[1]


def test_a_run_takes_one_digest_of_each_picture(lens_file, tmp_path, monkeypatch):
    taken = []

    def blake2b(data, **sizes):
        taken.append(bytes(data))
        return hashlib.blake2b(data, **sizes)

    monkeypatch.setattr(images, "hashlib", SimpleNamespace(blake2b=blake2b, sha256=hashlib.sha256))
    folder = folder_of(tmp_path / "pictures", "ant", "bee", count=12)
    settings = [
        "tasks.plan=[[bee], [ant]]",
        "tasks.per_task=null",
        f"model.lens={lens_file}",
        "method.num_features=null",
    ]
    recipe = resolve("own", [f"data.path={folder}", "device=cpu", *settings]).recipe
    found = prepare(recipe, kept=FeatureCache(tmp_path / "seen"))
    assert len(taken) == len(set(taken)) == 24
    assert len(set(found.digests.train)) == len(found.dataset.train), "the ledger names the same pictures"


@pytest.mark.parametrize("name", ["small", pytest.param("leaves", marks=pytest.mark.slow)])
def test_features_do_not_depend_on_the_other_pictures_of_a_chunk(lens_file, name):
    lens, chunk = open_lens(lens_file if name == "small" else name), lenses.CHUNK["cpu"]
    pixels, others = data(n=chunk).train.pixels, data(seed=1, n=chunk).train.pixels
    alone = lens.seen(pixels)
    order = torch.randperm(chunk, generator=torch.Generator().manual_seed(2))
    assert torch.equal(lens.seen(pixels[order]), alone[order])
    half = torch.cat([others[chunk // 2 :], pixels[chunk // 2 :]])
    assert torch.equal(lens.seen(half)[chunk // 2 :], alone[chunk // 2 :])


def flipped(path):
    """One byte of the features changed, everything else as it was."""
    with safe_open(path, "pt") as stored:
        told = stored.metadata()
    tensors = load_file(path)
    tensors["features"][0, 0, 0, 0] ^= 1
    save_file(tensors, path, told)


def renamed(path):
    """The features of one picture under the name of another one."""
    with safe_open(path, "pt") as stored:
        told = stored.metadata()
    tensors = load_file(path)
    tensors["pictures"] = tensors["pictures"].flip(0).contiguous()
    save_file(tensors, path, told)


def shortened(path):
    path.write_bytes(path.read_bytes()[:-9])


def emptied(path):
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [flipped, renamed, shortened, emptied])
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
    assert path.name.startswith(key_of(open_lens(lens_file).sha256, (3, 32, 32), torch.device("cpu")))
    assert len(load_file(path)["pictures"]) == 8, "of the last look"
    assert kept.clear() == found.st_size and kept.files() == []


def test_a_site_looks_at_new_images_only_and_keeps_nothing_of_images_that_are_gone(lens_file, looks, tmp_path):
    kept = FeatureCache(tmp_path / "seen", last_only=True)
    through(lens_file, data(n=32), kept=kept)
    looks.clear()
    through(lens_file, joined(data(n=32), data(seed=1, n=32)), kept=kept)
    assert looks == [32, 4]
    looks.clear()
    through(lens_file, data(seed=1, n=32), kept=kept)
    ((path, _),) = kept.files()
    assert looks == [2] and len(load_file(path)["pictures"]) == 34
    nothing = replace(data(), train=data().train.select(slice(0, 0)), test=data().test.select(slice(0, 0)))
    through(lens_file, nothing, kept=kept)
    assert kept.files() == []


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
