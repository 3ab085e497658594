"""Whether code of one's own is what it was when a run was made: hashes of functions and classes, by three rules.

``source`` reads their file: the definitions, and all that they name in the same file, without comments, docstrings and layout.
It is the same under every version of Python. ``instructions`` looks at the objects themselves, for code whose file cannot be
read (a notebook, a function inside a function). ``code`` is the rule of earlier versions, kept for their runs and for the names of
objects: it misses default values, class attributes, constants of the file, and the first constant of a comprehension.
"""

from __future__ import annotations

import ast
import dis
import hashlib
import inspect
import sys
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, ModuleType
from typing import Any

RULES = ("source", "instructions", "code")  # the best first; two records are compared by the best that both have
_TEXT = "__rescene_source__"  # what a module's file said when the module was loaded
_IMPORTS = (ast.Import, ast.ImportFrom)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")  # instructions that take a name of the file
_UNSAID = ("__doc__", "__firstlineno__")  # what the body of a class sets, and is no code
_PLAIN = (int, float, complex, str, bytes, type(None), type(...))


def short_hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def hashes_of(things: Iterable[Any], before: Iterable[Any]) -> dict[str, str]:
    """Of these functions and classes, by the best rule; and by the rule ``code``, of the functions that it was applied to."""
    things, code = list(things), {"code": code_hash(*before)}
    source = source_hash(*things)
    if source is not None:
        return code | {"source": source}
    return code | {"instructions": short_hash(repr([_live(one, set()) for one in things]).encode())}


def same_code(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether two records say the same of the code, by the best rule that both have; without such a rule nothing is known.

    >>> same_code({"code": "a"}, {"code": "a", "source": "b"}), same_code({"source": "c"}, {"source": "b"}), same_code({}, {})
    (True, False, True)
    """
    rule = next((rule for rule in RULES if rule in before and rule in now), None)
    return rule is None or before[rule] == now[rule]


# the file


def remember_source(module: ModuleType) -> str | None:
    """What the module's file said when the module was loaded, as far as that is known: from now on a later edit does not count."""
    spec, text = vars(module).get(_TEXT, (None, None))
    if text is None or spec is not module.__spec__:  # the first time, or loaded again
        try:
            text = inspect.getsource(module)
        except (OSError, TypeError, UnicodeError, SyntaxError):  # a notebook, or typed in
            return None
        setattr(module, _TEXT, (module.__spec__, text))
    return str(text)


def source_hash(*things: Any) -> str | None:
    """A hash of the text that defines these functions and classes; None where it cannot be told from a file."""
    wanted: dict[str, set[str]] = {}
    for one in things:
        path, module = getattr(one, "__qualname__", "<"), str(getattr(one, "__module__", ""))
        if "<" in path:  # inside a function, or no name at all
            return None
        wanted.setdefault(module, set()).add(path.partition(".")[0])
    found = []
    for module, names in sorted(wanted.items()):
        text = remember_source(sys.modules[module]) if module in sys.modules else None
        parts = None if text is None else _parts(text, names)
        if parts is None:
            return None
        found.append(parts)
    return short_hash(repr(found).encode())


def _parts(text: str, names: set[str]) -> list[Any] | None:
    """The statements of a file behind these names and behind the names that they use; None if one is not defined there."""
    try:
        statements = list(_statements(ast.parse(text).body))
    except (SyntaxError, ValueError):
        return None
    imported = {name for one in statements if isinstance(one, _IMPORTS) for name in _given(one, set())}
    given = [_given(one, imported) for one in statements]
    if not names <= set().union(*given):
        return None
    wanted, chosen = set(names), set[int]()
    while more := [i for i, about in enumerate(given) if i not in chosen and about & wanted]:
        chosen.update(more)
        wanted.update(*(_read(statements[i]) for i in more))
    used = [statements[i] for i in sorted(chosen)]
    free = (*_IMPORTS, *_DEFINITIONS)  # their order says nothing
    return [
        sorted(repr(_plain(one)) for one in used if isinstance(one, free)),
        [_plain(one) for one in used if not isinstance(one, free)],
    ]


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """With one statement for each imported name, and without what only a script does."""
    for one in body:
        if isinstance(one, ast.Import):
            yield from (ast.Import([alias], lineno=1, col_offset=0) for alias in one.names)
        elif isinstance(one, ast.ImportFrom):
            yield from (ast.ImportFrom(one.module, [a], one.level, lineno=1, col_offset=0) for a in one.names)
        elif not (isinstance(one, ast.If) and ast.unparse(one.test) == "__name__ == '__main__'"):
            yield one


def _given(statement: ast.stmt, imported: set[str]) -> set[str]:
    """The names that a statement of a file defines or changes: also X in ``X[0] = 1`` and, unless imported, ``X.append(1)``."""
    if isinstance(statement, _DEFINITIONS):
        return {statement.name}
    found = set()
    for node in ast.walk(statement):
        if isinstance(node, _DEFINITIONS):
            found.add(node.name)
        elif isinstance(node, _IMPORTS):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            found.add(_root(node))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _root(node.value) not in imported:
            found.add(_root(node.value) if isinstance(node.value.func, ast.Attribute) else "")
    return found


def _root(node: ast.AST) -> str:
    """X of ``X.a[0].b()``."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _read(statement: ast.stmt) -> set[str]:
    """The names of the file that a statement uses; what functions call their own variables does not count."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # they were shown when the file was loaded
        code = compile(ast.Module([statement], []), "<own code>", "exec", dont_inherit=True)
    return {name for inner in _nested(code) for name in _names_in(inner)}


def _names_in(code: CodeType) -> set[str]:
    return {str(one.argval) for one in dis.get_instructions(code) if one.opname in _READS}


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _nested(one)


def _plain(node: Any) -> Any:
    """A syntax tree as tuples, without docstrings and without fields that are empty: later versions of Python add such."""
    if isinstance(node, list):
        return [_plain(one) for one in node if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
    if isinstance(node, ast.Constant):
        return repr(node.value)
    if not isinstance(node, ast.AST):
        return node
    fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
    return type(node).__name__, [(name, _plain(value)) for name, value in fields]


# the objects


def _live(thing: Any, seen: set[int]) -> Any:
    """What a function or class does, and the unchangeable values that it uses: what else it uses may change in a run."""
    if isinstance(thing, _PLAIN):
        return repr(thing)
    if isinstance(thing, (tuple, frozenset)):
        inner = [_live(one, seen) for one in thing]
        return inner if isinstance(thing, tuple) else sorted(map(repr, inner))
    if isinstance(thing, CodeType):
        steps = [*dis.get_instructions(thing)]
        after = [one.argval for one in steps[1:]] + [None]
        return [(a.opname, _live(a.argval, seen)) for a, b in zip(steps, after, strict=True) if b not in _UNSAID]
    if id(thing) in seen:
        return None
    seen.add(id(thing))
    if isinstance(thing, (staticmethod, classmethod)):
        return _live(thing.__func__, seen)
    if isinstance(thing, property):
        return [_live(one, seen) for one in (thing.fget, thing.fset)]
    if isinstance(thing, type):
        bases = [_live(base, seen) for base in thing.__bases__ if base.__module__ == thing.__module__]
        own = [
            (key, value) for key, value in sorted(vars(thing).items()) if not key.startswith("__") or callable(value)
        ]
        return [bases, [(key, _live(value, seen)) for key, value in own]]
    if isinstance(thing, types.FunctionType):
        return _live_function(thing, seen)
    return type(thing).__name__


def _live_function(function: types.FunctionType, seen: set[int]) -> Any:
    code, names = function.__code__, function.__globals__
    used = sorted({name for inner in _nested(code) for name in _names_in(inner)} & names.keys())
    around = [cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType()]  # not yet filled
    defaults = [*(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items())]
    outside = [(name, _live(names[name], seen)) for name in used if _is_near(names[name], function.__module__)]
    return [_live(code, seen), [_live(one, seen) for one in (*around, *defaults)], outside]


def _is_near(value: Any, module: str) -> bool:
    """Whether a value that a function names is one of its own file: a plain value, or a function or class made there."""
    return isinstance(value, (*_PLAIN, tuple)) or getattr(value, "__module__", None) == module


# the rule of earlier versions


def code_hash(*functions: Any) -> str:
    return short_hash(repr([_code(getattr(f, "__code__", None)) for f in functions]).encode())


def functions_of(kind: type) -> list[Any]:
    """The functions that a class defines itself, in the order of their names."""
    return [value for _, value in sorted(vars(kind).items()) if hasattr(value, "__code__")]


def _code(code: CodeType | None) -> Any:
    if code is None:
        return None
    constants = [_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts[1:]]
    return code.co_code, code.co_names, constants
