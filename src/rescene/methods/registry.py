"""The methods by name: built in, or from the entry point ``rescene.methods`` of an installed package."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import TypeVar

from rescene.errors import ConfigError, did_you_mean
from rescene.methods.base import Method

BUILT_IN = ("rescene", "fedavg", "feddm")
_METHODS: dict[str, type[Method]] = {}
M = TypeVar("M", bound=type[Method])


def register(cls: M) -> M:
    """Class decorator that makes a method known under its ``name``; a name can be taken once."""
    if _METHODS.setdefault(cls.name, cls) is not cls:
        raise ConfigError("E110", f"two methods are called {cls.name!r}", fix="give one of them another `name`")
    return cls


def method_names() -> list[str]:
    """All known names, built-in ones first."""
    for name in BUILT_IN:
        import_module(f"rescene.methods.{name}")
    for entry in entry_points(group="rescene.methods"):
        if entry.name not in _METHODS:
            entry.load()
    return sorted(_METHODS, key=lambda name: (name not in BUILT_IN, name))


def method_class(name: str) -> type[Method]:
    """The class registered under a name, or an error that suggests the closest one."""
    names = method_names()
    if name not in _METHODS:
        close = did_you_mean(name, names)
        raise ConfigError(
            "E103",
            f"unknown method {name!r}" + (f"; did you mean {close!r}?" if close else ""),
            why=f"known: {', '.join(names)}",
            fix="rescene list methods",
        )
    return _METHODS[name]
