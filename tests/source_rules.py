"""Rules about the source, as functions over a folder of Python files: who imports whom, and which words may stand where.

Each takes the root of a package and returns the places that break the rule, so that a test can also give it a folder with a planted
violation. ``test_source_rules.py`` does this for every rule.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "rescene"
LAYERS = """\
core < functional < nets, data < accel, lens < training < privacy < methods < config < engine
     < deploy, use, trackers, notebook < audit, report, api, bench, testing < paper, sweeps < cli
"""
LEVEL = {name.strip(): level for level, names in enumerate(LAYERS.split("<")) for name in names.split(",")}
UNREADABLE = "(a module whose name nobody can read here)"
DOTTED = re.compile(rf"{PACKAGE}(\.\w+)+")


@dataclass(frozen=True)
class Source:
    """One file: where it is, the dotted name of its module, and what it says."""

    place: str  # below the root, with slashes
    module: str
    tree: ast.Module

    @property
    def is_package(self) -> bool:
        """Whether it is the ``__init__`` of a folder."""
        return self.place.endswith("__init__.py")

    @property
    def folder(self) -> str:
        """The first folder below the root, or the file's own name if it lies at the root: its layer."""
        return self.place.partition("/")[0].removesuffix(".py")


def sources(root: Path) -> list[Source]:
    """All Python files below ``root``, which is the folder of the package."""
    found = []
    for path in sorted(root.rglob("*.py")):
        place = path.relative_to(root)
        module = ".".join((PACKAGE, *place.with_suffix("").parts)).removesuffix(".__init__")
        found.append(Source(place.as_posix(), module, ast.parse(path.read_text(encoding="utf-8"))))
    return found


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for such a chain of names, else an empty text."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def only_for_types(node: ast.AST) -> bool:
    """Whether only a type checker reads it."""
    return isinstance(node, ast.If) and dotted(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def walked(tree: ast.AST, types: bool = True) -> Iterator[ast.AST]:
    """Every node; without ``types`` not those that only a type checker reads."""
    todo = [tree]
    while todo:
        node = todo.pop()
        if types or not only_for_types(node):
            yield node
            todo += ast.iter_child_nodes(node)


def absolute(source: Source, level: int, module: str) -> str:
    """The dotted name behind ``from ..module import``, as seen from the file."""
    if not level:
        return module
    parts = source.module.split(".") if source.is_package else source.module.split(".")[:-1]
    return ".".join([*parts[: len(parts) - level + 1], *([module] if module else [])])


def imported(source: Source, types: bool = True) -> Iterator[tuple[str, str]]:
    """(module, name) of every import, inside functions too: ``from a import b`` is ("a", "b"), ``import a`` is ("a", "").

    Relative imports are resolved. ``import_module`` and ``__import__`` count, and so does ``rescene.engine`` behind
    ``import rescene``, which loads that folder.
    """
    roots, loaders = {PACKAGE}, _loaders(source.tree)
    for node in walked(source.tree, types):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
            roots |= {alias.asname for alias in node.names if alias.name == PACKAGE and alias.asname}
        elif isinstance(node, ast.ImportFrom):
            module = absolute(source, node.level, node.module or "")
            yield from ((module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func) in loaders:
            yield _loaded(source, node), ""
    for node in walked(source.tree, types):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in roots:
            yield PACKAGE, node.attr


def _loaders(tree: ast.Module) -> set[str]:
    """What ``import_module`` is called in the file, and ``__import__``."""
    found = {"__import__", "builtins.__import__"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "importlib":
            found |= {alias.asname or alias.name for alias in node.names if alias.name in ("import_module", "__import__")}
        elif isinstance(node, ast.Import):
            names = {alias.asname or alias.name for alias in node.names if alias.name.startswith("importlib")}
            found |= {f"{name.partition('.')[0]}.import_module" for name in names}
    return found


def _loaded(source: Source, node: ast.Call) -> str:
    """The module that such a call names; ``folder.*`` for an f-string that goes on with ``{``."""
    given = [*node.args, *(word.value for word in node.keywords if word.arg == "name")][:1]
    first = given[0] if given else None
    if isinstance(first, ast.JoinedStr) and isinstance(first.values[0], ast.Constant):
        first = ast.Constant(str(first.values[0].value).rpartition(".")[0] + ".*")  # some file of this folder
    if not isinstance(first, ast.Constant) or not isinstance(first.value, str) or first.value == PACKAGE:
        return UNREADABLE
    name = first.value
    return absolute(source, len(name) - len(name.lstrip(".")), name.lstrip(".")) if name.startswith(".") else name


def upward_imports(root: Path, level: Mapping[str, int] = LEVEL) -> list[str]:
    """Imports of a layer that does not lie below the file's own. A text that is a module's dotted name counts as an import."""
    found = []
    for source in sources(root):
        if source.folder not in level:  # the package's own front door, which offers every layer
            continue
        written = {text.split(".")[1] for text in texts(source.tree) if DOTTED.fullmatch(text)} & set(level)
        for other in sorted((imported_layers(source) | written) - {source.folder}):
            if level.get(other, len(level)) >= level[source.folder]:
                found.append(f"{source.place} imports {other}, which is not below it")
    return found


def imported_layers(source: Source) -> set[str]:
    """The layers that the file imports; a name that is no layer stays as it is."""
    names = {f"{module}.{name}" if name else module for module, name in imported(source)}
    inside = {name.split(".")[1] for name in names if name.startswith(f"{PACKAGE}.")}
    return (inside | ({UNREADABLE} & names)) - {"__version__", "__file__"}


def texts(tree: ast.AST) -> Iterator[str]:
    """Every text in the file that is a value; no docstring."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


def circles(root: Path) -> list[str]:
    """Circles of imports, through packages too. What only a type checker reads does not count.

    ``from folder import name`` needs the folder's ``__init__`` unless the name is a file in it.
    """
    files = sources(root)
    known = {source.module for source in files}
    arrows: dict[str, set[str]] = {}
    for source in files:
        wanted = {
            f"{module}.{name}" if f"{module}.{name}" in known else module
            for module, name in imported(source, types=False)
        }
        arrows[source.module] = (wanted & known) - {source.module}
    return _circles_in(arrows)


def _circles_in(arrows: Mapping[str, set[str]]) -> list[str]:
    done: set[str] = set()
    under_way: list[str] = []
    found = []

    def visit(name: str) -> None:
        if name in under_way:
            found.append(" > ".join([*under_way[under_way.index(name) :], name]))
        elif name not in done:
            under_way.append(name)
            for other in sorted(arrows[name]):
                visit(other)
            done.add(under_way.pop())

    for name in arrows:
        visit(name)
    return found
