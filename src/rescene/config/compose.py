"""From a recipe name or file plus overrides to a validated recipe that knows where each value came from.

A file may say ``extends: OTHER`` to start from another recipe, and may hold a section ``methods`` with values to use when
that method is chosen, so that one recipe serves a comparison: ``rescene run demo method=fedavg``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rescene.config.schema import MethodLimit, Recipe
from rescene.core.documents import NO_SYNTAX, parse_toml, parse_yaml, read_text
from rescene.core.errors import ConfigError, MethodCannot, closest, command, with_guess
from rescene.core.recipe_keys import Flat, flatten
from rescene.core.versions import NEWER, name_then
from rescene.data.partition import other_number, site_names
from rescene.methods import DEFAULT_METHOD, method_class
from rescene.training import Training

SHORTHANDS = {"method": "method.name", "model": "model.name", "data": "data.name"}
RENAMED = {
    "private": "waves",
    "private-cifar10": "waves-cifar10",
    "private-dp": "waves-dp",
    "private-dp-cifar10": "waves-dp-cifar10",
    "private-dp-baselines": "dp-baselines",
    "private-dp-baselines-cifar10": "dp-baselines-cifar10",
}
COMMAND_LINE, CALL = "command line", "rescene.run"  # where a person gave a value: in words, or in Python
TASK_PLANS = {"tasks.per_task", "tasks.count", "tasks.sizes", "tasks.plan"}
LONGEST_SHOWN = 200  # characters of a value in a message


@dataclass(frozen=True)
class Resolved:
    """A recipe, the name it goes by, and the origin of each dotted key (default, recipe NAME, command line, rescene.run)."""

    name: str
    recipe: Recipe
    origins: dict[str, str]

    def flat(self) -> Flat:
        """All keys with their values, as ``section.key``."""
        return flatten(self.recipe.model_dump(mode="json"))

    def digest(self) -> str:
        """Eight hex digits that identify the experiment, whatever it is called.

        A plan's tasks and sites that left do not count: a federation that changes like that is the same federation.
        """
        return record_digest(self.recipe.model_dump(mode="json"))


def record_digest(record: Mapping[str, Any]) -> str:
    """The same of a whole recipe as sections, such as config.yaml of a run holds it.

    A record of an older version lacks keys and keeps the hash that it had then: only what it says is hashed.
    """
    told: dict[str, Any] = {key: dict(part) if isinstance(part, Mapping) else part for key, part in record.items()}
    told.pop("device", None)
    plan = told.pop("sites", None)
    if plan:
        told["sites"] = {key: value for key, value in plan.items() if key != "tasks"}
    sections = {key: part for key, part in told.items() if isinstance(part, dict)}
    sections.get("federation", {}).pop("exclude", None)
    for (section, key), before in NEWER.items():
        if sections.get(section, {}).get(key) == before:
            sections.get(section, {}).pop(key, None)
    if "method" in sections:
        told["method"]["name"] = name_then(told["method"])
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]


def recipe_names() -> list[str]:
    """Names of the recipes shipped with the package, such as ``demo`` or ``cifar10``."""
    folder = files("rescene.config") / "recipes"
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def recipe_text(name: str) -> str:
    """The YAML text of a shipped recipe, with its comments."""
    return (files("rescene.config") / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")


def resolve(recipe: str | Path, overrides: Iterable[str] | Mapping[str, Any] = ()) -> Resolved:
    """Read a recipe (shipped name, or YAML / TOML / JSON file), apply ``key=value`` overrides, validate."""
    layers = _layers(str(recipe))
    layers.append((CALL if isinstance(overrides, Mapping) else COMMAND_LINE, _parse(overrides)))
    layers = [(origin, {SHORTHANDS.get(k, k): v for k, v in values.items()}) for origin, values in layers]
    name = next((v["method.name"] for _, v in reversed(layers) if "method.name" in v), DEFAULT_METHOD)
    known = _known_keys(name)
    values: Flat = {}
    origins = dict.fromkeys(known, "default")
    for origin, layer in layers:
        chosen = _for_method(layer, str(name))
        if chosen.keys() & TASK_PLANS or chosen.get("tasks.scenario") == "domain":
            for key in TASK_PLANS - chosen.keys():  # another way to plan the tasks replaces the earlier one
                values.pop(key, None)
                origins[key] = "default"
        for key, value in chosen.items():
            _check_key(key, known, origin, {key: (value, origins[key]) for key, value in values.items()})
            values[key] = value
            origins[key] = origin
    try:
        made = Recipe.model_validate(_nest(values))
    except ValidationError as error:
        raise explain(error, origins, _symbols(str(name))) from None
    name = Path(str(recipe)).stem if _is_file(str(recipe)) else str(recipe)
    return with_sites_of_data(Resolved(name, made, origins))


def with_sites_of_data(resolved: Resolved) -> Resolved:
    """With ``federation.partition=sites``, the recipe for as many sites as the images name (E238 if that is one)."""
    recipe, data = resolved.recipe, resolved.recipe.images
    if recipe.federation.partition != "sites" or recipe.sites is not None or data.path is None:
        return resolved
    if not Path(data.path).expanduser().exists():
        return resolved  # the record of a run whose images are elsewhere; whoever needs the images is told
    names = site_names(data.name, data.path, layout=data.layout, columns=data.columns.given, more=data.more or ())
    asked, origins = recipe.federation.num_clients, dict(resolved.origins)
    if asked != len(names) and origins["federation.num_clients"] in (COMMAND_LINE, CALL):
        raise other_number(asked, names, data.path)
    made = recipe.with_sites(len(names))
    for key in ("num_clients", "per_round"):
        if getattr(made.federation, key) != getattr(recipe.federation, key):
            origins[f"federation.{key}"] = "sites of the data"
    return Resolved(resolved.name, made, origins)


def difference(before: Flat, after: Flat) -> list[tuple[str, Any, Any]]:
    """Keys whose values differ, with both values."""
    keys = sorted(before.keys() | after.keys())
    return [(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]


def _is_file(name: str) -> bool:
    return Path(name).suffix in (".yaml", ".yml", ".toml", ".json")


def _layers(name: str, below: tuple[str, ...] = ()) -> list[tuple[str, Flat]]:
    """The recipe and everything it extends, the base first."""
    if name in below:
        raise ConfigError("E105", "recipes extend each other in a circle", why=" -> ".join([*below, name]))
    tree, origin = _read(name)
    base = tree.pop("extends", None)
    return (_layers(str(base), (*below, name)) if base else []) + [(origin, flatten(tree))]


def _read(name: str) -> tuple[dict[str, Any], str]:
    if _is_file(name):
        path = Path(name)
        if not path.is_file():
            raise ConfigError(
                "E101", f"there is no recipe file {name!r}", fix="rescene list recipes shows the shipped ones"
            )
        try:
            text, origin = read_text(path), str(path)
        except OSError as error:
            raise ConfigError(NO_SYNTAX, f"{path} cannot be read", why=error.strerror) from None
    elif name in recipe_names():
        text, origin = recipe_text(name), f"recipe {name}"
    elif name.startswith("paper/"):
        table = name.removeprefix("paper/")
        raise ConfigError(
            "E101",
            f"{name!r} is a table of many experiments, not one recipe",
            why="a table of the paper has its own verb",
            fix=f"rescene paper run {table} --plan, or rescene paper run {table} --only CELL",
        )
    elif name in RENAMED:
        raise ConfigError(
            "E101",
            f"the recipe {name!r} is now called {RENAMED[name]!r}",
            why="the old names promised privacy, and not all of these recipes give it",
            fix=command("run", RENAMED[name]),
        )
    elif Path(name).is_dir():
        images = command("run", "own", f"data.path={name}")
        again = command("run", Path(name) / "config.yaml")
        raise ConfigError(
            "E101",
            f"{name!r} is a folder, not a recipe",
            fix=f"the same run once more: {again}"
            if (Path(name) / "config.yaml").is_file()
            else f"your own images: {images}",
        )
    elif "/" in name or os.sep in name:
        raise ConfigError(
            "E101", f"there is no recipe and no folder {name!r}", fix="rescene list recipes, rescene runs"
        )
    else:
        raise ConfigError(
            "E101",
            with_guess(f"unknown recipe {name!r}", name, recipe_names(), "{!r}"),
            why=f"shipped: {', '.join(recipe_names())}",
            fix="rescene list recipes, or give a file ending in .yaml, .toml or .json",
        )
    tree = deepcopy(_tree(text, origin, name.endswith(".toml")))
    if not isinstance(tree, dict):
        raise ConfigError(
            "E105", f"{origin} is not a recipe", why="it holds no sections", fix="rescene show demo prints one"
        )
    return tree, origin


@lru_cache(maxsize=64)
def _tree(text: str, origin: str, is_toml: bool) -> Any:
    """A recipe's text as it stands; the tables of the paper ask for the same few hundreds of times."""
    return parse_toml(text, origin) if is_toml else parse_yaml(text, origin)


def _parse(overrides: Iterable[str] | Mapping[str, Any]) -> Flat:
    if isinstance(overrides, Mapping):
        return flatten(overrides)
    values: Flat = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(
                "E106",
                f"cannot read the override {text!r}",
                why="overrides look like key=value",
                fix="for example federation.beta=0.1; quote a value that has spaces",
            )
        try:
            values[key] = parse_yaml(value, f"the override {key}")
        except ConfigError as error:
            if error.code != NO_SYNTAX:
                raise
            values[key] = value
    return values


def _for_method(layer: Flat, name: str) -> Flat:
    """A layer as the chosen method sees it: values meant for other methods fall away."""
    own = {key.removeprefix(f"methods.{name}."): v for key, v in layer.items() if key.startswith(f"methods.{name}.")}
    written_for = layer.get("method.name", name)
    rest = {
        key: value
        for key, value in layer.items()
        if not key.startswith("methods.") and (written_for == name or not key.startswith("method."))
    }
    return {f"method.{key}": value for key, value in own.items()} | rest


def _known_keys(method: object) -> dict[str, Any]:
    """Every dotted key with its default, for this method."""
    return flatten(Recipe(method={"name": method_class(method).name}).model_dump(mode="json"))


def _check_key(key: str, known: Mapping[str, Any], origin: str, given: Mapping[str, tuple[Any, str]]) -> None:
    """E102 for a key that there is not, with the closest one and its value. ``given``: values with the place they came from."""
    if key in known or any(name.startswith(f"{key}.") for name in known) or key.startswith("sites."):
        return  # a plan is none by default, so its keys are not among the known; the schema checks them
    section, _, leaf = key.rpartition(".")
    inside = [k for k in known if section and k.startswith(f"{section}.")]
    leaves = {k.rpartition(".")[2]: k for k in inside or known if k != "method.name"}
    near = leaves.get(closest(leaf, leaves) or "")
    if section:
        close = near if inside else closest(key, known) or near
    else:
        close = leaves.get(key) or closest(key, [*{k.partition(".")[0] for k in known}, "extends"]) or near
    hint = f"did you mean {close}{_has_value(close, known, given)}?" if close else None
    if section == "method" and not close:
        hint = (
            f"{known['method.name']} has no such setting; methods.NAME.{leaf}=VALUE sets it for one method of several"
        )
    raise ConfigError("E102", f"unknown key {key!r}", where=origin, why=hint, fix="rescene show RECIPE lists every key")


def _has_value(key: str, known: Mapping[str, Any], given: Mapping[str, tuple[Any, str]]) -> str:
    if key in given:
        value, place = given[key]
        return f" ({value!r} in {place})"
    return f" (default {known[key]!r})" if key in known else ""


def _nest(flat: Flat) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ConfigError(
                    "E104",
                    f"{parent} = {_shown(node)} is not possible",
                    why=f"it is a section: {key} is given as well",
                    fix=f"remove {parent}={_shown(node)}",
                )
        node[leaf] = value
    return tree


def _symbols(method: str) -> dict[str, str]:
    """The paper's symbol of each hyperparameter that has one."""
    tables = (("method.", method_class(method).table()), ("train.", Training.table()))
    return {prefix + row["name"]: row["symbol"] for prefix, table in tables for row in table if row["symbol"] != "-"}


def explain(
    error: ValidationError, origins: Mapping[str, str], symbols: Mapping[str, str], prefix: str = ""
) -> ConfigError:
    """The first validation error, in our words: key, symbol, value, what is allowed."""
    first = error.errors()[0]
    inner = first.get("ctx", {}).get("error")
    if isinstance(inner, ValidationError):  # the method's own record refused a hyperparameter
        return explain(inner, origins, symbols, "method.")
    key = prefix + ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        what = "the recipe contradicts itself"
        if isinstance(inner, MethodLimit):
            return MethodCannot("E104", what, why=message)
        return ConfigError("E104", what, why=message)
    name = f"{key} ({symbols[key]})" if key in symbols else key
    return ConfigError(
        "E104", f"{name} = {_shown(first['input'])} is not possible", where=origins.get(key), why=message
    )


def _shown(value: Any) -> str:
    """A value as Python writes it, in a line; Python writes no number of thousands of digits.

    >>> _shown(0.5), _shown(10**5000)
    ('0.5', 'a number of too many digits')
    """
    try:
        text = repr(value)
    except ValueError:
        return "a number of too many digits"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"
