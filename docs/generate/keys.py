"""The reference of a recipe's keys, from the records that validate it."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from generate.markdown import code, safe, table, yaml_value

INTRODUCTION = """# Keys of a recipe

A recipe is a YAML, TOML or JSON file with these keys; on the command line each is `key=value`, in Python
`rescene.run("demo", **{"key": value})`. Unknown keys are refused (E102). `rescene show RECIPE` prints every value with its origin.
The keys under `method.` belong to the method: see its page.
"""


def page() -> str:
    from rescene.config import Recipe

    lines, alone = [INTRODUCTION], []
    for name, field in Recipe.model_fields.items():
        record = _record(field.annotation)
        if record is None:
            alone.append(_row(name, field))
            continue
        lines += [f"## {name}", *(["", safe(field.description)] if field.description else []), ""]
        lines += [table(("key", "default", "values", "meaning"), list(_rows(name, record))), ""]
    lines += ["## At the top", "", table(("key", "default", "values", "meaning"), alone), ""]
    return "\n".join(lines)


def _rows(name: str, record: type[BaseModel]) -> Iterator[tuple[str, str, str, str]]:
    """The keys of a section, and of sections inside it."""
    for key, field in record.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _rows(f"{name}.{key}", field.annotation)
        else:
            yield _row(f"{name}.{key}", field)


def _row(key: str, field: FieldInfo) -> tuple[str, str, str, str]:
    default = field.get_default(call_default_factory=True)
    shown = "required" if field.is_required() else code(yaml_value(default))
    return code(key), shown, safe(_values(field)), safe(field.description or "")


def _values(field: FieldInfo) -> str:
    """The type in words, and its bounds."""
    words = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    bounds = [f"{words[n]} {getattr(b, n)}" for b in field.metadata for n in words if getattr(b, n, None) is not None]
    return " ".join([_type(field.annotation), ", ".join(bounds)]).strip()


def _type(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(map(str, get_args(kind)))
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else _type(part) for part in get_args(kind))
    if get_origin(kind) in (list, tuple):
        return f"list of {_type(get_args(kind)[0])}"
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true, false"}.get(
        getattr(kind, "__name__", ""), getattr(kind, "__name__", str(kind))
    )


def _record(kind: Any) -> type[BaseModel] | None:
    parts = get_args(kind) or (kind,)
    return next((part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)), None)
