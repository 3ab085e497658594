"""``rescene.load`` of what is no finished run says what is there instead."""

import pytest

import rescene
from rescene.core.errors import RunError


def error_of(folder):
    with pytest.raises(RunError, match="E408.*no finished run here") as caught:
        rescene.load(folder)
    return caught.value


def test_a_folder_that_is_not_there_cannot_be_resumed(tmp_path):
    error = error_of(tmp_path / "nothing")
    assert error.why == "there is no such folder" and "resume" not in error.fix and "rescene runs" in error.fix


def test_a_folder_without_results_may_be_resumed(tmp_path):
    error = error_of(tmp_path)
    assert error.why is None and f"rescene resume {tmp_path}" in error.fix


def test_only_the_damaged_file_is_to_be_removed(tmp_path):
    """The table of a sweep shows the fix without the lines above it, so the fix names the file."""
    damaged = tmp_path / "results.json"
    damaged.write_text("{")
    error = error_of(tmp_path)
    assert "results.json is damaged" in error.why
    assert error.fix == f"remove the damaged {damaged}, then rescene resume {tmp_path}"
