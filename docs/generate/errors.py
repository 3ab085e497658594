"""The index of error codes, read from the source: code, class, message, fix and the file that raises it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from generate.markdown import safe

SOURCE = Path(__file__).parents[2] / "src" / "rescene"
CODE = re.compile(r"[EW]\d{3}")
CLASSES = {name: name for name in ("ConfigError", "DataError", "RunError", "ResceneWarning", "Declined")}
CLASSES["MethodCannot"] = "ConfigError"  # which it extends
GROUPS = {
    "E1": ("Recipe, command line and settings", "exit status 2"),
    "E2": ("Images", "exit status 3"),
    "E3": ("A run that cannot go on", "exit status 4"),
    "E4": ("Run folders, checkpoints and the sites' ledgers", "exit status 4"),
    "E5": ("Command line and settings, second part", "exit status 2"),
    "W": ("Warnings", "the run goes on; they are kept in its events"),
}


@dataclass(frozen=True)
class Use:
    """One place where a code is given to a person. ``kind`` is the class raised, or "event" for a note in a run's events."""

    code: str
    kind: str
    message: str
    fix: str
    file: str
    line: int

    @property
    def layer(self) -> str:
        return self.file.split("/")[0].removesuffix(".py")


def uses(root: Path = SOURCE) -> list[Use]:
    """Every use in the source, by code."""
    found = (use for path in root.rglob("*.py") for use in _in_file(path, path.relative_to(root).as_posix()))
    return sorted(found, key=lambda use: (use.code[0], use.code, use.file, use.line))


def mentioned(root: Path = SOURCE) -> set[str]:
    """Every code that stands in the source as a string of its own, used or only compared with."""
    return {found[0] for path in root.rglob("*.py") for node in _nodes(path) if (found := _code(node))}


def page() -> str:
    """The index as Markdown, one anchor per code."""
    lines = [
        "# Error codes",
        "",
        "Every message says what, where, why and how to fix it, and begins with its code: `error[E102] unknown key …`. "
        "`--debug` adds the traceback. A word in ⟨brackets⟩ is filled in by the program.",
    ]
    everything = uses()
    for prefix, (title, status) in GROUPS.items():
        lines += ["", f"## {title}", "", f"Codes {prefix}xx; {status}.", ""]
        for code in dict.fromkeys(use.code for use in everything if use.code.startswith(prefix)):
            lines += [f"({code.lower()})=", f"### {code}", ""]
            seen = {}
            for use in (use for use in everything if use.code == code):
                seen.setdefault((use.message, use.fix), use)
            for use in seen.values():
                fix = f" Fix: {safe(use.fix)}." if use.fix else ""
                lines.append(f"- {safe(use.message)}.{fix} ({use.kind}, `{use.file}`)")
            lines.append("")
    return "\n".join(lines) + "\n"


def _nodes(path: Path) -> Iterator[ast.AST]:
    yield from ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def _code(node: ast.AST) -> tuple[str] | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.fullmatch(node.value):
        return (node.value,)
    return None


def _in_file(path: Path, name: str) -> Iterator[Use]:
    nodes = list(_nodes(path))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    named = {
        node.targets[0].id: node.value.value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and _code(node.value)
    }  # NO_FORECAST = "E114"
    for node in nodes:
        parts = node.args if isinstance(node, ast.Call) else node.elts if isinstance(node, ast.Tuple) else []
        for part, after in zip(parts, parts[1:], strict=False):
            code = named.get(part.id, "") if isinstance(part, ast.Name) else (_code(part) or ("",))[0]
            if not code or _code(after):
                continue
            here = [f for f in functions if f.lineno <= node.lineno <= (f.end_lineno or 0)]
            fixes = [key.value for key in getattr(node, "keywords", []) if key.arg == "fix"]
            message = _text(after, here)
            if message:
                fix = _text(fixes[0], here) if fixes else ""
                yield Use(code, _kind(node), message.rstrip("."), fix.rstrip("."), name, node.lineno)


def _kind(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in CLASSES:
            return CLASSES[name]
    return "event"


def _text(node: ast.AST, functions: list[ast.FunctionDef]) -> str:
    """An expression as a person would read it; what is filled in stands in brackets."""
    if isinstance(node, ast.Constant):
        return str(node.value or "")
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else f"⟨{_word(part.value)}⟩"  # type: ignore[attr-defined]
            for part in node.values
        )
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "with_guess":
        return _text(node.args[0], functions)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "did_you_mean":
        return "did you mean ⟨close⟩?"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):  # ... + (f" ({why})" if why else "")
        return _text(node.left, functions) + ("" if isinstance(node.right, ast.IfExp) else _text(node.right, functions))
    if isinstance(node, ast.BoolOp | ast.IfExp):
        return _text(node.values[0] if isinstance(node, ast.BoolOp) else node.body, functions)
    if isinstance(node, ast.Name):
        for function in reversed(functions):
            for inner in ast.walk(function):
                if isinstance(inner, ast.Assign) and any(
                    isinstance(t, ast.Name) and t.id == node.id for t in inner.targets
                ):
                    return _text(inner.value, functions)
        return f"⟨{node.id}⟩"
    return f"⟨{_word(node)}⟩"


def _word(node: ast.AST) -> str:
    """A short name for a value: the last name in the expression."""
    names = [
        n.attr if isinstance(n, ast.Attribute) else n.id
        for n in ast.walk(node)
        if isinstance(n, ast.Attribute | ast.Name)
    ]
    return names[0].strip("_") if names else "…"
