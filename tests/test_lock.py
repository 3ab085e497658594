"""The lock names everything that base and extras declare, in versions they allow and with hashes, in parts that build on each other."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PARTS = ["base", "deploy", "dev", "check", "all"]
LINES = {part: (ROOT / "locks" / f"{part}.txt").read_text().splitlines() for part in PARTS}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]


def locked(*parts):
    """The versions of each package; a package may have one for each Python."""
    found = {}
    for name, version in re.findall(r"^([a-z0-9-]+)==(\S+)", "\n".join(sum(map(LINES.get, parts), [])), re.M):
        found.setdefault(name, []).append(version)
    return found


@pytest.mark.parametrize(
    ("parts", "declared"),
    [
        (PARTS[:1], [*PROJECT["project"]["dependencies"], *PROJECT["build-system"]["requires"]]),
        (PARTS[:2], EXTRAS["deploy"]),
        (PARTS[:3], [text for extra in ("privacy", "docs", "notebooks", "dev") for text in EXTRAS[extra]]),
        (PARTS[:4], EXTRAS["check"]),
        (PARTS, [text for extra in EXTRAS.values() for text in extra]),
    ],
    ids=PARTS,
)
def test_what_is_declared_is_locked_in_allowed_versions(parts, declared):
    found = locked(*parts)
    for wanted in map(Requirement, declared):
        if wanted.name not in ("torch", "rescene"):  # torch comes from where the user takes it
            versions = found[canonicalize_name(wanted.name)]
            assert all(version in wanted.specifier for version in versions), f"{wanted}: make lock"


def test_every_file_has_hashes_and_no_part_repeats_another():
    for before, part in zip([None, *PARTS], PARTS, strict=False):
        text = "\n".join(line for line in LINES[part] if not line.startswith("#"))
        start = f"-r {before}.txt\n" if before else ""
        entry = r"[a-z0-9-]+==[^\s;]+(?: ; [^\\\n]+)? \\(?:\n    --hash=sha256:[0-9a-f]{64}(?: \\)?)+\n?"
        assert re.fullmatch(rf"{re.escape(start)}(?:{entry})+", text), part  # and no address of an index
    counts = [name for part in PARTS for name in locked(part)]
    assert len(counts) == len(set(counts)) and "torch" not in counts


def test_the_lock_and_the_container_name_the_tested_torch():
    from rescene.deploy.federation_folder import CONTAINERFILE

    pin = re.search(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.M)[0]
    assert f'"{pin}"' in CONTAINERFILE and all(f"pip install {pin} " in "\n".join(LINES[part]) for part in PARTS)
