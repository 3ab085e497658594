"""What a user can name: recipes, verbs with their options, methods, error codes, public names; and the stored results.

All of it is asked for as a user would: on the command line, and with ``import rescene``. Error codes stand in the source.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import io
import json
import os
import pkgutil
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import typer.main

import rescene
from rescene.cli.app import app, leaves

ROOT = Path(__file__).parents[2]
SURFACE = Path(__file__).parent / "surface"
CODE = re.compile(r"[EWI]\d{3}")


def surface() -> dict[str, str]:
    """Text by file name."""
    return {
        "recipes.txt": _recipes(),
        "verbs.txt": "\n".join(_verbs()) + "\n",
        "methods.txt": _methods(),
        "errors.txt": _errors(),
        "names.txt": "\n".join(_names()) + "\n",
    }


def index_of_results() -> dict[str, Any]:
    """Key numbers of each run folder under results/, as ``rescene runs`` and ``rescene.load`` tell them."""
    listed = {row["run"]: row for row in json.loads(told("runs", "results", "--json"))}
    titles = {row["name"]: row["title"] for row in json.loads(told("list", "methods", "--json"))}
    found = {}
    for path in sorted((ROOT / "results").rglob("results.json")):
        folder = path.parent.relative_to(ROOT).as_posix()
        result, row = rescene.load(path.parent), listed[folder]
        found[folder] = [
            titles[row["method"]],
            row["state"],
            row["aa"],
            row["aia"],
            result.aa,
            result.aia,
            len(result.matrix),
        ]
    return found


def told(*words: str) -> str:
    """What the command line prints, in this process and at the root of the repository, with plain lines of 100 characters."""
    module, function = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["rescene"].split(":")
    main, out, before = getattr(importlib.import_module(module), function), io.StringIO(), Path.cwd()
    plain = {"NO_COLOR": "1", "COLUMNS": "100", "TERMINAL_WIDTH": "100"}
    kept, argv = dict(os.environ), sys.argv
    try:
        os.environ.update(plain)
        sys.argv = ["rescene", *words]
        os.chdir(ROOT)
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            main()
    finally:
        os.chdir(before)
        sys.argv = argv
        os.environ.clear()
        os.environ.update(kept)
    return out.getvalue()


def _recipes() -> str:
    """Each shipped recipe with all its keys, and a hash of them."""
    parts = []
    for row in json.loads(told("list", "recipes", "--json")):
        shown = json.loads(told("show", row["name"], "--json"))
        lines = [f"  {key} = {json.dumps(shown[key]['value'])}" for key in sorted(shown)]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
        parts.append("\n".join([f"{row['name']} {digest}", *lines]))
    return "\n".join(parts) + "\n"


def _verbs() -> Iterator[str]:
    """Each verb with its arguments and options, one a line; their help texts may be rewritten."""
    for name, command in leaves(typer.main.get_command(app), "rescene"):
        shown = [one for one in command.params if one.name != "help" and not getattr(one, "hidden", False)]
        arguments = [one.make_metavar(click.Context(command)) for one in shown if one.param_type_name == "argument"]
        options = sorted("/".join(one.opts + one.secondary_opts) for one in shown if one.param_type_name == "option")
        yield " ".join([name, *arguments, "|", *options])


def _methods() -> str:
    """Each method with its title and its hyperparameters."""
    parts = []
    for row in json.loads(told("list", "methods", "--json")):
        known = json.loads(told("method", "explain", row["name"], "--json"))["hyperparameters"]
        parts += [
            f"{row['name']}: {row['title']}",
            *(f"  {one['name']} = {json.dumps(one['default'])}" for one in known),
        ]
    return "\n".join(parts) + "\n"


def _errors() -> str:
    """Each code of the source, with the class it is raised with and the status the program ends with."""
    found: dict[str, set[str]] = {}
    for path in Path(rescene.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and CODE.fullmatch(node.value):
                found.setdefault(node.value, set())
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                first, kind = node.args[0], getattr(rescene.core.errors, node.func.id, None)
                if isinstance(first, ast.Constant) and CODE.fullmatch(str(first.value)) and isinstance(kind, type):
                    found.setdefault(first.value, set()).add(f"{kind.__name__} {getattr(kind, 'exit_code', '-')}")
    return "".join(f"{code} {', '.join(sorted(kinds)) or 'in events'}\n" for code, kinds in sorted(found.items()))


def _names() -> Iterator[str]:
    """What ``rescene`` offers, and what its public parts offer."""
    yield from (f"rescene.{name}" for name in sorted(rescene.__all__))
    for part in sorted(module.name for module in pkgutil.iter_modules(rescene.__path__)):
        try:
            module = rescene.__getattr__(part)
        except AttributeError:
            continue  # not public
        yield f"rescene.{part}"
        yield from (f"rescene.{part}.{name}" for name in sorted(getattr(module, "__all__", ())))
