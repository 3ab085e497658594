"""Pictures in a row: when they are noticed, when they are not, and which ones `held_out=last` holds out."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from picture_files import picture, write_picture

import rescene
from rescene.core.errors import DataError
from rescene.data import Dataset, Images, load, prepare
from rescene.data.derived_sets import validation_part
from rescene.data.images import measure
from rescene.data.inspection import in_series, nearly_trained

NOISE, BLOCKS = 16, 2  # sides of the random parts of a picture: fine ones hardly correlate, coarse ones by chance


def pictures(count: int, side: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(count, 1, side, side, generator=generator)


def dataset(z: torch.Tensor, labels: torch.Tensor, split: str = "fraction=0.2 seed=0", **more: torch.Tensor) -> Dataset:
    """A data set of these pictures, grey and of 16 pixels."""
    pixels = (128 + 30 * z).clamp(0, 255).to(torch.uint8).expand(-1, 3, -1, -1)
    pixels = pixels.repeat_interleave(16 // z.shape[-1], dim=2).repeat_interleave(16 // z.shape[-1], dim=3)
    train = Images(pixels.contiguous(), labels, **more)
    names = {key: tuple(f"{key[0]}{i}" for i in range(int(values.max()) + 1)) for key, values in more.items()}
    classes = tuple(f"c{i}" for i in range(int(labels.max()) + 1))
    return Dataset("made", classes, train, train.select(slice(0, 1)), measure(pixels), split=split, **names)


def rows(count: int, views: int, share: float, generator: torch.Generator) -> torch.Tensor:
    """``count`` pictures, ``views`` of each object in a row; ``share`` of the variance is the object's."""
    things = pictures(-(-count // views), NOISE, generator).repeat_interleave(views, dim=0)[:count]
    return share**0.5 * things + (1 - share) ** 0.5 * pictures(count, NOISE, generator)


def test_views_in_a_row_are_noticed_where_the_test_was_drawn() -> None:
    g = torch.Generator().manual_seed(0)
    z, labels = rows(60, 5, 0.5, g), torch.arange(2).repeat_interleave(30)
    told = in_series(dataset(z, labels))
    assert told is not None and told.code == "W563" and "data.held_out=last" in told.what
    for split in ("given", "fraction=0.2 last", "validation=0.2 last"):
        assert in_series(dataset(z, labels, split)) is None
    shuffled = torch.randperm(60, generator=g)
    assert in_series(dataset(z[shuffled], labels[shuffled])) is None


def test_chance_is_not_taken_for_a_series() -> None:
    """A few coarse pictures correlate by chance, in some of these sets more than the bound."""
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        assert in_series(dataset(pictures(13, BLOCKS, g), torch.zeros(13, dtype=torch.int64))) is None


def test_a_slight_likeness_is_left_alone_however_sure_it_is() -> None:
    g = torch.Generator().manual_seed(0)
    assert in_series(dataset(rows(800, 5, 0.06, g), torch.zeros(800, dtype=torch.int64))) is None


def test_one_domain_of_several_is_named() -> None:
    g = torch.Generator().manual_seed(0)
    z, domains = torch.cat([pictures(600, NOISE, g), rows(40, 5, 0.5, g)]), torch.tensor([0] * 600 + [1] * 40)
    told = in_series(dataset(z, torch.zeros(640, dtype=torch.int64), domains=domains))
    assert told is not None and "images of d1 that follow each other" in told.what


def test_pictures_of_one_site_may_be_alike() -> None:
    g = torch.Generator().manual_seed(0)
    z = torch.cat([0.7 * pictures(1, NOISE, g) + 0.7 * pictures(40, NOISE, g) for _ in range(3)])
    labels, sites = torch.zeros(120, dtype=torch.int64), torch.arange(3).repeat_interleave(40)
    assert in_series(dataset(z, labels)) is not None  # as long as nobody says that there are sites
    assert in_series(dataset(z, labels, sites=sites)) is None


def test_the_advice_suits_the_split() -> None:
    z, labels = pictures(20, NOISE, torch.Generator().manual_seed(0)), torch.zeros(20, dtype=torch.int64)
    for split, is_named in (("fraction=0.2 seed=0", True), ("fraction=0.2 last", False), ("given", False)):
        made = dataset(z, labels, split)
        brighter = Images(made.train.pixels[:3] // 2 + 60, labels[:3])
        told = nearly_trained(Dataset("made", made.classes, made.train, brighter, made.transform, split=split))
        assert told is not None and ("data.held_out=last" in told.what) == is_named


def test_the_last_are_those_whose_names_have_the_highest_numbers(tmp_path: Path) -> None:
    """Also without leading zeros, and in a table in any order."""
    for i in range(1, 16):
        write_picture(tmp_path / "images" / "cup" / f"img{i}.png", i)
    expected = np.stack([picture(i).transpose(2, 0, 1) for i in (13, 14, 15)])
    found = load(path=tmp_path / "images", held_out="last").test.pixels.numpy()
    assert sorted(map(bytes, found)) == sorted(map(bytes, expected))
    order = np.random.default_rng(0).permutation(np.arange(1, 16))
    with (tmp_path / "images" / "all.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("path", "label"), *((f"cup/img{i}.png", "cup") for i in order)])
    found = load(path=tmp_path / "images" / "all.csv", held_out="last").test.pixels.numpy()
    assert sorted(map(bytes, found)) == sorted(map(bytes, expected))


def test_both_splits_can_be_prepared_and_each_run_finds_its_own(tmp_path: Path) -> None:
    for i in range(10):
        write_picture(tmp_path / "images" / "cup" / f"{i}.png", i)
    drawn = prepare("folder", tmp_path / "images", tmp_path / "ready")
    with pytest.raises(DataError, match="another test split") as caught:
        load(path=drawn, held_out="last")
    assert str(caught.value.fix).startswith("data.held_out=drawn, or") and "--held-out" in str(caught.value.fix)
    last = prepare("folder", tmp_path / "images", tmp_path / "ready", held_out="last")
    assert [file.name for file in (drawn, last)] == ["folder.safetensors", "folder-last.safetensors"]
    for held_out in ("drawn", "last"):
        fresh = load(path=tmp_path / "images", held_out=held_out)
        assert load("folder", tmp_path / "ready", held_out=held_out).fingerprint() == fresh.fingerprint()


def test_the_last_of_a_validation_part_come_from_every_site() -> None:
    labels = torch.tensor([0] * 10 + [1] * 10).repeat(3)
    made = dataset(
        pictures(60, NOISE, torch.Generator().manual_seed(0)), labels, sites=torch.arange(3).repeat_interleave(20)
    )
    part = validation_part(made, 0.3, 0, "last").test
    assert part.sites is not None and torch.bincount(part.labels * 3 + part.sites).tolist() == [3] * 6


def test_python_data_are_looked_at_too_and_their_last_ones_can_be_held_out(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    made = dataset(rows(120, 5, 0.5, g), torch.arange(2).repeat_interleave(60)).train
    quick = {"method": "fedavg", "federation.num_rounds": 1, "model.width": 2, "tasks.count": 1}
    drawn = rescene.run("smoke", data=(made.pixels, made.labels), out=tmp_path / "drawn", **quick)
    held = quick | {"data.held_out": "last"}
    last = rescene.run("smoke", data=(made.pixels, made.labels), out=tmp_path / "last", **held)
    assert "W563" in (tmp_path / "drawn" / "events.jsonl").read_text()
    assert not (tmp_path / "last" / "events.jsonl").exists()  # nothing was warned of
    assert drawn.values["tasks"][0]["test_size"] == last.values["tasks"][0]["test_size"] == 24
