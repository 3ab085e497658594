"""TinyImageNet and Office-31 in their original layouts, with small copies."""

from __future__ import annotations

import shutil
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from picture_files import picture, write_classes, write_picture
from PIL import Image

from rescene.core.errors import DataError
from rescene.data import load, plan_tasks
from rescene.data.sources.listing import Options, draw_test
from rescene.data.sources.published_sets import read_office31, read_tinyimagenet

IDS = ("n03", "n01", "n02")
SIZE = (64, 64)


def write_tiny(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "wnids.txt").write_text("\n".join(IDS) + "\n")
    (path / "words.txt").write_text("n01\tgoldfish, Carassius auratus\nn02\tcrane\nn03\tcrane\nn04\tother\n")
    for c, wnid in enumerate(IDS):
        for i in range(2):
            write_picture(path / "train" / wnid / "images" / f"{wnid}_{i}.png", 10 * c + i, SIZE)
        (path / "train" / wnid / f"{wnid}_boxes.txt").write_text("")
    lines = []
    for i, wnid in enumerate(("n02", "n01", "n03")):
        write_picture(path / "val" / "images" / f"val_{i}.png", 100 + i, SIZE)
        lines.append(f"val_{i}.png\t{wnid}\t0\t32\t44\t62\n")
    (path / "val" / "val_annotations.txt").write_text("".join(lines))
    write_picture(path / "test" / "images" / "test_0.png", 200, SIZE)  # unlabelled: must not be read
    return path


def read_tiny(path: Path):  # type: ignore[no-untyped-def]
    return read_tinyimagenet(path, Options(), num_classes=3, num_train=2, num_test=3)


def test_tinyimagenet_original_layout(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "tiny-imagenet-200")
    grey = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64).astype(np.uint8)
    Image.fromarray(grey).save(path / "train" / "n01" / "images" / "n01_1.png")
    for given in (path, tmp_path):  # the folder itself or the one above
        dataset = read_tiny(given)
        assert dataset.classes == ("goldfish", "crane (n02)", "crane (n03)")  # by id; a shared word keeps its id
        assert dataset.train.labels.tolist() == [0, 0, 1, 1, 2, 2] and dataset.test.labels.tolist() == [1, 0, 2]
        assert dataset.image_size == 64 and dataset.transform.pad == 8 and dataset.split == "given"
        assert np.array_equal(dataset.train.pixels[1].numpy(), np.stack([grey] * 3))  # grey became RGB
        assert np.array_equal(dataset.test.pixels[2].numpy(), picture(102, SIZE).transpose(2, 0, 1))


def test_tinyimagenet_half_copied(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "x")
    with pytest.raises(DataError, match="TinyImageNet is incomplete") as caught:
        load(path=path)  # recognised by its files, refused by its counts
    assert caught.value.code == "E202" and "3 classes listed, not 200" in str(caught.value)
    (path / "val" / "images" / "val_1.png").unlink()
    with pytest.raises(DataError) as caught:
        read_tiny(path)
    assert "val holds 2 labelled images, not 3" in str(caught.value)
    (path / "train" / "n02" / "images" / "n02_0.png").unlink()
    with pytest.raises(DataError) as caught:
        read_tiny(path)
    assert "train/n02/images holds 1 images, not 2" in str(caught.value)
    (path / "val" / "val_annotations.txt").unlink()
    write_picture(path / "train" / "n02" / "images" / "n02_0.png", 0, SIZE)
    with pytest.raises(DataError) as caught:
        read_tiny(path)
    assert "val_annotations.txt is missing" in str(caught.value)


COUNTS = {"webcam": {"bike": 7, "mug": 8}, "amazon": {"bike": 12, "mug": 13}, "dslr": {"bike": 2, "mug": 5}}
TOTALS = {"amazon": 25, "dslr": 7, "webcam": 15}


def write_office(path: Path, between: str = "") -> Path:
    for d, (domain, counts) in enumerate(COUNTS.items()):
        write_classes(path / domain / between, counts, SIZE, start=100 * d)
    return path


@pytest.mark.parametrize("between", ["", "images"])
def test_office31_both_layouts(tmp_path: Path, between: str) -> None:
    dataset = read_office31(write_office(tmp_path, between), Options(), TOTALS, num_classes=2)
    assert dataset.domains == ("amazon", "dslr", "webcam") and dataset.classes == ("bike", "mug")
    counts = {
        (domain, name): int(((dataset.test.domains == d) & (dataset.test.labels == c)).sum())
        for d, domain in enumerate(dataset.domains)
        for c, name in enumerate(dataset.classes)
    }
    # nearest of .2 n: 12 -> 2.4, 13 -> 2.6, 2 -> .4, 5 -> 1.0, 7 -> 1.4, 8 -> 1.6
    assert list(counts.values()) == [2, 3, 0, 1, 1, 2]
    assert len(dataset.train) + len(dataset.test) == sum(TOTALS.values())
    _, tasks = plan_tasks(dataset, scenario="domain")
    assert [len(task.train) for task in tasks] == [20, 6, 12] and [task.num_seen for task in tasks] == [2, 2, 2]


def test_office31_choice_depends_on_the_seed_only(tmp_path: Path) -> None:
    write_office(tmp_path / "a")
    write_office(tmp_path / "b", "images")
    first, second = (read_office31(tmp_path / name, Options(), TOTALS, num_classes=2) for name in "ab")
    other = read_office31(tmp_path / "a", Options(seed=1), TOTALS, num_classes=2)
    assert first.fingerprint() == second.fingerprint() != other.fingerprint()


def test_hold_out_rounds_to_nearest_for_every_class_size() -> None:
    for n in range(1, 101):
        exact = Fraction(n, 5)
        nearest = min(int(exact + Fraction(1, 2)), n - 1)
        assert len(draw_test([("d", "c")] * n, Options())) == nearest


def test_office31_half_copied(tmp_path: Path) -> None:
    path = write_office(tmp_path)
    with pytest.raises(DataError) as caught:
        load(path=path)  # recognised by its domains, refused by its counts
    assert caught.value.code == "E202" and "amazon: 25 images in 2 classes, not 2817 in 31" in str(caught.value)
    assert "name=folder" in str(caught.value) and len(load("folder", path, layout="domains").domains) == 3
    shutil.rmtree(path / "dslr")
    with pytest.raises(DataError, match="Office-31 is incomplete") as caught:
        load("office31", path)
    assert "dslr is missing" in str(caught.value)
    assert torch.equal(load("folder", path, layout="domains").train.domains.unique(), torch.tensor([0, 1]))
