"""YAML, TOML and JSON that somebody wrote, as plain values. Every such text is read here, and nowhere else.

Each is bounded before anything is built from it: bytes, values (an alias counts as all that it stands for), nesting, digits.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import yaml

from rescene.core.errors import ConfigError

MOST_BYTES = 2_000_000
MOST_VALUES = 100_000
DEEPEST = 32
MOST_DIGITS = 100
NO_SYNTAX = "E105"


def read_text(path: Path) -> str:
    """A file's text. OSError stays OSError: the caller knows what a missing file means."""
    with open(path, "rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise _too_much(str(path), f"it is larger than {MOST_BYTES / 1e6:g} MB")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(
            "E138",
            "this file is not UTF-8 text",
            where=f"{path}, line {line}",
            why=f"byte 0x{data[error.start]:02x} cannot stand there",
            fix="save it as UTF-8",
        ) from None


def read_yaml(path: Path) -> Any:
    """The content of a YAML file. Bad syntax is a ConfigError that names the file."""
    return parse_yaml(read_text(path), str(path))


def parse_yaml(text: str, where: str) -> Any:
    """The values in a YAML (or JSON) text; ``where`` is its name in errors.

    >>> parse_yaml("{beta: 0.1, tasks: [1, 2]}", "here")
    {'beta': 0.1, 'tasks': [1, 2]}
    """
    if len(text) > MOST_BYTES:
        raise _too_much(where, f"it is longer than {MOST_BYTES} characters")
    try:
        loader = _Loader(text, where)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except ConfigError:
        raise
    except Exception as error:  # what a scalar that is not what its tag says raises depends on the tag
        raise ConfigError(NO_SYNTAX, f"{where} cannot be read", why=str(error) or type(error).__name__) from None


def parse_toml(text: str, where: str) -> Any:
    """The content of a TOML text. ``where`` names its source in errors."""
    try:
        tree = tomllib.loads(text)
    except RecursionError:
        raise _too_deep(where) from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(NO_SYNTAX, f"{where} cannot be read", why=str(error)) from None
    except ValueError:  # Python's own bound on digits
        raise _too_long(where) from None
    waiting = [(tree, 1)]
    while waiting:
        value, depth = waiting.pop()
        if depth > DEEPEST:
            raise _too_deep(where)
        if isinstance(value, int) and abs(value) >= 10**MOST_DIGITS:
            raise _too_long(where)
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        waiting += [(item, depth + 1) for item in inner]
    return tree


def parse_json(text: str | bytes, where: str) -> Any:
    """The content of a JSON text. ``where`` names its source in errors."""
    try:
        return json.loads(text)
    except RecursionError:
        raise _too_deep(where) from None
    except ValueError as error:
        raise ConfigError(NO_SYNTAX, f"{where} cannot be read", why=str(error)) from None


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with bounds, which refuses a key that stands twice in a section.

    Where PyYAML has libyaml, that reads the text, six times as fast; what is composed of it is bounded here all the same.
    """

    def __init__(self, text: str, where: str) -> None:
        super().__init__(text)
        if yaml.__with_libyaml__:
            events = yaml.CSafeLoader(text)
            for name in ("check_event", "peek_event", "get_event"):
                setattr(self, name, getattr(events, name))
        self._where, self._values, self._depth, self._reached = where, 0, 0, 0
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}  # values and levels of each finished node

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        line = self.peek_event().start_mark.line  # type: ignore[no-untyped-call]
        if self.check_event(yaml.AliasEvent):
            node = super().compose_node(parent, index)
            if node not in self._sizes:
                raise _too_much(self._at(line), "an alias stands inside what it stands for")
            self._count(*self._sizes[node], line)
            return node
        before, outside, self._reached = self._values, self._reached, self._depth
        self._count(1, 1, line)
        self._depth += 1
        node = super().compose_node(parent, index)
        assert node is not None  # there is an event, so there is a node
        self._depth -= 1
        self._sizes[node] = self._values - before, self._reached - self._depth
        self._reached = max(outside, self._reached)
        return node

    def _count(self, values: int, levels: int, line: int) -> None:
        self._values += values
        self._reached = max(self._reached, self._depth + levels)
        if self._values > MOST_VALUES:
            raise _too_much(self._at(line), f"with its aliases it holds more than {MOST_VALUES} values")
        if self._reached > DEEPEST:
            raise _too_deep(self._at(line))

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            same = key.tag, key.value
            if same in lines:
                raise ConfigError(
                    "E139",
                    f"the key {key.value!r} stands twice in one section",
                    where=self._at(key.start_mark.line),
                    why=f"it stands already in line {lines[same] + 1}, and only one of the two can count",
                    fix="remove one of them",
                )
            lines[same] = key.start_mark.line
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        if len(node.value) > MOST_DIGITS:
            raise _too_long(self._at(node.start_mark.line))
        return int(super().construct_yaml_int(node))

    def _at(self, line: int) -> str:
        return f"{self._where}, line {line + 1}"


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def _too_much(where: str, why: str) -> ConfigError:
    return ConfigError("E149", "these settings are too large to be read", where=where, why=why)


def _too_deep(where: str) -> ConfigError:
    return _too_much(where, f"its sections or lists stand more than {DEEPEST} deep in each other")


def _too_long(where: str) -> ConfigError:
    return _too_much(where, f"a number has more than {MOST_DIGITS} digits")
