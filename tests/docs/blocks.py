"""Command blocks in Markdown. ``not_run.yaml`` says which commands the tests do not run, or only `make check`, and why."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "results/README.md")),
    *sorted(path for folder in ("docs", "docs/methods") for path in (ROOT / folder).glob("*.md")),
    *sorted(ROOT.glob("results/*/README.md")),
]
COMMANDS = ("", "bash", "sh", "console")
FENCE = re.compile(r"\s*```([\w{}-]*)\s*$")


@dataclass(frozen=True)
class Mark:
    """Commands that begin with a text in ``starts`` are not run ("not run"), or only by `make check` ("slow")."""

    mark: str
    why: str
    starts: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.mark not in ("not run", "slow") or not self.why or not self.starts:
            raise ValueError(f"a mark needs `not run` or `slow`, a reason and the commands it is for: {self}")


@dataclass(frozen=True)
class Command:
    """One command, or one block of Python. ``mark``: "" (run), "slow" or "not run"."""

    page: str
    line: int
    language: str
    text: str
    mark: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {self.text.splitlines()[0][:60]}"


def _read_marks(path: Path) -> dict[str, list[Mark]]:
    pages = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {page: [Mark(row["mark"], row["why"], tuple(row["starts"])) for row in rows] for page, rows in pages.items()}


MARKS = _read_marks(Path(__file__).with_name("not_run.yaml"))


def commands(path: Path, text: str | None = None, marks: Sequence[Mark] | None = None) -> list[Command]:
    """Every command of a page, in order. ``text`` and ``marks`` stand in for what is on disk."""
    page = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    marks = MARKS.get(page, ()) if marks is None else marks
    found: list[Command] = []
    language: str | None = None
    block: list[tuple[int, str]] = []
    for number, line in enumerate((text or path.read_text(encoding="utf-8")).splitlines(), 1):
        fence = FENCE.match(line)
        if fence and language is None:
            language, block = fence[1], []
        elif fence:
            found += [
                Command(page, n, language or "", part, _mark(part, marks)) for n, part in _parts(language or "", block)
            ]
            language = None
        elif language is not None:
            block.append((number, line.strip() if language in COMMANDS else line))
    return found


def unused_starts(path: Path, text: str | None = None, marks: Sequence[Mark] | None = None) -> list[str]:
    """Texts of a page's marks that no command of the page begins with."""
    found = [command.text for command in commands(path, text, ())]
    marks = MARKS.get(path.relative_to(ROOT).as_posix(), ()) if marks is None else marks
    return [s for mark in marks for s in mark.starts if not any(command.startswith(s) for command in found)]


def _parts(language: str, block: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """The commands of one block, with their line numbers. A block of Python is one command."""
    if language == "python":
        return [(block[0][0], "\n".join(line for _, line in block))]
    if language not in COMMANDS:
        return []
    if any(line.startswith("$ ") for _, line in block):  # a transcript: the rest is what was printed
        block = [(number, line[2:]) for number, line in block if line.startswith("$ ")]
    parts = [(n, part.strip()) for n, line in block for part in line.split("  #")[0].split(";")]
    return [(n, part) for n, part in parts if part and not part.startswith("#")]


def _mark(text: str, marks: Sequence[Mark]) -> str:
    return next((mark.mark for mark in marks if any(text.startswith(s) for s in mark.starts)), "")
