"""CIFAR in its four forms, with small copies: the expected counts are part of the specification that a reader takes."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from picture_files import write_picture
from PIL import Image

from rescene.core.errors import DataError
from rescene.data import load
from rescene.data.sources import cifar
from rescene.data.sources.cifar import CIFAR10, CIFAR100
from rescene.data.sources.listing import Options

SMALL10 = replace(CIFAR10, num_train=10, num_test=4)
SMALL100 = replace(CIFAR100, num_train=10, num_test=4)
RNG = np.random.default_rng(0)
TRAIN, TEST = (RNG.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8) for n in (10, 4))
TRAIN_LABELS, TEST_LABELS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [8, 9, 7, 0]


def check(dataset, spec) -> None:  # type: ignore[no-untyped-def]
    assert np.array_equal(dataset.train.pixels.numpy(), TRAIN) and np.array_equal(dataset.test.pixels.numpy(), TEST)
    assert dataset.train.labels.tolist() == TRAIN_LABELS and dataset.test.labels.tolist() == TEST_LABELS
    assert (dataset.name, dataset.classes) == (spec.name, spec.classes)
    assert (dataset.transform.mean, dataset.transform.std, dataset.transform.pad) == (*spec.statistics, 4)


def refused(path: Path, spec, words: str, code: str = "E202") -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DataError) as caught:
        cifar.read(path, Options(), spec)
    assert (caught.value.code, caught.value.exit_code) == (code, 3)
    assert words in str(caught.value), str(caught.value)


# parquet


def encoded(pixels: np.ndarray) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(stream, "PNG")
    return stream.getvalue()


def write_parquet(path: Path, pixels: np.ndarray, labels: list[int], image: str = "img", label: str = "label") -> None:
    cells = [{"bytes": encoded(picture), "path": None} for picture in pixels]
    pq.write_table(pa.table({image: cells, label: labels}), path)


def write_shards(folder: Path, **columns: str) -> None:
    for i, part in enumerate((slice(0, 6), slice(6, 10))):
        write_parquet(folder / f"train-0000{i}-of-00002.parquet", TRAIN[part], TRAIN_LABELS[part], **columns)
    write_parquet(folder / "test-00000-of-00001.parquet", TEST, TEST_LABELS, **columns)


def test_parquet_shards_in_name_order(tmp_path: Path) -> None:
    write_shards(tmp_path)
    check(cifar.read(tmp_path, Options(), SMALL10), SMALL10)
    check(cifar.read(tmp_path / "test-00000-of-00001.parquet", Options(), SMALL10), SMALL10)  # one file stands for all


def test_parquet_of_cifar100_uses_fine_labels(tmp_path: Path) -> None:
    (tmp_path / "cifar100").mkdir()
    write_shards(tmp_path / "cifar100", image="image", label="fine_label")
    check(cifar.read(tmp_path, Options(), SMALL100), SMALL100)


def test_parquet_half_copied(tmp_path: Path) -> None:
    write_shards(tmp_path)
    refused(tmp_path, CIFAR10, "train split holds 10 images, not 50,000")
    (tmp_path / "train-00001-of-00002.parquet").rename(tmp_path / "gone")
    refused(tmp_path, SMALL10, "missing: train-00001-of-00002.parquet")
    (tmp_path / "train-00001-of-00002.parquet").write_bytes((tmp_path / "gone").read_bytes()[:300])
    refused(tmp_path, SMALL10, "cannot read train-00001-of-00002.parquet")
    (tmp_path / "gone").rename(tmp_path / "train-00001-of-00002.parquet")
    (tmp_path / "test-00000-of-00001.parquet").unlink()
    refused(tmp_path, SMALL10, "no parquet file of the test split")


def test_parquet_with_other_columns_or_labels(tmp_path: Path) -> None:
    write_shards(tmp_path, label="target")
    refused(tmp_path, SMALL10, "no column label", code="E205")
    write_shards(tmp_path)
    refused(tmp_path, replace(SMALL10, classes=SMALL10.classes[:5]), "labels run from 1 to 9")


def test_damaged_picture_in_parquet_names_file_and_row(tmp_path: Path) -> None:
    write_shards(tmp_path)
    cells = [{"bytes": encoded(picture) if i != 2 else b"x", "path": None} for i, picture in enumerate(TEST)]
    pq.write_table(pa.table({"img": cells, "label": TEST_LABELS}), tmp_path / "test-00000-of-00001.parquet")
    refused(tmp_path, SMALL10, "test-00000-of-00001.parquet row 2", code="E203")


# official archives


def batches(spec) -> dict[str, tuple[np.ndarray, list[int]]]:  # type: ignore[no-untyped-def]
    if spec.name == "cifar100":
        return {"train": (TRAIN, TRAIN_LABELS), "test": (TEST, TEST_LABELS)}
    parts = {f"data_batch_{i + 1}": slice(2 * i, 2 * i + 2) for i in range(5)}
    return {name: (TRAIN[p], TRAIN_LABELS[p]) for name, p in parts.items()} | {"test_batch": (TEST, TEST_LABELS)}


def python2_pickle(pixels: np.ndarray, key: str, labels: list[int]) -> bytes:
    """{'data': uint8 array [n, 3072], key: labels} with the opcodes that Python 2 and an old NumPy wrote."""

    def text(value: str) -> bytes:
        return b"U" + bytes([len(value)]) + value.encode()

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    raw = pixels.tobytes()
    dtype = b"cnumpy\ndtype\n(" + text("u1") + b"K\x00K\x01tR(K\x03" + text("|") + b"NNN" + number(-1) * 2 + b"K\x00tb"
    shape = b"(" + number(len(pixels)) + number(3072) + b"t"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text("b") + b"tR"
    state = b"(K\x01" + shape + dtype + b"\x89" + b"T" + struct.pack("<i", len(raw)) + raw + b"tb"
    items = b"](" + b"".join(number(value) for value in labels) + b"e"
    return b"\x80\x02}(" + text("data") + array + state + text(key) + items + b"u."


def modern_pickle(pixels: np.ndarray, key: str, labels: list[int]) -> bytes:
    return pickle.dumps({b"data": pixels.reshape(-1, 3072), key.encode(): labels}, protocol=4)


def write_python(folder: Path, spec, dump=modern_pickle) -> Path:  # type: ignore[no-untyped-def]
    folder.mkdir(parents=True)
    for name, (pixels, labels) in batches(spec).items():
        (folder / name).write_bytes(dump(pixels, spec.key, labels))
    return folder


def write_binary(folder: Path, spec) -> Path:  # type: ignore[no-untyped-def]
    folder.mkdir(parents=True)
    for name, (pixels, labels) in batches(spec).items():
        coarse = [17] if spec.name == "cifar100" else []
        records = [bytes([*coarse, label]) + picture.tobytes() for picture, label in zip(pixels, labels, strict=True)]
        (folder / f"{name}.bin").write_bytes(b"".join(records))
    return folder


def packed(folder: Path) -> Path:
    archive = folder.parent / "archive.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, arcname=folder.name)
    return archive


@pytest.mark.parametrize("spec", [SMALL10, SMALL100], ids=["10", "100"])
@pytest.mark.parametrize("write", [write_python, write_binary])
def test_archives_unpacked_above_and_packed(tmp_path: Path, spec, write) -> None:  # type: ignore[no-untyped-def]
    folder = write(tmp_path / "in" / "cifar-batches", spec)
    check(cifar.read(folder, Options(), spec), spec)
    check(cifar.read(folder.parent, Options(), spec), spec)  # the folder above it
    check(cifar.read(packed(folder), Options(), spec), spec)


def test_pickles_of_python_2_are_read(tmp_path: Path) -> None:
    reference = pickle.loads(python2_pickle(TRAIN, "labels", TRAIN_LABELS), encoding="bytes")  # noqa: S301  (made here)
    assert np.array_equal(reference[b"data"].reshape(TRAIN.shape), TRAIN)  # the hand-made opcodes are a valid pickle
    check(cifar.read(write_python(tmp_path / "x", SMALL10, python2_pickle), Options(), SMALL10), SMALL10)


def test_pickle_that_wants_to_run_code_is_refused(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (Path(tmp_path / "pwned"),)  # type: ignore[return-value]

    folder = write_python(tmp_path / "x", SMALL10)
    (folder / "data_batch_3").write_bytes(pickle.dumps({b"data": Attack(), b"labels": []}))
    refused(folder, SMALL10, "data_batch_3")
    assert not (tmp_path / "pwned").exists()
    (folder / "data_batch_3").write_bytes(b"cbuiltins\neval\n(V1\ntR.")
    refused(folder, SMALL10, "builtins.eval")


def test_archive_half_copied(tmp_path: Path) -> None:
    folder = write_python(tmp_path / "x", SMALL10)
    refused(folder, CIFAR10, "holds 10 images, not 50,000")
    (folder / "data_batch_2").unlink()
    (folder / "test_batch").unlink()
    refused(folder, SMALL10, "missing: data_batch_2")
    binary = write_binary(tmp_path / "y", SMALL10)
    (binary / "data_batch_1.bin").write_bytes((binary / "data_batch_1.bin").read_bytes()[:-5])
    refused(binary, SMALL10, "not a whole number of 3073-byte records")


def test_truncated_tar(tmp_path: Path) -> None:
    archive = packed(write_binary(tmp_path / "x", SMALL10))
    archive.write_bytes(archive.read_bytes()[:-4000])
    refused(archive, SMALL10, "cannot read archive.tar.gz")


# PNG folders


def write_folders(path: Path) -> None:
    for c, name in enumerate(CIFAR10.classes):
        write_picture(path / "train" / name / "0.png", c)
        write_picture(path / "test" / name / "0.png", 100 + c)


def test_png_folders_follow_the_official_order(tmp_path: Path) -> None:
    write_folders(tmp_path)
    spec = replace(CIFAR10, num_train=10, num_test=10)
    dataset = cifar.read(tmp_path, Options(), spec)
    assert dataset.classes == CIFAR10.classes and dataset.transform.mean == CIFAR10.statistics[0]
    assert dataset.train.labels.tolist() == list(range(10))
    refused(tmp_path, CIFAR10, "train split holds 10 images, not 50,000")
    (tmp_path / "train" / "ship").rename(tmp_path / "train" / "boat")
    refused(tmp_path, spec, "boat")


def test_official_names() -> None:
    assert len(set(CIFAR10.classes)) == 10 and list(CIFAR10.classes) == sorted(CIFAR10.classes)
    assert len(set(CIFAR100.classes)) == 100 and list(CIFAR100.classes) == sorted(CIFAR100.classes)


def test_png_folders_with_an_order_of_their_own(tmp_path: Path) -> None:
    write_folders(tmp_path)
    order = CIFAR10.classes[::-1]
    dataset = cifar.read(tmp_path, Options(), replace(CIFAR10, classes=order, num_train=10, num_test=10))
    assert dataset.train.labels.tolist() == list(range(10))[::-1]  # files come by name, labels by the given order


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (lambda folder: write_shards(folder), "cifar10"),
        (lambda folder: write_shards(folder, label="fine_label"), "cifar100"),
        (lambda folder: write_python(folder / "cifar-10-batches-py", SMALL10), "cifar10"),
        (lambda folder: write_binary(folder / "cifar-100-binary", SMALL100), "cifar100"),
        (write_folders, "cifar10"),
    ],
    ids=["parquet10", "parquet100", "python10", "binary100", "png10"],
)
def test_auto_recognises_the_form_and_checks_it(tmp_path: Path, write, name: str) -> None:  # type: ignore[no-untyped-def]
    write(tmp_path)
    with pytest.raises(DataError, match=f"{name} is incomplete") as caught:
        load(path=tmp_path)
    assert "not 50,000" in str(caught.value)


def test_nothing_known(tmp_path: Path) -> None:
    refused(tmp_path, SMALL10, "no cifar10 was found in a known form", code="E205")
