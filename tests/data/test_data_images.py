from __future__ import annotations

import hashlib

import pytest
import torch

from rescene.data import Dataset, Images, Transform
from rescene.data.images import measure

TRANSFORM = Transform(mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.5), pad=4)


def pixels(n: int, size: int = 32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (n, 3, size, size), generator=generator, dtype=torch.uint8)


def images(n: int = 6, domains: bool = False) -> Images:
    return Images(pixels(n), torch.arange(n) % 3, torch.arange(n) % 2 if domains else None)


def test_normalise_is_the_formula_by_channel() -> None:
    x = torch.zeros(1, 3, 1, 1, dtype=torch.uint8)
    x[0, :, 0, 0] = torch.tensor([0, 51, 255])
    expected = [(0 / 255 - 0.5) / 0.2, (51 / 255 - 0.4) / 0.25, (255 / 255 - 0.3) / 0.5]
    assert TRANSFORM.normalise(x).flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_fill_is_what_a_black_pixel_becomes() -> None:
    black = TRANSFORM.normalise(torch.zeros(1, 3, 1, 1, dtype=torch.uint8)).flatten().tolist()
    assert list(TRANSFORM.fill) == pytest.approx(black, abs=1e-6)


def test_to_pixels_inverts_normalise_on_every_value() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16)
    assert torch.equal(TRANSFORM.to_pixels(TRANSFORM.normalise(every)), every)


def test_to_pixels_clamps_and_rounds() -> None:
    x = TRANSFORM.normalise(torch.full((1, 3, 1, 3), 100, dtype=torch.uint8))
    x[..., 0], x[..., 1] = 99.0, -99.0
    x[..., 2] += 0.4 / 255 / torch.tensor(TRANSFORM.std).view(1, 3, 1)  # 100.4 rounds to 100
    assert TRANSFORM.to_pixels(x)[0, 0, 0].tolist() == [255, 0, 100]


def augment_slowly(transform: Transform, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Picture by picture, pixel by pixel, from the same draws."""
    n, _, height, width = x.shape
    offsets = torch.randint(2 * transform.pad + 1, (2, n), generator=generator)
    mirror = torch.randint(2, (n,), generator=generator)
    out = torch.empty_like(x)
    for i in range(n):
        for row in range(height):
            for column in range(width):
                source = width - 1 - column if mirror[i] else column
                down, right = row + int(offsets[0, i]) - transform.pad, source + int(offsets[1, i]) - transform.pad
                inside = 0 <= down < height and 0 <= right < width
                out[i, :, row, column] = x[i, :, down, right] if inside else torch.tensor(transform.fill)
    return out


@pytest.mark.parametrize("pad", [0, 1, 4])
def test_augment_agrees_with_a_slow_reference(pad: int) -> None:
    transform = Transform(TRANSFORM.mean, TRANSFORM.std, pad)
    x = transform.normalise(pixels(12, size=8))
    fast = transform.augment(x, torch.Generator().manual_seed(3))
    assert torch.equal(fast, augment_slowly(transform, x, torch.Generator().manual_seed(3)))


def test_augment_draws_all_offsets_and_both_mirrors_for_single_pictures() -> None:
    one_pixel = torch.zeros(400, 3, 5, 5)
    one_pixel[:, :, 2, 1] = 1.0  # off centre, so that a mirror image shows
    moved = Transform((0.0,) * 3, (1.0,) * 3, pad=1).augment(one_pixel, torch.Generator().manual_seed(0))
    places = {tuple(torch.nonzero(picture[0])[0].tolist()) for picture in moved}
    # 3 rows; columns 1 + {-1, 0, 1} and their mirror images 4 - that
    assert places == {(row, column) for row in (1, 2, 3) for column in (0, 1, 2, 3, 4)}


def test_augment_leaves_its_input_alone_and_repeats_with_the_seed() -> None:
    x = TRANSFORM.normalise(pixels(5))
    before = x.clone()
    first, second = (TRANSFORM.augment(x, torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(x, before) and torch.equal(first, second)


def test_measure_gives_channel_mean_and_population_std() -> None:
    x = torch.zeros(2, 3, 64, 64, dtype=torch.uint8)
    x[1, 0] = 255  # red: half 0, half 1 -> mean .5, std .5
    x[:, 1] = 51  # green: constant .2 -> std at its floor
    transform = measure(x)
    assert transform.mean == (0.5, 0.2, 0.0) and transform.std == (0.5, 0.001, 0.001)
    assert transform.pad == 8 and measure(x[..., :32, :32]).pad == 4


def test_measure_does_not_depend_on_chunks() -> None:
    x = pixels(1500, size=4)
    values = x.double().transpose(0, 1).flatten(1) / 255
    assert measure(x).mean == pytest.approx(values.mean(1).tolist(), abs=1e-6)
    assert measure(x).std == pytest.approx(values.std(1, unbiased=False).tolist(), abs=1e-6)


@pytest.mark.parametrize(
    "index", [[4, 1], torch.tensor([4, 1]), torch.tensor([0, 1, 0, 0, 1, 0]).bool(), slice(1, 5, 3)]
)
def test_select_takes_positions_masks_and_slices(index: object) -> None:
    chosen = images(6, domains=True).select(index)  # type: ignore[arg-type]
    assert sorted(chosen.labels.tolist()) == [1, 1] and sorted(chosen.domains.tolist()) == [0, 1]  # type: ignore[union-attr]
    assert len(chosen) == len(chosen.pixels) == 2


@pytest.mark.parametrize("index", [[4, 1], torch.tensor([0, 1, 0, 0, 1, 0]).bool(), slice(1, 5, 3), slice(None)])
def test_parts_know_their_digests_if_the_whole_does(index: object) -> None:
    whole = images(6)
    assert "digests" not in vars(whole.select(index)), "nothing is hashed before somebody asks"  # type: ignore[arg-type]
    expected = whole.select(index).digests  # type: ignore[arg-type]
    assert len(set(whole.digests)) == 6 and whole.digests[0] == images(6).digests[0]
    part = whole.select(index).relabelled(torch.zeros(len(expected), dtype=torch.int64)).to("cpu")  # type: ignore[arg-type]
    assert vars(part)["digests"] == expected


def test_select_of_nothing_is_empty() -> None:
    assert len(images().select([])) == 0


@pytest.mark.parametrize(
    "fields",
    [
        (pixels(2).float(), torch.zeros(2, dtype=torch.int64)),
        (pixels(2)[:, :1], torch.zeros(2, dtype=torch.int64)),
        (pixels(2), torch.zeros(3, dtype=torch.int64)),
        (pixels(2), torch.zeros(2)),
        (pixels(2), torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)),
    ],
)
def test_images_refuse_wrong_types_and_shapes(fields: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(TypeError, match="must be"):
        Images(*fields)


def dataset(**changes: object) -> Dataset:
    fields = {"name": "x", "classes": ("a", "b", "c"), "train": images(6), "test": images(3), "transform": TRANSFORM}
    return Dataset(**{**fields, **changes})  # type: ignore[arg-type]


def test_fingerprint_sees_pixels_labels_classes_and_not_the_name() -> None:
    reference = dataset().fingerprint()
    assert len(reference) == len(hashlib.sha256().hexdigest()) and reference == dataset(name="y").fingerprint()
    changed_pixel = images(6)
    changed_pixel.pixels[5, 2, 31, 31] += 1
    changed_label = images(6)
    changed_label.labels[0] = 2
    others = [
        dataset(train=changed_pixel),
        dataset(train=changed_label),
        dataset(classes=("a", "b", "d")),
        dataset(test=images(2)),
    ]
    assert len({reference, *(other.fingerprint() for other in others)}) == 5


def test_dataset_moves_as_a_whole() -> None:
    moved = dataset(train=images(6, domains=True), domains=("p", "q")).to("meta")
    assert moved.train.pixels.device.type == moved.train.domains.device.type == moved.test.labels.device.type == "meta"  # type: ignore[union-attr]
    assert moved.image_size == 32 and moved.domains == ("p", "q")
