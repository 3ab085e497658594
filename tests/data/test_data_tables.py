"""Readers of lists and arrays: CSV and NumPy files."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from picture_files import picture, write_picture
from PIL import Image

from rescene.core.errors import DataError
from rescene.data import load, site_names


def code_of(caught: pytest.ExceptionInfo[DataError]) -> tuple[str, int]:
    return caught.value.code, caught.value.exit_code


# CSV


def write_csv(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_csv_with_split_and_domain(tmp_path: Path) -> None:
    for i in range(4):
        write_picture(tmp_path / "pics" / f"{i}.png", i)
    rows = (
        "pics/0.png,dog,train,north\npics/1.png,cat,train,south\npics/2.png,dog,test,south\npics/3.png,cat,val,north\n"
    )
    dataset = load(path=write_csv(tmp_path / "list.csv", "\ufeffpath, Label ,split,domain\n" + rows))
    assert (dataset.name, dataset.classes, dataset.domains) == ("list", ("cat", "dog"), ("north", "south"))
    assert dataset.train.labels.tolist() == [1, 0] and dataset.test.labels.tolist() == [1, 0]
    assert dataset.train.domains.tolist() == [0, 1] and dataset.test.domains.tolist() == [1, 0]  # type: ignore[union-attr]
    assert np.array_equal(dataset.test.pixels[0].numpy(), picture(2).transpose(2, 0, 1))
    assert load(path=tmp_path).fingerprint() == dataset.fingerprint()  # the folder with one manifest is that manifest


def test_csv_without_split_draws_one(tmp_path: Path) -> None:
    for i in range(10):
        write_picture(tmp_path / f"{i}.png", i)
    text = "path,label\n" + "".join(f"{i}.png,{'ab'[i % 2]}\n" for i in range(10))
    dataset = load("csv", write_csv(tmp_path / "list.csv", text))
    assert (len(dataset.train), len(dataset.test), dataset.split) == (8, 2, "fraction=0.2 seed=0")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no column 'path'"),
        ("pic,label\nx,a\n", "found: pic, label"),
        ("path,lable\nx.png,a\n", "is it 'lable'"),
        ("path,label\n", "no row"),
        ("path,label\nx.png,\n", "row 2 has no label"),
        ("path,label,split\nx.png,a,train\ny.png,a,tset\n", "row 3: split is 'tset'"),
        ("path,label,domain\nx.png,a,d\ny.png,a,\n", "some have none"),
    ],
)
def test_bad_csv_is_explained(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(DataError) as caught:
        load(path=write_csv(tmp_path / "list.csv", text))
    assert code_of(caught) == ("E206", 3) and words in str(caught.value) and "list.csv" in str(caught.value)


@pytest.mark.parametrize("skip", [False, True])
def test_a_short_csv_with_a_missing_file_names_the_file_first(tmp_path: Path, skip: bool) -> None:
    for name in ("a", "b"):
        write_picture(tmp_path / f"{name}.png", 0)
    table = write_csv(tmp_path / "t.csv", "path,label\na.png,a\nlost.png,b\n")
    with pytest.raises(DataError, match="lost.png") as caught:
        load(path=table, skip_unreadable=skip)
    assert caught.value.code == "E203" and caught.value.where == str(tmp_path / "lost.png")
    write_csv(tmp_path / "t.csv", "path,label\na.png,a\nb.png,b\n")
    with pytest.raises(DataError, match="no test image") as caught:
        load(path=table, skip_unreadable=skip)
    assert caught.value.code == "E202" and caught.value.where == str(table)


def test_csv_naming_a_missing_file(tmp_path: Path) -> None:
    write_picture(tmp_path / "0.png", 0)
    text = "path,label,split\n0.png,a,train\ngone.png,a,test\n"
    with pytest.raises(DataError, match="gone.png") as caught:
        load(path=write_csv(tmp_path / "list.csv", text))
    assert caught.value.code == "E203"


# NumPy


GREY = np.random.default_rng(0).integers(0, 256, (6, 32, 32), dtype=np.uint8)
FOUR = {"x_train": GREY[:4], "y_train": np.array([7, 3, 7, 3]), "x_test": GREY[4:], "y_test": np.array([3, 7])}


@pytest.mark.parametrize(
    "shape",
    [
        lambda x: x,
        lambda x: x[..., None],
        lambda x: x[:, None],
        lambda x: np.stack([x] * 3, -1),
        lambda x: np.stack([x] * 3, 1),
    ],
    ids=["grey", "NHW1", "N1HW", "NHWC", "NCHW"],
)
def test_npz_in_every_picture_shape(tmp_path: Path, shape) -> None:  # type: ignore[no-untyped-def]
    np.savez(tmp_path / "x.npz", **{k: shape(v) if k.startswith("x") else v for k, v in FOUR.items()})
    dataset = load(path=tmp_path / "x.npz")
    assert dataset.classes == ("3", "7") and dataset.train.labels.tolist() == [1, 0, 1, 0] and dataset.split == "given"
    assert np.array_equal(dataset.train.pixels.numpy(), np.stack([GREY[:4]] * 3, 1))
    assert dataset.test.labels.tolist() == [0, 1] and dataset.image_size == 32


def test_npz_with_one_block_names_and_column_labels(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (10, 32, 32), dtype=np.uint8)
    y = (np.arange(10) % 2)[:, None]
    np.savez(tmp_path / "x.npz", x=x, y=y, classes=np.array(["zebra", "ant"]))
    dataset = load(path=tmp_path)
    assert dataset.classes == ("zebra", "ant")  # the given order, not the alphabet
    assert torch.bincount(dataset.train.labels).tolist() == [4, 4] and dataset.split == "fraction=0.2 seed=0"
    for images in (dataset.train, dataset.test):
        for pixels, label in zip(images.pixels, images.labels, strict=True):
            (i,) = np.flatnonzero((x == pixels[0].numpy()).all((1, 2)))
            assert int(label) == i % 2


def test_npz_that_is_not_square_is_fitted(tmp_path: Path) -> None:
    wide = np.zeros((4, 32, 48), np.uint8)
    np.savez(tmp_path / "x.npz", x_train=wide, y_train=[0, 1, 0, 1], x_test=wide, y_test=[0, 1, 0, 1])
    dataset = load(path=tmp_path / "x.npz")
    assert dataset.image_size == 32 and dataset.notes == ("resized from 48x32 to 32x32 (shorter side, centre crop)",)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({"x_train": GREY[:4] / 255.0}, "E206", "x_train is float64"),
        ({"x_train": GREY[:3]}, "E206", "3 pictures"),
        ({"x_train": GREY[:4].reshape(4, -1)}, "E206", "(4, 1024)"),
        ({"y_train": np.array([0.5, 1, 1, 0])}, "E206", "y_train is float64"),
        ({"y_test": np.array([3, 9])}, "E204", "class 9"),
        ({"classes": np.array(["a", "b"])}, "E206", "which is not in classes"),
        ({"x_test": None}, "E206", "no array x_test"),
        ({"x_train": None}, "E206", "no array x, y"),
    ],
)
def test_bad_npz_is_explained(tmp_path: Path, change: dict, code: str, words: str) -> None:
    np.savez(tmp_path / "x.npz", **{k: v for k, v in {**FOUR, **change}.items() if v is not None})
    with pytest.raises(DataError) as caught:
        load(path=tmp_path / "x.npz")
    assert code_of(caught) == (code, 3) and words in str(caught.value)


def test_npz_with_pickles_or_garbage_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "p.npz", x=np.array([{}], dtype=object), y=np.array([0]))
    (tmp_path / "g.npz").write_bytes(b"not a zip")
    for name in ("p.npz", "g.npz"):
        with pytest.raises(DataError, match="NumPy file") as caught:
            load(path=tmp_path / name)
        assert caught.value.code == "E206"


# Tables of any schema


def encoded(seed: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(picture(seed)).save(stream, "PNG")
    return stream.getvalue()


def test_columns_are_named_or_known_by_their_usual_names_and_the_note_says_which(tmp_path: Path) -> None:
    rows = []
    for i in range(10):
        write_picture(tmp_path / f"{i}.png", i)
        rows.append(f"{i}.png;{'ab'[i % 2]};{'PQ'[i // 5]};x")
    table = write_csv(tmp_path / "list.csv", "Datei;Art;Klinik;label\n" + "\n".join(rows))
    dataset = load(path=table, columns={"label": "Art", "site": "Klinik"})
    assert (dataset.classes, dataset.sites) == (("a", "b"), ("P", "Q"))
    assert dataset.notes[0] == "columns: label = Art, site = Klinik, path = Datei"  # by what the column holds
    assert load(path=tmp_path, columns={"label": "Art"}).classes == ("a", "b")  # found in its folder, too
    with pytest.raises(DataError, match="did you mean 'Klinik'") as caught:
        load(path=table, columns={"label": "Art", "site": "Klinic"})
    assert caught.value.code == "E206"


def test_a_table_whose_label_nobody_knows_shows_its_columns(tmp_path: Path) -> None:
    write_picture(tmp_path / "0.png", 0)
    table = write_csv(tmp_path / "list.csv", "Datei,Art\n0.png,rose\n")
    with pytest.raises(DataError) as caught:
        load(path=tmp_path)
    assert "Datei (0.png); Art (rose)" in str(caught.value.why)
    assert f"rescene data inspect {table} --columns label=NAME" in str(caught.value.fix)


def hugging_face(folder: Path, split: str, labels: list[int], names: list[str]) -> None:
    cells = [{"bytes": encoded(100 * len(split) + i), "path": f"{i}.png"} for i in range(len(labels))]
    about = {"info": {"features": {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": names}}}}
    table = pa.table({"image": cells, "label": labels}).replace_schema_metadata({"huggingface": json.dumps(about)})
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / f"{split}-00000-of-00001.parquet")


def test_parquet_as_hugging_face_writes_it(tmp_path: Path) -> None:
    names = ["zebra", "unicorn", "ant"]  # nobody has a picture of the second
    hugging_face(tmp_path / "data", "train", [0, 2, 0, 2, 0, 2], names)
    hugging_face(tmp_path / "data", "validation", [0, 2], names)
    dataset = load(path=tmp_path)
    assert dataset.classes == ("zebra", "ant") and len(dataset.test) == 2 and dataset.split == "given"
    hugging_face(tmp_path / "data", "test", [2, 2, 0], names)
    dataset = load(path=tmp_path)
    assert dataset.train.labels.tolist() == [0, 1, 0, 1, 0, 1] and dataset.test.labels.tolist() == [1, 1, 0]
    assert "not read: validation-00000-of-00001.parquet" in dataset.notes[0]
    one = load(path=tmp_path / "data" / "train-00000-of-00001.parquet")
    assert (len(one.train), len(one.test)) == (4, 2)  # one split alone: a part of it is held out
    assert np.array_equal(dataset.train.pixels[1].numpy(), picture(501).transpose(2, 0, 1))


def test_parquet_with_paths_sites_and_missing_shards(tmp_path: Path) -> None:
    for i in range(6):
        write_picture(tmp_path / f"{i}.png", i)
    columns = {"file": [f"{i}.png" for i in range(6)], "label": [0.0, 1.0] * 3, "site": ["s", "t"] * 3}
    pq.write_table(pa.table(columns), tmp_path / "list.parquet")
    dataset = load(path=tmp_path / "list.parquet")
    assert dataset.classes == ("0", "1") and dataset.sites == ("s", "t")
    assert site_names("auto", tmp_path / "list.parquet") == ("s", "t")
    (tmp_path / "list.parquet").rename(tmp_path / "train-00000-of-00002.parquet")
    with pytest.raises(DataError, match="train-00001-of-00002.parquet") as caught:
        load("parquet", tmp_path)
    assert caught.value.code == "E202"


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"image": [b"x"], "label": [0.5]}, "the label is '0.5', float"),
        ({"image": [b"x"], "label": [None]}, "row 0 has no label"),
        ({"image": [3], "label": [1]}, "the picture is int"),
        ({"label": [1]}, "no column 'path'"),
    ],
)
def test_bad_parquet_is_explained(tmp_path: Path, columns, words: str) -> None:  # type: ignore[no-untyped-def]
    pq.write_table(pa.table(columns), tmp_path / "list.parquet")
    with pytest.raises(DataError) as caught:
        load(path=tmp_path / "list.parquet")
    assert code_of(caught) == ("E206", 3) and words in str(caught.value)
