"""All generated pages, written where Sphinx finds them."""

from __future__ import annotations

from pathlib import Path

from generate import commands, errors, keys, methods, status


def write(folder: Path) -> None:
    texts = {"errors": errors.page(), "commands": commands.page(), "keys": keys.page(), "status": status.page()}
    texts |= {f"methods/{name}": text for name, text in methods.pages().items()}
    for old in folder.rglob("*.md"):
        if old.relative_to(folder).with_suffix("").as_posix() not in texts:
            old.unlink()
    for name, text in texts.items():
        path = folder / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:  # an unchanged page is not built again
            path.write_text(text, encoding="utf-8")
