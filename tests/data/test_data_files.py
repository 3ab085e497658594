"""Readers of a user's own images: folders, decoding and resizing."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from picture_files import picture, write_classes, write_picture
from PIL import Image

from rescene.core.errors import ConfigError, DataError, ResceneWarning
from rescene.data import load, prepare
from rescene.data.sources.decode import decode, fit_pixels, guess_size


def code_of(caught: pytest.ExceptionInfo[DataError]) -> tuple[str, int]:
    return caught.value.code, caught.value.exit_code


# folders


def test_train_and_test_folders_are_read_in_name_order(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", {"b": 2, "a": 3})
    write_classes(tmp_path / "test", {"a": 1, "b": 1}, start=10)
    dataset = load(path=tmp_path)
    assert dataset.classes == ("a", "b") and dataset.split == "given" and dataset.notes == () and not dataset.domains
    assert dataset.train.labels.tolist() == [0, 0, 0, 1, 1] and dataset.test.labels.tolist() == [0, 1]
    # write_classes numbered b first: b/0.png is 0, a/0.png is 2
    expected = np.stack([picture(i).transpose(2, 0, 1) for i in (2, 3, 4, 0, 1)])
    assert np.array_equal(dataset.train.pixels.numpy(), expected)
    assert np.array_equal(dataset.test.pixels[0].numpy(), picture(10).transpose(2, 0, 1))


def test_class_folders_get_a_seeded_hold_out(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a": 10, "b": 3, "c": 1})
    dataset = load(path=tmp_path)
    assert torch.bincount(dataset.train.labels).tolist() == [8, 2, 1]  # nearest of 2.0, 0.6 and 0.2 held out
    assert torch.bincount(dataset.test.labels).tolist() == [2, 1]
    assert dataset.split == "fraction=0.2 seed=0"
    assert load(path=tmp_path).fingerprint() == dataset.fingerprint()
    assert load(path=tmp_path, seed=1).fingerprint() != dataset.fingerprint()
    half = load(path=tmp_path, test_fraction=0.9)
    assert torch.bincount(half.train.labels).tolist() == [1, 1, 1]  # one picture always stays for training
    pictures = torch.cat([dataset.train.pixels, dataset.test.pixels]).flatten(1)
    assert len(torch.unique(pictures, dim=0)) == 14  # nothing lost, nothing twice


def test_the_last_of_each_class_can_be_held_out(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a": 10, "b": 3, "c": 1})
    dataset, drawn = load(path=tmp_path, held_out="last"), load(path=tmp_path)
    assert dataset.split == "fraction=0.2 last"
    assert torch.equal(dataset.test.labels, drawn.test.labels)  # as many of each class
    expected = np.stack([picture(i).transpose(2, 0, 1) for i in (8, 9, 12)])  # a has 0 to 9, b 10 to 12, c 13
    assert np.array_equal(dataset.test.pixels.numpy(), expected)
    assert load(path=tmp_path, held_out="last", seed=1).fingerprint() == dataset.fingerprint()  # nothing is drawn
    file = prepare("folder", tmp_path, tmp_path / "out", held_out="last")
    assert load(path=file, held_out="last").fingerprint() == dataset.fingerprint()
    assert load(path=file).fingerprint() == dataset.fingerprint()  # whoever does not ask gets what is there
    with pytest.raises(DataError, match="asked for fraction=0.2 seed=0"):
        load(path=file, held_out="drawn")


def test_hold_out_of_a_class_does_not_depend_on_the_others(tmp_path: Path) -> None:
    write_classes(tmp_path / "two", {"a": 10, "b": 10})
    write_classes(tmp_path / "three", {"a": 10, "b": 10, "c": 10})
    two, three = (load(path=tmp_path / name) for name in ("two", "three"))
    assert torch.equal(two.test.pixels, three.test.pixels[three.test.labels < 2])


def test_domain_folders(tmp_path: Path) -> None:
    write_classes(tmp_path / "paris", {"cat": 5, "dog": 5})
    write_classes(tmp_path / "berlin", {"cat": 10}, start=20)
    dataset = load(path=tmp_path, layout="domains")
    assert dataset.domains == ("berlin", "paris") and dataset.classes == ("cat", "dog")
    pairs = [(d, c) for d, c in zip(dataset.test.domains.tolist(), dataset.test.labels.tolist(), strict=True)]
    assert sorted(pairs) == [(0, 0), (0, 0), (1, 0), (1, 1)]  # 20 % of each domain and class


def test_hidden_files_other_files_and_case_of_extensions(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a": 5, "b": 5})
    (tmp_path / ".git").mkdir()
    (tmp_path / "a" / ".DS_Store.png").write_bytes(b"no image")
    (tmp_path / "a" / "notes.txt").write_text("no image")
    write_picture(tmp_path / "a" / "z.BMP", 99)
    dataset = load(path=tmp_path)
    assert dataset.classes == ("a", "b") and len(dataset.train) + len(dataset.test) == 11


def test_numbers_as_class_names_are_ordered_by_value(tmp_path: Path) -> None:
    write_classes(tmp_path, {"10": 5, "9": 5})
    assert load(path=tmp_path).classes == ("9", "10")


def test_a_class_called_train_is_a_class(tmp_path: Path) -> None:
    write_classes(tmp_path, {"car": 5, "train": 5})
    assert load(path=tmp_path).classes == ("car", "train")


def test_unlabelled_test_folder_gives_way_to_val(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", {"a": 2, "b": 2})
    write_classes(tmp_path / "val", {"a": 1, "b": 1}, start=10)
    write_picture(tmp_path / "test" / "0.png", 50)
    assert len(load(path=tmp_path).test) == 2


def test_train_folder_alone_is_split(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", {"a": 5, "b": 5})
    dataset = load(path=tmp_path)
    assert (len(dataset.train), len(dataset.test), dataset.split) == (8, 2, "fraction=0.2 seed=0")


def test_class_without_training_image_is_named(tmp_path: Path) -> None:
    write_classes(tmp_path / "train", {"a": 2})
    write_classes(tmp_path / "test", {"a": 1, "moth": 1})
    with pytest.raises(DataError, match="moth") as caught:
        load(path=tmp_path)
    assert code_of(caught) == ("E204", 3)
    (tmp_path / "train" / "empty").mkdir()
    with pytest.raises(DataError, match="empty") as caught:
        load(path=tmp_path)
    assert code_of(caught) == ("E204", 3)


def test_layouts_that_make_no_sense(tmp_path: Path) -> None:
    write_picture(tmp_path / "loose" / "0.png", 0)
    write_classes(tmp_path / "odd" / "x", {"a": 1})
    write_classes(tmp_path / "odd" / "y", {"b": 1})
    for name, layout in (("loose", "auto"), ("loose", "domains"), ("odd", "domains")):
        with pytest.raises(DataError) as caught:
            load(path=tmp_path / name, layout=layout)
        assert code_of(caught) == ("E205", 3) and "<class>" in str(caught.value)
    with pytest.raises(DataError) as caught:
        load(path=tmp_path / "nowhere")
    assert code_of(caught) == ("E201", 3) and "nowhere" in str(caught.value)


def test_no_test_image_at_all(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a": 2, "b": 2})
    with pytest.raises(DataError, match="no test image") as caught:
        load(path=tmp_path)
    assert caught.value.code == "E202" and "test_fraction" in str(caught.value.fix)


# decoding


def test_unreadable_images_are_named_counted_and_skipped_on_request(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a": 10, "b": 10})
    (tmp_path / "b" / "3.png").write_bytes((tmp_path / "b" / "3.png").read_bytes()[:200])
    (tmp_path / "b" / "4.png").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        load(path=tmp_path)
    assert code_of(caught) == ("E203", 3)
    assert "b/3.png" in caught.value.what and "1 more" in caught.value.what and "4.png" in str(caught.value.where)
    with pytest.warns(ResceneWarning, match="left out 2 of 20") as warned:
        dataset = load(path=tmp_path, skip_unreadable=True)
    assert [w.message.code for w in warned] == ["W203"]  # type: ignore[union-attr]
    assert len(dataset.train) + len(dataset.test) == 18


def test_skipping_a_whole_class_is_still_an_error(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a": 10, "b": 1})
    (tmp_path / "b" / "0.png").write_bytes(b"x")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResceneWarning)
        with pytest.raises(DataError, match="class b") as caught:
            load(path=tmp_path, skip_unreadable=True)
    assert caught.value.code == "E204"
    assert caught.value.why == f"files that cannot be read were left out: {tmp_path / 'b' / '0.png'} (not a picture)"


def test_picture_modes_become_rgb(tmp_path: Path) -> None:
    grey = np.arange(32 * 32, dtype=np.uint16).reshape(32, 32)
    made = {
        "l.png": Image.fromarray((grey // 4).astype(np.uint8)),
        "i16.png": Image.fromarray((grey * 64).astype(np.uint16)),
        "rgba.png": Image.fromarray(np.dstack([picture(0), np.full((32, 32), 128, np.uint8)])),
    }
    for name, image in made.items():
        image.save(tmp_path / name)
    decoded = decode([tmp_path / name for name in made], list(made), 32)
    eight_bit = (grey // 4).astype(np.uint8)
    assert np.array_equal(decoded.pixels[0].numpy(), np.stack([eight_bit] * 3))
    assert np.array_equal(decoded.pixels[1].numpy(), np.stack([eight_bit] * 3))  # upper byte of 64 g is g // 4
    assert np.array_equal(decoded.pixels[2].numpy(), picture(0).transpose(2, 0, 1))


def test_float_pictures_are_refused_with_a_reason(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((32, 32), np.float32)).save(tmp_path / "f.tif")
    with pytest.raises(DataError, match="f.tif") as caught:
        decode([tmp_path / "f.tif"], ["f.tif"], 32)
    assert "8 bits" in str(caught.value.why)


def test_pictures_are_turned_upright(tmp_path: Path) -> None:
    image = Image.new("RGB", (32, 32))
    image.paste((255, 255, 255), (0, 0, 32, 8))  # white above
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned clockwise: what is stored above belongs to the right
    image.save(tmp_path / "x.png", exif=exif)
    pixels = decode([tmp_path / "x.png"], ["x"], 32).pixels[0, 0]
    assert (pixels[:, 24:] == 255).all() and (pixels[:, :24] == 0).all()


def test_resizing_keeps_the_centre_and_says_so(tmp_path: Path) -> None:
    wide = np.zeros((64, 128, 3), np.uint8)
    wide[:, 32:96] = 200  # exactly the centre square
    for split in ("train", "test"):
        (tmp_path / split / "a").mkdir(parents=True)
        Image.fromarray(wide).save(tmp_path / split / "a" / "0.png")
    dataset = load(path=tmp_path, image_size=32)
    assert dataset.notes == ("resized from 128x64 to 32x32 (shorter side, centre crop)",)
    assert (dataset.train.pixels[..., 1:-1] == 200).all()  # the border column blends with black
    write_picture(tmp_path / "train" / "a" / "1.png", 0, size=(40, 50))
    assert load(path=tmp_path, image_size=32).notes == (
        "resized from mixed sizes to 32x32 (shorter side, centre crop)",
    )


def test_shrinking_averages_instead_of_dropping_pixels(tmp_path: Path) -> None:
    stripes = np.zeros((128, 128, 3), np.uint8)
    stripes[:, 0::4] = stripes[:, 3::4] = 255
    # shrunk by 4, a new pixel sees 8 old ones with weights .5 1.5 2.5 3.5 3.5 2.5 1.5 .5 (of 16); the white ones among
    # them weigh 1.5 + 2.5 + 2.5 + 1.5 = 8, hence grey. Interpolation without that filter would see black pixels only.
    Image.fromarray(stripes).save(tmp_path / "s.png")
    from_file = decode([tmp_path / "s.png"], ["s"], 32).pixels
    from_tensor = fit_pixels(torch.from_numpy(stripes.transpose(2, 0, 1).copy())[None], 32)
    for pixels in (from_file, from_tensor):
        assert (pixels[..., 2:-2].float() - 127.5).abs().max() <= 1


@pytest.mark.parametrize(("sides", "expected"), [((20, 47, 200), 32), ((20, 48, 200), 64), ((300, 300), 64)])
def test_default_size_follows_the_median_shorter_side(tmp_path: Path, sides: tuple[int, ...], expected: int) -> None:
    paths = [write_picture(tmp_path / f"{i}.png", i, size=(side + 30, side)) for i, side in enumerate(sides)]
    assert guess_size(paths) == expected


@pytest.mark.parametrize(
    "options", [{"image_size": 4}, {"test_fraction": 1.0}, {"test_fraction": -0.1}, {"held_out": "first"}]
)
def test_options_out_of_range(tmp_path: Path, options: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        load(path=tmp_path, **options)


# what is read, and what is not


def told(caught: pytest.WarningsRecorder) -> dict[str, str]:
    return {w.message.code: w.message.what for w in caught.list if isinstance(w.message, ResceneWarning)}


def test_pictures_in_subfolders_of_a_class_are_read_and_told(tmp_path: Path) -> None:
    write_classes(tmp_path, {"cat": 10, "dog": 10})
    flat = load(path=tmp_path)
    write_classes(tmp_path / "dog", {"from phone": 5}, start=50)
    (tmp_path / "dog" / "images").mkdir()
    dataset = load(path=tmp_path)
    assert dataset.classes == ("cat", "dog") and torch.bincount(dataset.train.labels).tolist() == [8, 12]
    assert dataset.notes == ("5 images lie in subfolders of their class: dog (5)",)
    cats = [(d.train.pixels[d.train.labels == 0], d.test.pixels[d.test.labels == 0]) for d in (flat, dataset)]
    assert all(torch.equal(before, after) for before, after in zip(*cats, strict=True))  # other classes as before


def test_what_is_not_read_is_counted_and_named_by_kind(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    write_classes(tmp_path, {"cat": 5, "dog": 5})
    write_picture(tmp_path / "dog" / "moving.gif", 90)
    for name in ("dog/a.HEIC", "dog/b.heic", "cat/notes.txt", "cat/._0.png", "cat/.keep", "cat/Thumbs.db", "README.md"):
        (tmp_path / name).write_bytes(b"something")
    write_picture(tmp_path / "loose.png", 91)
    write_picture(tmp_path / ".cache" / "0.png", 92)
    dataset = load(path=tmp_path)
    assert len(dataset.train) + len(dataset.test) == 11
    words = told(recwarn)["W214"]
    assert ".heic pictures: 2 (dog/a.HEIC, dog/b.heic)" in words and ".txt files: 1 (cat/notes.txt)" in words
    assert "hidden pictures: 2 (.cache/0.png, cat/._0.png)" in words and "is read: 1 (loose.png)" in words
    assert not any(name in words for name in (".keep", "Thumbs", "README"))


def test_folders_beside_train_and_test_are_told(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    for split, start in (("train", 0), ("test", 20), ("extra", 40)):
        write_classes(tmp_path / split, {"a": 2, "b": 2}, start=start)
    assert len(load(path=tmp_path).train) == 4
    assert "is read: 4 (extra/a/0.png, extra/a/1.png, extra/b/0.png and 1 more)" in told(recwarn)["W214"]


def test_an_npz_among_class_folders_is_told(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    write_classes(tmp_path, {"cat": 5, "dog": 5})
    np.savez(tmp_path / "x.npz", x=np.stack([picture(i) for i in range(10)]), y=np.arange(10) % 2)
    assert load(path=tmp_path).classes == ("0", "1")
    assert "cat, dog" in told(recwarn)["W214"]
    assert load("folder", tmp_path).classes == ("cat", "dog")


def test_two_readings_are_asked_about_and_the_layout_decides(tmp_path: Path) -> None:
    write_classes(tmp_path / "dog", {"camera": 5, "phone": 5})
    write_classes(tmp_path / "cat", {"camera": 5, "phone": 5}, start=20)
    with pytest.raises(DataError) as caught:
        load(path=tmp_path)
    assert code_of(caught) == ("E214", 3) and "data.layout=classes" in str(caught.value.fix)
    assert caught.value.why == "cat/ holds camera, phone; dog/ holds camera, phone"
    assert f"rescene data inspect {tmp_path} --layout sites  if camera, phone are classes" in str(caught.value.fix)
    classes, domains = (load(path=tmp_path, layout=layout) for layout in ("classes", "domains"))
    assert (classes.classes, classes.domains) == (("cat", "dog"), ())
    assert (domains.classes, domains.domains) == (("camera", "phone"), ("cat", "dog"))
    assert domains.notes == ("read as <domain>/<class>/*",)


@pytest.mark.parametrize(
    "places",
    [
        {"a": 5, "b/batch": 5},  # b: a class whose images lie deeper, or a domain?
        {"a": 1, "a/x": 5, "b": 1, "b/x": 5},  # domains with a preview each?
        {"train/a/x": 5, "train/b/x": 5},
    ],
)
def test_folders_that_are_mostly_nested_are_asked_about(tmp_path: Path, places: dict[str, int]) -> None:
    write_classes(tmp_path, places)
    with pytest.raises(DataError) as caught:
        load(path=tmp_path)
    assert code_of(caught) == ("E214", 3)
    assert load(path=tmp_path, layout="classes").classes == ("a", "b")


def test_domains_in_train_and_test_folders(tmp_path: Path) -> None:
    for split, start in (("train", 0), ("test", 20)):
        for i, domain in enumerate(("day", "night")):
            write_classes(tmp_path / split / domain, {"a": 2, "b": 2}, start=start + 4 * i)
    dataset = load(path=tmp_path, layout="domains")
    assert dataset.domains == ("day", "night") and dataset.classes == ("a", "b") and len(dataset.test) == 8


def test_domains_with_their_own_train_and_test_folders(tmp_path: Path) -> None:
    for i, domain in enumerate(("day", "night")):
        write_classes(tmp_path / domain / "train", {"a": 3, "b": 3}, start=20 * i)
        write_classes(tmp_path / domain / "test", {"a": 2, "b": 2}, start=20 * i + 10)
    with pytest.raises(DataError) as caught:
        load(path=tmp_path)
    assert "--layout domains" in str(caught.value.fix) and "--layout classes" not in str(caught.value.fix)
    dataset = load(path=tmp_path, layout="domains")
    assert dataset.domains == ("day", "night") and dataset.classes == ("a", "b") and dataset.split == "given"
    assert (len(dataset.train), len(dataset.test)) == (12, 8)
    assert torch.bincount(dataset.test.domains).tolist() == [4, 4]


def test_a_folder_images_in_every_class_is_no_second_reading(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a/images": 5, "b/images": 5})
    dataset = load(path=tmp_path)
    assert dataset.classes == ("a", "b") and dataset.notes == ()


def test_a_folder_that_may_not_be_opened_is_named(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a": 5, "b": 5, "c": 5})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "scandir", _closed(tmp_path / "c"))
        with pytest.raises(DataError, match="cannot open the folder") as caught:
            load("folder", tmp_path)
    assert code_of(caught) == ("E203", 3)


def _closed(folder: Path) -> Any:
    """os.scandir for somebody who may not look into this folder; tests may run as root, who may."""
    scan = os.scandir

    def scandir(path: Any) -> Any:
        if Path(path) == folder:
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    return scandir
