from __future__ import annotations

import torch

from rescene.data import Images, Shard, Task, Transform

LABELS = torch.tensor([5, 4, 5, 6, 4, 6])
INDEX = torch.tensor([5, 1, 2, 4])  # labels 6, 4, 5, 4


def make(index: torch.Tensor = INDEX) -> Shard:
    pixels = torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1).expand(6, 3, 2, 2).contiguous()
    task = Task(2, (4, 5, 6), 7, None, torch.arange(6), torch.arange(0))
    transform = Transform((0.0,) * 3, (1 / 255,) * 3, 0)
    return Shard(Images(pixels, LABELS), index, task, transform)


def test_labels_and_length_follow_the_index() -> None:
    shard = make()
    assert len(shard) == 4 and shard.labels.tolist() == [6, 4, 5, 4] and shard.device.type == "cpu"


def test_by_class_gives_positions_into_the_split_by_ascending_label() -> None:
    by_class = make().by_class()
    assert list(by_class) == [4, 5, 6]
    assert {c: places.tolist() for c, places in by_class.items()} == {4: [1, 4], 5: [2], 6: [5]}


def test_absent_classes_and_empty_shards() -> None:
    assert list(make(torch.tensor([0])).by_class()) == [5]
    empty = make(torch.tensor([], dtype=torch.int64))
    assert len(empty) == 0 and empty.by_class() == {}


def test_pictures_are_normalised_in_the_order_asked() -> None:
    shard = make()
    pictures = shard.pictures(torch.tensor([4, 0]))
    torch.testing.assert_close(pictures[:, 0, 0, 0], torch.tensor([4.0, 0.0]))
    assert pictures.shape == (2, 3, 2, 2) and pictures.dtype == torch.float32
