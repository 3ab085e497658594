"""Data that somebody else packed: it takes no more memory than it may, runs nothing, and leads nowhere unseen."""

from __future__ import annotations

import io
import os
import re
import shutil
import struct
import subprocess
import sys
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from picture_files import picture, write_classes, write_picture
from PIL import Image

from rescene.core.errors import DataError, ResceneWarning
from rescene.data import load
from rescene.data.sources import cifar
from rescene.data.sources.cifar import CIFAR10, _parse_pickle
from rescene.data.sources.decode import decode, fit_pixels
from rescene.data.sources.listing import Options
from rescene.use import predict
from rescene.use.model import Model

LOAD = """
import pathlib, resource, sys
resource.setrlimit(resource.RLIMIT_AS, (8 * 2**30, 8 * 2**30))  # what goes wrong here shall not take the machine along
from rescene.data import load
from rescene.core.errors import DataError
for path in sys.argv[1:]:
    try:
        print("fine", len(load(path=path).train))
    except DataError as error:
        print(error)
if sys.platform == "linux":  # getrusage would also count what the parent held when it made this process
    status = pathlib.Path("/proc/self/status").read_text()
    print("peak", 1024 * int(status.partition("VmHWM:")[2].split()[0]))
else:
    print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024))
"""


def loaded_elsewhere(*paths: Path) -> tuple[str, float]:
    """What a process of its own says when it loads these, and the most gigabytes it held. A crash is a failure."""
    done = subprocess.run([sys.executable, "-c", LOAD, *map(str, paths)], capture_output=True, text=True)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"
    words, _, peak = done.stdout.rpartition("peak ")
    return words, int(peak) / 2**30


def png_header(width: int, height: int, bits: int = 8) -> bytes:
    """A PNG that is nothing but what it claims to be."""
    header = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )


# memory


def test_small_files_do_not_take_gigabytes(tmp_path: Path) -> None:
    """A long thin picture, large ones with 16 bits, an archive of nothing, and thin pictures in one: each took 3 GB or more."""
    thin, deep = tmp_path / "thin", tmp_path / "deep"
    for folder in (thin, deep):
        write_classes(folder, {"a": 3, "b": 3})
    Image.new("L", (1, 2_000_000)).save(thin / "a" / "thin.png")
    assert (thin / "a" / "thin.png").stat().st_size < 5000
    Image.new("I;16", (8000, 8000)).save(deep / "a" / "x.png", compress_level=1)
    shutil.copy(deep / "a" / "x.png", deep / "b" / "x.png")
    write_zeros(tmp_path / "x.npz", 600)
    square, line, labels = np.zeros((4, 64, 64), np.uint8), np.zeros((4, 1, 4_000_000), np.uint8), [0, 1, 0, 1]
    np.savez_compressed(tmp_path / "thin.npz", x_train=square, y_train=labels, x_test=line, y_test=labels)
    words, peak = loaded_elsewhere(thin, deep, tmp_path / "x.npz", tmp_path / "thin.npz")
    first, second, third, fourth = re.split(r"^(?=error|fine)", words, flags=re.MULTILINE)[1:]
    assert "error[E219]" in first and "too long and thin" in first and "thin.png" in first
    assert second == "fine 6\n"
    assert "error[E220]" in third and "0.6 GB" in third
    assert "error[E219]" in fourth and "too long and thin" in fourth
    assert peak < 1.5, peak


def write_zeros(path: Path, megabytes: int) -> None:
    """An archive with x and y in which x is so much of nothing."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open("x.npy", "w", force_zip64=True) as stream:
            header = {"descr": "|u1", "fortran_order": False, "shape": (megabytes, 1024, 1024)}
            np.lib.format.write_array_header_1_0(stream, header)
            for _ in range(megabytes):
                stream.write(bytes(2**20))
        with archive.open("y.npy", "w") as stream:
            np.lib.format.write_array(stream, np.arange(megabytes) % 2)


@pytest.mark.parametrize(("width", "height"), [(13_000, 13_000), (60_000, 60_000)])
def test_a_huge_picture_is_refused_by_its_header(tmp_path: Path, width: int, height: int) -> None:
    (tmp_path / "x.png").write_bytes(png_header(width, height, bits=16))
    with pytest.raises(DataError, match="too large") as caught:
        decode([tmp_path / "x.png"], ["x.png"], 32)
    assert caught.value.code == "E219" and "shrink" in str(caught.value.fix)


def test_lists_tables_and_predictions_go_through_the_same_decoder(tmp_path: Path) -> None:
    thin = png_header(1, 2_000_000)
    write_picture(tmp_path / "0.png", 0)
    (tmp_path / "thin.png").write_bytes(thin)
    (tmp_path / "list.csv").write_text("path,label,split\n0.png,a,train\nthin.png,a,test\n")
    with pytest.raises(DataError, match="thin.png") as caught:
        load(path=tmp_path / "list.csv", image_size=128)
    assert caught.value.code == "E219"
    for split in ("train", "test"):
        table = pa.table({"img": [{"bytes": thin, "path": None}] * 2, "label": [0, 1]})
        pq.write_table(table, tmp_path / f"{split}.parquet")
    with pytest.raises(DataError, match=r"train.parquet row 0 and 1 more") as caught:
        cifar.read(tmp_path, Options(), replace(CIFAR10, num_train=2, num_test=2))
    assert caught.value.code == "E219"
    about = {"classes": ["a"], "arch": {"image_size": 128}}
    model = Model(tmp_path, about, lambda pixels: torch.zeros(len(pixels), 1))
    answers, refused = predict(model, [tmp_path / "0.png", tmp_path / "thin.png"])
    assert [answer.file.name for answer in answers] == ["0.png"]
    assert "too long and thin" in refused[tmp_path / "thin.png"]


def test_arrays_that_nobody_asked_for_stay_packed(tmp_path: Path) -> None:
    x = np.stack([picture(i) for i in range(10)])
    np.savez(tmp_path / "x.npz", x=x, y=np.arange(10) % 2, note=np.array([{}], dtype=object))
    assert len(load(path=tmp_path / "x.npz").train) == 8


def test_scaling_in_smaller_steps_gives_the_same_bits() -> None:
    pixels = torch.from_numpy(np.stack([picture(i, (700, 500)).transpose(2, 0, 1) for i in range(3)]))
    assert torch.equal(fit_pixels(pixels, 64), torch.cat([fit_pixels(one[None], 64) for one in pixels]))


# pickles


def crafted(labels: bytes) -> bytes:
    """A batch of CIFAR-10 with one picture, and with these opcodes in the place of its labels."""
    pixels = array(dtype(b"u1"), (1, 3072), bytes(3072))
    return b"\x80\x02}(" + text(b"data") + pixels + text(b"labels") + labels + b"u."


def text(value: bytes) -> bytes:
    return b"U" + bytes([len(value)]) + value


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def dtype(code: bytes, names: bytes = b"N", fields: bytes = b"N", size: int = -1, align: int = -1) -> bytes:
    """numpy.dtype(code), and then a state of our choice; its flags say that it holds no objects."""
    state = b"(K\x03" + text(b"|") + b"N" + names + fields + number(size) + number(align) + b"K\x00tb"
    return b"cnumpy\ndtype\n" + text(code) + b"K\x00K\x01\x87R" + state


def array(kind: bytes, shape: tuple[int, ...], raw: bytes) -> bytes:
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n(K\x00t" + text(b"b") + b"\x87R"
    sides = b"(" + b"".join(map(number, shape)) + b"t"
    return empty + b"(K\x01" + sides + kind + b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb"


POINTERS = struct.pack("<q", 0x4141414141414141) * 8
OBJECTS = array(dtype(b"O8"), (8,), POINTERS)
FIELD = b"}" + text(b"a") + dtype(b"O8") + b"K\x00\x86s"
HIDDEN = array(dtype(b"V8", text(b"a") + b"\x85", FIELD, 8, 1), (8,), POINTERS)


def test_pointers_of_the_makers_choice_are_never_followed(tmp_path: Path) -> None:
    for folder, labels in (("one", OBJECTS), ("two", HIDDEN)):
        (tmp_path / folder).mkdir()
        for name in (*CIFAR10.train_files, *CIFAR10.test_files):
            (tmp_path / folder / name).write_bytes(crafted(labels))
    words, _ = loaded_elsewhere(tmp_path / "one", tmp_path / "two")
    assert words.count("error[E202]") == words.count("where plain integers belong") == 2


@pytest.mark.parametrize(
    "labels",
    [
        array(dtype(b"u1"), (10**6, 10**6), b"\x00"),  # more than there is
        b"r" + struct.pack("<I", 2**31 - 1) + b"]",  # a place in the pickle's memory that takes 32 GB
        b"cnumpy.core.multiarray\nscalar\n",
    ],
    ids=["shape", "memo", "other function"],
)
def test_other_crafted_batches_are_refused(tmp_path: Path, labels: bytes) -> None:
    with pytest.raises(DataError) as caught:
        _parse_pickle(crafted(labels), CIFAR10, tmp_path / "data_batch_1")
    assert caught.value.code == "E202"


def test_labels_may_be_an_array_of_integers(tmp_path: Path) -> None:
    labels = array(dtype(b"i8"), (1,), struct.pack("<q", 7))
    assert _parse_pickle(crafted(labels), CIFAR10, tmp_path)[1].tolist() == [7]


# links and lists that lead out of the folder


def test_links_out_of_the_folder_are_told_or_refused(tmp_path: Path) -> None:
    write_classes(tmp_path / "images", {"a": 5, "b": 5})
    write_classes(tmp_path / "private", {"holiday": 5}, start=50)
    (tmp_path / "images" / "c").symlink_to(tmp_path / "private" / "holiday")
    (tmp_path / "images" / "b" / "x.png").symlink_to(tmp_path / "private" / "holiday" / "0.png")
    with pytest.warns(ResceneWarning, match="6 of 16 images lie outside") as warned:
        dataset = load(path=tmp_path / "images")
    assert [w.message.code for w in warned] == ["W215"] and dataset.classes == ("a", "b", "c")  # type: ignore[union-attr]
    with pytest.raises(DataError, match="6 of 16") as caught:
        load(path=tmp_path / "images", outside="refuse")
    assert caught.value.code == "E215" and "private" in str(caught.value.why)


def test_links_within_the_folder_and_a_linked_folder_are_fine(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    write_classes(tmp_path / "real" / "images", {"a": 5, "b": 5})
    (tmp_path / "real" / "images" / "b" / "x.png").symlink_to("../a/0.png")
    (tmp_path / "images").symlink_to(tmp_path / "real" / "images")
    assert len(load(path=tmp_path / "images", outside="refuse").train) == 9
    assert not recwarn.list


def test_links_in_circles_and_to_nowhere_are_told(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a": 5, "b": 5})
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    (tmp_path / "a" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    with pytest.warns(ResceneWarning, match=r"circle: 1 \(a/again\).*nowhere: 1 \(a/gone.png\)"):
        dataset = load(path=tmp_path)
    assert len(dataset.train) + len(dataset.test) == 10


@pytest.mark.parametrize("row", ["{outside}/0.png", "../outside/0.png"])
def test_a_list_that_names_files_elsewhere_is_told_or_refused(tmp_path: Path, row: str) -> None:
    write_picture(tmp_path / "here" / "0.png", 0)
    write_picture(tmp_path / "outside" / "0.png", 1)
    row = row.format(outside=tmp_path / "outside")
    (tmp_path / "here" / "list.csv").write_text(f"path,label,split\n0.png,a,train\n{row},a,test\n")
    with pytest.warns(ResceneWarning, match="1 of 2 images lie outside"):
        load(path=tmp_path / "here")
    with pytest.raises(DataError) as caught:
        load(path=tmp_path / "here", outside="refuse")
    assert caught.value.code == "E215"


# names


def write_named(folder: Path, *names: str | bytes) -> Path:
    """Class folders with these names."""
    for i, name in enumerate(names):
        write_classes(folder, {f"class{i}": 5}, start=10 * i)
        os.rename(os.fsencode(folder / f"class{i}"), os.path.join(os.fsencode(folder), os.fsencode(name)))
    return folder


@pytest.mark.parametrize(
    ("names", "code"),
    [
        (("dog", "dog "), "E216"),
        (("caf\u00e9", "cafe\u0301"), "E216"),
        (("dog", "dog\u200b"), "E216"),
        (("0", "0.0"), "E216"),
        (("nan", "dog"), "E217"),
        (("dog", "cat\x1b[2J"), "E217"),
        (("dog", b"\xe9t\xe9"), "E217"),
    ],
)
def test_class_names_that_mislead_are_refused(tmp_path: Path, names: tuple[str | bytes, ...], code: str) -> None:
    with pytest.raises(DataError) as caught:
        load(path=write_named(tmp_path, *names))
    assert caught.value.code == code
    str(caught.value).encode()  # it can be printed


def test_names_in_lists_and_arrays_are_looked_at_too(tmp_path: Path) -> None:
    x = np.stack([picture(i) for i in range(10)])
    np.savez(tmp_path / "nan.npz", x=x, y=np.array(["nan", "dog"] * 5))
    np.savez(tmp_path / "twice.npz", x=x, y=np.arange(10) % 2, classes=np.array(["dog", "dog"]))
    for i in range(10):
        write_picture(tmp_path / f"{i}.png", i)
    rows = "".join(f"{i}.png,{'0' if i % 2 else '0.0'}\n" for i in range(10))
    (tmp_path / "list.csv").write_text("path,label\n" + rows)
    for name, code in (("nan.npz", "E217"), ("twice.npz", "E216"), ("list.csv", "E216")):
        with pytest.raises(DataError) as caught:
            load(path=tmp_path / name)
        assert caught.value.code == code


def test_capitals_may_be_meant(tmp_path: Path) -> None:
    with pytest.warns(ResceneWarning, match="A, a differ only in capitals") as warned:
        dataset = load(path=write_named(tmp_path, "A", "a"))
    assert dataset.classes == ("A", "a") and [w.message.code for w in warned] == ["W216"]  # type: ignore[union-attr]


def test_a_damaged_file_with_a_name_that_is_not_utf8_can_be_told(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a": 5, "b": 5})
    Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), b"a/\xe9.png"))).write_bytes(b"x")
    with pytest.raises(DataError, match=r"a/\\udce9.png") as caught:
        load(path=tmp_path)
    assert str(caught.value).encode() and caught.value.why == "not a picture"


def test_a_path_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = os.fsdecode(os.path.join(os.fsencode(tmp_path), b"im\xe9ges"))
    write_classes(Path(path), {"a": 5, "b": 5})
    with pytest.raises(DataError) as caught:
        load(path=path)
    assert caught.value.code == "E217" and str(caught.value).encode()


def test_a_label_of_thousands_of_digits_is_a_name(tmp_path: Path) -> None:
    for i in range(10):
        write_picture(tmp_path / f"{i}.png", i)
    long = "7" * 5000
    (tmp_path / "list.csv").write_text("path,label\n" + "".join(f"{i}.png,{long if i % 2 else 8}\n" for i in range(10)))
    assert load(path=tmp_path).classes == (long, "8")


def test_frames_behind_the_first_are_told(tmp_path: Path) -> None:
    write_classes(tmp_path, {"a": 5, "b": 5})
    frames = [Image.fromarray(picture(i)).quantize(16) for i in (90, 91, 92)]
    frames[0].save(tmp_path / "a" / "x.gif", save_all=True, append_images=frames[1:])
    stream = io.BytesIO()
    frames[0].save(stream, "GIF")
    dataset = load(path=tmp_path)
    assert len(dataset.train) + len(dataset.test) == 11 and "only the first picture was read" in dataset.notes[-1]
    decoded = decode([tmp_path / "a" / "x.gif", stream.getvalue()], ["x", "y"], 32).pixels
    assert torch.equal(decoded[0], decoded[1])
