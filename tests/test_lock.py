"""requirements.lock names every dependency, in a version the package allows, with the hash of its file."""

import re
import tomllib
from pathlib import Path

import pytest

Requirement = pytest.importorskip("packaging.requirements").Requirement
ROOT = Path(__file__).parents[1]
LOCKED = dict(
    re.findall(
        r"^([a-z0-9-]+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}$", (ROOT / "requirements.lock").read_text(), re.M
    )
)


def test_every_dependency_is_locked_in_an_allowed_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *extras["privacy"], *extras["deploy"]]:
        wanted = Requirement(text)
        if wanted.name != "torch":  # comes from where the user takes it
            assert LOCKED[wanted.name.lower()] in wanted.specifier, text


def test_nothing_is_locked_without_a_hash_and_torch_is_left_to_the_user():
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == 2 * len(LOCKED) and "torch" not in LOCKED
