"""Rules about the source, as functions over a folder of Python files: who imports whom, and which words may stand where.

Each takes the root of a package and returns the places that break the rule, so that a test can also give it a folder with a planted
violation. ``test_source_rules.py`` does this for every rule.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = "rescene"
LAYERS = """\
core < functional < nets, data < accel, lens < training < privacy < methods < config < engine
     < deploy, use, trackers, notebook < audit, report, api, bench, testing < paper, sweeps < cli
"""
LEVEL = {name.strip(): level for level, names in enumerate(LAYERS.split("<")) for name in names.split(",")}
UNREADABLE = "(a module whose name nobody can read here)"
DOTTED = re.compile(rf"{PACKAGE}(\.\w+)+(:\w+)?")  # as import_module and an entry point take it


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


@cache
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
            found |= {
                alias.asname or alias.name for alias in node.names if alias.name in ("import_module", "__import__")
            }
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


def repeated_names(root: Path) -> dict[str, list[str]]:
    """Names of files and of types that stand for different things in two folders -> the places.

    A type is a class, or another capitalised name that a file assigns or imports under that name. Aliases with the same
    definition (``Row = dict[str, Any]``) mean the same.
    """
    places: dict[str, set[tuple[str, str, str]]] = defaultdict(set)
    for source in sources(root):
        folder, _, file = source.place.rpartition("/")
        if not source.is_package:
            places[file].add((folder, source.place, source.place))
        for name, meaning in _types_of(source):
            places[name].add((folder, meaning, source.place))
    return {
        name: sorted(place for _, _, place in found)
        for name, found in sorted(places.items())
        if len({folder for folder, _, _ in found}) > 1 and len({meaning for _, meaning, _ in found}) > 1
    }


def _types_of(source: Source) -> Iterator[tuple[str, str]]:
    """(name, what it stands for) of the classes and aliases of a file; a class stands for itself alone."""
    is_type = re.compile(r"_*[A-Z]\w*[a-z]\w*")
    for node in source.tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name, source.module
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            yield from ((name, ast.unparse(node.value)) for name in names if is_type.fullmatch(name))
        elif isinstance(node, ast.ImportFrom):
            renamed = [
                (one.asname, f"{node.module}.{one.name}") for one in node.names if one.asname not in (None, one.name)
            ]
            yield from ((name, meaning) for name, meaning in renamed if name and is_type.fullmatch(name))


# a privacy budget, or how much noise it takes
BUDGET = re.compile(r"_?(\w+_)?epsilons?(_\w+)?|delta_max|noise_multiplier|sigma")
OTHER_SIGMA = {"fit.sigma"}  # a spread in the theory of herding
KEEPS = {"float", "round", "abs", "sorted", "list", "tuple", "next"}  # what they give is still an epsilon
REDUCES = {"sum", "max", "min", "pow"}
LOOKS = {"math.isfinite", "math.isinf", "math.isnan"}
CALCULUS = {
    "rescene.privacy.accounting": {"Composition", "NEIGHBOURS", "check_target"},
    "rescene.privacy.epsilon_bounds": set(),
    "rescene.privacy.noise": {"Noise"},
}
"""The modules that compute with epsilon, calibrate noise and draw it, and the names of each that every layer may import."""
# a method may toss coins (``noise.chosen``): they are no noise on a number
DRAWS = (".noise.normal", ".noise.uniform", ".noise.words")


def budget_computations(root: Path, exempt: tuple[str, ...] = ("privacy", "audit")) -> list[str]:
    """Places outside these folders that compute with an epsilon, calibrate noise or draw it.

    Arithmetic, sums, extremes and functions of ``math`` and ``torch`` count, also on a name that was assigned from an epsilon. To pass
    it on, to compare it, to round it and to print it is no computation.
    """
    found = []
    for source in sources(root):
        if source.folder in exempt:
            continue
        found += [f"{source.place} imports {name}" for name in sorted(_calculus_in(source, root))]
        aliases = _aliases(source.tree)
        for node in ast.walk(source.tree):
            if _computes(node, aliases) or (isinstance(node, ast.Call) and dotted(node.func).endswith(DRAWS)):
                found.append(f"{source.place}:{getattr(node, 'lineno', 0)} computes {ast.unparse(node)}")
    return sorted(set(found))


def _calculus_in(source: Source, root: Path) -> set[str]:
    """What the file imports of the calculus, from its home or from a file of the folder that imports it too."""
    owned, found = _calculus_names(root), set()
    for module, name in imported(source):
        whole = f"{module}.{name}" if name else module
        elsewhere = module.startswith(f"{PACKAGE}.privacy") and name in owned
        if whole in CALCULUS or elsewhere or (module in CALCULUS and name not in CALCULUS[module]):
            found.add(whole)
    return found


def _calculus_names(root: Path) -> set[str]:
    """The functions and values that the modules of the calculus define, but for those that everybody may use."""
    found = set()
    for module, allowed in CALCULUS.items():
        path = root.joinpath(*module.split(".")[1:]).with_suffix(".py")
        body = ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else []
        found |= {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))} - allowed
    return found


def _aliases(tree: ast.Module) -> set[str]:
    """Names that the file assigns from an epsilon, or from such a name."""
    bound = [
        (target.id, value) for node in ast.walk(tree) for target, value in _bound(node) if isinstance(target, ast.Name)
    ]
    found: set[str] = set()
    while new := {name for name, value in bound if is_budget(value, found)} - found:
        found |= new
    return found


def _bound(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """(target, value) of assignments, one by one where tuples are assigned, and of loops over several values."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            both = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
            yield from zip(target.elts, node.value.elts, strict=False) if both else [(target, node.value)]
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value:
        yield node.target, node.value
    elif isinstance(node, (ast.For, ast.comprehension)):
        yield node.target, node.iter


def is_budget(node: ast.AST, aliases: set[str]) -> bool:
    """Whether the expression is an epsilon: by its name, key or function, or as one branch of it."""
    if isinstance(node, ast.Name):
        return bool(BUDGET.fullmatch(node.id)) or node.id in aliases
    if isinstance(node, ast.Attribute):
        return bool(BUDGET.fullmatch(node.attr)) and dotted(node) not in OTHER_SIGMA
    if isinstance(node, ast.Subscript):
        return _is_key(node.slice)
    if isinstance(node, ast.Call):
        kept = dotted(node.func) in KEEPS and any(is_budget(one, aliases) for one in node.args)
        is_get = isinstance(node.func, ast.Attribute) and node.func.attr == "get"
        looked_up = (is_get or dotted(node.func) == "getattr") and any(_is_key(one) for one in node.args)
        return kept or looked_up or is_budget(node.func, set())
    if isinstance(node, (ast.GeneratorExp, ast.ListComp, ast.SetComp)):
        return is_budget(node.elt, aliases)
    parts = {ast.BoolOp: lambda n: n.values, ast.IfExp: lambda n: [n.body, n.orelse], ast.Starred: lambda n: [n.value]}
    return any(is_budget(one, aliases) for one in parts.get(type(node), lambda n: [])(node))  # type: ignore[no-untyped-call]


def _is_key(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and "epsilon" in node.value


def _computes(node: ast.AST, aliases: set[str]) -> bool:
    if isinstance(node, ast.BinOp):
        return is_budget(node.left, aliases) or is_budget(node.right, aliases)
    if isinstance(node, ast.AugAssign):
        return is_budget(node.target, aliases) or is_budget(node.value, aliases)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and is_budget(node.operand, aliases)
    if isinstance(node, ast.Call):
        name = dotted(node.func)
        counts = name in REDUCES or (name.startswith(("math.", "torch.", "np.")) and name not in LOOKS)
        return counts and any(is_budget(one, aliases) for one in node.args)
    return False


SHARED = {
    "base",
    "registry",
    "upload_schema",
    "nominal_cost",
    "averaging",
    "surrogates",
}  # of methods/, but of no single method
WORDS = {
    "rescene",
    "local",
    "target",
    "joint",
    "moments",
}  # mean something else too: the package, a place, a step, sums


def method_mentions(root: Path, titles: Mapping[str, str], exempt: tuple[str, ...] = ("methods", "paper")) -> list[str]:
    """Places outside these folders that know a single method, by its name or title (``titles``: name -> title).

    Texts count wherever the name stands in them; names that are also ordinary words count behind ``method=``, and where something
    called name or method is compared with them. Imports of a method's own file count in every form. So does ``getattr(method, "x")``,
    which asks for what the contract does not have. Docstrings do not count.
    """
    known = set(titles)
    clear = {word for name, title in titles.items() if name not in WORDS for word in (name, title)}
    inside = re.compile(rf"(?<![\w.-])({'|'.join(sorted(map(re.escape, clear), key=len, reverse=True))})(?![\w-])")
    chosen = re.compile(rf"\bmethod=({'|'.join(sorted(map(re.escape, known), key=len, reverse=True))})(?![\w-])")
    found = []
    for source in sources(root):
        if source.folder in exempt:
            continue
        for text in texts(source.tree):
            found += [f"{source.place} says {name}" for name in {*inside.findall(text), *chosen.findall(text)}]
        found += [f"{source.place} imports {module}" for module in _method_files(source)]
        found += [f"{source.place}:{line} compares with {name}" for line, name in _compared(source.tree, known)]
        found += [f"{source.place}:{line} asks a method for {name}" for line, name in _asked(source.tree)]
    return sorted(set(found))


def _method_files(source: Source) -> set[str]:
    """Files of single methods that are imported, or reached as attributes of the package."""
    names = {f"{module}.{name}" if name else module for module, name in imported(source)}
    names |= {dotted(node) for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)}
    names |= {text for text in texts(source.tree) if DOTTED.fullmatch(text)}
    modules = {".".join(name.split(".")[:3]) for name in names if name.startswith(f"{PACKAGE}.methods.")}
    is_file = re.compile(rf"{PACKAGE}\.methods\.[a-z]\w*")
    offered = {f"{PACKAGE}.methods.{name}" for name in (*SHARED, "register", "method_class", "method_names")}
    return {module for module in modules if is_file.fullmatch(module)} - offered


def _compared(tree: ast.Module, known: set[str]) -> Iterator[tuple[int, str]]:
    """(line, method) of comparisons of something called name or method with a method's name; ``match`` too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            asked, told = ast.unparse(node), texts(node)
        elif isinstance(node, ast.Match):
            asked, told = ast.unparse(node.subject), (text for case in node.cases for text in texts(case.pattern))
        else:
            continue
        if re.search(r"\.name\b|\bname\b|\['name'\]|method", asked):
            yield from ((node.lineno, text) for text in told if text in known)


def _asked(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, attribute) of ``getattr`` and ``hasattr`` on something called method with an attribute's name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr") and len(node.args) > 1:
            of, name = dotted(node.args[0]), node.args[1]
            if of.rpartition(".")[2] == "method" and isinstance(name, ast.Constant):
                yield node.lineno, str(name.value)
