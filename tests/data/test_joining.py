"""Data sets that came one after the other as one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from picture_files import write_classes

from rescene.core.errors import ConfigError, DataError
from rescene.data import load, plan_tasks
from rescene.data.derived_sets import joined, narrowed


def test_earlier_classes_keep_their_numbers_and_the_normalisation(tmp_path: Path) -> None:
    write_classes(tmp_path / "april", {"bee": 5, "dog": 5})
    write_classes(tmp_path / "may", {"ant": 5}, start=50)
    first, later = load(path=tmp_path / "april"), load(path=tmp_path / "may")
    both = joined(first, later, "may")
    assert both.classes == ("bee", "dog", "ant") and both.transform == first.transform
    assert both.train.labels.tolist() == [*first.train.labels.tolist(), *[2] * len(later.train)]
    assert torch.equal(both.test.pixels, torch.cat([first.test.pixels, later.test.pixels]))
    earlier, _ = plan_tasks(both, plan=[["bee", "dog"]])
    assert earlier.fingerprint() == first.fingerprint()


def test_a_domain_and_a_site_that_come_later(tmp_path: Path) -> None:
    for kind, names in (("domains", ("day", "night")), ("sites", ("north", "south"))):
        for i, (month, name) in enumerate(zip(("april", "may"), names, strict=True)):
            classes = {"ant": 5, "bee": 5} if kind == "domains" or not i else {"cat": 5}
            write_classes(tmp_path / kind / month / name, classes, start=50 * i)
        first, later = (load(path=tmp_path / kind / month, layout=kind) for month in ("april", "may"))
        both = joined(first, later, "may")
        assert getattr(both, kind) == names and getattr(both.train, kind).unique().tolist() == [0, 1]
        if kind == "domains":
            assert narrowed(both, ["day"]).fingerprint() == first.fingerprint()
            _, tasks = plan_tasks(both, scenario="domain", plan=[["night"], ["day"]])
            assert [(task.index, task.domain) for task in tasks] == [(0, 1), (1, 0)]
            with pytest.raises(ConfigError) as caught:
                plan_tasks(both, scenario="domain", plan=[["night", "day"]])
            assert caught.value.code == "E207"


def test_what_cannot_be_joined(tmp_path: Path) -> None:
    write_classes(tmp_path / "april", {"ant": 5, "bee": 5})
    write_classes(tmp_path / "may", {"bee": 5, "cat": 5}, start=50)
    write_classes(tmp_path / "june" / "north", {"dog": 5}, start=90)
    first, later = load(path=tmp_path / "april"), load(path=tmp_path / "may")
    for other, code in ((later, "E250"), (load(path=tmp_path / "june", layout="sites"), "E251")):
        with pytest.raises(DataError) as caught:
            joined(first, other, "new")
        assert caught.value.code == code and caught.value.fix
