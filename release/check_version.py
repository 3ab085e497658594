"""Is everything ready for a release of this version?

    python release/check_version.py v0.2.0      the tag, or the version without "v"; without a word only whether all files agree

The version has one place, src/rescene/__init__.py. It is not made from tags: server and sites refuse each other when versions
differ, containers install `rescene==VERSION`, and runs record it, so a number that changes with every commit would do harm.
A release is the tag that equals it, and this check runs before anything is built.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = {  # each has the version once
    "CITATION.cff": r"^version: (\S+)$",
    "release/conda/recipe.yaml": r"^  version: \"(\S+)\"$",
    "examples/flower-app/pyproject.toml": r'^version = "(\S+)"$',
    "examples/flower-baseline/pyproject.toml": r'^version = "(\S+)"$',
}


def problems(tag: str | None = None, root: Path = ROOT) -> list[str]:
    """What does not agree with the version of the source, and what a release of ``tag`` lacks."""
    tomllib.loads((root / "pyproject.toml").read_text())  # that it can be read at all
    version = _only(r'^__version__ = "(\S+)"$', root / "src/rescene/__init__.py")
    stated = {place: _only(pattern, root / place) for place, pattern in PLACES.items()}
    stated[".zenodo.json"] = json.loads((root / ".zenodo.json").read_text()).get("version", "none")
    found = [f"{place} says {other}, the source {version}" for place, other in stated.items() if other != version]
    if tag is None:
        return found
    if tag.removeprefix("v") != version:
        found.append(f"the tag {tag} is not the version {version}")
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", (root / "CHANGELOG.md").read_text(), re.M):
        found.append(f"CHANGELOG.md has no line `## [{version}] - YEAR-MONTH-DAY`")
    return found


def _only(pattern: str, path: Path) -> str:
    found = re.findall(pattern, path.read_text(), re.M)
    return str(found[0]) if len(found) == 1 else f"{len(found)} versions"


def main() -> int:
    found = problems(sys.argv[1] if len(sys.argv) > 1 else None)
    print("\n".join(found) or "all versions agree")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
