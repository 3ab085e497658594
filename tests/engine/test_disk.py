"""A failing disk; the short form of benchmarks/trust_disk.py, which lets every kind of call fail."""

import errno
import json
import random

import pytest
import smallworld as world
import trust_disk

import rescene
from rescene.core.errors import RunError
from rescene.engine import checkpoint

KINDS = ["open config.yaml", "mkdir checkpoints", "write chunk", "fsync chunk", "replace step", "unlink chunk",
         "write metrics.jsonl", "fsync metrics.jsonl", "mkdir csv", "write rounds.csv", "replace results.json",
         "write status.json"]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    root = tmp_path_factory.mktemp("disk")
    data, disk = world.images(root / "images.npz"), trust_disk.Disk(root / "whole")
    with disk.watched():
        world.run(data, "rescene", root / "whole")
    return root, data, world.fingerprint(root / "whole"), disk.calls


@pytest.mark.parametrize(("number", "kind"), list(enumerate(KINDS)), ids=KINDS)
def test_a_failing_call_is_told_and_the_resumed_run_ends_the_same(whole, number, kind):
    root, data, bits, calls = whole
    places = [at for at, call in enumerate(calls) if call == kind]
    error = trust_disk.ERRORS[number % 3]
    assert trust_disk.fail(root, data, bits, places[len(places) // 2], error) is None


def test_damage_in_forty_places_is_never_loaded(whole):
    hit, noticed, missed = trust_disk.damage(whole[0] / "whole" / "checkpoints", random.Random(3), 40)
    assert hit and noticed >= hit and not missed


def test_checkpoints_that_are_all_damaged_are_begun_again(whole):
    root, data, bits, _ = whole
    assert trust_disk.healed(root, data, bits, random.Random(0), 1) == []


def test_a_full_disk_says_what_to_do(whole, tmp_path):
    calls = whole[3]
    disk = trust_disk.Disk(tmp_path / "r", calls.index("write step"), errno.ENOSPC)
    with pytest.raises(RunError, match="E410") as caught, disk.watched():
        world.run(whole[1], "rescene", tmp_path / "r")
    assert "No space left" in caught.value.what and "resume" in caught.value.fix


@pytest.mark.slow
def test_a_log_that_lost_its_end_or_a_line_does_not_stand_in_the_way(tmp_path, monkeypatch):
    """The lines are gone, which is told; the results are not."""
    narrow = {"model.width": 8}
    whole = rescene.run("smoke", out=tmp_path / "whole", **narrow)

    def stop(place):
        if place == "model.json opening":
            raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "watcher", stop)
    with pytest.raises(KeyboardInterrupt):
        rescene.run("smoke", out=tmp_path / "r", **narrow)
    monkeypatch.setattr(checkpoint, "watcher", None)
    metrics = tmp_path / "r/metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"#" + b"".join(lines[:2]))
    resumed = rescene.run("smoke", out=tmp_path / "r", **narrow)
    codes = [json.loads(line)["code"] for line in (tmp_path / "r/events.jsonl").read_text().splitlines()]
    assert codes.count("W402") == 2 and resumed.values == whole.values
