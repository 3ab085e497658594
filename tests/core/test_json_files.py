"""Files of a run as typed records: what is missing is empty, what is damaged is empty and noted once."""

from dataclasses import dataclass, field

import pytest

from rescene.core.json_files import (
    LEFT_OUT,
    NULL,
    as_json,
    beside,
    json_lines,
    record_file,
    record_of,
    records_of,
    row_of,
)


@dataclass(frozen=True)
class Part:
    name: str
    size: int | None = None


@dataclass(frozen=True)
class Whole:
    accuracy: float | None = None
    kind: str = field(default="?", metadata={"key": "class"})
    parts: tuple[Part, ...] = ()
    matrix: tuple[tuple[float | None, ...], ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)


def test_values_are_converted_by_their_type():
    row = {
        "accuracy": 3,
        "class": "a",
        "parts": [{"name": "x", "size": 2.0}],
        "matrix": [[1, None]],
        "seconds": {"a": 1},
    }
    damaged = []
    found = record_of(Whole, row | {"unknown": 1}, damaged)
    assert found == Whole(3.0, "a", (Part("x", 2),), ((1.0, None),), {"a": 1.0}) and damaged == []
    assert isinstance(found.accuracy, float) and row_of(found)["class"] == "a"


@dataclass(frozen=True)
class Written:
    name: str = ""
    parts: tuple[Part, ...] = field(default=(), metadata=LEFT_OUT)
    best: Part | None = field(default=None, metadata=beside("parts"))
    seconds: dict[str, float] = field(default_factory=dict, metadata=NULL)


def test_a_record_is_written_as_its_fields_say():
    assert as_json(Written()) == {"name": "", "seconds": None}
    part = {"name": "x", "size": 2}
    row = {"name": "", "parts": [part], "best": None, "seconds": {"a": 1.0}}
    assert as_json(Written(parts=(Part("x", 2),), seconds={"a": 1.0})) == row
    assert record_of(Written, as_json(Written(best=Part("x", 2))), []) == Written(), (
        "without parts nobody writes the best"
    )


@pytest.mark.parametrize(
    ("row", "places"),
    [
        ({"accuracy": None, "parts": None}, []),  # null says: not measured
        ({"accuracy": float("nan")}, ["accuracy"]),
        ({"accuracy": True}, ["accuracy"]),
        ({"accuracy": "3"}, ["accuracy"]),
        ({"class": 7}, ["class"]),
        ({"parts": {"name": "x"}}, ["parts"]),
        ({"parts": [{"name": "x", "size": 1.5}]}, ["parts[0].size"]),
        ({"parts": [{"size": 1}, 3, {"name": "y"}]}, ["parts[0].name", "parts[1]"]),
        ({"matrix": [[1, "x"], 2]}, ["matrix[0][1]", "matrix[1]"]),
        ({"seconds": {"a": "x"}}, ["seconds.a"]),
    ],
)
def test_damaged_values_take_their_default_and_their_place_is_told(row, places):
    damaged = []
    record_of(Whole, row, damaged)
    assert damaged == places


def test_rows_without_what_they_need_are_left_out_and_the_file_is_noted_once():
    problems = []
    rows = [{"name": "a"}, {"size": 1}, {"name": 2}, {"name": "b", "size": "x"}, {}]
    assert records_of(Part, rows, "rows.jsonl", problems) == [Part("a"), Part("b")]
    assert problems == ["rows.jsonl: row 2.name, row 3.name, row 4.size and 1 more places could not be read"]
    with pytest.raises(ValueError, match="name is missing"):
        record_of(Part, {}, [])


def test_files_may_be_missing_or_damaged(tmp_path):
    problems = []
    assert record_file(Whole, tmp_path / "none.json", problems) == Whole() and problems == []
    (tmp_path / "bad.json").write_text("[1]")
    assert record_file(Whole, tmp_path / "bad.json", problems) == Whole()
    assert problems == ["bad.json could not be read (it is empty or not a JSON object)"]
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"a"')
    assert json_lines(tmp_path / "rows.jsonl", []) == [{"a": 1}]
