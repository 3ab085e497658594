"""A file is written whole or not at all, whoever fails on the way; other processes and other users do not come in between."""

import os
import stat

import pytest

from rescene.core.files import US_ALONE, replacing, sync_folder, unique_draft, write_atomically


def watched(monkeypatch, *names):
    """What the module os is asked to do, in order, by name."""
    calls = []

    def watch(name, real):
        def call(*args):
            calls.append(name)
            return real(*args)

        return call

    for name in names:
        monkeypatch.setattr(os, name, watch(name, getattr(os, name)))
    return calls


@pytest.mark.parametrize(
    ("sync", "expected"),
    [("folder", ["fsync", "replace", "fsync"]), ("file", ["fsync", "replace"]), ("none", ["replace"])],
)
def test_what_is_synced_before_and_after_the_new_name(tmp_path, monkeypatch, sync, expected):
    calls = watched(monkeypatch, "fsync", "replace")
    write_atomically(tmp_path / "a", b"one ", b"two", sync=sync)
    assert calls == expected
    assert (tmp_path / "a").read_bytes() == b"one two" and [p.name for p in tmp_path.iterdir()] == ["a"]


def test_the_steps_are_told_in_order(tmp_path):
    steps = []
    write_atomically(tmp_path / "a", b"1", b"2", reach=steps.append)
    assert steps == ["opening", "writing", "writing", "written", "synced", "renamed"]


def test_a_secret_is_for_this_user_alone_from_its_first_byte(tmp_path):
    def look(place):
        if place == "written":
            modes.append(stat.S_IMODE((tmp_path / ".a.tmp").stat().st_mode))

    modes, before = [], os.umask(0o022)
    try:
        write_atomically(tmp_path / "a", b"secret", mode=US_ALONE, reach=look)
        write_atomically(tmp_path / "b", b"for all")
    finally:
        os.umask(before)
    assert modes == [0o600] and stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "b").stat().st_mode) == 0o644


@pytest.mark.parametrize("error", [OSError, ValueError, KeyboardInterrupt])
def test_a_block_that_fails_leaves_the_old_content_and_no_draft(tmp_path, error):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with pytest.raises(error), replacing(path) as draft:
        draft.write_bytes(b"half")
        raise error
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_a_draft_that_a_killed_process_left_is_written_over(tmp_path):
    (tmp_path / ".a.tmp").write_bytes(b"a long half of something")
    write_atomically(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new" and len(list(tmp_path.iterdir())) == 1


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    path = tmp_path / "a"
    with replacing(path, unique_draft(path)) as first, replacing(path, unique_draft(path)) as second:
        first.write_bytes(b"first")
        second.write_bytes(b"second")
    assert path.read_bytes() == b"first"  # the outer block ends last
    assert list(tmp_path.iterdir()) == [path] and not list(tmp_path.glob(".*.tmp"))


def test_a_folder_too_appears_whole_or_not_at_all(tmp_path):
    target = tmp_path / "run"
    with pytest.raises(OSError), replacing(target) as draft:
        (draft / "inner").mkdir(parents=True)
        raise OSError
    assert list(tmp_path.iterdir()) == []
    with replacing(target) as draft:
        (draft / "inner").mkdir(parents=True)
    assert (target / "inner").is_dir()


def test_a_missing_folder_is_an_oserror(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "none" / "a", b"")
    with pytest.raises(FileNotFoundError):
        sync_folder(tmp_path / "none")
