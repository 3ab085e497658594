"""Data as Python objects: what is taken, what it becomes, and what is refused with its place."""

import numpy as np
import pytest
import torch
from own_things import SMALL, Pairs, arrays
from PIL import Image
from torch.utils.data import IterableDataset

import rescene
from rescene.core.errors import DataError
from rescene.data.objects import dataset_of
from rescene.data.sources.listing import Options

X, Y, X_TEST, Y_TEST = arrays()


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y.tolist(), strict=True))


class Rows:
    """What a Hugging Face data set looks like: columns with features, rows as mappings."""

    column_names = ["img", "fine_label", "coarse_label"]

    def __init__(self, x, y, names):
        self.rows = [
            {"img": Image.fromarray(p.permute(1, 2, 0).numpy()), "fine_label": int(c), "coarse_label": 0}
            for p, c in zip(x, y, strict=True)
        ]
        self.features = {"fine_label": type("ClassLabel", (), {"names": names})()}

    def __iter__(self):
        return iter(self.rows)

    def __len__(self):
        return len(self.rows)


@pytest.mark.parametrize("data", [
    (X, Y, X_TEST, Y_TEST),
    {"x_train": X.numpy(), "y_train": Y.numpy(), "x_test": X_TEST.numpy(), "y_test": Y_TEST.numpy()},
    (X.permute(0, 2, 3, 1).numpy(), Y.reshape(-1, 1).numpy(), X_TEST.permute(0, 2, 3, 1).numpy(), Y_TEST.tolist()),
    (X.float() / 255, Y, X_TEST.double() / 255, Y_TEST),
    (Pairs(X, Y), Pairs(X_TEST, Y_TEST)),
    {"train": Pairs(X, Y), "test": Pairs(X_TEST, Y_TEST)},
    (Stream(), Pairs(X_TEST, Y_TEST)),
    {"train": Rows(X, Y, list("0123")), "validation": Rows(X_TEST, Y_TEST, list("0123"))},
], ids=["tensors", "mapping", "channels last", "floats", "torch", "splits", "stream", "hugging face"])  # fmt: skip
def test_the_same_pictures_whatever_holds_them(data):
    found = dataset_of(data, name="mine")
    assert torch.equal(found.train.pixels, X) and torch.equal(found.test.pixels, X_TEST)
    assert torch.equal(found.train.labels, Y) and found.classes == ("0", "1", "2", "3") and found.split == "given"


def test_without_test_data_some_of_each_class_are_held_out():
    found = dataset_of(Pairs(X, Y, classes=["ant", "bee", "cat", "dog"]), options=Options(test_fraction=0.25))
    assert torch.bincount(found.test.labels).tolist() == [4] * 4 and found.classes[0] == "ant"
    assert found.split == "fraction=0.25 seed=0"


def test_pictures_of_other_sizes_become_squares_of_one_size():
    mixed = Pairs(X, Y, lambda x, y: (x[:, : 12 + y], y))
    found = dataset_of((mixed, mixed))
    assert found.image_size == 12 and "mixed sizes" in found.notes[0]
    assert dataset_of((mixed, mixed), options=Options(image_size=8)).image_size == 8


def test_a_frame_of_paths(tmp_path):
    pandas = pytest.importorskip("pandas")
    rows = []
    for i in range(24):
        Image.fromarray(X[i].permute(1, 2, 0).numpy()).save(tmp_path / f"{i}.png")
        rows.append({"Path": tmp_path / f"{i}.png", "label": i % 2, "domain": "day" if i < 12 else "night"})
    frame = pandas.DataFrame(rows)
    found = dataset_of(frame, name="frame")
    assert found.classes == ("0", "1") and found.domains == ("day", "night") and len(found.test) == 4
    both = dataset_of((frame[:20], frame[20:]))
    assert len(both.train) == 20 and len(both.test) == 4
    with pytest.raises(DataError, match="1 of 25 files are not there"):
        dataset_of(pandas.concat([frame, pandas.DataFrame([{"Path": "gone.png", "label": 0, "domain": "day"}])]))
    with pytest.raises(DataError, match=r"row 0(.|\n)*label is float 0.5"):
        dataset_of(frame.assign(label=0.5))


def test_a_transform_changes_every_picture_once(tmp_path):
    run = rescene.run("smoke", data=(X, Y, X_TEST, Y_TEST), transform=lambda x: x[:, ::2, ::2], method="fedavg",
                      out=tmp_path / "run", **SMALL)  # fmt: skip
    assert run.values["config"]["data"]["name"].startswith("object:arrays-")
    assert rescene.use.open_model(run.folder).image_size == 8
    np.savez(tmp_path / "mine.npz", x=X.permute(0, 2, 3, 1).numpy(), y=Y.numpy())
    path = {"data.path": str(tmp_path / "mine.npz")}
    named = rescene.run("smoke", transform=lambda x: 255 - x, method="fedavg", out=tmp_path / "b", **SMALL, **path)
    assert named.objects[0].startswith("data: mine-")


def spoilt(change):
    return (Pairs(X, Y, change), Pairs(X_TEST, Y_TEST))


@pytest.mark.parametrize(("data", "words"), [
    (spoilt(lambda x, y: (x, float(y))), "item 0.*label is float 0.0"),
    (spoilt(lambda x, y: (x, None)), "label is NoneType"),
    (spoilt(lambda x, y: (x, [0, 1])), "label is list"),
    (spoilt(lambda x, y: (x, y - 1)), "label is -1"),
    (spoilt(lambda x, y: (x, y, 0)), "it is 3 values"),
    (spoilt(lambda x, y: x), "it is a Tensor"),
    (spoilt(lambda x, y: (x[0, 0], y)), r"shape \[16\]"),
    (spoilt(lambda x, y: (torch.cat([x, x]), y)), r"shape \[6, 16, 16\]"),
    (spoilt(lambda x, y: (x * 4 - 2, y)), "floating-point pixels from"),
    (spoilt(lambda x, y: (x / 0, y)), "floating-point pixels from"),
    (spoilt(lambda x, y: ("a.png", y)), "no picture|shape"),
    (spoilt(lambda x, y: ({}[0], y)), "item 0.*KeyError"),
    ((X, Y[:-1]), "64 pictures and 63 labels"),
    ((X.to(torch.int32) * 300, Y), "int32 pixels"),
    ((X[:0], Y[:0]), "it is empty"),
    ({"pictures": X}, "a mapping with pictures"),
    (object(), "is no data set"),
    (({"a": 1},), "columns|no data set|a mapping|dict"),
    ((Pairs(X, Y, classes=["a", "b"]), Pairs(X, Y)), "label 2, but 2 classes are named"),
    ((Pairs(X, Y), Pairs(X_TEST[:0], Y_TEST[:0])), "test data.*it is empty"),
], ids=range(20))  # fmt: skip
def test_what_is_no_data_is_refused_with_its_place_before_there_is_a_folder(data, words, tmp_path):
    import re

    with pytest.raises(DataError) as error:
        rescene.run("smoke", data=data, method="fedavg", out=tmp_path / "run", **SMALL)
    assert re.search(words, str(error.value), re.DOTALL), error.value
    assert error.value.code == "E240" and error.value.fix and not (tmp_path / "run").exists()


def test_a_transform_that_fails_is_named():
    with pytest.raises(DataError, match="the transform fails on uint8"):
        rescene.run("smoke", data=(X, Y), transform=lambda x: x @ x[0, 0, 0], method="fedavg", **SMALL)
    with pytest.raises(DataError, match="E243"):
        rescene.run("smoke", data=(X, Y), transform="flip", method="fedavg", **SMALL)


def test_numbers_are_sorted_as_numbers():
    y = np.array([10, 9] * 8)
    assert dataset_of((X[:16], y)).classes == ("9", "10")


def test_a_hugging_face_data_set(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["ant", "bee", "cat", "dog"])}
    )
    parts = {
        name: datasets.Dataset.from_dict(
            {"image": [Image.fromarray(p.permute(1, 2, 0).numpy()) for p in x], "label": y.tolist()}, features=features
        )
        for name, x, y in (("train", X, Y), ("test", X_TEST, Y_TEST))
    }
    found = dataset_of(datasets.DatasetDict(parts))
    assert found.classes == ("ant", "bee", "cat", "dog") and torch.equal(found.train.pixels, X)
    assert torch.equal(found.test.labels, Y_TEST) and len(dataset_of(parts["train"]).test) == 12
