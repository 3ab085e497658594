"""The file map of CONTRIBUTING.md is true: what it names exists, and what exists is named."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "rescene"
NOT_MAPPED = {"__init__.py", "__main__.py", "__pycache__", "py.typed"}


SECTION = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## File map")[1].split("\n## ")[0]
ROWS = [line.strip("| ").split(" | ", 1) for line in SECTION.splitlines() if line.startswith("| `")]


def places(cell):
    """The paths in a first column; a second name may stand beside the first: `src/rescene/nets/`, `data/`."""
    first, *others = re.findall(r"`([^`]+)`", cell)
    beside = [(ROOT / first).parent / name for name in others]
    return [ROOT / first, *(path if path.exists() else ROOT / path.name for path in beside)]


def test_what_the_map_names_exists():
    paths = [path for cell, _ in ROWS for path in places(cell)]
    assert len(paths) > 20 and [str(path) for path in paths if not path.exists()] == []


def test_every_part_of_the_package_is_on_the_map():
    there = {path for path in PACKAGE.iterdir() if path.name not in NOT_MAPPED}
    assert sorted(path.name for path in there - {path for cell, _ in ROWS for path in places(cell)}) == []


def test_files_in_the_second_column_exist():
    """`base.py` in the row of `methods/` is a file of that folder."""
    missing = []
    for cell, words in ROWS:
        folders = [ROOT, *(path if path.is_dir() else path.parent for path in places(cell))]
        names = re.findall(r"`([\w./-]+(?:\.py|/))`", words)
        missing += [name for name in names if not any((folder / name).exists() for folder in folders)]
    assert missing == []
