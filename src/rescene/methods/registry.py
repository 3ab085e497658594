"""The methods by name: built in, or from the entry point ``rescene.methods`` of an installed package."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

from rescene.core.errors import ConfigError, with_guess
from rescene.core.plugins import installed, note_registered
from rescene.methods.base import Method

ORDER = (
    "rescene",
    "fedavg",
    "fedewc",
    "fedlwf",
    "target",
    "glfc",
    "fedcbdr",
    "refed",
    "feddm",
    "fedaf",
)  # as in the paper
WITHOUT_FEDERATION = ("joint", "local")  # sites send nothing that a server could run out of
DEFAULT_METHOD = ORDER[0]  # of a recipe that names none
_METHODS: dict[str, type[Method]] = {}
M = TypeVar("M", bound=type[Method])


def register(cls: M) -> M:
    """Class decorator that makes a method known under its ``name``; a name can be taken once.

    The name and the style are checked here (E111, E179): a wrong colour is found before a run and not on its page.
    """
    if not getattr(cls, "name", None):
        raise ConfigError(
            "E111",
            f"the method {cls.__name__} has no name",
            where=cls.__module__,
            why="a recipe chooses a method by its name",
            fix=f'a line in the class, such as name = "{cls.__name__.lower()}"',
        )
    cls.style()
    _load_shipped(cls.name)
    if _METHODS.setdefault(cls.name, cls) is not cls:
        raise ConfigError("E110", f"two methods are called {cls.name!r}", fix="give one of them another `name`")
    note_registered(cls)
    return cls


def _load_shipped(name: str) -> None:
    """Load the method of this name if it is in this package; only this one: the others need not load."""
    file = name.replace("-", "_")
    if name not in _METHODS and file.isidentifier() and find_spec(f"rescene.methods.{file}"):
        import_module(f"rescene.methods.{file}")


def method_names() -> list[str]:
    """All known names, in the paper's order: every file of this package is one method, plus those of installed plug-ins."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        import_module(f"rescene.methods.{module.name}")
    for entry in installed("rescene.methods"):
        if entry.name not in _METHODS:
            entry.load()
    return sorted(_METHODS, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))


def method_class(given: object) -> type[Method]:
    """The class registered under a name, or an error that suggests the closest one. A recipe may give anything."""
    name = "" if given is None else str(given)
    _load_shipped(name)
    if name not in _METHODS:
        names = method_names()
    if name not in _METHODS:
        raise ConfigError(
            "E103",
            with_guess(f"unknown method {name!r}", name, names, "{!r}") if name else "no method is named",
            why=f"known: {', '.join(names)}",
            fix="rescene list methods; one of your own: --plugin FILE",
        )
    return _METHODS[name]
