"""Finding, preparing, inspecting and verifying data sets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from picture_files import picture, write_classes, write_picture
from PIL import Image

import rescene
import rescene.data as data
from rescene.config import resolve
from rescene.core.errors import ConfigError, DataError, ResceneWarning
from rescene.data import catalog
from rescene.data.inspection import noise_words, propose_settings
from rescene.engine.experiment import prepare


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test looks into the caches or the data of whoever runs it."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(catalog, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr("rescene.data.loading.cache_folder", lambda: tmp_path / "cache")
    monkeypatch.delenv("RESCENE_DATA", raising=False)


def test_the_default_needs_no_file() -> None:
    dataset = data.load()
    assert dataset.name == "fashion-mini" and dataset.image_size == 32 and len(dataset.classes) == 10
    assert dataset.classes[0] == "T-shirt" and dataset.classes[-1] == "Ankle boot"
    for images, per_class in ((dataset.train, 600), (dataset.test, 200)):
        assert torch.bincount(images.labels).tolist() == [per_class] * 10
        assert not images.pixels[:, :, :2].any() and not images.pixels[..., -2:].any()  # 28 px in a black frame of 2
        assert torch.equal(images.pixels[:, 0], images.pixels[:, 2])
    assert "28x28 padded to 32x32" in dataset.notes[0]
    assert dataset.transform.normalise(dataset.train.pixels).mean().abs() < 1e-3


def test_another_image_size_is_noted() -> None:
    dataset = data.load("fashion-mini", image_size=64)
    assert dataset.image_size == 64 and dataset.transform.pad == 8
    assert dataset.notes[-1] == "resized from 32x32 to 64x64 (shorter side, centre crop)"


def test_heavy_libraries_stay_unloaded() -> None:
    code = "import sys, rescene.data as d; d.load(); print([m for m in ('PIL', 'pyarrow') if m in sys.modules])"
    env = {**os.environ, "PYTHONPATH": str(Path(rescene.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.strip() == "[]"


def test_a_set_that_is_nowhere_says_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        data.load("cifar100")
    text = str(caught.value)
    assert caught.value.code == "E201" and "$RESCENE_DATA (unset)" in text and "cifar-100-python.tar.gz" in text
    assert str(Path("data") / "cifar100") in text and str(tmp_path / "cache" / "cifar100") in text
    monkeypatch.setenv("RESCENE_DATA", str(tmp_path / "shelf"))
    with pytest.raises(DataError) as caught:
        data.load("cifar100")
    assert str(tmp_path / "shelf" / "cifar100") in str(caught.value) and "unset" not in str(caught.value)


def test_unknown_name_and_missing_path() -> None:
    with pytest.raises(DataError, match="cifr10") as caught:
        data.load("cifr10")
    assert caught.value.code == "E201" and caught.value.fix == "did you mean 'cifar10'?"
    with pytest.raises(DataError, match="needs a path"):
        data.load("folder")
    with pytest.raises(ConfigError, match="takes no path"):
        data.load("fashion-mini", "/tmp")


@pytest.mark.parametrize("name", ["./birds", "pictures/birds", "../birds", "birds.csv", "~/no-such-birds"])
def test_a_path_in_the_place_of_a_name_is_taken_for_a_path(name: str, tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="there is nothing at") as caught:
        data.load(name)
    assert caught.value.code == "E201" and caught.value.fix == "check the path"


def test_a_path_that_exists_in_the_place_of_a_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is a path, not the name") as caught:
        data.load(str(tmp_path))
    assert caught.value.code == "E201" and caught.value.fix == f"data.path={tmp_path}"


def test_a_file_of_unknown_kind(tmp_path: Path) -> None:
    (tmp_path / "x.docx").write_text("hello")
    with pytest.raises(DataError, match="x.docx") as caught:
        data.load(path=tmp_path / "x.docx")
    assert caught.value.code == "E205"


def office(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """A small Office-31 that the reader takes for complete."""
    from rescene.data import loading
    from rescene.data.sources.listing import Options
    from rescene.data.sources.published_sets import read_office31

    for d, domain in enumerate(("amazon", "dslr", "webcam")):
        write_classes(path / domain, {"bike": 5, "mug": 5}, (64, 64), start=50 * d)
    counts = dict.fromkeys(("amazon", "dslr", "webcam"), 10)

    def read(path: Path, options: Options) -> data.Dataset:
        return read_office31(path, options, counts, 2)

    monkeypatch.setitem(loading.READERS, "office31", read)


def test_places_are_searched_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RESCENE_DATA", str(tmp_path / "shelf"))
    office(monkeypatch, tmp_path / "shelf" / "office31")
    rows = {row["name"]: row for row in data.available()}
    assert rows["office31"]["found"] == str(tmp_path / "shelf" / "office31") and rows["cifar10"]["found"] is None
    assert rows["fashion-mini"]["found"] == "embedded" and rows["tinyimagenet"]["classes"] == 200
    on_shelf = data.load("office31").fingerprint()
    write_picture(tmp_path / "shelf" / "office31" / "dslr" / "mug" / "0.png", 999, (64, 64))
    Path("data").mkdir()
    office(monkeypatch, Path("data") / "office31")
    assert data.load("office31").fingerprint() == on_shelf  # ./data comes first and is unchanged
    assert {row["name"]: row["found"] for row in data.available()}["office31"] == str(Path("data") / "office31")


def test_prepared_file_is_preferred_and_equal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    office(monkeypatch, tmp_path / "raw")
    file = data.prepare("office31", tmp_path / "raw")
    assert file == tmp_path / "cache" / "office31" / "office31-last.safetensors"
    assert [p.name for p in file.parent.iterdir()] == [file.name]  # nothing half-written is left
    original, ready = data.load("office31", tmp_path / "raw"), data.load("office31")
    assert ready.fingerprint() == original.fingerprint()
    fields = ("name", "classes", "domains", "notes", "transform", "split")
    assert [getattr(ready, field) for field in fields] == [getattr(original, field) for field in fields]
    for path in (file, file.parent):
        assert data.load(path=path).fingerprint() == original.fingerprint()


def test_prepared_file_with_another_hold_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    office(monkeypatch, tmp_path / "raw")
    file = data.prepare("office31", tmp_path / "raw", tmp_path / "out", held_out="drawn")
    with pytest.raises(DataError, match="another test split") as caught:
        data.load(path=file, seed=5)
    assert "fraction=0.2 seed=0" in str(caught.value) and "seed=5" in str(caught.value)
    data.prepare("office31", tmp_path / "raw", tmp_path / "raw", held_out="drawn")  # the originals serve the other seed
    assert data.load("office31", tmp_path / "raw", seed=5, held_out="drawn").split == "fraction=0.2 seed=5"


def test_office31_has_the_last_images_as_its_test_as_in_its_recipe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    office(monkeypatch, tmp_path / "raw")
    usual = resolve("office31").recipe.data.held_out
    for loaded in (data.load("office31", tmp_path / "raw"), data.load(path=data.prepare("office31", tmp_path / "raw"))):
        assert loaded.split == data.load("office31", tmp_path / "raw", held_out=usual).split == "fraction=0.2 last"
    drawn = data.prepare("office31", tmp_path / "raw", held_out="drawn")
    assert data.load("office31").split == "fraction=0.2 last"  # both are there
    drawn.with_name("office31-last.safetensors").unlink()
    assert data.load("office31").split == "fraction=0.2 seed=0"
    Path("data").mkdir()
    (tmp_path / "raw").rename(Path("data") / "office31")
    assert data.load("office31").split == "fraction=0.2 last"  # the originals go before what was prepared otherwise
    drawn.rename(Path("data") / "office31" / drawn.name)
    assert data.load("office31", Path("data") / "office31").split == "fraction=0.2 last"


def test_what_is_not_there_is_to_be_prepared_with_the_test_that_was_asked_for() -> None:
    for held_out, option in (("drawn", " --held-out drawn"), ("last", ""), (None, "")):
        with pytest.raises(DataError) as caught:
            data.load("office31", held_out=held_out)
        assert str(caught.value.fix).startswith(f"rescene data prepare office31 --from SOURCE{option}, where")


def test_damaged_prepared_file(tmp_path: Path) -> None:
    write_classes(tmp_path / "raw", {"a": 10, "b": 10})
    file = data.prepare("mine", tmp_path / "raw", tmp_path)
    assert data.load(path=file).name == "mine"
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match="prepared") as caught:
        data.load(path=file)
    assert caught.value.code == "E202" and "checksum" in str(caught.value)
    file.write_bytes(content[:50])
    with pytest.raises(DataError, match="prepared"):
        data.load(path=file)


def test_a_model_file_beside_the_images_is_no_data_set(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    write_classes(tmp_path / "pictures", {"a": 10, "b": 10})
    save_file({"w": torch.zeros(1)}, tmp_path / "pictures" / "model.safetensors")
    assert data.load(path=tmp_path / "pictures").classes == ("a", "b")


def test_inspect_counts_proposes_and_warns(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", {"ant": 12, "bee": 3, "cow": 12, "dog": 12})
    for name, number in {"ant": 500, "bee": 501, "cow": 502}.items():
        write_picture(tmp_path / "test" / name / "0.png", number)
    Image.fromarray(picture(0)).save(tmp_path / "test" / "cow" / "copy.png")  # train/ant/0.png again
    Image.fromarray(picture(20)).save(tmp_path / "train" / "dog" / "copy.png")
    report = data.inspect(data.load(path=tmp_path))
    assert report["classes"][1] == {"name": "bee", "train": 3, "test": 1}
    assert (report["num_train"], report["num_test"], report["image_size"]) == (40, 4, 32)
    assert report["proposed_tasks"] == {"scenario": "class", "count": 2}
    assert report["warnings"] == [
        "1 tiny class: bee (3)",
        "1 class without test image: dog",
        "1 image repeats another training image",
        "1 image of the test split is also a training image",
    ]
    with pytest.warns(ResceneWarning, match=r"W568.*no test image of dog; test images in all: 4  fix"):
        prepare(resolve("smoke", [f"data.path={tmp_path}", "tasks.per_task=4"]).recipe)


@pytest.mark.parametrize(
    ("num_classes", "count"), [(1, 1), (2, 1), (3, 1), (5, 2), (10, 5), (31, 5), (100, 10), (200, 10)]
)
def test_proposed_tasks(num_classes: int, count: int) -> None:
    labels = torch.arange(num_classes)
    images = data.Images(torch.zeros(num_classes, 3, 8, 8, dtype=torch.uint8), labels)
    dataset = data.Dataset("x", tuple(map(str, labels.tolist())), images, images, data.Transform((0,) * 3, (1,) * 3, 1))
    proposal = data.propose_tasks(dataset)
    assert proposal == {"scenario": "class", "count": count}
    assert len(data.plan_tasks(dataset, **proposal)[1]) == count


@pytest.mark.parametrize(("held", "smaller"), [(49, True), (99, True), (100, False), (150, False)])
def test_the_smaller_lens_is_proposed_for_few_images_of_a_class(held: int, smaller: bool) -> None:
    labels = torch.arange(2).repeat_interleave(held)
    images = data.Images(torch.zeros(2 * held, 3, 8, 8, dtype=torch.uint8), labels)
    dataset = data.Dataset("x", ("a", "b"), images, images, data.Transform((0,) * 3, (1,) * 3, 1))
    assert ("model.lens=waves" in propose_settings(dataset)) is smaller
    assert ("leaves is better from 100" in noise_words(dataset)) is (held == 99)
    assert "model.lens=waves" not in propose_settings(dataset, exact=True)


def test_verify_lists_every_check(tmp_path: Path) -> None:
    pictures = tmp_path / "pictures"
    write_classes(pictures, {"a": 20, "b": 20})
    rows = data.verify("folder", pictures)
    assert all(set(row) == {"check", "problem", "fix"} and not row["problem"] for row in rows) and len(rows) == 7
    (pictures / "a" / "3.png").write_bytes(b"x")
    problems = [row for row in data.verify("folder", pictures) if row["problem"]]
    assert [row["check"] for row in problems] == ["images readable"] and "3.png" in problems[0]["problem"]


def test_verify_of_what_cannot_be_loaded(tmp_path: Path) -> None:
    (row,) = data.verify("cifar10")
    assert "E201" in row["check"] and "not on this machine" in row["problem"] and "prepare" in row["fix"]
    for i in range(2):
        write_picture(tmp_path / "train" / "cat" / f"{i}.png", i)
    (row,) = data.verify("cifar10", tmp_path)
    assert "E202" in row["check"] and "missing: airplane" in row["problem"]
