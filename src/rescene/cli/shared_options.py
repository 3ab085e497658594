"""Arguments and options that several verbs share, what they mean, and what the shell offers for them on TAB.

TAB must answer at once, so nothing here imports torch: names and keys are read from the text of the source files.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

import rescene
from rescene.core.errors import ConfigError, ResceneError
from rescene.core.json_files import json_object
from rescene.core.plugins import installed, load_plugin

_CLASS = re.compile(r"^class (\w+)(?:\(([^)]*)\))?:\n(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)
_FIELD = re.compile(r"^    ([a-z]\w*): ([^=\n]+?) *(?:=|$)", re.MULTILINE)
_NAME = re.compile(r'^    name: ClassVar\[str\] = "(.+)"', re.MULTILINE)
METHOD_KEYS = ("method", "method.name")
_PACKAGES = ("rescene.config", "rescene.methods", "rescene.training")  # where recipes and methods declare their keys


def verb_group(about: str) -> typer.Typer:
    """An empty group of verbs, such as ``rescene data``."""
    return typer.Typer(help=about, no_args_is_help=True, rich_markup_mode=None)


def complete_recipe(incomplete: str) -> list[str]:
    """Shipped recipes; the shell itself completes files."""
    found = (_folder("rescene.config") / "recipes").glob("*.yaml")
    return sorted(path.stem for path in found if path.stem.startswith(incomplete))


def complete_method(incomplete: str) -> list[str]:
    """Names of methods: those of the package, and those of installed plug-ins."""
    own = [name for path in _folder("rescene.methods").glob("*.py") for name in _NAME.findall(path.read_text("utf-8"))]
    others = [entry.name for entry in installed("rescene.methods")]
    return sorted(name for name in {*own, *others} if name.startswith(incomplete))


def complete_override(ctx: typer.Context, incomplete: str) -> list[str]:
    """Keys of a recipe, and methods after ``method=``.

    Bash cuts a word at ``=``: then key and ``=`` are words of their own, and only the value is asked for. A single key is
    offered twice, once with three dots behind it, because a shell puts a space after an only answer.
    """
    key = _cut_key(list(ctx.params.get("overrides") or []), incomplete)
    if key is not None:
        return complete_method(incomplete) if key in METHOD_KEYS else []
    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={name}" for name in complete_method(value)] if key in METHOD_KEYS else []
    found = [f"{one}=" for one in recipe_keys() if one.startswith(incomplete)]
    return [*found, f"{found[0]}..."] if len(found) == 1 else found


def _cut_key(before: list[str], incomplete: str) -> str | None:
    """The key whose value is asked for, where the shell cut the word at ``=``. ``before``: the words so far.

    >>> _cut_key(["seed", "=", "3", "method", "="], "fed"), _cut_key(["method"], ""), _cut_key(["seed=3"], "")
    ('method', 'method', None)
    """
    if before[-1:] == ["="]:
        return before[-2] if len(before) > 1 else None
    waits = bool(before) and not incomplete and "=" not in before[-1] and before[-2:-1] != ["="]
    return before[-1] if waits else None  # the sign itself is not passed on


@cache
def recipe_keys() -> list[str]:
    """Every key that a recipe may have, dotted; below ``method`` those of all methods."""
    classes = {
        name: (bases or "", body)
        for package in _PACKAGES
        for path in _folder(package).glob("*.py")
        for name, bases, body in _CLASS.findall(path.read_text("utf-8"))
    }

    def fields(name: str) -> Iterator[tuple[str, str]]:
        bases, body = classes.get(name, ("", ""))
        for base in re.findall(r"\w+", bases):
            yield from fields(base)
        yield from ((key, kind) for key, kind in _FIELD.findall(body.split("\n    def ")[0]) if "ClassVar" not in kind)

    def keys(name: str, prefix: str = "") -> Iterator[str]:
        for key, kind in fields(name):
            yield from keys(kind, f"{prefix}{key}.") if kind in classes else [f"{prefix}{key}"]

    methods = [name for name, (_, body) in classes.items() if _NAME.search(body)]
    own = {f"method.{key}" for name in methods for key, kind in fields(name) if kind not in classes}
    return sorted({*keys("Recipe"), *own})


def _folder(package: str) -> Path:
    """The folder of a package of ours, without importing it."""
    return Path(rescene.__file__).parent.joinpath(*package.split(".")[1:])


def load_plugins(paths: Iterable[Path]) -> None:
    """Import the files that were given with ``--plugin``, and let the installed observers that were named watch."""
    for path in paths:
        found = [] if path.is_file() else [one for one in installed("rescene.observers") if one.name == str(path)]
        for entry in found:
            from rescene.engine.observers import register_observer  # loads torch

            register_observer(entry.load())
        if not found and not load_plugin(path):
            raise ConfigError(
                "E561",
                f"the plug-in {path} registers nothing",
                where="--plugin",
                why="a file becomes a plug-in by what it registers: a method, a network, a data set or an observer",
                fix="put @rescene.register_method, register_model, register_dataset or register_observer before the class",
            )


LACKING = ("E103", "E428")  # what a run says whose method, network or data set came from a plug-in that is not there
UNKNOWN = ("E130", "E201")  # the same of a network and a data set, if the name is the run's: a word may be misspelt too


def name_plugins(error: Exception, given: Mapping[str, Any]) -> Exception:
    """The error with the plug-ins that the run was started with, where a verb got none and the run needs one.

    They are named and not loaded: a run folder may come from somebody else, and must not start code.
    """
    if not isinstance(error, ResceneError) or error.code not in LACKING + UNKNOWN or given.get("plugin", True):
        return error
    paths = [Path(value) for value in given.values() if isinstance(value, (str, Path))]
    for folder in (one for path in paths for one in (path.parents[:2] if path.is_file() else [path])):
        files = _plugins_of(folder)
        if files and (error.code in LACKING or any(repr(name) in error.what for name in _own_names(folder))):
            moved = "" if all(map(os.path.isfile, files)) else " (with the place where the file is now)"
            options = shlex.join(plugin_words(files))
            error.why = f"the run was started with {options}; a run folder loads no plug-in by itself"
            error.fix = f"the same command with {options}{moved}"
            return error
    return error


def plugin_words(files: Iterable[str | Path] | None) -> list[str]:
    """The options that give these plug-ins.

    >>> plugin_words(["a.py", "b.py"]), plugin_words(None)
    (['--plugin', 'a.py', '--plugin', 'b.py'], [])
    """
    return [word for file in files or () for word in ("--plugin", str(file))]


def _plugins_of(run: Path) -> list[str]:
    """What stands after ``--plugin`` in the command of a run."""
    try:
        words = shlex.split((run / "command.txt").read_text("utf-8"))
    except (OSError, ValueError):  # no run, or a command that is damaged
        return []
    apart = [after for word, after in itertools.pairwise(words) if word == "--plugin"]
    return apart + [word.removeprefix("--plugin=") for word in words if word.startswith("--plugin=")]


def _own_names(run: Path) -> list[str]:
    """What a run calls the network and the data set of one's own that it was made with."""
    known = json_object(run / "objects.json", []).get("objects")
    parts = known.values() if isinstance(known, dict) else ()
    return [str(part["name"]) for part in parts if isinstance(part, dict) and "name" in part]


def find_runs(folder: Path) -> list[Path]:
    """The folder itself if it is a run, else every run below it, in name order."""
    if (folder / "config.yaml").is_file():
        return [folder]
    return sorted(path.parent for path in folder.rglob("config.yaml")) if folder.is_dir() else []


def run_config(folder: Path) -> Path:
    """The recipe of a run folder; an error if there is none."""
    config = folder / "config.yaml"
    if not config.is_file():
        raise ConfigError(
            "E108", "not a run folder", where=str(folder), why="it has no config.yaml", fix="rescene runs"
        )
    return config


def recipe_of(name: str) -> str | Path:
    """The recipe file of a run if ``name`` is its folder, else the name itself."""
    config = Path(name) / "config.yaml"
    return config if name and config.is_file() else name


RecipeName = Annotated[
    str,
    typer.Argument(
        help="shipped recipe (rescene list recipes) or a .yaml, .toml or .json file", autocompletion=complete_recipe
    ),
]
RecipeOrRun = Annotated[
    str,
    typer.Argument(
        help="shipped recipe (rescene list recipes), recipe file or run folder", autocompletion=complete_recipe
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="key=value overrides, e.g. federation.beta=0.1 seed=1", autocompletion=complete_override),
]
MethodName = Annotated[str, typer.Argument(help="name of a method", autocompletion=complete_method)]
FinishedRun = Annotated[Path, typer.Argument(help="finished run folder")]
Out = Annotated[Path | None, typer.Option("--out", help="run folder (default: runs/<recipe>/<method>-s<seed>-<hash>)")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="print results only")]
Plugin = Annotated[  # the class of all verbs, in app, loads them before a verb begins
    list[Path] | None,
    typer.Option(
        "--plugin",
        help="Python file that registers methods, networks, data sets or observers, or an installed observer; may be repeated",
    ),
]
Log = Annotated[
    str, typer.Option("--log", help="also log to tensorboard, wandb (offline), mlflow or trackio; separate with commas")
]
Elsewhere = Annotated[
    bool,
    typer.Option("--elsewhere", help="go on although the code or the machine has changed; the results then say so"),
]
ServerGflops = Annotated[
    float | None, typer.Option("--server-gflops", help="the server's speed in GFLOP/s (default: this device's)")
]
AsJson = Annotated[bool, typer.Option("--json", help="machine-readable output")]
