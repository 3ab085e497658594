"""Command blocks in Markdown, and the marks before them that say what is not run, or only by `make check`, and why.

<!-- not run: why -->                        the whole block
<!-- not run: why | rescene a | rescene b -->  its lines that begin so
<!-- slow: why | rescene c -->               run by `make check` only
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "results/README.md")),
    *sorted(path for folder in ("docs", "docs/methods") for path in (ROOT / folder).glob("*.md")),
]
COMMANDS = ("", "bash", "sh", "console")
MARK = re.compile(r"<!-- (not run|slow): (.+?) -->")
FENCE = re.compile(r"\s*```([\w{}-]*)\s*$")


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


def commands(path: Path, text: str | None = None) -> list[Command]:
    """Every command of a page, in order."""
    page = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
    found: list[Command] = []
    marks: list[tuple[str, list[str]]] = []
    language: str | None = None
    block: list[tuple[int, str]] = []
    for number, line in enumerate((text or path.read_text(encoding="utf-8")).splitlines(), 1):
        fence, mark = FENCE.match(line), MARK.search(line)
        if fence and language is None:
            language, block = fence[1], []
        elif fence:
            found += _of_block(page, language or "", block, marks)
            language, marks = None, []
        elif language is not None:
            block.append((number, line.strip() if language in COMMANDS else line))
        elif mark:
            marks.append((mark[1], [part.strip() for part in mark[2].split(" | ")[1:]]))
        elif line.strip():
            marks = []
    return found


def _of_block(page, language, block, marks):
    if language == "python":
        text = "\n".join(line for _, line in block)
        return [Command(page, block[0][0], language, text, _mark(text, marks))]
    if language not in COMMANDS:
        return []
    if any(line.startswith("$ ") for _, line in block):  # a transcript: the rest is what was printed
        block = [(number, line[2:]) for number, line in block if line.startswith("$ ")]
    parts = [(n, part.strip()) for n, line in block for part in line.split("  #")[0].split(";") if part.strip()]
    return [Command(page, n, language, part, _mark(part, marks)) for n, part in parts if not part.startswith("#")]


def _mark(text, marks):
    return next((kind for kind, starts in marks if not starts or any(text.startswith(s) for s in starts)), "")
